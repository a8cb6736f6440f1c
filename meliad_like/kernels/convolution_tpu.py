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

from meliad_like.kernels.common import call_kernel, sharded_on_mesh, tpu_params
from meliad_like.layers.losses import divisor
from meliad_like.layers.sharding import MESH_AXES_OF

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
    interpret: bool | pltpu.InterpretParams = False,
) -> Float[Array, "b n channels"]:
    """Computes `convolve`, also under a mesh, where each device computes its lanes and channels."""
    lanes, heads = MESH_AXES_OF["lanes"], MESH_AXES_OF["heads"]
    parts = jax.sharding.get_abstract_mesh().shape.get(heads, 1)
    channels = heads if inputs.shape[2] % parts == 0 else None
    vectors = PartitionSpec(lanes, None, channels)
    in_specs = vectors, vectors, PartitionSpec(None, channels), PartitionSpec(lanes)

    def run(*arguments: Array) -> Any:
        return _convolve(interpret, *arguments)

    return sharded_on_mesh(run, in_specs, vectors)(inputs, recent.astype(inputs.dtype), filters, start)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _convolve(interpret, inputs, recent, filters, start):
    return _convolve_forward(interpret, inputs, recent, filters, start)[0]


@functools.partial(jax.jit, static_argnums=0)
def _convolve_forward(interpret, inputs, recent, filters, start):
    call, spec, of_recent, of_filters = _grid(interpret, inputs, recent, filters, start, reversed=False)
    read = (inputs, spec), (recent, of_recent), (filters, of_filters)
    [result] = call(_forward_kernel, read, [(jax.ShapeDtypeStruct(inputs.shape, jnp.float32), spec)])
    return result, (inputs, recent, filters, start)


@functools.partial(jax.jit, static_argnums=0)
def _convolve_backward(interpret, saved, cotangent):
    inputs, recent, filters, _ = saved
    call, spec, of_recent, of_filters = _grid(interpret, *saved, reversed=True)
    (taps, channels), b = filters.shape, len(inputs)
    by_lane = jax.ShapeDtypeStruct((b, taps, channels), jnp.float32)
    of_lane = pl.BlockSpec((None, taps, run_size(channels)), lambda b, i, s: (b, 0, i))
    read = (inputs, spec), (recent, of_recent), (filters, of_filters), (cotangent, spec)
    results = call(_backward_kernel, read, [(inputs, spec), (recent, of_recent), (by_lane, of_lane)])
    return results[0], results[1], jnp.sum(results[2], axis=0).astype(filters.dtype), None


_convolve.defvjp(_convolve_forward, _convolve_backward)


def _grid(interpret, inputs, recent, filters, start, reversed: bool):
    """How a kernel is called, and the parts that a run of it sees of vectors, recent inputs and filters.

    The grid is that of lanes, some channels, and some tokens of a block.
    """
    (b, n, channels), block = inputs.shape, inputs.shape[1] // start.shape[1]
    width, t = run_size(channels), run_size(block)
    steps = n // t

    def at(s):
        return steps - 1 - s if reversed else s

    first = jnp.zeros((b, start.shape[1], block // t), jnp.int32).at[:, :, 0].set(start).reshape(b, steps)
    of_recent = pl.BlockSpec((None, recent.shape[1], width), lambda b, i, s: (b, 0, i))

    def call(kernel, read, written):
        read = (first, pl.BlockSpec(memory_space=pltpu.SMEM)), *read
        grid, scratch = (b, channels // width, steps), [pltpu.VMEM((t + BEYOND, width), jnp.float32)]
        params, name = tpu_params("parallel", "parallel", "arbitrary"), f"convolution{kernel.__name__}"
        return call_kernel(kernel, grid, read, written, params, scratch, interpret=interpret, name=name)

    vectors = pl.BlockSpec((None, t, width), lambda b, i, s: (b, at(s), i))
    return call, vectors, of_recent, pl.BlockSpec((filters.shape[0], width), lambda b, i, s: (0, i))


def run_size(x: int) -> int:
    """The number of tokens or channels of a run."""
    unit = TILE if x % TILE == 0 else 1
    return unit * divisor(x // unit, max(LARGEST // unit, 1))


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
