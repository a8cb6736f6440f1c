"""A Pallas kernel for TPUs that computes `scan_channels` (`layers/linear_recurrence.py`) in one pass over its inputs.

One run of it computes some tokens of some channels, from first to last, or for the gradients from last to first. The
state lasts in the chip's own memory from run to run.

In memory, vectors are cut into tiles of `r` = 8 tokens by `l` = 128 channels. A kernel gets arrays with the axes of
these tiles, for which nothing is moved in memory. It reads the rows of a token in several tiles as one array, and so
combines no rows that lie side by side.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from einops import rearrange
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float

from meliad_like.kernels.common import Grid, Interpret, differentiable, tpu_params
from meliad_like.kernels.convolution_tpu import TILE, run_size
from meliad_like.kernels.recurrence import scan_on_mesh

ROWS = 8
"""The tokens of a tile of float32 in memory."""


def fits(block: int, channels: int) -> bool:
    """Whether the kernel can be compiled for this number of tokens in a block, and of channels."""
    return block % TILE == 0 and channels % TILE == 0


def scan_in_kernel(
    decay: Float[Array, "b n channels"],
    added: Float[Array, "b n channels"],
    state: Float[Array, "b channels"],
    *,
    interpret: Interpret = False,
) -> tuple[Float[Array, "b channels"], Float[Array, "b n channels"]]:
    """Computes `scan_channels`, also under a mesh, where each device computes its lanes and channels."""
    return scan_on_mesh(functools.partial(_scan, interpret), decay, added, state)


@functools.partial(jax.jit, static_argnums=0)
def _scan_forward(interpret, decay, added, state):
    [states] = _call(interpret, _forward_kernel, [decay, added], [], state, 1, reversed=False)
    return states, (decay, states, state)


@functools.partial(jax.jit, static_argnums=0)
def _scan_backward(interpret, saved, cotangent):
    decay, states, state = saved
    read = [decay, states, cotangent]
    of_decay, of_added = _call(interpret, _backward_kernel, read, [states], state, 2, reversed=True)
    return of_decay, of_added, decay[:, 0] * of_added[:, 0]


_scan = differentiable(_scan_forward, _scan_backward)


def _call(
    interpret: Interpret,
    kernel: Callable[..., None],
    read: Sequence[Float[Array, "b n channels"]],
    read_before: Sequence[Float[Array, "b n channels"]],
    state: Float[Array, "b channels"],
    number: int,
    *,
    reversed: bool,
) -> list[Float[Array, "b n channels"]]:
    """Runs a kernel that writes this number of arrays of vectors; of `read_before`, a run sees the tile before its own,
    or in the first run any."""
    b, n, channels = read[0].shape
    width, t = run_size(channels), run_size(n)
    rows, columns = math.gcd(t, ROWS), math.gcd(width, TILE)
    parts, steps, tiles, i = channels // width, n // t, t // rows, width // columns

    def step(at):
        return steps - 1 - at["s"] if reversed else at["s"]

    grid = Grid(
        {"b": b, "p": parts, "s": steps},
        {"b": None, "p": None, "g": tiles, "e": None, "x": i * rows, "i": i, "l": columns},
        {"g": step, "e": lambda at: jnp.maximum(step(at) * tiles - 1, 0), "x": "p"},
    )

    def tiled(x):
        return rearrange(x, "b (g r) (i l) -> b g (i r) l", r=rows, l=columns)

    vectors = [(tiled(x), "bgxl") for x in read] + [(tiled(x), "bexl") for x in read_before]
    written = [(jax.ShapeDtypeStruct(vectors[0][0].shape, jnp.float32), "bgxl")] * number
    inputs = *vectors, (state.reshape(b, parts, i, columns), "bpil")
    params, scratch = tpu_params("parallel", "parallel", "arbitrary"), [pltpu.VMEM((i, columns), jnp.float32)]
    results = grid.call(kernel, inputs, written, params, scratch, interpret=interpret, name=f"scan{kernel.__name__}")
    return [rearrange(x, "b g (i r) l -> b (g r) (i l)", r=rows) for x in results]


def _rows(tiles: Any, carried: Any) -> list[Any]:
    """The rows of each token of a tile, in tiles side by side."""
    i, rows = len(carried), tiles.shape[1] // len(carried)
    return [pl.ds(row, i, stride=rows) for row in range(rows)]


def _forward_kernel(decay, added, state, states, carried):
    """Writes the states. `carried` is the state before the next token."""

    @pl.when(pl.program_id(2) == 0)
    def _():
        carried[...] = state[...]

    def read_tile(tile, state):
        for row in _rows(decay, carried):
            state = decay[tile, row, :] * state + added[tile, row, :]
            states[tile, row, :] = state
        return state

    carried[...] = jax.lax.fori_loop(0, len(decay), read_tile, carried[...])


def _backward_kernel(decay, states, cotangent, before, state, of_decay, of_added, carried):
    """Writes the gradients. `carried` is the part of a state's gradient that comes through later tokens."""
    turn, last, rows = pl.program_id(2), len(decay) - 1, _rows(decay, carried)

    @pl.when(turn == 0)
    def _():
        carried[...] = jnp.zeros_like(carried)

    before_run = jnp.where(turn == pl.num_programs(2) - 1, state[...], before[rows[-1], :])

    def read_tile(i, gradient):
        tile = last - i
        before_tile = jnp.where(tile == 0, before_run, states[jnp.maximum(tile - 1, 0), rows[-1], :])
        earlier = [before_tile, *(states[tile, row, :] for row in rows[:-1])]
        for row, state in zip(reversed(rows), reversed(earlier), strict=True):
            gradient += cotangent[tile, row, :]
            of_added[tile, row, :] = gradient
            of_decay[tile, row, :] = gradient * state
            gradient = decay[tile, row, :] * gradient
        return gradient

    carried[...] = jax.lax.fori_loop(0, last + 1, read_tile, carried[...])
