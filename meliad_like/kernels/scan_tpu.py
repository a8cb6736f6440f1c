"""A Pallas kernel for TPUs that computes `scan_channels` (`layers/linear_recurrence.py`) in one pass over its inputs.

One run of it computes some tokens of some channels, from first to last, or for the gradients from last to first. The
state lasts in the chip's own memory from run to run.

In memory, vectors are cut into tiles of `r` = 8 tokens by `l` = 128 channels. A kernel gets arrays with the axes of
these tiles, for which nothing is moved in memory. It reads the rows of a token in several tiles as one array, and so
combines no rows that lie side by side.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from einops import rearrange
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float

from meliad_like.kernels.common import call_kernel, tpu_params
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
    interpret: bool | pltpu.InterpretParams = False,
) -> tuple[Float[Array, "b channels"], Float[Array, "b n channels"]]:
    """Computes `scan_channels`, also under a mesh, where each device computes its lanes and channels.

    Args:
        interpret: whether the kernel is interpreted, on any platform, instead of compiled for a TPU; and how.
    """
    return scan_on_mesh(functools.partial(_scan, interpret), decay, added, state)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _scan(interpret, decay, added, state):
    return _scan_forward(interpret, decay, added, state)[0]


@functools.partial(jax.jit, static_argnums=0)
def _scan_forward(interpret, decay, added, state):
    grid = _Grid(interpret, decay, reversed=False)
    read = *map(grid.vectors, (decay, added)), grid.state(state)
    [states] = grid.call(_forward_kernel, read, 1)
    return states, (decay, states, state)


@functools.partial(jax.jit, static_argnums=0)
def _scan_backward(interpret, saved, cotangent):
    decay, states, state = saved
    grid = _Grid(interpret, decay, reversed=True)
    read = *map(grid.vectors, (decay, states, cotangent)), grid.before(states), grid.state(state)
    of_decay, of_added = grid.call(_backward_kernel, read, 2)
    return of_decay, of_added, decay[:, 0] * of_added[:, 0]


_scan.defvjp(_scan_forward, _scan_backward)


class _Grid:
    """The grid of the kernels (lanes, some channels, some tokens), and arrays with the parts that a run sees."""

    def __init__(self, interpret, decay: Float[Array, "b n channels"], reversed: bool):
        self.interpret = interpret
        self.b, n, channels = decay.shape
        width, t = run_size(channels), run_size(n)
        self.r, self.l, self.parts, self.steps = math.gcd(t, ROWS), math.gcd(width, TILE), channels // width, n // t
        self.tiles, self.i = t // self.r, width // self.l

        def at(s):
            return self.steps - 1 - s if reversed else s

        def tile_before(s):
            return jnp.maximum(at(s) * self.tiles - 1, 0)

        rows = self.i * self.r, self.l
        self.spec = pl.BlockSpec((None, self.tiles, *rows), lambda b, i, s: (b, at(s), i, 0))
        self.spec_before = pl.BlockSpec((None, None, *rows), lambda b, i, s: (b, tile_before(s), i, 0))

    def vectors(self, x: Float[Array, "b n channels"]) -> tuple[Array, pl.BlockSpec]:
        return rearrange(x, "b (g r) (i l) -> b g (i r) l", r=self.r, l=self.l), self.spec

    def before(self, x: Float[Array, "b n channels"]) -> tuple[Array, pl.BlockSpec]:
        """The tiles before those of a run; of the first run, any."""
        return self.vectors(x)[0], self.spec_before

    def state(self, x: Float[Array, "b channels"]) -> tuple[Array, pl.BlockSpec]:
        array = x.reshape(self.b, self.parts, self.i, self.l)
        return array, pl.BlockSpec((None, None, self.i, self.l), lambda b, i, s: (b, i, 0, 0))

    def call(self, kernel, read, number: int) -> list[Array]:
        """Runs a kernel that writes this number of arrays of vectors."""
        written = [(jax.ShapeDtypeStruct(read[0][0].shape, jnp.float32), self.spec)] * number
        grid, scratch = (self.b, self.parts, self.steps), [pltpu.VMEM((self.i, self.l), jnp.float32)]
        params, name = tpu_params("parallel", "parallel", "arbitrary"), f"scan{kernel.__name__}"
        results = call_kernel(kernel, grid, read, written, params, scratch, interpret=self.interpret, name=name)
        return [rearrange(x, "b g (i r) l -> b (g r) (i l)", r=self.r) for x in results]


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
