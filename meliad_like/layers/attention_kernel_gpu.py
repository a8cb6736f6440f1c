"""Pallas kernels for NVIDIA GPUs (Triton) that compute `attend_window` (`layers/attention.py`) and write no scores to
memory. Their contract is that of the TPU's kernel (`layers/attention_kernel.py`).

They read queries, keys and values as the projections write them, with the heads side by side. Unit length and scale are
factors of the rows and columns of the scores, so no queries or keys of unit length are written either.

The tokens of a segment are one band: the query at `p` sees the keys at `p - w` to `p - 1`, of which those before 0 are
in the block before the segment. A program computes one tile of queries (or, for the gradients of keys and values, of
keys) of one head and lane, and goes through the tiles that meet it in the band. Where a document begins, the loop is
shorter. The backward pass computes the weights again from the logarithms of their sums, in one kernel for the queries
and one for keys and values (Dao et al. 2022, FlashAttention), so every sum has one order, and results are the same in
every run.

The gradient of the bias is a sum along diagonals. A tile of gradients is cut into 8 by 8 squares of g by g. A product
sums the squares on each of their 15 diagonals, and a second product sums the diagonals of these sums; what is left of a
tile, 15 by 2g numbers, is written and added up outside.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from einops import rearrange
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton
from jaxtyping import Array, Bool, Float

from meliad_like.layers.attention import LOWEST, MASKED, unit_and_factor
from meliad_like.layers.attention_kernel import Projected, matrix_product, sharded_by_head
from meliad_like.layers.basic import multiplier_of

SMALLEST_TILE = 64
"""Compiled for a GPU, the window must be a multiple of it, and the head size one of `HEAD_SIZES`."""
HEAD_SIZES = (32, 64, 128)
SQUARES = 8
"""The number of squares along a side of a tile, for the gradient of the bias."""


class Tiling(NamedTuple):
    """The tiles of one kernel, and how Triton compiles it. The defaults were the fastest on an H200
    (benchmarks/gpu_kernel.py)."""

    queries: int = 64
    keys: int = 64
    warps: int = 4
    stages: int = 1

    def within(self, tile: int) -> "Tiling":
        """The same with tiles of at most this size."""
        return self._replace(queries=min(self.queries, tile), keys=min(self.keys, tile))


class Options(NamedTuple):
    """What is known when the kernels are compiled."""

    forward: Tiling = Tiling(stages=2)
    of_queries: Tiling = Tiling()
    """The gradients of queries and bias; its tiles are squares."""
    of_keys: Tiling = Tiling()
    """The gradients of keys and values."""
    mask_previous: bool = True
    """Whether a block before that is not valid is masked; otherwise it has keys and values of 0."""
    interpret: bool = False


DEFAULT = Options()


class Shared(NamedTuple):
    """What all tiles of a head and lane read."""

    valid: Any
    """[c]: whether the block before each block is of the same document."""
    scale: Any
    """[]: the attention scale."""
    bias: Any
    """[5w]: the bias at distance d is at 2w + d - 1, and all else is masked."""
    multiplier: Any
    """[w, w]: dropout by the offsets of query and key in their blocks; None: no dropout."""


class Queries(NamedTuple):
    """The queries of a head and lane, or a tile of them, and one number for each."""

    query: Any
    factor: Any
    """That which makes them unit length."""
    largest: Any
    """The largest bias that the query sees. The bias less it changes no weight, and is more exact."""


class Keys(NamedTuple):
    """The keys and values of a head and lane, or a tile of them."""

    key: Any
    value: Any
    factor: Any
    """That which makes keys unit length."""


class Saved(NamedTuple):
    """What the gradients of keys and values read of the queries in addition."""

    cotangent: Any
    log_total: Any
    """The logarithm of the sum of the weights."""
    inner: Any
    """The product of the result and its cotangent."""


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
    options: Options = DEFAULT,
) -> Float[Array, "b n i"]:
    """As `attention_kernel.attend_window_in_kernel`; `rows` is the largest size of a tile, a divisor of `w`."""
    w = bias.shape[1]
    if rows is None:
        # Two tiles of float32 vectors of 128 do not fit a GPU's shared memory.
        sizes = (128, SMALLEST_TILE) if projected.query.dtype.itemsize < 4 else (SMALLEST_TILE,)
        rows = next((size for size in sizes if w % size == 0), w)
    forward, of_queries, of_keys = (tiling.within(rows) for tiling in options[:3])
    options = Options(forward, of_queries, of_keys, mask_previous, interpret)

    def run(projected, *others):
        # The heads of this device.
        heads = Projected(*(rearrange(x, "b n (h k) -> b n h k", h=len(others[0])) for x in projected))
        return rearrange(_attend(options, heads, *others), "b n h k -> b n (h k)")

    return sharded_by_head(run)(projected, scale, bias, previous_valid, multiplier_of(kept, dropout_rate))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(options: Options, *inputs) -> Array:
    return _attend_forward(options, *inputs)[0]


def _attend_forward(options, *inputs):
    band = _Band(options, *inputs)
    tiling = options.forward
    read = band.tile(band.queries, tiling.queries), band.whole(band.keys), band.whole(band.before)
    written = (band.tile(x, tiling.queries) for x in (inputs[0].value, band.queries.factor))
    mixed, log_total = band.call(forward_kernel, tiling, band.n // tiling.queries, read, written)
    return mixed, (inputs, mixed, log_total)


def _attend_backward(options, saved, cotangent):
    inputs, mixed, log_total = saved
    projected, scale, bias, *_ = inputs
    band = _Band(options, *inputs)
    tiling, size = options.of_queries, options.of_queries.queries
    read = band.queries, mixed, cotangent, log_total
    read = *(band.tile(x, size) for x in read), band.whole(band.keys), band.whole(band.before)
    squares, side = _squares(size)
    parts = jax.ShapeDtypeStruct(
        (band.b, band.h, band.n // size, band.w // size + 1, 2 * squares, 2 * side), jnp.float32
    )
    of_parts = pl.BlockSpec((None, None, None, *parts.shape[3:]), lambda t, h, b: (b, h, t, 0, 0, 0))
    written = *(band.tile(x, size) for x in (projected.query, log_total, log_total)), (parts, of_parts)
    of_query, of_scale, inner, parts = band.call(query_gradient_kernel, tiling, band.n // size, read, written)

    tiling, of_keys = options.of_keys, []
    for keys in (band.keys, band.before):
        kernel = functools.partial(key_gradient_kernel, is_before=keys is band.before)
        read = band.whole(band.queries), band.whole(Saved(cotangent, log_total, inner)), band.tile(keys, tiling.keys)
        written = [band.tile(x, tiling.keys) for x in keys[:2]]
        of_keys += band.call(kernel, tiling, keys.key.shape[1] // tiling.keys, read, written)

    # The number of keys grows where distances fall, so tiles of keys are taken from the last to the first.
    parts = jnp.sum(parts, axis=(0, 2))[:, ::-1, :-1]
    tiles = _overlapped(rearrange(parts, "h r e (two g) -> h r e two g", two=2))
    of_bias = _overlapped(rearrange(tiles, "h r (two g) -> h r two g", two=2))[:, size : size + band.w]
    of_scale = jnp.sum(of_scale, axis=(0, 2)).astype(scale.dtype)
    return Projected(of_query, *of_keys), of_scale, of_bias.astype(bias.dtype), None, None


_attend.defvjp(_attend_forward, _attend_backward)


def _overlapped(x: Float[Array, "*batch m 2 g"]) -> Float[Array, "*batch _"]:
    """Rows of 2g numbers added up, each g places to the right of the one before."""
    none = [(0, 0)] * (x.ndim - 3)
    left, right = (jnp.pad(x[..., i, :], (*none, (i, 1 - i), (0, 0))) for i in (0, 1))
    return rearrange(left + right, "... m g -> ... (m g)")


class _Band:
    """The arrays that the kernels read, and the parts of them that a program of the grid (tile, head, lane) sees."""

    def __init__(self, options: Options, projected: Projected, scale, bias, valid, multiplier):
        self.options = options
        (self.h, self.w), (self.b, self.n, _, _) = bias.shape, projected.query.shape
        w, bias = self.w, bias.astype(jnp.float32)
        highest = jax.lax.cummax(bias, axis=1)
        within_block = jnp.pad(highest[:, :-1], ((0, 0), (1, 0)), constant_values=LOWEST)
        seen = (valid | (not options.mask_previous))[:, None, :, None]
        # As `attention.without_largest`: a query sees either all distances or those within its block.
        largest = jnp.where(seen, highest[:, None, -1:], within_block[:, None]).reshape(self.b, self.h, self.n)
        padded = jnp.pad(bias, ((0, 0), (2 * w, 2 * w)), constant_values=MASKED)
        ones = jnp.ones((self.b, self.h, w), jnp.float32)
        self.queries = Queries(projected.query, _factor(projected.query), largest)
        self.keys = Keys(projected.key, projected.value, _factor(projected.key))
        self.before = Keys(projected.before_key, projected.before_value, ones)
        self.shared = Shared(valid.astype(jnp.int32), scale.astype(jnp.float32), padded, multiplier)

    def tile(self, arrays: Any, tile: int) -> tuple[Any, Any]:
        """Arrays [b, n, h, k] and [b, h, n] with their specs, where a program sees a tile of the tokens."""

        def spec(x):
            if x.ndim == 4:
                return pl.BlockSpec((None, tile, None, x.shape[3]), lambda t, h, b: (b, t, h, 0))
            return pl.BlockSpec((None, None, tile), lambda t, h, b: (b, h, t))

        return arrays, jax.tree.map(spec, arrays)

    def whole(self, arrays: Any) -> tuple[Any, Any]:
        """As `tile`, where a program sees all tokens of its head and lane."""

        def spec(x):
            if x.ndim == 4:
                return pl.BlockSpec((None, x.shape[1], None, x.shape[3]), lambda t, h, b: (b, 0, h, 0))
            return pl.BlockSpec((None, None, x.shape[2]), lambda t, h, b: (b, h, 0))

        return arrays, jax.tree.map(spec, arrays)

    def call(self, kernel, tiling: Tiling, tiles: int, read, written) -> list[Array]:
        """Runs a kernel, a function of the references to what is shared, read and written, for a number of tiles."""

        def by_head(x):
            return pl.BlockSpec((None, *x.shape[1:]), lambda t, h, b: (h, *[0] * (x.ndim - 1)))

        valid, *others = self.shared
        shared = Shared(
            pl.BlockSpec((None, valid.shape[1]), lambda t, h, b: (b, 0)),
            *jax.tree.map(by_head, others),
        )
        written = list(written)
        return pl.pallas_call(
            functools.partial(kernel, self.options),
            grid=(tiles, self.h, self.b),
            in_specs=[shared, *(spec for _, spec in read)],
            out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x, _ in written],
            out_specs=[spec for _, spec in written],
            compiler_params=triton.CompilerParams(num_warps=tiling.warps, num_stages=tiling.stages),
            interpret=self.options.interpret,
        )(self.shared, *(x for x, _ in read))


def _factor(x: Float[Array, "b n h k"]) -> Float[Array, "b h n"]:
    """What makes vectors unit length."""
    return rearrange(unit_and_factor(x)[1], "b n h 1 -> b h n")


def forward_kernel(options: Options, shared: Shared, queries: Queries, keys: Keys, before: Keys, results, log_totals):
    """Writes the results of a tile of queries [tile, k], and the logarithms of the sums of their weights."""
    dtype, query, row = results.dtype, queries.query[...], queries.factor[...] * shared.scale[...]
    largest = queries.largest[...][:, None]

    def add(sums, tile: _Tile):
        mixed, highest, total = sums
        scores = _scores((query, row), tile[:2], tile.bias, largest)
        next_highest = jnp.maximum(highest, jnp.max(scores, axis=1))
        weights = jnp.exp(scores - next_highest[:, None]).astype(dtype).astype(jnp.float32)
        correction = jnp.exp(highest - next_highest)
        mixed = mixed * correction[:, None] + matrix_product(
            _product(weights, tile.multiplier).astype(dtype), tile.value
        )
        return mixed, next_highest, total * correction + jnp.sum(weights, axis=1)

    none = jnp.zeros(row.shape, jnp.float32)
    sums = jnp.zeros(query.shape, jnp.float32), none + LOWEST, none
    mixed, highest, total = _over_keys(options, options.forward, shared, keys, before, add, sums)
    # The largest weight is 1. If all keys are masked, the sum is 0, and so is the result.
    total = jnp.maximum(total, 1)
    results[...] = (mixed / total[:, None]).astype(dtype)
    log_totals[...] = highest + jnp.log(total)


def query_gradient_kernel(
    options: Options, shared: Shared, queries: Queries, mixed, cotangent, log_total, keys: Keys, before: Keys, *results
):
    """Writes the gradients of a tile of queries, what each query adds to that of the scale, its inner product for
    `Saved`, and what each tile of keys adds to the gradient of the bias."""
    of_query, of_scale, inner_products, of_bias = results
    query, row, cotangent, scale = queries.query[...], queries.factor[...], cotangent[...], shared.scale[...]
    dtype, largest, log_total = query.dtype, queries.largest[...][:, None], log_total[...][:, None]
    inner = jnp.sum(cotangent.astype(jnp.float32) * mixed[...].astype(jnp.float32), axis=1)
    inner_products[...] = inner

    def add(of_unit, tile: _Tile):
        scores = _scores((query, row * scale), tile[:2], tile.bias, largest)
        weights = jnp.exp(scores - log_total)
        products = _product(matrix_product(cotangent, tile.value, (1, 1)), tile.multiplier)
        gradient = weights * (products - inner[:, None])
        of_bias[tile.index] = _diagonals(gradient)
        return of_unit + matrix_product((gradient * tile.factor[None]).astype(dtype), tile.key)

    def skip(index, none):
        of_bias[index] = jnp.zeros(of_bias.shape[1:], jnp.float32)
        return none

    of_unit = jnp.zeros(query.shape, jnp.float32)
    of_unit = _over_keys(options, options.of_queries, shared, keys, before, add, of_unit, skip)
    unit = query.astype(jnp.float32) * row[:, None]
    along = jnp.sum(unit * of_unit, axis=1)
    of_scale[...] = along
    of_query[...] = ((scale * row)[:, None] * (of_unit - unit * along[:, None])).astype(dtype)


def key_gradient_kernel(
    options: Options, shared: Shared, queries: Queries, saved: Saved, keys: Keys, of_key, of_value, *, is_before: bool
):
    """Writes the gradients of a tile of keys and of their values. Keys before the segment have unit length already."""
    tiling, w, n = options.of_keys, shared.bias.shape[0] // 5, len(queries.query)
    key, value, column = keys.key[...], keys.value[...], keys.factor[...]
    dtype, scale, first = key.dtype, shared.scale[...], pl.program_id(0) * len(key) - is_before * w
    next_block = jax.lax.div(first + w, w)
    # The last block has none after it, so what is read for it there doesn't matter.
    is_seen = shared.valid[jnp.minimum(next_block, len(shared.valid) - 1)] > 0
    end = jnp.minimum(jnp.where(is_seen, first + len(key) + w - 1, next_block * w), n)
    offsets = _distances(tiling.queries, len(key)).T

    def add(index, sums):
        of_unit, of_value = sums
        begin = index * tiling.queries
        rows = pl.ds(begin, tiling.queries)
        query, cotangent, row = queries.query[rows, :], saved.cotangent[rows, :], queries.factor[rows] * scale
        bias, multiplier = _by_element(tiling, shared, offsets, begin, first, transposed=True)
        scores = _scores((key, column), (query, row), bias, queries.largest[rows][None])
        weights = jnp.exp(scores - saved.log_total[rows][None])
        products = _product(matrix_product(value, cotangent, (1, 1)), multiplier)
        gradient = weights * (products - saved.inner[rows][None])
        of_unit += matrix_product((gradient * row[None]).astype(dtype), query)
        return of_unit, of_value + matrix_product(_product(weights, multiplier).astype(dtype), cotangent)

    none = jnp.zeros(key.shape, jnp.float32)
    last = jax.lax.div(end + tiling.queries - 1, tiling.queries)
    of_unit, value_sums = jax.lax.fori_loop(jax.lax.div(jnp.maximum(first, 0), tiling.queries), last, add, (none, none))
    if not is_before:
        unit = key.astype(jnp.float32) * column[:, None]
        of_unit = column[:, None] * (of_unit - unit * jnp.sum(unit * of_unit, axis=1, keepdims=True))
    of_key[...], of_value[...] = of_unit.astype(dtype), value_sums.astype(dtype)


class _Tile(NamedTuple):
    """A tile of keys, seen from a tile of queries."""

    key: Array
    factor: Array
    value: Array
    bias: Array
    """[queries, keys], also the mask."""
    multiplier: Array | None
    index: Array
    """The number of tiles from the first one that the band has here."""


def _over_keys(options: Options, tiling: Tiling, shared: Shared, keys: Keys, before: Keys, add, sums, skip=None):
    """`sums` after `sums = add(sums, tile)` for each tile of keys that a program's tile of queries sees, in order.

    `skip(index, 0)` is called for each tile that the band has here, but in another document.
    """
    w, first = len(before.key), pl.program_id(0) * tiling.queries
    block = jax.lax.div(first, w)
    is_visible = shared.valid[block] > 0
    begin = jnp.where(is_visible, first - w, block * w) if options.mask_previous else first - w
    if skip is not None:
        jax.lax.fori_loop(0, jax.lax.div(begin + w - first, tiling.keys), skip, 0)
    offsets = _distances(tiling.queries, tiling.keys)
    for source, start in ((before, -w), (keys, 0)):

        def step(index, sums, source=source, start=start):
            row = index * tiling.keys
            rows, place = pl.ds(row, tiling.keys), row + start
            factor, value = source.factor[rows], source.value[rows, :]
            if not options.mask_previous:
                is_seen = is_visible | (place >= block * w)
                factor, value = jnp.where(is_seen, factor, 0), jnp.where(is_seen, value, jnp.zeros_like(value))
            bias, multiplier = _by_element(tiling, shared, offsets, first, place)
            tile = jax.lax.div(place + w - first, tiling.keys)
            return add(sums, _Tile(source.key[rows, :], factor, value, bias, multiplier, tile))

        lower = jax.lax.div(jnp.maximum(begin - start, 0), tiling.keys)
        upper = jax.lax.div(first - start + tiling.queries + tiling.keys - 2, tiling.keys)
        sums = jax.lax.fori_loop(lower, jnp.minimum(upper, len(source.key) // tiling.keys), step, sums)
    return sums


def _distances(queries: int, keys: int) -> Array:
    """The distances in a tile whose first query and key are the same token."""
    row, column = (jax.lax.broadcasted_iota(jnp.int32, (queries, keys), axis) for axis in (0, 1))
    return row - column


def _by_element(
    tiling: Tiling, shared: Shared, offsets, query, key, transposed: bool = False
) -> tuple[Array, Array | None]:
    """The bias and the multiplier of the tile that begins at this query and this key; None without dropout."""
    w = len(shared.bias) // 5
    bias = shared.bias[offsets + (query - key + 2 * w - 1)]
    if shared.multiplier is None:
        return bias, None
    rows, columns = jax.lax.rem(query, w), jax.lax.rem(key + w, w)
    multiplier = shared.multiplier[pl.ds(rows, tiling.queries), pl.ds(columns, tiling.keys)]
    return bias, multiplier.T if transposed else multiplier


def _product(x: Array, multiplier: Array | None) -> Array:
    return x if multiplier is None else x * multiplier


def _scores(left: tuple, right: tuple, bias, largest) -> Array:
    """The scores of vectors and their factors with others, with bias and mask."""
    products = matrix_product(left[0], right[0], (1, 1)) * left[1][:, None] * right[1][None]
    return products + (bias - largest)


def _squares(tile: int) -> tuple[int, int]:
    """The number of squares along a side of a tile, and the length of their sides."""
    side = tile // SQUARES if tile % SQUARES == 0 else 1
    return tile // side, side


def _diagonals(x: Float[Array, "tile tile"]) -> Float[Array, "_ _"]:
    """The sums of a tile along its diagonals: at [e, f], of the diagonal `f - g + 1` of each square of the diagonal
    `e - m + 1` of the m by m squares. The last row and the last column are 0."""
    m, g = _squares(len(x))
    squares = x.reshape(m, g, m, g).transpose(0, 2, 1, 3).reshape(m * m, g * g)
    return matrix_product(_on_diagonal(m, 0), matrix_product(squares, _on_diagonal(g, 1)))


def _on_diagonal(side: int, axis: int) -> Array:
    """Ones where the entries of a square, along one axis, are on its diagonals, along the other one."""
    shape = (2 * side, side * side) if axis == 0 else (side * side, 2 * side)
    diagonal, entry = (jax.lax.broadcasted_iota(jnp.int32, shape, i) for i in (axis, 1 - axis))
    difference = jax.lax.div(entry, side) - jax.lax.rem(entry, side) + (side - 1)
    return (difference == diagonal).astype(jnp.float32)
