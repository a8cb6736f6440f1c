"""The programs of the kernel for windows on TPUs (`kernels/window_tpu.py`).

They read queries, keys and values as the projections write them, with the heads side by side, because an axis for the
heads would cost copies. Unit length, scale and the block before are computed or kept inside, because each would be one
more array in memory.

One run of the kernel computes one block of one head. It goes through the `w` by `w` ring of the scores in rows of 128
queries. The row that begins with query `t` needs the keys of its own block before `t + 128`, and of the block before
from `t`; so what no query sees is not computed, but for the tile on the diagonal. The backward pass computes the
weights again from the logarithms of their sums (Dao et al. 2022, FlashAttention).

What lasts for a whole head, its bias and the gradients of bias and scale, is laid out or summed in the chip's own
memory; so the head is the grid's outermost axis. The bias is read by distance. On the ring it is the same row of 128
queries, rotated: this row is laid out before a head's first block, and the gradient is summed in a row like it until
the head's last block.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float

from meliad_like.kernels.common import Grid, Interpret, Ref, matrix_product, row_and_column, tpu_params
from meliad_like.layers.attention import LOWEST, MASKED, unit, unit_and_factor

ROWS = 128
"""The number of queries in each row of the ring; compiled for a TPU, window and head size must be multiples of it."""


class Projected(NamedTuple):
    """A layer's queries, keys and values as they are projected, and the keys and values before its first block.

    Outside of a kernel: whole segments. As inputs of a kernel: one block of one head, [w, k], and the block before it.
    In scratch, the chip's own memory: the same with unit length, and with queries times their scale.
    """

    query: Float[Ref, "b n i"]
    """The heads are side by side; so are those of keys and values."""
    key: Float[Ref, "b n i"]
    value: Float[Ref, "b n i"]
    before_key: Float[Ref, "b w i"]
    """The keys before the first block, of unit length."""
    before_value: Float[Ref, "b w i"]


class Options(NamedTuple):
    """The settings that are known when a kernel is compiled."""

    length: int
    """The number of tokens of a window."""
    rows: int
    """The number of queries in each row of the ring."""
    mask_previous: bool
    """Whether a block before that is not valid is masked; otherwise it has keys and values of 0."""
    dropout_rate: float
    unit_keys: bool
    """Whether all keys have unit length, instead of only the keys before the first block."""
    interpret: Interpret


def forward(options: Options, inputs: tuple) -> list[Array]:
    """The outputs [b, n, i] of a window of `length` tokens, and the logarithms of the sums of the weights [b, c, h,
    r / rows, rows]. `inputs` are projections, scale, bias, whether the block before is visible, and what dropout keeps
    [h, p, r, r], where block `c` has entry `c % p`."""
    projected, _, bias, *_ = inputs
    (b, n, _), (h, w) = projected.query.shape, bias.shape
    log_totals = jax.ShapeDtypeStruct((b, n // w, h, w // options.rows, options.rows), jnp.float32)
    return _call(options, forward_kernel, inputs, (), [(projected.value, "bni"), (log_totals, "bchqr")], ())


def backward(options: Options, inputs: tuple, mixed: Array, log_totals: Array, cotangent: Array) -> tuple:
    """The gradients of projections, scale and bias."""
    projected, scale, bias, *_ = inputs
    (h, w), k = bias.shape, projected.query.shape[2] // len(bias)
    others = (projected.key, "bpi"), (projected.value, "bpi"), (mixed, "bni"), (log_totals, "bchqr"), (cotangent, "bni")
    of_scale, of_bias = (jax.ShapeDtypeStruct((h, 1, size), jnp.float32) for size in (k, w))
    written = (projected, PROJECTED), (of_scale, "h1k"), (of_bias, "h1w")
    bias_row, of_block = (pltpu.VMEM(shape, jnp.float32) for shape in ((options.rows, w), (w, k)))
    scratch = pltpu.VMEM((1, k), jnp.float32), bias_row, Projected(None, *[of_block] * 4)
    gradients, of_scale, of_bias = _call(options, backward_kernel, inputs, others, written, scratch, backward=True)
    return gradients, jnp.sum(of_scale, axis=(1, 2)).astype(scale.dtype), of_bias[:, 0, ::-1].astype(bias.dtype)


PROJECTED = Projected("bni", "bni", "bni", "bmi", "bmi")
"""The axes of the projections in `_call`."""


def _call(options: Options, kernel, inputs: tuple, others, written, scratch, *, backward: bool = False) -> list[Any]:
    """Runs a kernel, a function of the references to inputs, others, outputs and scratch, in a grid of heads, lanes and
    blocks. Others and outputs are pairs of arrays and axes: `i` is that of all heads side by side, and a run sees of
    `n` its block, of `m` the block before the segment, and of `p` the block before its own.

    The forward pass goes through the blocks from first to last; each leaves its keys and values in scratch for the next
    one. The backward pass goes from last to first; each leaves there the gradient of the keys and values before it.
    """
    projected, scale, bias, valid, kept = inputs
    (h, w), (b, n, inner), rows = bias.shape, projected.query.shape, options.rows
    c, k = n // w, inner // h
    period = 1 if kept is None else kept.shape[1]

    def block(at):
        return c - 1 - at["c"] if backward else at["c"]

    grid = Grid(
        {"h": h, "b": b, "c": c},
        dict.fromkeys("bche") | {"n": w, "m": w, "p": w, "i": k, "q": w // rows, "r": rows, "1": 1, "w": w, "k": k},
        {
            "n": block,
            "c": block,
            "p": lambda at: jnp.maximum(block(at) - 1, 0),
            "i": "h",
            "e": lambda at: jax.lax.rem(block(at), period) if period > 1 else 0,
        },
    )
    # The largest of the arrays, [h, period, w, w]: a second buffer for it would be too much.
    of_kept = dataclasses.replace(grid.part("heww"), pipeline_mode=pl.Buffered(1))
    # Reversed, because a column further on the ring is a distance less.
    bias, scalars = bias[:, None, ::-1].astype(jnp.float32), pl.BlockSpec(memory_space=pltpu.SMEM)
    read = (valid.astype(jnp.int32), scalars), (scale.astype(jnp.float32), scalars), (bias, "h1w"), (kept, of_kept)
    heads = Projected(*[pltpu.VMEM((w, k), projected.query.dtype)] * 5)
    return grid.call(
        functools.partial(kernel, options),
        [*read, (projected, PROJECTED), *others],
        written,
        tpu_params("parallel", "arbitrary", "arbitrary"),
        [pltpu.VMEM((rows, w), jnp.float32), heads, *scratch],
        interpret=options.interpret,
        name=kernel.__name__,
    )


def forward_kernel(options, valid, scale, bias, kept, projected, mixed, log_totals, bias_row, heads):
    """Writes the outputs [w, k] of one block, and the logarithms of the sums of the weights, [w / rows, rows]."""
    head, lane, block = (pl.program_id(axis) for axis in range(3))
    is_valid = valid[lane, block] > 0
    pl.when((lane == 0) & (block == 0))(lambda: _lay_out(bias, bias_row))

    @pl.when(block > 0)
    def _():
        heads.before_key[...], heads.before_value[...] = heads.key[...], heads.value[...]

    _fill(heads, projected, scale[head], options, block == 0, is_valid)
    for index in range(len(heads.query) // options.rows):
        row = _Row(index, options, is_valid, kept, heads, bias_row)
        scores, dtype = row.scores(), heads.value.dtype
        highest = jnp.maximum(jnp.max(scores, axis=1, keepdims=True), LOWEST)
        weights = jnp.exp(scores - highest).astype(dtype).astype(jnp.float32)
        total = jnp.maximum(jnp.sum(weights, axis=1, keepdims=True), 1)
        result = row.mix(row.dropped(weights).astype(dtype), heads.value, heads.before_value)
        mixed[row.queries, :] = (result / total).astype(dtype)
        log_totals[index : index + 1, :] = broadcast_transposed(highest + jnp.log(total))[:1]


def backward_kernel(options, valid, scale, bias, kept, projected, key, value, mixed, log_totals, cotangents, *results):
    """Writes the gradients of the projections, and the sums over a head's blocks of those of its scale and its bias."""
    gradients, scale_gradient, bias_gradient, bias_row, heads, scale_sums, bias_sums, sums = results
    head, lane, turn = (pl.program_id(axis) for axis in range(3))
    last_turn = pl.num_programs(2) - 1
    is_first = turn == last_turn
    is_valid = valid[lane, last_turn - turn] > 0

    @pl.when((lane == 0) & (turn == 0))
    def _():
        _lay_out(bias, bias_row)
        for one in (bias_sums, scale_sums):
            one[...] = jnp.zeros(one.shape, jnp.float32)

    # The turn before, of the block after this one, has left its part of the sums as those of the block before; they
    # become the block's own, and the others start again at 0.
    for one, left in ((sums.key, sums.before_key), (sums.value, sums.before_value)):
        one[...] = jnp.where(turn > 0, left[...], 0)
        left[...] = jnp.zeros(left.shape, jnp.float32)

    @pl.when(~is_first)
    def _():
        heads.before_key[...], heads.before_value[...] = _unit_keys(key, options), value[...]

    _fill(heads, projected, scale[head], options, is_first, is_valid)
    for index in range(len(heads.query) // options.rows):
        row = _Row(index, options, is_valid, kept, heads, bias_row)
        dtype, cotangent = heads.query.dtype, cotangents[row.queries, :]
        inner = cotangent.astype(jnp.float32) * mixed[row.queries, :].astype(jnp.float32)
        inner = jnp.sum(inner, axis=1, keepdims=True)
        weights = jnp.exp(row.scores() - broadcast_transposed(log_totals[index : index + 1, :])[:, :1])
        products = row.products(cotangent, heads.value, heads.before_value)
        gradient = weights * (row.dropped(products) - inner)
        bias_sums[...] += row.rotated(gradient, back=True)
        weights, gradient = row.dropped(weights).astype(dtype), gradient.astype(dtype)
        of_query, query = row.mix(gradient, heads.key, heads.before_key), projected.query[row.queries, :]
        scale_sums[...] += jnp.sum(of_query * unit(query).astype(jnp.float32), axis=0, keepdims=True)
        gradients.query[row.queries, :] = before_unit(query, scale[head] * of_query)
        row.add(weights, cotangent, sums.value, sums.before_value)
        row.add(gradient, row.query, sums.key, sums.before_key)
    of_key = sums.key[...] if options.unit_keys else before_unit(projected.key[...], sums.key[...])
    gradients.key[...] = of_key.astype(gradients.key.dtype)
    gradients.value[...] = sums.value[...].astype(gradients.value.dtype)
    if not options.mask_previous:
        _clear_unless(is_valid, sums.before_key, sums.before_value)

    @pl.when(is_first)
    def _():
        gradients.before_key[...] = sums.before_key[...].astype(gradients.before_key.dtype)
        gradients.before_value[...] = sums.before_value[...].astype(gradients.before_value.dtype)

    @pl.when((lane == pl.num_programs(1) - 1) & is_first)
    def _():
        scale_gradient[...] = scale_sums[...]
        # The transpose of `_lay_out`: the gradient is summed over the queries, by distance.
        bias_gradient[...] = jnp.sum(_sheared(bias_sums[...], right=False), axis=0, keepdims=True)


def _clear_unless(is_valid: Array, *arrays: Any) -> None:
    for one in arrays:
        one[...] = jnp.where(is_valid, one[...], jnp.zeros(one.shape, one.dtype))


def _fill(heads: Projected, projected: Projected, scale, options: Options, is_first, is_valid) -> None:
    """Fills the arrays of a block; if it is not the first one, those of the block before are there."""
    heads.query[...] = scaled_unit(projected.query[...], scale)
    heads.key[...], heads.value[...] = _unit_keys(projected.key, options), projected.value[...]

    @pl.when(is_first)
    def _():
        heads.before_key[...], heads.before_value[...] = projected.before_key[...], projected.before_value[...]

    if not options.mask_previous:
        _clear_unless(is_valid, heads.before_key, heads.before_value)


def _unit_keys(key: Any, options: Options) -> Array:
    return key[...] if options.unit_keys else unit(key[...])


def rows_of(num_queries: int) -> int:
    """The default number of queries in each row of scores."""
    return ROWS if num_queries % ROWS == 0 else num_queries


def scaled_unit(query: Array, scale: Array) -> Array:
    """Queries with unit length, times the scale of their head."""
    query = unit(query)
    return (query.astype(jnp.float32) * scale).astype(query.dtype)


def before_unit(x: Array, gradient: Array) -> Array:
    """The gradient of vectors, from the gradient of these vectors scaled to unit length."""
    _, factor = unit_and_factor(x)
    y = x.astype(jnp.float32) * factor
    return (factor * (gradient - y * jnp.sum(y * gradient, axis=1, keepdims=True))).astype(x.dtype)


class _Row:
    """A row of the ring: `rows` consecutive queries of one block and head, and their scores [rows, w]."""

    def __init__(self, index: int, options: Options, is_valid, kept, heads: Projected, bias_row):
        rows, self.factor = options.rows, 1 / (1 - options.dropout_rate)
        self.begin, self.end = index * rows, (index + 1) * rows
        self.kept, self.heads, self.bias_row = kept, heads, bias_row
        self.previous_seen = is_valid | (not options.mask_previous)
        self.w, self.queries = heads.query.shape[0], slice(self.begin, self.end)
        self.query = heads.query[self.queries, :]
        row, column = row_and_column(rows, self.w)
        self.own = self.begin + row > column
        """The columns that hold keys of the own block."""

    def scores(self):
        """The scores with bias and mask."""
        bias = self.rotated(self.bias_row[...])
        # As in `attention.attend`; a query sees either all distances or those within its block.
        largest = jax.lax.cond(
            self.previous_seen,
            lambda: jnp.broadcast_to(jnp.max(self.bias_row[:1, :], axis=1, keepdims=True), (len(bias), 1)),
            lambda: jnp.max(jnp.where(self.own, bias, LOWEST), axis=1, keepdims=True),
        )
        scores = self.products(self.query, self.heads.key, self.heads.before_key) + (bias - largest)
        return jnp.where(self.own | self.previous_seen, scores, MASKED)

    def products(self, x, own, previous):
        """The products of vectors of the queries with the vector in each column of the ring."""
        both = (matrix_product(x, keys[self.queries, :], (1, 1)) for keys in (own, previous))
        columns = [jnp.where(self.own[:, self.queries], *both)]
        # Empty arrays can't be compiled.
        if self.begin > 0:
            columns.insert(0, matrix_product(x, own[: self.begin, :], (1, 1)))
        if self.end < self.w:
            columns.append(matrix_product(x, previous[self.end :, :], (1, 1)))
        return jnp.concatenate(columns, axis=1)

    def halves(self, x):
        """The columns of a row that the own block has, and those that the block before has; zeros elsewhere."""
        own, previous = x[:, : self.end], x[:, self.begin :]
        return (
            jnp.where(self.own[:, : self.end], own, jnp.zeros_like(own)),
            jnp.where(self.own[:, self.begin :], jnp.zeros_like(previous), previous),
        )

    def mix(self, weights, own, previous):
        """The sum over the columns of weights times the vectors in them."""
        of_own, of_previous = self.halves(weights)
        return matrix_product(of_own, own[: self.end, :]) + matrix_product(of_previous, previous[self.begin :, :])

    def add(self, weights, x, own, previous):
        """Adds weights times vectors of the queries to the vector in each column: the transpose of `mix`."""
        of_own, of_previous = self.halves(weights)
        own[: self.end, :] += matrix_product(of_own, x, (0, 0))
        previous[self.begin :, :] += matrix_product(of_previous, x, (0, 0))

    def dropped(self, x):
        if self.kept is None:
            return x
        return x * (self.kept[self.queries, :].astype(jnp.float32) * self.factor)

    def rotated(self, x, back: bool = False):
        """`x` with its columns rotated from their places in the first row of the ring to those in this row; or back."""
        shift = self.w - self.begin if back else self.begin
        return x if self.begin == 0 else pltpu.roll(x, shift, 1)


def broadcast_transposed(x: Array) -> Array:
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
