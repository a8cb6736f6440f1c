"""A Pallas kernel for TPUs that computes `attend_window` (`layers/attention.py`) without writing scores to memory.

It reads queries, keys and values as the projections write them, with the heads side by side, because an axis for the
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

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Float

from meliad_like.kernels.common import call_kernel, matrix_product, sharded_on_mesh, tpu_params
from meliad_like.kernels.window_wide import Passes, attend_wide_window
from meliad_like.layers.attention import LOWEST, MASKED, unit, unit_and_factor
from meliad_like.layers.losses import divisor
from meliad_like.layers.sharding import MESH_AXES_OF

ROWS = 128
"""The number of queries in each row of the ring; compiled for a TPU, window and head size must be multiples of it."""
WIDEST = 1024
"""The widest window that one run of the kernel computes: one of 2,048 would need 32.5 of v4's 16 MiB."""


class Projected(NamedTuple):
    """A layer's queries, keys and values as they are projected, and the keys and values before its first block.

    Outside of a kernel: whole segments. As inputs of a kernel: one block of one head, [w, k], and the block before it.
    In scratch, the chip's own memory: the same with unit length, and with queries times their scale.
    """

    query: Any
    """The queries [b, n, i], with the heads side by side; so are keys and values."""
    key: Any
    value: Any
    before_key: Any
    """The keys before the first block, [b, w, i], of unit length."""
    before_value: Any


class Options(NamedTuple):
    """The settings that are known when a kernel is compiled."""

    rows: int
    """The number of queries in each row of the ring."""
    mask_previous: bool
    """Whether a block before that is not valid is masked; otherwise it has keys and values of 0."""
    dropout_rate: float
    unit_keys: bool
    """Whether all keys have unit length, instead of only the keys before the first block."""
    interpret: bool | pltpu.InterpretParams


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
    widest: int = WIDEST,
    interpret: bool | pltpu.InterpretParams = False,
) -> Float[Array, "b n i"]:
    """`attend_window` of projections in one kernel, also under a mesh, where each device computes its lanes and heads.

    Queries and keys get unit length (`attention.unit`), and queries their scale. The gradient reaches all arguments but
    `previous_valid` and `kept`.

    Args:
        projected: a segment of n = c w tokens, with heads of i / h numbers each.
        scale: the attention scale of each head, not negative.
        bias, previous_valid: as for `attend_window`.
        kept, dropout_rate: the weights that dropout keeps, and its rate; None: all.
        mask_previous: whether a block before that is not valid is masked; otherwise its keys and values are 0.
        rows: the number of queries in each row of the ring; a divisor of `w`. None: 128, or `w` if 128 is none.
        widest: a wider window is computed as several (`window_wide.py`), best of a length near this one.
        interpret: whether the kernel is interpreted, on any platform, instead of compiled for a TPU; and how.
    """
    w = bias.shape[1]
    rows = rows or rows_of(w)
    length = rows * divisor(w // rows, max(widest // rows, 1))
    options = Options(rows, mask_previous, dropout_rate, length < w, interpret)
    passes = functools.partial(_forward, options), functools.partial(_backward, options)
    run = functools.partial(attend_wide_window, Passes(*passes, length, rows, mask_previous))
    # A number for each weight, so in bytes: they must fit into the chip's own memory.
    kept = None if kept is None else kept.astype(jnp.int8)
    return sharded_by_head(run)(projected, scale, bias, previous_valid, kept)


def sharded_by_head(run: Callable[..., Array]) -> Callable[..., Array]:
    """`run`, a function of the arguments of `attend_window_in_kernel`, on the mesh."""
    lanes, heads = MESH_AXES_OF["lanes"], MESH_AXES_OF["heads"]
    tokens, by_head = PartitionSpec(lanes, None, heads), PartitionSpec(heads)
    return sharded_on_mesh(run, (Projected(*[tokens] * 5), by_head, by_head, PartitionSpec(lanes), by_head), tokens)


def _forward(options, inputs):
    grid = _Grid(options, inputs, backward=False)
    return grid.call(forward_kernel, (), ((inputs[0].value, grid.block), grid.log_totals), ())


def _backward(options, inputs, mixed, log_totals, cotangent):
    projected, scale, bias, *_ = inputs
    grid = _Grid(options, inputs, backward=True)
    gradients, scale_gradient, bias_gradient = grid.call(
        backward_kernel,
        (
            (projected.key, grid.previous),
            (projected.value, grid.previous),
            (mixed, grid.block),
            (log_totals, grid.log_totals[1]),
            (cotangent, grid.block),
        ),
        ((projected, grid.projected), grid.by_head(1, grid.k), grid.by_head(1, grid.w)),
        (pltpu.VMEM((1, grid.k), jnp.float32), grid.bias_row, Projected(None, *[grid.scratch(jnp.float32)] * 4)),
    )
    scale_gradient = jnp.sum(scale_gradient, axis=(1, 2)).astype(scale.dtype)
    return gradients, scale_gradient, bias_gradient[:, 0, ::-1].astype(bias.dtype)


class _Grid:
    """The grid of the kernels (heads, lanes, blocks), and the parts of the arrays that a run of them sees.

    The forward pass goes through the blocks from first to last; each leaves its keys and values in scratch for the next
    one. The backward pass goes from last to first; each leaves there the gradient of the keys and values before it.
    """

    def __init__(self, options: Options, inputs: tuple, backward: bool):
        self.options, self.inputs = options, inputs
        projected, _, bias, *_ = inputs
        (self.h, self.w), (self.b, n, inner) = bias.shape, projected.query.shape
        self.c, self.k = n // self.w, inner // self.h
        rows = (self.w // options.rows, options.rows)

        self.at = lambda c: self.c - 1 - c if backward else c

        def spec(block):
            return pl.BlockSpec((None, self.w, self.k), lambda h, b, c: (b, block(c), h))

        self.block, before = spec(self.at), spec(lambda c: 0)
        self.previous = spec(lambda c: jnp.maximum(self.at(c) - 1, 0))
        self.projected = Projected(self.block, self.block, self.block, before, before)
        self.log_totals = (
            jax.ShapeDtypeStruct((self.b, self.c, self.h, *rows), jnp.float32),
            pl.BlockSpec((None, None, None, *rows), lambda h, b, c: (b, self.at(c), h, 0, 0)),
        )
        self.bias_row = pltpu.VMEM((options.rows, self.w), jnp.float32)

    def by_head(self, *shape: int):
        """An array that is the same for all blocks of a head, and the part of it that a run sees."""
        spec = pl.BlockSpec((None, *shape), lambda h, b, c: (h, 0, 0))
        return jax.ShapeDtypeStruct((self.h, *shape), jnp.float32), spec

    def of_kept(self, period: int):
        """The part that a run sees of the weights that dropout keeps, [h, period, w, w]. It is the largest of the
        arrays, and a second buffer for it would be too much."""

        def index(h, b, c):
            return h, jax.lax.rem(self.at(c), period) if period > 1 else 0, 0, 0

        return pl.BlockSpec((None, None, self.w, self.w), index, pipeline_mode=pl.Buffered(1))

    def scratch(self, dtype):
        """Memory for the vectors of one block."""
        return pltpu.VMEM((self.w, self.k), dtype)

    def call(self, kernel, others, outputs, scratch):
        """Runs a kernel, a function of the references to inputs, others, outputs and scratch, on the whole grid.

        Args:
            others: more inputs with their specs.
            outputs: arrays of the shapes and dtypes of the outputs, with their specs.
        """
        projected, scale, bias, valid, kept = self.inputs
        # Reversed, because a column further on the ring is a distance less.
        bias, scalars = bias[:, None, ::-1].astype(jnp.float32), pl.BlockSpec(memory_space=pltpu.SMEM)
        of_kept = None if kept is None else self.of_kept(kept.shape[1])
        read = (valid.astype(jnp.int32), scalars), (scale.astype(jnp.float32), scalars)
        read = *read, (bias, self.by_head(1, self.w)[1]), (kept, of_kept), (projected, self.projected), *others
        heads = Projected(*[self.scratch(projected.query.dtype)] * 5)
        grid, scratch = (self.h, self.b, self.c), [self.bias_row, heads, *scratch]
        run, params = functools.partial(kernel, self.options), tpu_params("parallel", "arbitrary", "arbitrary")
        interpret, name = self.options.interpret, kernel.__name__
        return call_kernel(run, grid, read, outputs, params, scratch, interpret=interpret, name=name)


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

    _begin_block(sums, turn)

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


def _begin_block(sums: Projected, turn: Array) -> None:
    """Begins the sums of a block. The turn before, of the block after it, has left its part of them as those of the
    block before; they become the block's own, and the others start again at 0."""
    for one, left in ((sums.key, sums.before_key), (sums.value, sums.before_value)):
        one[...] = jnp.where(turn > 0, left[...], 0)
        left[...] = jnp.zeros(left.shape, jnp.float32)


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
        row, column = (jax.lax.broadcasted_iota(jnp.int32, (rows, self.w), axis) for axis in (0, 1))
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
