"""A Pallas kernel for TPUs that computes `attend_unit` (`layers/attention.py`), the attention of states and to states,
without writing scores to memory.

It reads queries, keys and values as the projections write them, with the heads side by side, as the window's kernel
does. One run of it computes one head: all its queries, in rows of 128, and all its keys.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Float

from meliad_like.kernels.common import (
    HEADS,
    LANES,
    Grid,
    Interpret,
    differentiable,
    matrix_product,
    sharded_on_mesh,
    tpu_params,
)
from meliad_like.kernels.window_tpu_programs import before_unit, broadcast_transposed, rows_of, scaled_unit
from meliad_like.layers.attention import MASKED, unit


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
    interpret: Interpret


def attend_unit_in_kernel(
    query: Float[Array, "*batch t i"],
    scale: Float[Array, " h"],
    *parts: ProjectedKeys,
    rows: int | None = None,
    interpret: Interpret = False,
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
        mixed = _attend(Options(rows, interpret), flat, scale, keys_and_values, flags)
        return mixed.reshape(query.shape)

    vectors, by_lane = PartitionSpec(LANES, *[None] * len(batch), HEADS), PartitionSpec(LANES)
    of_parts = [ProjectedKeys(vectors, vectors, *(x if x is None else by_lane for x in part[2:])) for part in parts]
    return sharded_on_mesh(run, (vectors, PartitionSpec(HEADS), of_parts), vectors)(query, scale, list(parts))


def _attend_forward(options, *inputs):
    query, scale, *_ = inputs
    (b, t, _), h = query.shape, len(scale)
    log_totals = jax.ShapeDtypeStruct((b, h, t // options.rows, options.rows), jnp.float32)
    mixed, log_totals = _call(options, _forward_kernel, inputs, (), [(query, "bti"), (log_totals, "bhqr")])
    return mixed, (inputs, mixed, log_totals)


def _attend_backward(options, saved, cotangent):
    inputs, mixed, log_totals = saved
    query, scale, parts, _ = inputs
    b, h, k = len(query), len(scale), query.shape[2] // len(scale)
    of_scale = jax.ShapeDtypeStruct((b, h, 1, k), jnp.float32)
    others = (mixed, "bti"), (log_totals, "bhqr"), (cotangent, "bti")
    written = (query, "bti"), (of_scale, "bh1k"), (parts, _parts_of_head(parts, k))
    sums = jax.tree.map(lambda x: pltpu.VMEM((x.shape[1], k), jnp.float32), parts)
    of_query, of_scale, of_parts = _call(options, _backward_kernel, inputs, others, written, [sums])
    return of_query, jnp.sum(of_scale, axis=(0, 2, 3)).astype(scale.dtype), of_parts, None


_attend = differentiable(_attend_forward, _attend_backward)


def _parts_of_head(parts: Any, k: int) -> Any:
    """The parts of keys and values [b, s, i], of any lengths, that belong to one lane and head."""
    return jax.tree.map(lambda x: pl.BlockSpec((None, x.shape[1], k), lambda b, h: (b, 0, h)), parts)


def _call(options: Options, kernel, inputs, others, written, scratch=()) -> list[Any]:
    """Runs a kernel, a function of the references to inputs, others, results and scratch, for each lane and head."""
    query, scale, parts, flags = inputs
    (b, t, inner), h = query.shape, len(scale)
    k, rows = inner // h, {"q": t // options.rows, "r": options.rows}
    grid = Grid({"b": b, "h": h}, dict.fromkeys("bh") | {"t": t, "i": k, "k": k, "1": 1} | rows, {"i": "h"})
    scalars = jax.tree.map(lambda x: x.astype(jnp.int32), flags), scale.astype(jnp.float32)
    in_memory = jax.tree.map(lambda _: pl.BlockSpec(memory_space=pltpu.SMEM), scalars)
    read = (scalars, in_memory), (query, "bti"), (parts, _parts_of_head(parts, k)), *others
    run, params = functools.partial(kernel, options), tpu_params("parallel", "parallel")
    name = f"states{kernel.__name__}"
    return grid.call(run, read, written, params, scratch, interpret=options.interpret, name=name)


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


def _backward_kernel(options, scalars, query, parts, mixed, log_totals, cotangents, of_query, of_scale, of_parts, sums):
    head = _Head(options, scalars, query, parts)
    for one in (*jax.tree.leaves(sums), of_scale):
        one[...] = jnp.zeros(one.shape, jnp.float32)
    for index, row in enumerate(head.queries()):
        cotangent, raw = cotangents[row, :], query[row, :]
        inner = cotangent.astype(jnp.float32) * mixed[row, :].astype(jnp.float32)
        inner = jnp.sum(inner, axis=1, keepdims=True)
        log_total = broadcast_transposed(log_totals[index : index + 1, :])[:, :1]
        scaled, scores = head.scores(row)
        gradient_sum = jnp.zeros(raw.shape, jnp.float32)
        for key, value, part_scores, (key_sum, value_sum) in zip(head.keys, head.values, scores, sums):
            weights = jnp.exp(part_scores - log_total)
            gradient = weights * (matrix_product(cotangent, value, (1, 1)) - inner)
            gradient = gradient.astype(raw.dtype)
            gradient_sum += matrix_product(gradient, key)
            key_sum[...] += matrix_product(gradient, scaled, (0, 0))
            value_sum[...] += matrix_product(weights.astype(raw.dtype), cotangent, (0, 0))
        of_scale[...] += jnp.sum(gradient_sum * unit(raw).astype(jnp.float32), axis=0, keepdims=True)
        of_query[row, :] = before_unit(raw, head.scale * gradient_sum)
    for given, (key, _), part_sums, (of_key, of_value) in zip(head.has_unit_length, parts, sums, of_parts):
        key_sum, value_sum = (one[...] for one in part_sums)
        of_raw = before_unit(key[...], key_sum)
        of_key[...] = _choose(given, key_sum.astype(of_raw.dtype), of_raw)
        of_value[...] = value_sum.astype(of_value.dtype)
