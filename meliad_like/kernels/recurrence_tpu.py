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

from meliad_like.kernels.common import call_kernel, tpu_params
from meliad_like.kernels.recurrence import begins_document, read_on_mesh
from meliad_like.kernels.recurrence_tpu_products import Options
from meliad_like.kernels.recurrence_tpu_programs import Inputs, Results, backward_kernel, forward_kernel, largest_part
from meliad_like.layers.attention import merge_heads, split_heads
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
    norm_epsilon: float | None = None,
    interpret: bool | pltpu.InterpretParams = False,
    heads: int | None = None,
) -> tuple[Float[Array, "b h p k"], Float[Array, "b h n p"]]:
    """Computes `read_chunks`, also under a mesh, where each device computes its lanes and heads.

    Args:
        chunk: not used: chunks have the largest length up to `CHUNK` that divides a block, which is the fastest.
        dtype: the activations' type, to which queries, keys, values, updates and states are rounded for products.
        norm_epsilon: the epsilon of an RMS norm of each vector that is read; None: no norm.
        interpret: whether the kernel is interpreted, on any platform, instead of compiled for a TPU; and how.
        heads: see `Options`; None: 2 with decays by channel, which take longest to compile, and in float32, for which
            the chip's own memory is small, otherwise 4.
    """
    del chunk
    by_channel = rule.log_decay.shape[3] > 1
    dtype = jnp.dtype(dtype)
    heads = heads or (2 if by_channel or dtype == jnp.float32 else 4)
    options = Options(dtype, heads, by_channel, rule.strength is not None, norm_epsilon, interpret)

    def read(rule, matrix, start):
        t = math.gcd(rule.value.shape[2] // start.shape[1], CHUNK)
        g, h, num_chunks = rule.query.shape[1], rule.value.shape[1], rule.value.shape[2] // t
        in_group = h // g
        sizes = rule.key.shape[3], in_group * rule.value.shape[3]
        programs = g // largest_part(options, g, max(options.heads // in_group, 1), *sizes)

        def rows(x: Array) -> Array:
            return rearrange(x, "b (i h) (c t) 1 -> b i c h t", i=programs, t=t)

        # As in `decayed_products`: the bound changes no decay.
        log_decay = jnp.maximum(rule.log_decay, -128)
        log_decay = merge_heads(log_decay) if options.by_channel else rows(log_decay)
        strength = rule.strength if options.corrected else rule.step
        strength = None if strength is None else rows(strength)
        query, key, value = (merge_heads(x).astype(options.dtype) for x in rule[:3])
        inputs = Inputs(query, key, value, log_decay, strength)
        states = rearrange(matrix, "b (i h) p k -> b i h p k", i=programs)
        flags = begins_document(start, num_chunks)
        after, read = cast(tuple[Array, Array], _read(options, inputs, states, flags))
        return after.reshape(matrix.shape), split_heads(read.astype(jnp.float32), h)

    return read_on_mesh(read, rule, matrix, start)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _read(options: Options, inputs: Inputs, matrix: Array, first: Array) -> tuple[Array, Array]:
    return _read_forward(options, inputs, matrix, first)[0]


# Jitted, so that layers with equal shapes are traced and lowered once.
@functools.partial(jax.jit, static_argnums=0)
def _read_forward(options, inputs, matrix, first):
    grid = _Grid(options, inputs, matrix, first, reversed=False)
    read = (first, grid.flags), (inputs, grid.inputs), (matrix, grid.matrix)
    results = Results(inputs.value, grid.factor)
    written = (results, grid.results), (grid.before, grid.states), (matrix, grid.matrix)
    results, before, after = grid.call(forward_kernel, read, written, [grid.sums])
    return (after, results.vectors), (inputs, before, first, Results() if results.factor is None else results)


@functools.partial(jax.jit, static_argnums=0)
def _read_backward(options, saved, cotangents):
    (inputs, before, first, results), (of_after, cotangent) = saved, cotangents
    grid = _Grid(options, inputs, of_after, first, reversed=True)
    read = (first, grid.flags), (inputs, grid.inputs), (before, grid.states)
    read = *read, (results, grid.results if results.factor is not None else results)
    read = *read, (cotangent, grid.inputs.value), (of_after, grid.matrix)
    of_keys = pltpu.VMEM(grid.inputs.key.block_shape[1:], jnp.float32)
    written = (inputs, grid.inputs), (of_after, grid.matrix)
    gradients, of_matrix = grid.call(backward_kernel, read, written, [grid.sums, of_keys, of_keys])
    return gradients, of_matrix, None


_read.defvjp(_read_forward, _read_backward)


class _Grid:
    """The grid of the kernels (lanes, programs for some heads, chunks), and the parts of arrays that a run sees."""

    def __init__(self, options: Options, inputs: Inputs, matrix: Array, first: Array, reversed: bool):
        self.options = options
        (self.b, self.i, h, self.p, self.k), (_, self.c) = matrix.shape, first.shape
        self.t = inputs.value.shape[1] // self.c

        def at(c):
            return self.c - 1 - c if reversed else c

        def vectors(x):
            return pl.BlockSpec((None, self.t, x.shape[2] // self.i), lambda b, i, c: (b, at(c), i))

        def of_chunk(*shape):
            return pl.BlockSpec((None, None, None, *shape), lambda b, i, c: (b, i, at(c), *[0] * len(shape)))

        rows = of_chunk(h, self.t)
        strength = None if inputs.strength is None else rows
        log_decay = vectors(inputs.log_decay) if options.by_channel else rows
        factor = jax.ShapeDtypeStruct((self.b, self.i, self.c, h, self.t), jnp.float32)
        self.factor = None if options.norm_epsilon is None else factor
        self.results = Results(vectors(inputs.value), self.factor and rows)
        of_keys = vectors(inputs.key)
        self.inputs = Inputs(of_keys, of_keys, vectors(inputs.value), log_decay, strength)
        self.flags = pl.BlockSpec(memory_space=pltpu.SMEM)
        self.matrix = pl.BlockSpec((None, None, h, self.p, self.k), lambda b, i, c: (b, i, 0, 0, 0))
        self.states = of_chunk(h, self.p, self.k)
        self.before = jax.ShapeDtypeStruct((self.b, self.i, self.c, h, self.p, self.k), options.dtype)
        self.sums = pltpu.VMEM((2 * h, self.t), jnp.float32)

    def call(self, kernel, read, written, scratch) -> list[Any]:
        """Runs a kernel, a function of references to arrays that are read or written, in pairs of arrays and specs."""
        run, grid = functools.partial(kernel, self.options), (self.b, self.i, self.c)
        params, name = tpu_params("parallel", "parallel", "arbitrary"), f"recurrence_{kernel.__name__}"
        return call_kernel(run, grid, read, written, params, scratch, interpret=self.options.interpret, name=name)
