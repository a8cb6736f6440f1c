"""What the attention kernel (`attention_kernel`) computes of one block and head, forward and backward.

It goes through the `w` by `w` ring of the scores in rows of 128 queries. The row that begins with query `t` needs the
keys of the own block before `t + 128`, and of the block before from `t`; so what no query sees is not computed, but for
the tile on the diagonal. The backward pass computes the weights again from the logarithms of their sums (Dao et al.
2022, FlashAttention).

The bias is read by distance. On the ring it is the same row of 128 queries, rotated: this row is laid out in the chip's
own memory before a head's first block, and the gradient is summed in a row like it until the head's last block.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array

from meliad_like.layers.attention import LOWEST, MASKED, UNIT_EPSILON, unit


class Projected(NamedTuple):
    """A layer's queries, keys and values as they are projected, and what its first block has before it.

    In a kernel, those of one block and head: [w, k].
    """

    query: Any
    """[b, n, i], with the heads side by side; so are keys and values."""
    key: Any
    value: Any
    before_key: Any
    """[b, w, i]; keys of unit length."""
    before_value: Any


class Options(NamedTuple):
    """What is known when a kernel is compiled."""

    rows: int
    """The number of queries in each row of the ring."""
    mask_previous: bool
    """Whether a block before that is not valid is masked; otherwise it has keys and values of 0."""
    interpret: bool


class Heads(NamedTuple):
    """The arrays of one block and head, [w, k]: queries of unit length times their scale, keys of unit length."""

    query: Any
    key: Any
    value: Any
    previous_key: Any
    previous_value: Any


def forward_kernel(options, valid, scale, bias, multiplier, projected, previous, mixed, log_totals, bias_row, heads):
    """Writes the outputs [w, k] of one block, and the logarithms of the sums of the weights, [w / rows, rows]."""
    head, lane, block = (pl.program_id(axis) for axis in range(3))
    is_valid = valid[lane, block] > 0
    pl.when((lane == 0) & (block == 0))(lambda: _lay_out(bias, bias_row))

    @pl.when(block > 0)
    def _():
        heads.previous_key[...], heads.previous_value[...] = heads.key[...], heads.value[...]

    _fill(heads, projected, scale[head], options, block == 0, is_valid)
    for row in _rows_of(options, is_valid, multiplier, heads, bias_row):
        scores, dtype = row.scores(), heads.value.dtype
        highest = jnp.maximum(jnp.max(scores, axis=1, keepdims=True), LOWEST)
        weights = jnp.exp(scores - highest).astype(dtype).astype(jnp.float32)
        total = jnp.maximum(jnp.sum(weights, axis=1, keepdims=True), 1)
        result = row.mix(row.dropped(weights).astype(dtype), heads.value, heads.previous_value)
        mixed[row.queries, :] = (result / total).astype(dtype)
        log_totals[row.index : row.index + 1, :] = _broadcast_transposed(highest + jnp.log(total))[:1]


def backward_kernel(
    options, valid, scale, bias, multiplier, projected, previous, mixed, log_totals, cotangents, *results
):
    """Writes the gradients of the projections, and the sums over a head's blocks of those of its scale and its bias."""
    gradients, scale_gradient, bias_gradient, bias_row, heads, scale_sums, bias_sums, sums = results
    head, lane, turn = (pl.program_id(axis) for axis in range(3))
    last_turn = pl.num_programs(2) - 1
    is_first = turn == last_turn
    is_valid = valid[lane, last_turn - turn] > 0
    pl.when((lane == 0) & (turn == 0))(lambda: _begin_head(bias, bias_row, bias_sums, scale_sums))
    _begin_block(sums, turn)

    @pl.when(~is_first)
    def _():
        heads.previous_key[...], heads.previous_value[...] = unit(previous[0][...]), previous[1][...]

    _fill(heads, projected, scale[head], options, is_first, is_valid)
    for row in _rows_of(options, is_valid, multiplier, heads, bias_row):
        dtype, cotangent = heads.query.dtype, cotangents[row.queries, :]
        inner = cotangent.astype(jnp.float32) * mixed[row.queries, :].astype(jnp.float32)
        inner = jnp.sum(inner, axis=1, keepdims=True)
        weights = jnp.exp(row.scores() - _broadcast_transposed(log_totals[row.index : row.index + 1, :])[:, :1])
        products = row.products(cotangent, heads.value, heads.previous_value)
        gradient = weights * (row.dropped(products) - inner)
        bias_sums[...] += row.rotated(gradient, back=True)
        weights, gradient = row.dropped(weights).astype(dtype), gradient.astype(dtype)
        of_query, query = row.mix(gradient, heads.key, heads.previous_key), projected.query[row.queries, :]
        scale_sums[...] += jnp.sum(of_query * unit(query).astype(jnp.float32), axis=0, keepdims=True)
        gradients.query[row.queries, :] = _before_unit(query, scale[head] * of_query)
        row.add(weights, cotangent, sums.value, sums.previous_value)
        row.add(gradient, row.query, sums.key, sums.previous_key)
    gradients.key[...] = _before_unit(projected.key[...], sums.key[...])
    gradients.value[...] = sums.value[...].astype(gradients.value.dtype)
    if not options.mask_previous:
        _clear_unless(is_valid, sums.previous_key, sums.previous_value)

    @pl.when(is_first)
    def _():
        gradients.before_key[...] = sums.previous_key[...].astype(gradients.before_key.dtype)
        gradients.before_value[...] = sums.previous_value[...].astype(gradients.before_value.dtype)

    @pl.when((lane == pl.num_programs(1) - 1) & is_first)
    def _():
        scale_gradient[...] = scale_sums[...]
        _sum_by_distance(bias_sums, bias_gradient)


class Sums(NamedTuple):
    """Sums of gradients of the keys and values of a block and of the one before, [w, k]."""

    key: Any
    value: Any
    previous_key: Any
    previous_value: Any


def _begin_head(bias, bias_row, bias_sums, scale_sums) -> None:
    _lay_out(bias, bias_row)
    bias_sums[...] = jnp.zeros(bias_sums.shape, jnp.float32)
    scale_sums[...] = jnp.zeros(scale_sums.shape, jnp.float32)


def _begin_block(sums: Sums, turn: Array) -> None:
    """Begins the sums of a block. The turn before, of the block after it, has left its part of them as those of the
    block before; they become the block's own, and the others start again at 0."""
    for one, left in ((sums.key, sums.previous_key), (sums.value, sums.previous_value)):
        one[...] = jnp.where(turn > 0, left[...], jnp.zeros(left.shape, jnp.float32))
        left[...] = jnp.zeros(left.shape, jnp.float32)


def _clear_unless(is_valid: Array, *arrays: Any) -> None:
    for one in arrays:
        one[...] = jnp.where(is_valid, one[...], jnp.zeros(one.shape, one.dtype))


def _fill(heads: Heads, projected: Projected, scale: Array, options: Options, is_first: Array, is_valid: Array) -> None:
    """Fills the arrays of a block; if it is not the first one, those of the block before are there."""
    query = unit(projected.query[...])
    heads.query[...] = (query.astype(jnp.float32) * scale).astype(query.dtype)
    heads.key[...], heads.value[...] = unit(projected.key[...]), projected.value[...]

    @pl.when(is_first)
    def _():
        heads.previous_key[...], heads.previous_value[...] = projected.before_key[...], projected.before_value[...]

    if not options.mask_previous:
        _clear_unless(is_valid, heads.previous_key, heads.previous_value)


def _before_unit(x: Array, gradient: Array) -> Array:
    """The gradient of vectors, from that of the vectors scaled to unit length."""
    y = x.astype(jnp.float32)
    factor = jax.lax.rsqrt(jnp.sum(jnp.square(y), axis=1, keepdims=True) + UNIT_EPSILON)
    y = y * factor
    return (factor * (gradient - y * jnp.sum(y * gradient, axis=1, keepdims=True))).astype(x.dtype)


def _rows_of(options, is_valid, multiplier, heads, bias_row) -> Iterator["_Row"]:
    for index in range(heads.query.shape[0] // options.rows):
        yield _Row(index, options, is_valid, multiplier, heads, bias_row)


class _Row:
    """A row of the ring: `rows` consecutive queries of one block and head, and their scores [rows, w]."""

    def __init__(self, index: int, options: Options, is_valid, multiplier, heads: Heads, bias_row):
        rows = options.rows
        self.index, self.begin, self.end = index, index * rows, (index + 1) * rows
        self.multiplier, self.heads, self.bias_row = multiplier, heads, bias_row
        self.previous_seen = is_valid | (not options.mask_previous)
        self.w, self.queries = heads.query.shape[0], slice(self.begin, self.end)
        self.query = heads.query[self.queries, :]
        row, column = (jax.lax.broadcasted_iota(jnp.int32, (rows, self.w), axis) for axis in (0, 1))
        self.own = self.begin + row > column
        """The columns that hold keys of the own block."""

    def scores(self):
        """The scores with bias and mask."""
        bias = self.rotated(self.bias_row[...])
        # As `attention.without_largest`: a query sees either all distances or those within its block.
        largest = jax.lax.cond(
            self.previous_seen,
            lambda: jnp.broadcast_to(jnp.max(self.bias_row[:1, :], axis=1, keepdims=True), (len(bias), 1)),
            lambda: jnp.max(jnp.where(self.own, bias, LOWEST), axis=1, keepdims=True),
        )
        scores = self.products(self.query, self.heads.key, self.heads.previous_key) + (bias - largest)
        return jnp.where(self.own | self.previous_seen, scores, MASKED)

    def products(self, x, own, previous):
        """The products of vectors of the queries with what is in each column of the ring."""
        both = (_dot(x, keys[self.queries, :], (1, 1)) for keys in (own, previous))
        columns = [jnp.where(self.own[:, self.queries], *both)]
        # Empty arrays can't be compiled.
        if self.begin > 0:
            columns.insert(0, _dot(x, own[: self.begin, :], (1, 1)))
        if self.end < self.w:
            columns.append(_dot(x, previous[self.end :, :], (1, 1)))
        return jnp.concatenate(columns, axis=1)

    def halves(self, x):
        """The columns of a row that the own block has, and those that the block before has; zeros besides."""
        own, previous = x[:, : self.end], x[:, self.begin :]
        return (
            jnp.where(self.own[:, : self.end], own, jnp.zeros_like(own)),
            jnp.where(self.own[:, self.begin :], jnp.zeros_like(previous), previous),
        )

    def mix(self, weights, own, previous):
        """The sum over the columns of weights times what is in them."""
        of_own, of_previous = self.halves(weights)
        return _dot(of_own, own[: self.end, :]) + _dot(of_previous, previous[self.begin :, :])

    def add(self, weights, x, own, previous):
        """Adds weights times vectors of the queries to what is in each column: the transpose of `mix`."""
        of_own, of_previous = self.halves(weights)
        own[: self.end, :] += _dot(of_own, x, (0, 0))
        previous[self.begin :, :] += _dot(of_previous, x, (0, 0))

    def dropped(self, x):
        return x if self.multiplier is None else x * self.multiplier[self.queries, :]

    def rotated(self, x, back: bool = False):
        """`x` with its columns rotated from their places in the first row of the ring to those in this row; or back."""
        shift = self.w - self.begin if back else self.begin
        return x if self.begin == 0 else pltpu.roll(x, shift, 1)


def _dot(x: Array, y: Array, contracted: tuple[int, int] = (1, 0)) -> Array:
    """The product of two matrices, summed over one axis of each, in float32."""
    axes = (contracted[:1], contracted[1:])
    return jax.lax.dot_general(x, y, (axes, ((), ())), preferred_element_type=jnp.float32)


def _broadcast_transposed(x: Array) -> Array:
    """The transpose of a column [rows, 1] or a row [1, rows], repeated to [rows, rows]."""
    return jnp.broadcast_to(x, (x.size, x.size)).T


def _sheared(x: Array, right: bool) -> Array:
    """Row `t` of `x` rotated by `t` columns, in steps of powers of two."""
    rows, columns = x.shape
    index = jax.lax.broadcasted_iota(jnp.int32, (rows, columns), 0)
    for bit in (1 << n for n in range((rows - 1).bit_length())):
        x = jnp.where(index & bit > 0, pltpu.roll(x, bit if right else columns - bit, 1), x)
    return x


def _lay_out(bias, bias_row) -> None:
    """Fills the ring's first row: column `s` of query `t` gets entry `(s - t) % w` of the reversed bias."""
    bias_row[...] = _sheared(jnp.broadcast_to(bias[...], bias_row.shape), right=True)


def _sum_by_distance(bias_sums, bias_gradient) -> None:
    """The transpose of `_lay_out`: sums the gradient over the queries, by distance."""
    bias_gradient[...] = jnp.sum(_sheared(bias_sums[...], right=False), axis=0, keepdims=True)
