"""Pallas kernels for TPUs that find memories by bucket and read them, as `layers/memory_search.py` does: without scores
in the chip's main memory, and without looking up single vectors, which TPUs do slowly.

Slot `s` is in bucket `s % count`, so that `count` consecutive slots, a row, have one of each bucket. What a query has
found in a bucket is known by its row. A kernel computes the products of all queries with all rows, and keeps or uses
those that it needs.

One run of a kernel has some queries of one lane and head, and a piece of their memory. The pieces are the grid's
innermost axis; results stay in the chip's own memory until the last one.
"""

import functools
from collections.abc import Callable, Iterator, Sequence

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

from meliad_like.kernels.common import HEADS, LANES, Interpret, largest_part, matrix_product, sharded_on_mesh
from meliad_like.layers.memory_search import Hits, MemorySearch, Operations

SLOTS = 4096
"""The most slots of a piece; with fewer the results are read and written more often."""
QUERIES = 512
"""The most queries of a run."""
PART = 128
"""The most queries that are computed together, whose results fit into registers."""


def operations(interpret: Interpret = False) -> Operations:
    """The kernels for a search by bucket, with the arguments of the functions in `memory_search`."""

    def search(
        query: Float[Array, "b h t k"],
        key: Float[Array, "b h m k"],
        filled: Int[Array, " b"],
        count: int,
        kind: MemorySearch,
    ) -> Hits:
        assert kind == "bucketed"
        shape = (*query.shape[:3], count)
        results = jax.ShapeDtypeStruct(shape, jnp.float32), jax.ShapeDtypeStruct(shape, jnp.int32)
        filled = jnp.broadcast_to(filled[:, None], query.shape[:2])
        score, row = _run(_search_kernel, count, filled, (query,), key, results, interpret)
        return Hits(row * count + jnp.arange(count), score)

    def on_slots(kernel: Callable, x: Array, memory: Array, slot: Array, size: int) -> Array:
        """Runs a kernel of one result, with `size` numbers for each query."""
        count = slot.shape[-1]
        row = slot // count
        filled = (jnp.max(row, axis=(2, 3)) + 1) * count
        result = jax.ShapeDtypeStruct((*slot.shape[:3], size), jnp.float32)
        return _run(kernel, count, filled, (x, row), memory, (result,), interpret)[0]

    def products(
        query: Float[Array, "b h t k"], memory: Float[Array, "b h m k"], slot: Int[Array, "b h t j"]
    ) -> Float[Array, "b h t j"]:
        return on_slots(_products_kernel, query, memory, slot, slot.shape[-1])

    def mix(
        weights: Float[Array, "b h t j"], memory: Float[Array, "b h m k"], slot: Int[Array, "b h t j"]
    ) -> Float[Array, "b h t k"]:
        return on_slots(_mix_kernel, weights.astype(jnp.float32), memory, slot, memory.shape[-1])

    return Operations(search, products, mix)


def _run(
    kernel: Callable,
    count: int,
    filled: Int[Array, "b h"],
    of_queries: tuple[Array, ...],
    memory: Float[Array, "b h m k"],
    results: Sequence[jax.ShapeDtypeStruct],
    interpret: Interpret,
) -> list[Array]:
    """Runs a kernel, a function of the number of buckets and of references: to the number of slots that it needs, to
    what belongs to queries, to a piece of the memory and to results. Under a mesh, each device does so for its lanes
    and heads."""

    def run(filled, of_queries, memory):
        (b, h, t, _), (*_, m, k) = of_queries[0].shape, memory.shape
        queries, slots = largest_part(t, QUERIES, PART), largest_part(m, SLOTS, count)

        def of_query(x) -> pl.BlockSpec:
            return pl.BlockSpec((None, None, queries, x.shape[3]), lambda b, h, t, m, filled: (b, h, t, 0))

        def piece(b, h, t, index, filled):
            # Pieces that aren't needed are not loaded: the last one that is needed stays.
            return b, h, jnp.minimum(index, jnp.maximum(filled[b, h] - 1, 0) // slots), 0

        return pl.pallas_call(
            functools.partial(kernel, count),
            out_shape=[jax.ShapeDtypeStruct((b, h, *x.shape[2:]), x.dtype) for x in results],
            grid_spec=pltpu.PrefetchScalarGridSpec(
                num_scalar_prefetch=1,
                grid=(b, h, t // queries, m // slots),
                in_specs=[*map(of_query, of_queries), pl.BlockSpec((None, None, slots, k), piece)],
                out_specs=list(map(of_query, results)),
            ),
            compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel", "parallel", "arbitrary")),
            interpret=interpret,
            name=kernel.__name__.strip("_"),
        )(filled.astype(jnp.int32), *of_queries, memory)

    spec = PartitionSpec(LANES, HEADS)
    specs = spec, (spec,) * len(of_queries), spec
    return sharded_on_mesh(run, specs, spec)(filled, of_queries, memory)


def _search_kernel(count, filled, query, key, score, row):
    """Writes the highest score of each bucket, and the row that has it."""
    piece = _Piece(count, filled, key)
    piece.begin((score, -jnp.inf), (row, -1))

    @pl.when(piece.is_needed)
    def _():
        for part in _parts(query):
            best_score, best_row = score[part, :], row[part, :]
            scores = matrix_product(query[part, :], key[...], (1, 1))
            bucket = jax.lax.broadcasted_iota(jnp.int32, best_row.shape, 1)
            for index, slots in piece.rows():
                is_filled = bucket < piece.filled - index * count
                of_row = jnp.where(is_filled, scores[:, slots], -jnp.inf)
                better = of_row > best_score
                best_score, best_row = jnp.where(better, of_row, best_score), jnp.where(better, index, best_row)
            score[part, :], row[part, :] = best_score, best_row


def _products_kernel(count, filled, query, row, memory, result):
    """Writes the products of the queries with the vectors in their rows."""
    piece = _Piece(count, filled, memory)
    piece.begin((result, 0))

    @pl.when(piece.is_needed)
    def _():
        for part in _parts(query):
            of_rows = result[part, :]
            of_slots = matrix_product(query[part, :], memory[...], (1, 1))
            for index, slots in piece.rows():
                of_rows = jnp.where(row[part, :] == index, of_slots[:, slots], of_rows)
            result[part, :] = of_rows


def _mix_kernel(count, filled, weights, row, memory, result):
    """Writes the sums of the vectors in the queries' rows, times their weights."""
    piece = _Piece(count, filled, memory)
    piece.begin((result, 0))

    @pl.when(piece.is_needed)
    def _():
        # What an earlier document has left may be infinite, and 0 times that is not 0.
        slot = piece.index * len(memory) + jax.lax.broadcasted_iota(jnp.int32, memory.shape, 0)
        vectors = jnp.where(slot < piece.filled, memory[...], jnp.zeros(memory.shape, memory.dtype))
        for part in _parts(weights):
            of_slots = [jnp.where(row[part, :] == index, weights[part, :], 0) for index, _ in piece.rows()]
            result[part, :] += matrix_product(jnp.concatenate(of_slots, axis=1).astype(memory.dtype), vectors)


class _Piece:
    """A piece of the memory of a lane and head."""

    def __init__(self, count: int, filled, memory):
        lane, head, self.index = (pl.program_id(axis) for axis in (0, 1, 3))
        self.count, self.num_slots, self.filled = count, len(memory), filled[lane, head]
        self.is_needed = self.index * self.num_slots < self.filled

    def begin(self, *results: tuple) -> None:
        """Fills each result with a value, if this is the first piece."""

        @pl.when(self.index == 0)
        def _():
            for result, value in results:
                result[...] = jnp.full(result.shape, value, result.dtype)

    def rows(self) -> Iterator[tuple[Array, slice]]:
        """The index of each row in the whole memory, and its slots in the piece."""
        num_rows = self.num_slots // self.count
        for row in range(num_rows):
            yield self.index * num_rows + row, slice(row * self.count, (row + 1) * self.count)


def _parts(of_queries) -> Iterator[slice]:
    """The queries that are computed together."""
    num_queries = len(of_queries)
    size = largest_part(num_queries, PART, PART)
    for begin in range(0, num_queries, size):
        yield slice(begin, begin + size)
