"""The programs of the kernels for NVIDIA GPUs (`kernels/window_gpu.py`).

A program computes one tile of queries (or, for the gradients of keys and values, of keys) of one head and lane, and
goes through the tiles that meet it in the band. Where a document begins, the loop is shorter.

The gradient of the bias is a sum along diagonals. A tile of gradients is cut into 8 by 8 squares of g by g. A product
sums the squares on each of their 15 diagonals, and a second product sums the diagonals of these sums; what is left of a
tile, 15 by 2g numbers, is written and added up outside.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton
from jaxtyping import Array, Float, Int

from meliad_like.kernels.common import Ref, matrix_product
from meliad_like.layers.attention import LOWEST, unit_and_factor

SQUARES = 8
"""The number of squares along a side of a tile, for the gradient of the bias."""


class Tiling(NamedTuple):
    """The tiles of one kernel, and how Triton compiles it. The defaults were the fastest on an H200
    (benchmarks/gpu_kernel.py)."""

    queries: int = 64
    keys: int = 64
    warps: int = 4
    stages: int = 1

    def dividing(self, size: int) -> "Tiling":
        """The largest tiles that divide this size and are no larger than these, if both are powers of 2."""
        return self._replace(queries=math.gcd(self.queries, size), keys=math.gcd(self.keys, size))


class Tilings(NamedTuple):
    """The tilings of the kernels."""

    forward: Tiling = Tiling(stages=2)
    of_queries: Tiling = Tiling()
    """The gradients of queries and bias; its tiles are squares."""
    of_keys: Tiling = Tiling(queries=32, stages=2)
    """The gradients of keys and values."""


class Options(NamedTuple):
    """The settings that are known when the kernels are compiled."""

    tilings: Tilings
    kept_share: float
    """The share of the weights that dropout keeps."""
    mask_previous: bool
    """Whether a block before that is not valid is masked; otherwise it has keys and values of 0."""
    interpret: bool


class Shared(NamedTuple):
    """The arrays that all tiles of a head and lane read."""

    valid: Int[Ref, " c"]
    """Whether the block before each block is of the same document."""
    scale: Float[Ref, ""]
    bias: Float[Ref, "m rows columns"]
    """The bias, also the mask, of each tile of the band; see `_in_band`."""
    kept: Float[Ref, "w w"]
    """1 where dropout keeps a weight and 0 elsewhere, by the offset in its block of each row and column; None:
    no dropout."""


class Queries(NamedTuple):
    """The queries of a head and lane, or a tile of them, and one number for each."""

    query: Float[Ref, "t k"]
    """The projected queries; for the gradients of keys and values of unit length, times the scale."""
    largest: Float[Ref, " t"]
    """The largest bias that the query sees. The bias less it changes no weight, and is more exact."""


class Keys(NamedTuple):
    """The keys and values of a head and lane, or a tile of them."""

    key: Float[Ref, "s k"]
    value: Float[Ref, "s k"]
    factor: Float[Ref, " s"]
    """The factor that gives each key unit length."""


class Saved(NamedTuple):
    """The numbers of each query that the gradients of keys and values read in addition."""

    cotangent: Float[Ref, "t k"]
    log_total: Float[Ref, " t"]
    """The logarithm of the sum of the weights."""
    inner: Float[Ref, " t"]
    """The product of the result and its cotangent, times the share that dropout keeps."""


def forward_kernel(options: Options, shared: Shared, queries: Queries, keys: Keys, before: Keys, results, log_totals):
    """Writes the results of a tile of queries [tile, k], and the logarithms of the sums of their weights."""
    dtype, largest = results.dtype, queries.largest[...][:, None]
    query = _scaled_unit(queries, shared)[0]

    def add(sums, tile: _Tile):
        mixed, highest, total = sums
        scores = _multiply_add(options, matrix_product(query, tile.key, (1, 1)), tile.factor[None], tile.bias - largest)
        next_highest = jnp.maximum(highest, jnp.max(scores, axis=1))
        weights = _exponential(options, scores, next_highest[:, None])
        correction = _exponential(options, highest, next_highest)
        # The weights are summed before they are rounded and some of them are dropped.
        mixed = mixed * correction[:, None] + matrix_product(_dropped(weights.astype(dtype), tile.kept), tile.value)
        return mixed, next_highest, total * correction + jnp.sum(weights, axis=1)

    none = jnp.zeros(len(query), jnp.float32)
    sums = jnp.zeros(query.shape, jnp.float32), none + LOWEST, none
    mixed, highest, total = _over_keys(options, options.tilings.forward, shared, keys, before, add, sums)
    # The largest weight is 1. If all keys are masked, the sum is 0, and so is the result.
    total = jnp.maximum(total, 1)
    results[...] = (mixed / total[:, None] / options.kept_share).astype(dtype)
    log_totals[...] = highest + jnp.log(total)


def query_gradient_kernel(
    options: Options, shared: Shared, queries: Queries, mixed, cotangent, log_total, keys: Keys, before: Keys, *results
):
    """Writes, for a tile of queries, their gradients; the queries of unit length, times the scale; what each adds to
    the scale's gradient; its inner product for `Saved`; and what each tile of keys adds to the bias's gradient."""
    of_query, scaled_unit, of_scale, inner_products, of_bias = results
    cotangent, scale = cotangent[...], shared.scale[...]
    dtype, largest, log_total = cotangent.dtype, queries.largest[...][:, None], log_total[...][:, None]
    query, unit, factor = _scaled_unit(queries, shared)
    # All gradients are multiplied by the share that dropout keeps, until they are written.
    inner = options.kept_share * jnp.sum(cotangent.astype(jnp.float32) * mixed[...].astype(jnp.float32), axis=1)
    scaled_unit[...], inner_products[...] = query, inner
    squares, side = squares_of(len(query))
    on_diagonals = _on_diagonal(squares, 0).astype(jnp.float32), _on_diagonal(side, 1).astype(dtype)

    def add(of_unit, tile: _Tile):
        scores = _multiply_add(options, matrix_product(query, tile.key, (1, 1)), tile.factor[None], tile.bias - largest)
        weights = _exponential(options, scores, log_total)
        products = _dropped(matrix_product(cotangent, tile.value, (1, 1)), tile.kept)
        gradient = weights * (products - inner[:, None])
        of_bias[tile.index] = _diagonals(gradient.astype(dtype), *on_diagonals)
        return of_unit + matrix_product((gradient * tile.factor[None]).astype(dtype), tile.key)

    def skip(index, none):
        of_bias[index] = jnp.zeros(of_bias.shape[1:], jnp.float32)
        return none

    none, tiling = jnp.zeros(query.shape, jnp.float32), options.tilings.of_queries
    of_unit = _over_keys(options, tiling, shared, keys, before, add, none, skip) / options.kept_share
    along = jnp.sum(unit * of_unit, axis=1)
    of_scale[...] = along
    of_query[...] = (scale * factor * (of_unit - unit * along[:, None])).astype(dtype)


def key_gradient_kernel(
    options: Options, shared: Shared, queries: Queries, saved: Saved, keys: Keys, of_key, of_value, *, is_before: bool
):
    """Writes the gradients of a tile of keys and of their values. Queries have unit length and are scaled; keys before
    the segment have unit length."""
    tiling, n = options.tilings.of_keys, len(queries.query)
    w = n // len(shared.valid)
    key, value, column = keys.key[...], keys.value[...], keys.factor[...]
    dtype, key_tile = key.dtype, pl.program_id(0)
    first = key_tile * len(key) - is_before * w
    next_block = jax.lax.div(first + w, w)
    # The last block has none after it, so the numbers that are read for it there don't matter.
    is_seen = shared.valid[jnp.minimum(next_block, len(shared.valid) - 1)] > 0
    end = jnp.minimum(jnp.where(is_seen, first + len(key) + w, next_block * w), n)

    def add(index, sums):
        of_unit, of_value = sums
        rows = pl.ds(index * tiling.queries, tiling.queries)
        query, cotangent = queries.query[rows, :], saved.cotangent[rows, :]
        _, bias, kept = _in_band(tiling, shared, w, index, key_tile, is_before, by_key=True)
        bias -= queries.largest[rows][None]
        scores = _multiply_add(options, matrix_product(key, query, (1, 1)), column[:, None], bias)
        weights = _exponential(options, scores, saved.log_total[rows][None])
        products = _dropped(matrix_product(value, cotangent, (1, 1)), kept)
        gradient = weights * (products - saved.inner[rows][None])
        of_unit += matrix_product(gradient.astype(dtype), query)
        return of_unit, of_value + matrix_product(_dropped(weights.astype(dtype), kept), cotangent)

    none = jnp.zeros(key.shape, jnp.float32)
    last = jax.lax.div(end + tiling.queries - 1, tiling.queries)
    of_unit, value_sums = jax.lax.fori_loop(jax.lax.div(jnp.maximum(first, 0), tiling.queries), last, add, (none, none))
    if not is_before:
        unit = key.astype(jnp.float32) * column[:, None]
        of_unit = column[:, None] * (of_unit - unit * jnp.sum(unit * of_unit, axis=1, keepdims=True))
    of_key[...] = (of_unit / options.kept_share).astype(dtype)
    of_value[...] = (value_sums / options.kept_share).astype(dtype)


def _scaled_unit(queries: Queries, shared: Shared) -> tuple[Array, Array, Array]:
    """A tile of queries of unit length times the scale; those of unit length, in float32; and the factor for it."""
    query = queries.query[...]
    unit, factor = unit_and_factor(query.astype(jnp.float32))
    return (unit * shared.scale[...]).astype(query.dtype), unit, factor


class _Tile(NamedTuple):
    """A tile of keys, seen from a tile of queries."""

    key: Float[Array, "s k"]
    factor: Float[Array, " s"]
    value: Float[Array, "s k"]
    index: Int[Array, ""]
    """The number of the tile, see `_in_band`."""
    bias: Float[Array, "t s"]
    """The bias, also the mask."""
    kept: Float[Array, "t s"] | None


def _over_keys(options: Options, tiling: Tiling, shared: Shared, keys: Keys, before: Keys, add, sums, skip=None):
    """`sums` after `sums = add(sums, tile)` for each tile of keys that a program's tile of queries sees, in order.

    `skip(index, 0)` is called for each tile that the band has here, but in another document.
    """
    w, query_tile = len(before.key), pl.program_id(0)
    first = query_tile * tiling.queries
    block = jax.lax.div(first, w)
    is_visible = shared.valid[block] > 0
    begin = jnp.where(is_visible, first - w, block * w) if options.mask_previous else first - w
    if skip is not None:
        jax.lax.fori_loop(jax.lax.div(first - begin, tiling.keys) + 1, w // tiling.keys + 1, skip, 0)
    for source, start in ((before, -w), (keys, 0)):

        def step(index, sums, source=source, start=start):
            row = index * tiling.keys
            rows, place = pl.ds(row, tiling.keys), row + start
            factor, value = source.factor[rows], source.value[rows, :]
            if not options.mask_previous:
                is_seen = is_visible | (place >= block * w)
                factor, value = jnp.where(is_seen, factor, 0), jnp.where(is_seen, value, jnp.zeros_like(value))
            in_band = _in_band(tiling, shared, w, query_tile, index, source is before)
            return add(sums, _Tile(source.key[rows, :], factor, value, *in_band))

        lower = jax.lax.div(jnp.maximum(begin - start, 0), tiling.keys)
        upper = jax.lax.div(first - start + tiling.queries + tiling.keys - 2, tiling.keys)
        sums = jax.lax.fori_loop(lower, jnp.minimum(upper, len(source.key) // tiling.keys), step, sums)
    return sums


def _in_band(
    tiling: Tiling, shared: Shared, w: int, query_tile, key_tile, is_before: bool, by_key: bool = False
) -> tuple[Array, Array, Array | None]:
    """The number of the tile of the band where these tiles of queries and keys meet, its bias, and what dropout keeps
    there."""
    distance = query_tile * tiling.queries - key_tile * tiling.keys + is_before * w
    index = jax.lax.div(distance + tiling.queries, min(tiling.queries, tiling.keys)) - 1
    # Compiled, a product with a constant shows that several numbers can be read at once.
    tiles = ((query_tile, tiling.queries), (key_tile, tiling.keys))
    rows, columns = (pl.ds(jax.lax.rem(tile, w // size) * size, size) for tile, size in tiles)
    kept = None if shared.kept is None else shared.kept[(columns, rows) if by_key else (rows, columns)]
    return index, shared.bias[index], kept


def _multiply_add(options: Options, products: Array, factors: Array, bias: Array) -> Array:
    if options.interpret:
        return products * factors + bias
    return _by_element("fma.rn.f32 $0, $1, $2, $3;", products, factors, bias)


def _exponential(options: Options, x: Array, shift: Array) -> Array:
    """`exp(x - shift)`; results below 2^-126 are 0."""
    if options.interpret:
        return jnp.exp(x - shift)
    asm = "{.reg .f32 t; sub.f32 t, $1, $2; mul.f32 t, t, $3; ex2.approx.ftz.f32 $0, t;}"
    return _by_element(asm, x, shift, np.log2(np.e, dtype=np.float32))


def _by_element(asm: str, x: Array, *others: Any) -> Array:
    """Instructions for each element of float32 arrays, where the compiler would take several times as many: XLA has
    Triton put no product and sum together, and its exponential is not the one that the GPU has."""
    args = [x, *(jnp.broadcast_to(y, x.shape) for y in others)]
    constraints = ",".join(["=f"] + ["f"] * len(args))
    result = jax.ShapeDtypeStruct(x.shape, x.dtype)
    [y] = triton.elementwise_inline_asm(asm, args=args, constraints=constraints, pack=1, result_shape_dtypes=[result])
    return y


def _dropped(x: Array, kept: Array | None) -> Array:
    """`x` where dropout keeps it; elsewhere 0."""
    return x if kept is None else x * kept.astype(x.dtype)


def squares_of(tile: int) -> tuple[int, int]:
    """The number of squares along a side of a tile, and the length of their sides."""
    side = tile // SQUARES if tile % SQUARES == 0 else 1
    return tile // side, side


def _diagonals(x: Float[Array, "tile tile"], across: Float[Array, "_ _"], along: Float[Array, "_ _"]) -> Array:
    """The sums of a tile along its diagonals: at [e, f], of the diagonal `f - g + 1` of each square of the diagonal
    `e - m + 1` of the m by m squares. The last row and the last column are 0.

    `across` and `along` are `_on_diagonal` of the squares and of a square's entries.
    """
    m, g = squares_of(len(x))
    squares = x.reshape(m, g, m, g).transpose(0, 2, 1, 3).reshape(m * m, g * g)
    return matrix_product(across, matrix_product(squares, along))


def _on_diagonal(side: int, axis: int) -> Array:
    """Ones where the entries of a square, along one axis, are on its diagonals, along the other one."""
    shape = (2 * side, side * side) if axis == 0 else (side * side, 2 * side)
    diagonal, entry = (jax.lax.broadcasted_iota(jnp.int32, shape, i) for i in (axis, 1 - axis))
    difference = jax.lax.div(entry, side) - jax.lax.rem(entry, side) + (side - 1)
    return difference == diagonal
