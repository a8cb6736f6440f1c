"""Pallas kernels for NVIDIA GPUs (Triton) that compute `attend_window` (`layers/attention.py`) and write no scores to
memory. They have the contract of the TPU's kernel (`kernels/window_tpu.py`).

They read queries, keys and values as the projections write them, with the heads side by side. The unit length of keys
is a factor of the columns of the scores, so no keys of unit length are written either.

The tokens of a segment are one band: the query at `p` sees the keys at `p - w` to `p - 1`, of which those before 0 are
in the block before the segment. The bias, which is also the mask, is the same in all tiles with the same distance of
their first query and key, so one tile for each of these distances is made outside, and programs read them like keys.
The backward pass computes the weights again from the logarithms of their sums, in one kernel for the queries and one
for keys and values (Dao et al. 2022, FlashAttention), so every sum has one order, and results are always the same.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from einops import rearrange
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton
from jaxtyping import Array, Bool, Float

from meliad_like.kernels import window_gpu_programs as programs
from meliad_like.kernels.common import Grid, differentiable, row_and_column
from meliad_like.kernels.window_gpu_programs import Keys, Options, Queries, Saved, Shared, Tiling, Tilings
from meliad_like.kernels.window_tpu import Projected, sharded_by_head
from meliad_like.layers.attention import LOWEST, MASKED, unit_and_factor

SMALLEST_TILE = 64
"""Compiled for a GPU, the window must be a multiple of it, and the head size one of `HEAD_SIZES`."""
HEAD_SIZES = (32, 64, 128)
DEFAULT = Tilings()


def attend_window_in_kernel(
    projected: Projected,
    scale: Float[Array, " h"],
    bias: Float[Array, "h w"],
    previous_valid: Bool[Array, "b c"],
    kept: Bool[Array, "h w w"] | None = None,
    *,
    dropout_rate: float,
    mask_previous: bool = True,
    rows: int | None = None,
    interpret: bool = False,
    tilings: Tilings = DEFAULT,
) -> Float[Array, "b n i"]:
    """See `window_tpu.attend_window_in_kernel`. Tiles divide `rows`, which divides `w`; None: they divide `w`."""
    tilings = Tilings(*(tiling.dividing(rows or bias.shape[1]) for tiling in tilings))
    kept_share = 1.0 if kept is None else 1.0 - dropout_rate
    options = Options(tilings, kept_share, mask_previous, interpret)

    def run(projected, *others):
        # The heads of this device.
        heads = Projected(*(rearrange(x, "b n (h k) -> b n h k", h=len(others[0])) for x in projected))
        return rearrange(_attend(options, heads, *others), "b n h k -> b n (h k)")

    return sharded_by_head(run)(projected, scale, bias, previous_valid, kept)


def _attend_forward(options, *inputs):
    band = _Band(options, *inputs)
    tiling = options.tilings.forward
    read = _along(band.queries, "t"), _along(band.keys, "n"), _along(band.before, "w")
    written = _along(inputs[0].value, "t"), _along(band.queries.largest, "t")
    mixed, log_total = band.call(programs.forward_kernel, tiling, tiling.queries, read, written)
    return mixed, (inputs, mixed, log_total)


def _attend_backward(options, saved, cotangent):
    inputs, mixed, log_total = saved
    projected, scale, bias, *_ = inputs
    band = _Band(options, *inputs)
    tiling, size = options.tilings.of_queries, options.tilings.of_queries.queries
    read = *(_along(x, "t") for x in (band.queries, mixed, cotangent, log_total)), _along(band.keys, "n")
    squares, side = programs.squares_of(size)
    sums = band.w // size + 1, 2 * squares, 2 * side
    parts = jax.ShapeDtypeStruct((band.b, band.h, band.n // size, *sums), jnp.float32)
    of_parts = pl.BlockSpec((None, None, None, *sums), lambda t, h, b: (b, h, t, 0, 0, 0))
    written = *(_along(x, "t") for x in (projected.query, projected.query, log_total, log_total)), (parts, of_parts)
    of_query, scaled_unit, of_scale, inner, parts = band.call(
        programs.query_gradient_kernel, tiling, size, [*read, _along(band.before, "w")], written
    )

    tiling, of_keys = options.tilings.of_keys, []
    queries = band.queries._replace(query=scaled_unit)
    for keys in (band.keys, band.before):
        kernel = functools.partial(programs.key_gradient_kernel, is_before=keys is band.before)
        read = _along(queries, "n"), _along(Saved(cotangent, log_total, inner), "n"), _along(keys, "t")
        written = [_along(x, "t") for x in keys[:2]]
        of_keys += band.call(kernel, tiling, tiling.keys, read, written, by_key=True)

    parts = jnp.sum(parts, axis=(0, 2))[..., :-1, :] / options.kept_share
    tiles = _overlapped(rearrange(parts, "h m e (two g) -> h m e two g", two=2))
    of_bias = _overlapped(rearrange(tiles, "h m (two g) -> h m two g", two=2))[:, size : size + band.w]
    of_scale = jnp.sum(of_scale, axis=(0, 2)).astype(scale.dtype)
    return Projected(of_query, *of_keys), of_scale, of_bias.astype(bias.dtype), None, None


_attend = differentiable(_attend_forward, _attend_backward)


def _overlapped(x: Float[Array, "*batch m 2 g"]) -> Float[Array, "*batch _"]:
    """Rows of 2g numbers added up, each g places to the right of the one before."""
    none = [(0, 0)] * (x.ndim - 3)
    left, right = (jnp.pad(x[..., i, :], (*none, (i, 1 - i), (0, 0))) for i in (0, 1))
    return rearrange(left + right, "... m g -> ... (m g)")


def _along(arrays: Any, axis: str) -> tuple[Any, Any]:
    """Arrays [b, n, h, k] and [b, h, n] with their axes in the grid of `_Band.call`. `axis` is that of their tokens:
    `t`, if a program sees a tile of them; `n` or `w`, if it sees all of a segment's or of the block before it."""
    return arrays, jax.tree.map(lambda x: f"b{axis}hk" if x.ndim == 4 else f"bh{axis}", arrays)


class _Band:
    """The arrays that the kernels read."""

    def __init__(self, options: Options, projected: Projected, scale, bias, valid, kept):
        self.options = options
        (self.h, self.w), (self.b, self.n, _, _) = bias.shape, projected.query.shape
        self.valid, self.scale, self.bias = valid, scale.astype(jnp.float32), bias.astype(jnp.float32)
        self.kept = None if kept is None else kept.astype(jnp.bfloat16)
        highest = jnp.maximum(jax.lax.cummax(self.bias, axis=1), LOWEST)
        within_block = jnp.pad(highest[:, :-1], ((0, 0), (1, 0)), constant_values=LOWEST)
        seen = (valid | (not options.mask_previous))[:, None, :, None]
        # As in `attention.attend`; a query sees either all distances or those within its block.
        largest = jnp.where(seen, highest[:, None, -1:], within_block[:, None]).reshape(self.b, self.h, self.n)
        self.queries = Queries(projected.query, largest)
        factor = rearrange(unit_and_factor(projected.key)[1], "b n h 1 -> b h n")
        self.keys = Keys(projected.key, projected.value, factor)
        ones = jnp.ones((self.b, self.h, self.w), jnp.float32)
        self.before = Keys(projected.before_key, projected.before_value, ones)

    def shared(self, tiling: Tiling, by_key: bool) -> Shared:
        """The arrays that all tiles read; `by_key`: the rows of a tile are keys, and its columns queries."""
        size = min(tiling.queries, tiling.keys)
        tiles = (self.w + tiling.queries + tiling.keys) // size - 1
        first = jnp.arange(1, tiles + 1)[:, None, None] * size - tiling.queries
        row, column = row_and_column(tiling.queries, tiling.keys)
        distance = first + (row - column)
        bias = jnp.where((distance > 0) & (distance <= self.w), self.bias[:, distance - 1], MASKED)
        by_element = jax.tree.map(lambda x: x.mT if by_key else x, (bias, self.kept))
        return Shared(self.valid.astype(jnp.int32), self.scale, *by_element)

    def call(self, kernel, tiling: Tiling, tile: int, read, written, by_key: bool = False) -> list[Array]:
        """Runs a kernel, a function of references to shared, read and written arrays, in a grid of tiles with this
        number of tokens, heads and lanes."""
        shared = self.shared(tiling, by_key)
        (_, length, _, k), (_, m, rows, columns) = written[0][0].shape, shared.bias.shape
        of_shared = {"c": shared.valid.shape[1], "m": m, "x": rows, "y": columns}
        grid = Grid(
            {"t": length // tile, "h": self.h, "b": self.b},
            {"b": None, "h": None, "t": tile, "n": self.n, "w": self.w, "k": k, **of_shared},
            {},
        )
        params = triton.CompilerParams(num_warps=tiling.warps, num_stages=tiling.stages)
        read = (shared, Shared("bc", "h", "hmxy", "hww")), *read
        run = functools.partial(kernel, self.options)
        return grid.call(run, read, written, params, interpret=self.options.interpret)
