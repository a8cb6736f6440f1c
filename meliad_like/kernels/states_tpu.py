"""A Pallas kernel for TPUs that computes `attend_unit` (`layers/attention.py`), the attention of states and to states,
without writing scores to memory.

It reads queries, keys and values as the projections write them, with the heads side by side, as the window's kernel
(`kernels/window_tpu.py`) does. One run of it computes one head: all its queries, in rows of 128, and all its keys.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Float

from meliad_like.kernels.common import call_kernel, matrix_product, sharded_on_mesh, tpu_params
from meliad_like.kernels.window_tpu import before_unit, broadcast_transposed, rows_of, scaled_unit
from meliad_like.layers.attention import MASKED, unit
from meliad_like.layers.sharding import MESH_AXES_OF


class ProjectedKeys(NamedTuple):
    """Some of the keys that queries see, as they are projected, and their values."""

    key: Float[Array, "*batch s i"]
    value: Float[Array, "*batch s i"]
    visible: Bool[Array, "*batch"] | None = None
    """Whether they are visible; None: always."""
    has_unit_length: Bool[Array, "*batch"] | None = None
    """Whether the keys have unit length already, as those from a cache. None: they don't."""


class Options(NamedTuple):
    """The settings that are known when a kernel is compiled."""

    rows: int
    """The number of queries in each row of scores."""
    interpret: bool | pltpu.InterpretParams


def attend_unit_in_kernel(
    query: Float[Array, "*batch t i"],
    scale: Float[Array, " h"],
    *parts: ProjectedKeys,
    rows: int | None = None,
    interpret: bool | pltpu.InterpretParams = False,
) -> Float[Array, "*batch t i"]:
    """`attend_unit` of projections in one kernel, also under a mesh, where each device computes its lanes and heads.

    Queries and keys get unit length (`attention.unit`), and queries the scale of their head, which is not negative.
    At least one of the parts is visible. The gradient reaches queries, scale, keys and values. `rows` is the number of
    queries in each row of scores, a divisor of `t`; None: 128, or `t` if 128 is none.
    """
    rows = rows or rows_of(query.shape[-2])
    *batch, _, _ = query.shape

    def run(query, scale, parts):
        flat = query.reshape(-1, *query.shape[-2:])
        parts = jax.tree.map(lambda x: x.reshape(-1, *x.shape[len(batch) :]), parts)
        keys_and_values, flags = [part[:2] for part in parts], [part[2:] for part in parts]
        mixed: Array = _attend(Options(rows, interpret), flat, scale, keys_and_values, flags)
        return mixed.reshape(query.shape)

    lanes, heads = MESH_AXES_OF["lanes"], MESH_AXES_OF["heads"]
    vectors, by_lane = PartitionSpec(lanes, *[None] * len(batch), heads), PartitionSpec(lanes)
    of_parts = [ProjectedKeys(vectors, vectors, *(x if x is None else by_lane for x in part[2:])) for part in parts]
    return sharded_on_mesh(run, (vectors, PartitionSpec(heads), of_parts), vectors)(query, scale, list(parts))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(options: Options, query, scale, parts, flags) -> Array:
    return _attend_forward(options, query, scale, parts, flags)[0]


def _attend_forward(options, query, scale, parts, flags):
    grid = _Grid(options, query, scale, parts, flags)
    mixed, log_totals = grid.call(_forward_kernel, (), (grid.like(query), grid.log_totals), ())
    return mixed, (query, scale, parts, flags, mixed, log_totals)


def _attend_backward(options, saved, cotangent):
    query, scale, parts, flags, mixed, log_totals = saved
    grid = _Grid(options, query, scale, parts, flags)
    others = (mixed, grid.vectors(query)), (log_totals, grid.log_totals[1]), (cotangent, grid.vectors(query))
    results = grid.like(query), grid.by_head(1, grid.k), *(grid.like(x) for part in parts for x in part)
    sums = [pltpu.VMEM((x.shape[1], grid.k), jnp.float32) for part in parts for x in part]
    of_query, of_scale, *of_parts = grid.call(_backward_kernel, others, results, sums)
    of_scale = jnp.sum(of_scale, axis=(0, 2, 3)).astype(scale.dtype)
    return of_query, of_scale, list(zip(of_parts[::2], of_parts[1::2])), None


_attend.defvjp(_attend_forward, _attend_backward)


class _Grid:
    """The grid of the kernels (lanes, heads), and the parts of the arrays that a run of them sees."""

    def __init__(self, options: Options, query, scale, parts, flags):
        self.options, self.inputs = options, (query, scale, parts, flags)
        (self.b, self.t, inner), self.h = query.shape, len(scale)
        self.k = inner // self.h
        self.log_totals = self.by_head(self.t // options.rows, options.rows)

    def vectors(self, x) -> pl.BlockSpec:
        """The vectors of one lane and head."""
        return pl.BlockSpec((None, x.shape[1], self.k), lambda b, h: (b, 0, h))

    def like(self, x):
        """A result of the shape and type of `x`."""
        return x, self.vectors(x)

    def by_head(self, *shape: int):
        """An array of each lane and head, and the part of it that a run sees."""
        spec = pl.BlockSpec((None, None, *shape), lambda b, h: (b, h, 0, 0))
        return jax.ShapeDtypeStruct((self.b, self.h, *shape), jnp.float32), spec

    def call(self, kernel, others, results, scratch):
        """Runs a kernel, a function of the references to inputs, others, results and scratch, on the whole grid."""
        query, scale, parts, flags = self.inputs
        flags = jax.tree.map(lambda x: x.astype(jnp.int32), flags)
        scalars, spec = (flags, scale.astype(jnp.float32)), pl.BlockSpec(memory_space=pltpu.SMEM)
        read = (scalars, jax.tree.map(lambda _: spec, scalars)), (query, self.vectors(query))
        read = *read, (parts, jax.tree.map(self.vectors, parts)), *others
        run, grid, name = functools.partial(kernel, self.options), (self.b, self.h), f"states{kernel.__name__}"
        params, interpret = tpu_params("parallel", "parallel"), self.options.interpret
        return call_kernel(run, grid, read, results, params, scratch, interpret=interpret, name=name)


class _Head:
    """The keys and values of one head, and its queries row by row."""

    def __init__(self, options: Options, scalars, query, parts):
        (flags, scale), lane, head = scalars, pl.program_id(0), pl.program_id(1)
        self.query, self.scale, self.rows = query, scale[head], options.rows
        self.visible = [None if visible is None else visible[lane] > 0 for visible, _ in flags]
        self.has_unit_length = [None if given is None else given[lane] > 0 for _, given in flags]
        self.values = [value[...] for _, value in parts]
        self.keys = [_choose(given, key[...], unit(key[...])) for given, (key, _) in zip(self.has_unit_length, parts)]

    def queries(self):
        """The slices of the rows."""
        return [slice(begin, begin + self.rows) for begin in range(0, len(self.query), self.rows)]

    def scores(self, row: slice):
        """The queries of a row with unit length and scale, and their scores with each part of the keys."""
        query = scaled_unit(self.query[row, :], self.scale)
        scores = [matrix_product(query, key, (1, 1)) for key in self.keys]
        shown = (True if visible is None else visible for visible in self.visible)
        return query, [jnp.where(visible, x, MASKED) for visible, x in zip(shown, scores)]


def _choose(flag: Array | None, x: Array, otherwise: Array) -> Array:
    """`x` where the flag is set; without a flag, `otherwise`."""
    return otherwise if flag is None else jnp.where(flag, x, otherwise)


def _forward_kernel(options, scalars, query, parts, mixed, log_totals):
    head = _Head(options, scalars, query, parts)
    for index, row in enumerate(head.queries()):
        _, scores = head.scores(row)
        highest = functools.reduce(jnp.maximum, [jnp.max(x, axis=1, keepdims=True) for x in scores])
        weights = [jnp.exp(x - highest).astype(query.dtype) for x in scores]
        total = functools.reduce(jnp.add, [jnp.sum(x.astype(jnp.float32), axis=1, keepdims=True) for x in weights])
        result = functools.reduce(jnp.add, map(matrix_product, weights, head.values))
        mixed[row, :] = (result / total).astype(mixed.dtype)
        log_totals[index : index + 1, :] = broadcast_transposed(highest + jnp.log(total))[:1]


def _backward_kernel(
    options, scalars, query, parts, mixed, log_totals, cotangents, of_query, of_scale, *of_parts_and_sums
):
    head, num = _Head(options, scalars, query, parts), 2 * len(parts)
    of_parts, sums = of_parts_and_sums[:num], of_parts_and_sums[num:]
    for one in (*sums, of_scale):
        one[...] = jnp.zeros(one.shape, jnp.float32)
    for index, row in enumerate(head.queries()):
        cotangent, raw = cotangents[row, :], query[row, :]
        inner = cotangent.astype(jnp.float32) * mixed[row, :].astype(jnp.float32)
        inner = jnp.sum(inner, axis=1, keepdims=True)
        log_total = broadcast_transposed(log_totals[index : index + 1, :])[:, :1]
        scaled, scores = head.scores(row)
        gradient_sum = jnp.zeros(raw.shape, jnp.float32)
        for key, value, part_scores, key_sum, value_sum in zip(head.keys, head.values, scores, sums[::2], sums[1::2]):
            weights = jnp.exp(part_scores - log_total)
            gradient = weights * (matrix_product(cotangent, value, (1, 1)) - inner)
            gradient = gradient.astype(raw.dtype)
            gradient_sum += matrix_product(gradient, key)
            key_sum[...] += matrix_product(gradient, scaled, (0, 0))
            value_sum[...] += matrix_product(weights.astype(raw.dtype), cotangent, (0, 0))
        of_scale[...] += jnp.sum(gradient_sum * unit(raw).astype(jnp.float32), axis=0, keepdims=True)
        of_query[row, :] = before_unit(raw, head.scale * gradient_sum)
    for index, (key, _) in enumerate(parts):
        key_sum, value_sum = (one[...] for one in sums[2 * index : 2 * index + 2])
        of_key = before_unit(key[...], key_sum)
        of_parts[2 * index][...] = _choose(head.has_unit_length[index], key_sum.astype(of_key.dtype), of_key)
        of_parts[2 * index + 1][...] = value_sum.astype(of_parts[2 * index + 1].dtype)
