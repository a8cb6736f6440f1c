"""A Pallas kernel for TPUs that computes `read_chunks` (`layers/linear_recurrence.py`).

One run of it computes a chunk of some heads, from the first chunk to the last, or for the gradients from the last to
the first. The states of the heads stay in the chip's own memory through the segment, and all products of a chunk's
tokens are computed where they are used. The forward pass writes the states before each chunk for the backward pass.
"""

import functools
import math
from typing import Any, cast

import jax
import jax.numpy as jnp
from einops import rearrange
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Bool, Float

from meliad_like.kernels.recurrence import begins_document, read_on_mesh
from meliad_like.kernels.recurrence_tpu_products import Options
from meliad_like.kernels.recurrence_tpu_programs import Inputs, backward_kernel, forward_kernel
from meliad_like.kernels.window_tpu import VMEM_LIMIT
from meliad_like.layers.linear_recurrence import Rule

CHUNK = 128
"""The largest number of tokens in a chunk, a power of two: that of the columns of a TPU's unit for products."""
SIZES = (64, 128, 192, 256)
"""The numbers of channels that a key and a value may have in the compiled kernel."""


def fits(block: int, chunk: int, key_size: int, value_size: int, by_channel: bool) -> bool:
    """Whether the kernel can be compiled for blocks and heads of these sizes."""
    del chunk, by_channel
    return block % CHUNK == 0 and key_size in SIZES and value_size in SIZES


def read_chunks_in_kernel(
    rule: Rule,
    matrix: Float[Array, "b h p k"],
    start: Bool[Array, "b c"],
    chunk: int,
    *,
    dtype: Any = jnp.float32,
    interpret: bool | pltpu.InterpretParams = False,
    heads: int | None = None,
) -> tuple[Float[Array, "b h p k"], Float[Array, "b h n p"]]:
    """Computes `read_chunks`, also under a mesh, where each device computes its lanes and heads.

    Args:
        chunk: not used: chunks have the largest length up to `CHUNK` that divides a block, which is the fastest.
        dtype: the activations' type, to which queries, keys, values, updates and states are rounded for products.
        interpret: whether the kernel is interpreted, on any platform, instead of compiled for a TPU; and how.
        heads: see `Options`; None: 2 with decays by channel, which take longest to compile, and in float32, for which
            the chip's own memory is small, otherwise 4.
    """
    del chunk
    by_channel = rule.log_decay.shape[3] > 1
    dtype = jnp.dtype(dtype)
    options = Options(dtype, heads or (2 if by_channel or dtype == jnp.float32 else 4), by_channel, interpret)

    def read(rule, matrix, start):
        t = math.gcd(rule.value.shape[2] // start.shape[1], CHUNK)
        g, h, num_chunks = rule.query.shape[1], rule.value.shape[1], rule.value.shape[2] // t
        # The number of groups in a program.
        groups = max(i for i in range(1, g + 1) if g % i == 0 and i * h // g <= max(options.heads, h // g))

        def rows(x: Array) -> Array:
            return rearrange(x, "b (i h) (c t) 1 -> b i c h t", i=g // groups, t=t)

        def vectors(x: Array, dtype: Any = options.dtype) -> Array:
            return rearrange(x.astype(dtype), "b (i h) n e -> b i h n e", i=g // groups)

        # As in `decayed_products`: the bound changes no decay.
        log_decay = jnp.maximum(rule.log_decay, -128)
        log_decay = vectors(log_decay, jnp.float32) if options.by_channel else rows(log_decay)
        strength = None if rule.strength is None else rows(rule.strength)
        inputs = Inputs(vectors(rule.query), vectors(rule.key), vectors(rule.value), log_decay, strength)
        states = rearrange(matrix, "b (i h) p k -> b i h p k", i=g // groups)
        after, read = cast(tuple[Array, Array], _read(options, inputs, states, begins_document(start, num_chunks)))
        return after.reshape(matrix.shape), read.astype(jnp.float32).reshape(rule.value.shape)

    return read_on_mesh(read, rule, matrix, start)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _read(options: Options, inputs: Inputs, matrix: Array, first: Array) -> tuple[Array, Array]:
    return _read_forward(options, inputs, matrix, first)[0]


def _read_forward(options, inputs, matrix, first):
    grid = _Grid(options, inputs, first.shape[1], reversed=False)
    read = (first, grid.flags), (inputs, grid.inputs), (matrix, grid.matrix)
    written = (inputs.value, grid.inputs.value), (grid.before, grid.states), (matrix, grid.matrix)
    read, before, after = grid.call(forward_kernel, read, written, [grid.sums])
    return (after, read), (inputs, before, first)


def _read_backward(options, saved, cotangents):
    (inputs, before, first), (of_after, cotangent) = saved, cotangents
    grid = _Grid(options, inputs, first.shape[1], reversed=True)
    read = (first, grid.flags), (inputs, grid.inputs), (before, grid.states)
    read = *read, (cotangent, grid.inputs.value), (of_after, grid.matrix)
    of_keys = pltpu.VMEM((inputs.key.shape[2], grid.t, grid.k), jnp.float32)
    written = (inputs, grid.inputs), (of_after, grid.matrix)
    gradients, of_matrix = grid.call(backward_kernel, read, written, [grid.sums, of_keys, of_keys])
    return gradients, of_matrix, None


_read.defvjp(_read_forward, _read_backward)


class _Grid:
    """The grid of the kernels (lanes, programs for some heads, chunks), and the parts of arrays that a run sees."""

    def __init__(self, options: Options, inputs: Inputs, num_chunks: int, reversed: bool):
        self.options = options
        self.b, self.i, h, n, p = inputs.value.shape
        self.c, self.t, self.k = num_chunks, n // num_chunks, inputs.key.shape[-1]

        def at(c):
            return self.c - 1 - c if reversed else c

        def vectors(x):
            return pl.BlockSpec((None, None, x.shape[2], self.t, x.shape[4]), lambda b, i, c: (b, i, 0, at(c), 0))

        def of_chunk(*shape):
            return pl.BlockSpec((None, None, None, *shape), lambda b, i, c: (b, i, at(c), *[0] * len(shape)))

        rows = of_chunk(h, self.t)
        strength = None if inputs.strength is None else rows
        of_key = vectors(inputs.key)
        log_decay = vectors(inputs.log_decay) if options.by_channel else rows
        self.inputs = Inputs(of_key, of_key, vectors(inputs.value), log_decay, strength)
        self.flags = pl.BlockSpec(memory_space=pltpu.SMEM)
        self.matrix = pl.BlockSpec((None, None, h, p, self.k), lambda b, i, c: (b, i, 0, 0, 0))
        self.states = of_chunk(h, p, self.k)
        self.before = jax.ShapeDtypeStruct((self.b, self.i, self.c, h, p, self.k), options.dtype)
        self.sums = pltpu.VMEM((2 * h, self.t), jnp.float32)

    def call(self, kernel, read, written, scratch) -> list[Any]:
        """Runs a kernel, a function of references to arrays that are read or written, in pairs of arrays and specs."""
        return pl.pallas_call(
            functools.partial(kernel, self.options),
            grid=(self.b, self.i, self.c),
            in_specs=[spec for _, spec in read],
            out_shape=jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), [x for x, _ in written]),
            out_specs=[spec for _, spec in written],
            scratch_shapes=scratch,
            compiler_params=pltpu.CompilerParams(
                dimension_semantics=("parallel", "parallel", "arbitrary"), vmem_limit_bytes=VMEM_LIMIT
            ),
            interpret=self.options.interpret,
            name=f"recurrence_{kernel.__name__}",
        )(*(x for x, _ in read))
