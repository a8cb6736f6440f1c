"""A Pallas kernel for TPUs that computes `convolve` (`layers/linear_recurrence.py`) in one pass over its inputs.

One run of it computes some tokens of some channels, from first to last, or for the gradients from last to first. What
the next run needs of them lasts in the chip's own memory.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Float

from meliad_like.kernels.common import (
    LANES,
    Grid,
    Interpret,
    differentiable,
    largest_part,
    sharded_on_mesh,
    sharded_vectors,
    tpu_params,
)

TILE = 128
"""Compiled for a TPU, blocks and the number of channels must be multiples of it."""
LARGEST = 512
"""The most tokens, and the most channels, of one run."""
BEYOND = 8
"""The number of tokens before or after those of a run that are kept: a row of tiles. Filters are at most as long."""


def fits(block: int, taps: int, channels: int) -> bool:
    """Whether the kernel can be compiled for this number of tokens in a block, tokens of a filter, and channels."""
    return block % TILE == 0 and channels % TILE == 0 and taps <= BEYOND


def convolve_in_kernel(
    inputs: Float[Array, "b n channels"],
    recent: Float[Array, "b recent channels"],
    filters: Float[Array, "taps channels"],
    start: Bool[Array, "b c"],
    *,
    interpret: Interpret = False,
) -> Float[Array, "b n channels"]:
    """Computes `convolve`, also under a mesh, where each device computes its lanes and channels."""
    vectors = sharded_vectors(inputs.shape[2])
    in_specs = vectors, vectors, PartitionSpec(*vectors[1:]), PartitionSpec(LANES)
    run = functools.partial(_convolve, interpret)
    return sharded_on_mesh(run, in_specs, vectors)(inputs, recent.astype(inputs.dtype), filters, start)


@functools.partial(jax.jit, static_argnums=0)
def _convolve_forward(interpret, *inputs):
    written = [(jax.ShapeDtypeStruct(inputs[0].shape, jnp.float32), "bnx")]
    [result] = _call(interpret, _forward_kernel, inputs, [], written, reversed=False)
    return result, inputs


@functools.partial(jax.jit, static_argnums=0)
def _convolve_backward(interpret, saved, cotangent):
    inputs, recent, filters, _ = saved
    by_lane = jax.ShapeDtypeStruct((len(inputs), *filters.shape), jnp.float32)
    written = [(inputs, "bnx"), (recent, "brx"), (by_lane, "bfx")]
    of_inputs, of_recent, of_filters = _call(interpret, _backward_kernel, saved, [cotangent], written, reversed=True)
    return of_inputs, of_recent, jnp.sum(of_filters, axis=0).astype(filters.dtype), None


_convolve = differentiable(_convolve_forward, _convolve_backward)


def _call(interpret, kernel, inputs, cotangents, written, *, reversed: bool) -> list[Any]:
    """Runs a kernel in the grid of lanes, some channels, and some tokens of a block. `written` are pairs of an array
    and its axes."""
    inputs, recent, filters, start = inputs
    (b, n, channels), block = inputs.shape, inputs.shape[1] // start.shape[1]
    width, t = run_size(channels), run_size(block)
    steps = n // t
    grid = Grid(
        {"b": b, "i": channels // width, "s": steps},
        {"b": None, "n": t, "x": width, "r": recent.shape[1], "f": len(filters)},
        {"n": lambda at: steps - 1 - at["s"] if reversed else at["s"], "x": "i"},
    )
    first = jnp.zeros((b, start.shape[1], block // t), jnp.int32).at[:, :, 0].set(start).reshape(b, steps)
    read = (first, pl.BlockSpec(memory_space=pltpu.SMEM)), (inputs, "bnx")
    read = *read, (recent, "brx"), (filters, "fx"), *((x, "bnx") for x in cotangents)
    params, scratch = tpu_params("parallel", "parallel", "arbitrary"), [pltpu.VMEM((t + BEYOND, width), jnp.float32)]
    name = f"convolution{kernel.__name__}"
    return grid.call(kernel, read, written, params, scratch, interpret=interpret, name=name)


def run_size(x: int) -> int:
    """The number of tokens or channels of a run."""
    return largest_part(x, LARGEST, TILE)


def _forward_kernel(first, inputs, recent, filters, result, padded):
    """Writes the sums. `padded` are the inputs, behind those of the tokens before."""
    t, step, taps = len(inputs), pl.program_id(2), len(filters)

    @pl.when(step == 0)
    def _():
        padded[BEYOND - len(recent) : BEYOND, :] = recent[...].astype(jnp.float32)

    @pl.when(step > 0)
    def _():
        padded[:BEYOND, :] = padded[t:, :]

    @pl.when(first[pl.program_id(0), step] > 0)
    def _():
        padded[:BEYOND, :] = jnp.zeros_like(padded[:BEYOND, :])

    padded[BEYOND:, :] = inputs[...].astype(jnp.float32)
    begins = range(BEYOND - taps + 1, BEYOND + 1)
    terms = [padded[pl.ds(begin, t), :] * filters[i : i + 1, :] for i, begin in enumerate(begins)]
    result[...] = functools.reduce(jnp.add, terms)


def _backward_kernel(first, inputs, recent, filters, cotangent, of_inputs, of_recent, of_filters, padded):
    """Writes the gradients, that of the filters summed over a lane's tokens. `padded` are the cotangents, before those
    of the tokens after that see this run's inputs."""
    (t, _), turn, taps = inputs.shape, pl.program_id(2), len(filters)
    lane, last = pl.program_id(0), pl.num_programs(2) - 1

    @pl.when(turn == 0)
    def _():
        padded[t:, :] = jnp.zeros_like(padded[t:, :])
        of_filters[...] = jnp.zeros(of_filters.shape, jnp.float32)

    padded[:t, :] = cotangent[...]
    values = inputs[...].astype(jnp.float32)
    total = jnp.zeros_like(values)
    for later in range(taps):
        tap = slice(taps - 1 - later, taps - later)
        read_by = padded[pl.ds(later, t), :]
        total += read_by * filters[tap, :]
        of_filters[tap, :] += jnp.sum(values * read_by, axis=0, keepdims=True)
    of_inputs[...] = total.astype(of_inputs.dtype)
    is_first = first[lane, last - turn] > 0
    before = jnp.where(is_first, 0.0, padded[:BEYOND, :])
    padded[t:, :] = before

    @pl.when(turn == last)
    def _():
        number = len(recent)
        around = jnp.concatenate([jnp.zeros_like(before), before])
        earlier, total = recent[...].astype(jnp.float32), jnp.zeros(recent.shape, jnp.float32)
        for later in range(taps):
            tap, begin = slice(taps - 1 - later, taps - later), BEYOND - number + later
            read_by = around[begin : begin + number]
            total += read_by * filters[tap, :]
            of_filters[tap, :] += jnp.sum(earlier * read_by, axis=0, keepdims=True)
        of_recent[...] = total.astype(of_recent.dtype)
