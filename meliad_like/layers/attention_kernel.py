"""A Pallas kernel for TPUs that computes `attend_window` (`layers/attention.py`) without writing scores to memory.

One run of the kernel computes one block of one head. It goes through the `w` by `w` ring of the scores in rows of 128
queries. The row that begins with query `t` needs the keys of the own block before `t + 128`, and of the block before
from `t`; so what no query sees is not computed, but for the tile on the diagonal. The backward pass computes the
weights again from the logarithms of their sums (Dao et al. 2022, FlashAttention).

The bias is read by distance. On the ring it is the same row of 128 queries, rotated: this row is laid out in the chip's
own memory before a head's first block, and the gradient is summed in a row like it until the head's last block. So the
head is the outermost axis of the grid.
"""

import functools
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Float

from meliad_like.layers.attention import LOWEST, MASKED
from meliad_like.layers.sharding import MESH_AXES_OF

ROWS = 128
"""The number of queries in a row; compiled for a TPU, the window must be a multiple of it."""
VMEM_LIMIT = 100 * 2**20
"""The chip's own memory that a kernel may use, in bytes. The compiler's default is too little for windows of 1024."""


class Blocks(NamedTuple):
    """The arrays of the blocks, [b, c, h, w, k]; inside of a kernel, of one block and head, [w, k]."""

    query: Any
    key: Any
    value: Any
    previous_key: Any
    previous_value: Any


def attend_window_in_kernel(
    query: Float[Array, "b c h w k"],
    key: Float[Array, "b c h w k"],
    value: Float[Array, "b c h w k"],
    previous_key: Float[Array, "b c h w k"],
    previous_value: Float[Array, "b c h w k"],
    bias: Float[Array, "h w"],
    previous_valid: Bool[Array, "b c"],
    multiplier: Float[Array, "h w w"] | None = None,
    *,
    rows: int | None = None,
    interpret: bool = False,
) -> Float[Array, "b c h w k"]:
    """`attend_window` in one kernel, also under a mesh, where each device computes its own lanes and heads.

    The gradient reaches all arguments but `previous_valid` and `multiplier`.

    Args:
        query, key, value, previous_key, previous_value, previous_valid, multiplier: as for `attend_window`.
        bias: scaled bias at the distances 1 to w.
        rows: the number of queries in a row, of which `w` must be a multiple. None: 128, or `w` if it is no multiple.
        interpret: whether the kernel is interpreted, on any platform, instead of compiled for a TPU.
    """
    w = query.shape[3]
    if rows is None:
        rows = ROWS if w % ROWS == 0 else w
    run = functools.partial(_attend, rows, interpret)
    mesh = jax.sharding.get_abstract_mesh()
    if not mesh.empty:
        # The compiler can't divide a kernel among devices.
        lanes, heads = MESH_AXES_OF["lanes"], MESH_AXES_OF["heads"]
        block, by_head = PartitionSpec(lanes, None, heads), PartitionSpec(heads)
        run = jax.shard_map(
            run,
            in_specs=(Blocks(*[block] * 5), by_head, PartitionSpec(lanes), by_head),
            out_specs=block,
            axis_names=set(mesh.axis_names) - set(mesh.manual_axes),
            check_vma=False,
        )
    return run(Blocks(query, key, value, previous_key, previous_value), bias, previous_valid, multiplier)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _attend(rows: int, interpret: bool, blocks: Blocks, bias: Array, valid: Array, multiplier: Array | None) -> Array:
    return _attend_forward(rows, interpret, blocks, bias, valid, multiplier)[0]


def _attend_forward(rows, interpret, blocks, bias, valid, multiplier):
    grid = _Grid(blocks, rows, interpret)
    mixed, log_totals = grid.call(
        _forward_kernel,
        (valid, bias, multiplier, blocks),
        (),
        outputs=(blocks.value, grid.log_totals),
        output_specs=(grid.block_spec, grid.log_totals_spec),
        scratch=(),
    )
    return mixed, (valid, bias, multiplier, blocks, mixed, log_totals)


def _attend_backward(rows, interpret, saved, cotangent):
    *inputs, blocks, mixed, log_totals = saved
    grid = _Grid(blocks, rows, interpret)
    gradients, bias_gradient = grid.call(
        _backward_kernel,
        (*inputs, blocks),
        ((mixed, grid.block_spec), (log_totals, grid.log_totals_spec), (cotangent, grid.block_spec)),
        outputs=(blocks, grid.bias),
        output_specs=(Blocks(*[grid.block_spec] * 5), grid.bias_spec),
        scratch=(grid.bias_row, [pltpu.VMEM(blocks.query.shape[3:], jnp.float32)] * 4),
    )
    return gradients, bias_gradient[:, 0, ::-1].astype(inputs[1].dtype), None, None


_attend.defvjp(_attend_forward, _attend_backward)


class _Grid:
    """The grid of the kernels (heads, lanes, blocks), and the parts of the arrays that a run of them sees."""

    def __init__(self, blocks: Blocks, rows: int, interpret: bool):
        self.b, self.c, self.h, self.w, k = blocks.query.shape
        self.rows, self.interpret = rows, interpret
        self.block_spec = pl.BlockSpec((None, None, None, self.w, k), lambda h, b, c: (b, c, h, 0, 0))
        shape = (self.w // rows, rows)
        self.log_totals = jax.ShapeDtypeStruct((self.b, self.c, self.h, *shape), jnp.float32)
        self.log_totals_spec = pl.BlockSpec((None, None, None, *shape), lambda h, b, c: (b, c, h, 0, 0))
        self.bias = jax.ShapeDtypeStruct((self.h, 1, self.w), jnp.float32)
        self.bias_spec = pl.BlockSpec((None, 1, self.w), lambda h, b, c: (h, 0, 0))
        # The largest of the arrays, and constant for all blocks of a head, so a second buffer for the next is no use.
        self.multiplier_spec = pl.BlockSpec(
            (None, self.w, self.w), lambda h, b, c: (h, 0, 0), pipeline_mode=pl.Buffered(1)
        )
        self.bias_row = pltpu.VMEM((rows, self.w), jnp.float32)

    def call(self, kernel, inputs, others, *, outputs, output_specs, scratch):
        """Runs a kernel on the whole grid.

        Args:
            kernel: a function of the references to inputs, others, outputs and scratch.
            inputs: `previous_valid`, the bias by distance, the multiplier or None, and the blocks.
            others: more inputs with their specs.
            outputs: arrays of the shapes and dtypes of the outputs.
        """
        valid, bias, multiplier, blocks = inputs
        # Reversed, because a column further on the ring is a distance less.
        bias = bias[:, None, ::-1].astype(jnp.float32)
        specs = (
            pl.BlockSpec(memory_space=pltpu.SMEM),
            self.bias_spec,
            None if multiplier is None else self.multiplier_spec,
            Blocks(*[self.block_spec] * 5),
        )
        return pl.pallas_call(
            functools.partial(kernel, self.rows),
            grid=(self.h, self.b, self.c),
            in_specs=[*specs, *(spec for _, spec in others)],
            out_shape=jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), outputs),
            out_specs=output_specs,
            scratch_shapes=[self.bias_row, *scratch],
            compiler_params=pltpu.CompilerParams(
                dimension_semantics=("parallel", "arbitrary", "arbitrary"), vmem_limit_bytes=VMEM_LIMIT
            ),
            interpret=self.interpret,
            name=kernel.__name__.strip("_"),
        )(valid.astype(jnp.int32), bias, multiplier, blocks, *(x for x, _ in others))


def _forward_kernel(rows, valid, bias, multiplier, blocks, mixed, log_totals, bias_row):
    """Writes the outputs [w, k] of one block, and the logarithms of the sums of the weights, [w / rows, rows]."""
    is_first, _ = _ends_of_head()
    pl.when(is_first)(lambda: _lay_out(bias, bias_row))
    for row in _rows_of(rows, valid, multiplier, blocks, bias_row):
        scores, dtype = row.scores(), blocks.value.dtype
        highest = jnp.maximum(jnp.max(scores, axis=1, keepdims=True), LOWEST)
        weights = jnp.exp(scores - highest).astype(dtype).astype(jnp.float32)
        total = jnp.sum(weights, axis=1, keepdims=True) + jnp.exp(LOWEST - highest)
        result = row.mix(row.dropped(weights).astype(dtype), blocks.value, blocks.previous_value)
        mixed[row.queries, :] = (result / total).astype(dtype)
        log_totals[row.index : row.index + 1, :] = _turned(highest + jnp.log(total))[:1]


def _backward_kernel(rows, valid, bias, multiplier, blocks, mixed, log_totals, cotangents, *results):
    """Writes the gradients of the blocks' arrays, and the sum over a head's blocks of the gradient of its bias."""
    gradients, bias_gradient, bias_row, bias_sums, sums = results
    is_first, is_last = _ends_of_head()

    @pl.when(is_first)
    def _():
        _lay_out(bias, bias_row)
        bias_sums[...] = jnp.zeros(bias_sums.shape, jnp.float32)

    for one in sums:
        one[...] = jnp.zeros(one.shape, jnp.float32)
    key_sums, value_sums, previous_key_sums, previous_value_sums = sums
    for row in _rows_of(rows, valid, multiplier, blocks, bias_row):
        dtype, cotangent = blocks.query.dtype, cotangents[row.queries, :]
        inner = cotangent.astype(jnp.float32) * mixed[row.queries, :].astype(jnp.float32)
        inner = jnp.sum(inner, axis=1, keepdims=True)
        weights = jnp.exp(row.scores() - _turned(log_totals[row.index : row.index + 1, :])[:, :1])
        products = row.products(cotangent, blocks.value, blocks.previous_value)
        gradient = weights * (row.dropped(products) - inner)
        bias_sums[...] += row.rotated(gradient, back=True)
        weights, gradient = row.dropped(weights).astype(dtype), gradient.astype(dtype)
        gradients.query[row.queries, :] = row.mix(gradient, blocks.key, blocks.previous_key).astype(dtype)
        row.add(weights, cotangent, value_sums, previous_value_sums)
        row.add(gradient, row.query, key_sums, previous_key_sums)
    for written, one in zip(gradients[1:], sums):
        written[...] = one[...].astype(written.dtype)
    pl.when(is_last)(lambda: _sum_by_distance(bias_sums, bias_gradient))


def _ends_of_head() -> tuple[Array, Array]:
    """Whether the block is the first and the last one of its head."""
    at = [pl.program_id(axis) for axis in (1, 2)]
    last = [pl.num_programs(axis) - 1 for axis in (1, 2)]
    return (at[0] == 0) & (at[1] == 0), (at[0] == last[0]) & (at[1] == last[1])


def _rows_of(rows, valid, multiplier, blocks, bias_row) -> Iterator["_Row"]:
    previous_valid = valid[pl.program_id(1), pl.program_id(2)] > 0
    for index in range(blocks.query.shape[0] // rows):
        yield _Row(index, rows, previous_valid, multiplier, blocks, bias_row)


class _Row:
    """Some of the queries of one block and head, and their row [rows, w] of the ring."""

    def __init__(self, index: int, rows: int, previous_valid, multiplier, blocks: Blocks, bias_row):
        self.index, self.begin, self.end = index, index * rows, (index + 1) * rows
        self.previous_valid, self.multiplier, self.blocks, self.bias_row = previous_valid, multiplier, blocks, bias_row
        self.w, self.queries = blocks.query.shape[0], slice(self.begin, self.end)
        self.query = blocks.query[self.queries, :]
        row, column = (jax.lax.broadcasted_iota(jnp.int32, (rows, self.w), axis) for axis in (0, 1))
        self.own = self.begin + row > column
        """The columns that hold keys of the own block."""

    def scores(self):
        """The scores with bias and mask."""
        scores = self.products(self.query, self.blocks.key, self.blocks.previous_key) + self.rotated(self.bias_row[...])
        return jnp.where(self.own | self.previous_valid, scores, MASKED)

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
        """The first row of the bias, as it is in this row; or back."""
        shift = self.w - self.begin if back else self.begin
        return x if self.begin == 0 else pltpu.roll(x, shift, 1)


def _dot(x: Array, y: Array, contracted: tuple[int, int] = (1, 0)) -> Array:
    """The product of two matrices, summed over one axis of each, in float32."""
    axes = (contracted[:1], contracted[1:])
    return jax.lax.dot_general(x, y, (axes, ((), ())), preferred_element_type=jnp.float32)


def _turned(x: Array) -> Array:
    """A column [rows, 1] repeated in all rows, or a row [1, rows] in all columns."""
    return jnp.broadcast_to(x, (x.size, x.size)).T


def _sheared(x: Array, right: bool) -> Array:
    """Row `t` of `x` rotated by `t` columns, in steps of powers of two."""
    rows, columns = x.shape
    index = jax.lax.broadcasted_iota(jnp.int32, (rows, columns), 0)
    for bit in (1 << n for n in range((rows - 1).bit_length())):
        x = jnp.where(index & bit > 0, pltpu.roll(x, bit if right else columns - bit, 1), x)
    return x


def _lay_out(bias, bias_row) -> None:
    """Fills the ring's first row: column `s` of query `t` has entry `s - t` (modulo w) of the reversed bias."""
    bias_row[...] = _sheared(jnp.broadcast_to(bias[...], bias_row.shape), right=True)


def _sum_by_distance(bias_sums, bias_gradient) -> None:
    """Adds up what `_lay_out` copies."""
    bias_gradient[...] = jnp.sum(_sheared(bias_sums[...], right=False), axis=0, keepdims=True)
