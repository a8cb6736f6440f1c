"""A Pallas kernel for TPUs that computes `read_chunks` (`layers/linear_recurrence.py`).

One run of it computes a chunk of some heads, from the first chunk to the last, or for the gradients from the last to
the first. The states of the heads stay in the chip's own memory through the segment, and all products of a chunk's
tokens are computed where they are used. The forward pass writes the states before each chunk for the backward pass.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from einops import rearrange
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Bool, Float

from meliad_like.kernels.common import Grid, Interpret, differentiable, tpu_params
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
    interpret: Interpret = False,
    heads: int | None = None,
) -> tuple[Float[Array, "b h p k"], Float[Array, "b h n p"]]:
    """Computes `read_chunks`, also under a mesh, where each device computes its lanes and heads.

    Args:
        chunk: not used: chunks have the largest length up to `CHUNK` that divides a block, which is the fastest.
        dtype: the activations' type, to which queries, keys, values, updates and states are rounded for products.
        norm_epsilon: the epsilon of an RMS norm of each vector that is read; None: no norm.
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
        after, read = _read(options, inputs, states, flags)
        return after.reshape(matrix.shape), split_heads(read.astype(jnp.float32), h)

    return read_on_mesh(read, rule, matrix, start)


# Jitted, so that layers with equal shapes are traced and lowered once.
@functools.partial(jax.jit, static_argnums=0)
def _read_forward(options, inputs, matrix, first):
    grid, axes = _grid(options, inputs, matrix, first, reversed=False)
    (b, i, h, p, k), (_, c) = matrix.shape, first.shape
    factor = jax.ShapeDtypeStruct((b, i, c, h, inputs.value.shape[1] // c), jnp.float32)
    results = Results(inputs.value, None if options.norm_epsilon is None else factor)
    before = jax.ShapeDtypeStruct((b, i, c, h, p, k), options.dtype)
    read = (inputs, axes), (matrix, "bihpk")
    written = (results, Results("bny", "bicht")), (before, "bichpk"), (matrix, "bihpk")
    results, before, after = _call(options, grid, forward_kernel, first, read, written)
    return (after, results.vectors), (inputs, before, first, Results() if results.factor is None else results)


@functools.partial(jax.jit, static_argnums=0)
def _read_backward(options, saved, cotangents):
    (inputs, before, first, results), (of_after, cotangent) = saved, cotangents
    grid, axes = _grid(options, inputs, of_after, first, reversed=True)
    read = (inputs, axes), (before, "bichpk"), (results, Results("bny", "bicht")), (cotangent, "bny")
    read = *read, (of_after, "bihpk")
    written = (inputs, axes), (of_after, "bihpk")
    of_keys = pltpu.VMEM((grid.sizes["n"], grid.sizes["x"]), jnp.float32)
    gradients, of_matrix = _call(options, grid, backward_kernel, first, read, written, of_keys, of_keys)
    return gradients, of_matrix, None


_read = differentiable(_read_forward, _read_backward)


def _grid(options: Options, inputs: Inputs, matrix: Array, first: Array, reversed: bool) -> tuple[Grid, Inputs]:
    """The grid of the kernels (lanes, programs for some heads, chunks), and the axes of inputs: `x`, `y` and `z` are
    those of keys, of values and of decays by channel of all heads."""
    (b, i, h, p, k), (_, c) = matrix.shape, first.shape
    t = inputs.value.shape[1] // c
    widths = {"x": inputs.key, "y": inputs.value, "z": inputs.log_decay}

    def chunk(at):
        return c - 1 - at["c"] if reversed else at["c"]

    grid = Grid(
        {"b": b, "i": i, "c": c},
        {"b": None, "i": None, "c": None, "n": t, "h": h, "t": t, "p": p, "k": k}
        | {axis: array.shape[2] // i for axis, array in widths.items()},
        {"n": chunk, "c": chunk, "x": "i", "y": "i", "z": "i"},
    )
    return grid, Inputs("bnx", "bnx", "bny", "bnz" if options.by_channel else "bicht", "bicht")


def _call(options: Options, grid: Grid, kernel, first: Array, read, written, *scratch) -> list[Any]:
    """Runs a kernel, a function of references to arrays that are read or written, in pairs of arrays and axes."""
    read = (first, pl.BlockSpec(memory_space=pltpu.SMEM)), *read
    scratch = pltpu.VMEM((2 * grid.sizes["h"], grid.sizes["t"]), jnp.float32), *scratch
    params, name = tpu_params("parallel", "parallel", "arbitrary"), f"recurrence_{kernel.__name__}"
    run = functools.partial(kernel, options)
    return grid.call(run, read, written, params, scratch, interpret=options.interpret, name=name)
