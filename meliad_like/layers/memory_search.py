"""External memory: keys and values of a document's past, of which every token attends to the nearest few.

Memorizing Transformers (Wu et al. 2022), section 3, a baseline of Block-Recurrent Transformers (table 1).

A memory is a ring: the token at position `p` of its document lies in slot `p % m`. So the number of filled
slots follows from the position in the document, and nothing needs to be erased when the next document begins.
Of a segment, only the queries have a gradient, through the attention to the memories found.
"""

import functools
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from einops import rearrange
from jaxtyping import Array, Bool, Float, Int

from meliad_like.layers.attention import MASKED, average, weigh

MemorySearch = Literal["exact", "bucketed"]

# Slots whose scores exist together: for 512 queries of 8 heads 32 MB a lane, where 65,536 slots would be 1 GB.
PIECE = 2048
# Rows of buckets that are compared in one piece of the program.
ROWS = 16


class Memory(NamedTuple):
    """The keys, of unit length, and values of an external memory."""

    key: Float[Array, "b h m k"]
    value: Float[Array, "b h m k"]


class Hits(NamedTuple):
    """The memories found for every query and head: the nearest first (`exact`) or by bucket (`bucketed`)."""

    slot: Int[Array, "b h t j"]
    score: Float[Array, "b h t j"]
    """The inner product with the query; -inf where no memory was found. There the slot has no meaning."""


def search(
    query: Float[Array, "b h t k"],
    key: Float[Array, "b h m k"],
    filled: Int[Array, " b"],
    count: int,
    kind: MemorySearch,
) -> Hits:
    """Finds the `count` memories with the largest inner products for each query, one piece of the memory at a time.

    Args:
        query: vectors of any norm, which doesn't change the order.
        key: the keys in the memory.
        filled: number of filled slots of each lane, which are the first ones; may exceed m when all are filled.
        count: number of memories for each query.
        kind: `exact`: the nearest of all. `bucketed`, the reference's approximation: slot `s` is in bucket
            `s % count`, and the nearest of each bucket is found; `m` must be a multiple of `count`.
    """
    num_slots = key.shape[2]
    step = min(max(PIECE // count, 1), ROWS) * count if kind == "bucketed" else max(PIECE, count)
    size = min(step, num_slots)
    merge = {"exact": _merge_nearest, "bucketed": _merge_buckets}[kind]

    def piece(best, index):
        # The last piece ends with the memory, and may overlap the piece before it.
        begin = jnp.minimum(index * step, num_slots - size)
        slot = begin + jnp.arange(size)
        some = jax.lax.dynamic_slice_in_dim(key, begin, size, axis=2)
        # Slots before queries, so that a TPU cuts rows of buckets out without a copy.
        scores = jnp.einsum("bhtk,bhsk->bhst", query, some, preferred_element_type=jnp.float32)
        usable = (slot >= index * step) & (slot < filled[:, None])
        return merge(best, jnp.where(usable[:, None, :, None], scores, -jnp.inf), slot), None

    b, h, t, _ = query.shape
    nothing = (jnp.full((b, h, count, t), -jnp.inf), jnp.zeros((b, h, count, t), jnp.int32))
    best, _ = jax.lax.scan(piece, nothing, jnp.arange(-(-num_slots // step)))
    scores, slot = (jnp.swapaxes(x, 2, 3) for x in best)
    return Hits(slot, scores)


def _merge_nearest(best, scores: Float[Array, "b h s t"], slot: Int[Array, " s"]):
    best_scores, best_slot = (jnp.swapaxes(x, 2, 3) for x in best)
    scores = jnp.concatenate([best_scores, jnp.swapaxes(scores, 2, 3)], axis=-1)
    slots = jnp.concatenate([best_slot, jnp.broadcast_to(slot, (*best_slot.shape[:-1], slot.size))], axis=-1)
    scores, which = jax.lax.top_k(scores, best_slot.shape[-1])
    return jnp.swapaxes(scores, 2, 3), jnp.swapaxes(jnp.take_along_axis(slots, which, axis=-1), 2, 3)


def _merge_buckets(best, scores: Float[Array, "b h s t"], slot: Int[Array, " s"]):
    best_scores, best_slot = best
    count = best_slot.shape[2]
    for begin in range(0, slot.size, count):
        new_scores, new_slot = scores[:, :, begin : begin + count], slot[begin : begin + count, None]
        better = new_scores > best_scores
        best_scores, best_slot = jnp.where(better, new_scores, best_scores), jnp.where(better, new_slot, best_slot)
    return best_scores, best_slot


def products(
    query: Float[Array, "b h t k"], memory: Float[Array, "b h m k"], slot: Int[Array, "b h t j"]
) -> Float[Array, "b h t j"]:
    """The inner products of each query with the vectors in its slots."""
    return jnp.einsum("bhtk,bhtjk->bhtj", query, _recall(memory, slot), preferred_element_type=jnp.float32)


def mix(
    weights: Float[Array, "b h t j"], memory: Float[Array, "b h m k"], slot: Int[Array, "b h t j"]
) -> Float[Array, "b h t k"]:
    """The sum of the vectors in each query's slots, times the weights: the transpose of `products`."""
    weights = weights.astype(memory.dtype)
    return jnp.einsum("bhtj,bhtjk->bhtk", weights, _recall(memory, slot), preferred_element_type=jnp.float32)


def _recall(memory: Float[Array, "b h m k"], slot: Int[Array, "b h t j"]) -> Float[Array, "b h t j k"]:
    rows = jnp.take_along_axis(memory, rearrange(slot, "b h t j -> b h (t j) 1"), axis=2, mode="promise_in_bounds")
    return rearrange(rows, "b h (t j) k -> b h t j k", j=slot.shape[-1])


class Operations(NamedTuple):
    """The functions that go through a memory; kernels may take their place (`kernels/memory_tpu.py`)."""

    search: Callable[..., Hits] = search
    products: Callable[..., Array] = products
    mix: Callable[..., Array] = mix


class Lookup(NamedTuple):
    """The settings with which a layer finds memories and attends to them."""

    count: int
    """The number of memories that a query attends to."""
    kind: MemorySearch
    mask_empty: bool
    """Whether a memory that was not found is masked; otherwise its key and value are 0."""
    operations: Operations = Operations()

    def find(self, query: Float[Array, "b h t k"], memory: Memory, filled: Int[Array, " b"]) -> Hits:
        """The memories for each query among the first `filled` slots."""
        return self.operations.search(query, memory.key, filled, self.count, self.kind)

    def attend(self, hits: Hits, value: Float[Array, "b h m k"]) -> Float[Array, "b h t k"]:
        """Attention to the memories found; the result is 0 where there are none."""
        weights, total = self._weigh(hits, value.dtype)
        return average(self.operations.mix(weights, value, hits.slot), total, value.dtype)

    def gradient_of_query(
        self, hits: Hits, memory: Memory, result: Float[Array, "b h t k"], cotangent: Float[Array, "b h t k"]
    ) -> Float[Array, "b h t k"]:
        """The gradient of the query, from the result of `attend` and its cotangent. That of a score is its weight times
        the cotangent's products with value minus result."""
        weights, total = self._weigh(hits, jnp.float32)
        inner = jnp.sum(cotangent.astype(jnp.float32) * result.astype(jnp.float32), axis=-1, keepdims=True)
        of_score = self.operations.products(cotangent, memory.value, hits.slot) - inner
        of_score *= weights / jnp.maximum(total, 1)
        return self.operations.mix(of_score, memory.key, hits.slot).astype(cotangent.dtype)

    def _weigh(self, hits: Hits, dtype: Any) -> tuple[Float[Array, "b h t j"], Float[Array, "b h t 1"]]:
        """`attention.weigh`; memories that were not found have a weight of 0."""
        is_hit = hits.score > -jnp.inf
        weights, total = weigh(jnp.where(is_hit, hits.score, MASKED if self.mask_empty else 0), dtype)
        return jnp.where(is_hit, weights, 0), total


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def read_segment(
    lookup: Lookup,
    blocks_per_turn: int,
    query: Float[Array, "b c h w k"],
    key: Float[Array, "b c h w k"],
    value: Float[Array, "b c h w k"],
    memory: Memory,
    position: Int[Array, "b c"],
) -> tuple[Float[Array, "b c h w k"], Memory]:
    """Attends to the memories for the blocks of a segment, turn by turn, and adds the blocks to the memory.

    Only the query has a gradient. This needs what the memory contained at each turn, so the backward pass adds the
    blocks once more.

    Args:
        blocks_per_turn: the number of blocks that search together, and are then added.
        position: the position of each block's first token in its document.
    """
    return _read_forward(lookup, blocks_per_turn, query, key, value, memory, position)[0]


def _read_forward(lookup, blocks_per_turn, query, key, value, memory, position):
    w = query.shape[3]

    def step(memory, turn):
        query, block, position = turn
        hits = lookup.find(query, memory, position[:, 0])
        # Memories of an earlier document of the same segment are neither found nor kept.
        may_find = jnp.repeat(_in_document_of(0, position, w), w, axis=1)
        hits = hits._replace(score=jnp.where(may_find[:, None, :, None], hits.score, -jnp.inf))
        return _remember_blocks(memory, block, position), (hits, lookup.attend(hits, memory.value))

    blocks = Memory(*(rearrange(x, "b (i u) h w k -> i u b h w k", u=blocks_per_turn) for x in (key, value)))
    positions = rearrange(position, "b (i u) -> i b u", u=blocks_per_turn)
    turns = _by_turn(query, blocks_per_turn), blocks, positions
    after, (hits, results) = jax.lax.scan(step, memory, turns)
    return (_by_block(results, w), after), (memory, blocks, positions, hits, results)


def _read_backward(lookup, blocks_per_turn, saved, cotangents):
    memory, *of_turns = saved
    cotangent, _ = cotangents

    def step(memory, turn):
        block, position, hits, result, cotangent = turn
        gradient = lookup.gradient_of_query(hits, memory, result, cotangent)
        return _remember_blocks(memory, block, position), gradient

    _, gradients = jax.lax.scan(step, memory, (*of_turns, _by_turn(cotangent, blocks_per_turn)))
    return _by_block(gradients, cotangent.shape[3]), None, None, None, None


read_segment.defvjp(_read_forward, _read_backward)


def _by_turn(x: Float[Array, "b c h w k"], blocks_per_turn: int) -> Float[Array, "i b h t k"]:
    return rearrange(x, "b (i u) h w k -> i b h (u w) k", u=blocks_per_turn)


def _by_block(x: Float[Array, "i b h t k"], w: int) -> Float[Array, "b c h w k"]:
    return rearrange(x, "i b h (u w) k -> b (i u) h w k", w=w)


def _in_document_of(block: int, position: Int[Array, "b u"], w: int) -> Bool[Array, "b u"]:
    """Whether each block of `w` tokens is of the same document as the block with the index `block`, by the positions of
    their first tokens."""
    index = np.arange(position.shape[1])
    return position == position[:, block, None] + w * (index - index[block])


def _remember_blocks(memory: Memory, blocks: Memory, position: Int[Array, "b u"]) -> Memory:
    """Adds the blocks [u, b, h, w, k] of a turn that are of the same document as the last one."""

    def remember(memory, turn):
        return remember_block(memory, *turn), None

    keep = _in_document_of(-1, position, blocks.key.shape[3])
    return jax.lax.scan(remember, memory, (blocks, position.T, keep.T))[0]


def remember(
    memory: Memory,
    key: Float[Array, "b h n k"],
    value: Float[Array, "b h n k"],
    position: Int[Array, "b n"],
    keep: Bool[Array, "b n"],
) -> Memory:
    """Overwrites the oldest memories with the keys and values of at most m tokens at these positions in a document.
    `keep` tells which tokens to write."""
    num_slots = memory.key.shape[2]
    lanes = jnp.arange(key.shape[0])[:, None]
    # A slot that is out of bounds is not written.
    slot = jnp.where(keep, position % num_slots, num_slots)

    def write(x, new):
        return x.at[lanes, :, slot].set(jax.lax.stop_gradient(rearrange(new, "b h n k -> b n h k")), mode="drop")

    return Memory(write(memory.key, key), write(memory.value, value))


class Backup(NamedTuple):
    """A copy of the blocks of a memory that reading a segment can overwrite."""

    starts: Int[Array, "i b"]
    """The slots at which the blocks begin."""
    blocks: Memory
    """The copied blocks, [i, b, h, w, k]."""


def back_up(memory: Memory, position: Int[Array, " b"], w: int, num_blocks: int) -> Backup:
    """Copies the blocks that reading blocks of `w` tokens can overwrite: the slots from `position` on, a multiple of
    `w`, and the first ones, to which documents are written that begin in the segment. Blocks may be copied twice."""
    num_slots = memory.key.shape[2]
    offsets = w * jnp.arange(num_blocks)[:, None]
    starts = jnp.concatenate([position + offsets, jnp.zeros_like(position) + offsets]) % num_slots
    if len(starts) * w >= num_slots:
        # All slots, each of them once.
        starts = jnp.zeros_like(position) + w * jnp.arange(num_slots // w)[:, None]

    @functools.partial(jax.vmap, in_axes=(None, 0))
    @jax.vmap
    def blocks_at(x, start):
        return jax.lax.dynamic_slice_in_dim(x, start, w, axis=1)

    return Backup(starts, Memory(*(blocks_at(x, starts) for x in memory)))


def memory_or_backup(taken: Bool[Array, ""], memory: Memory, backup: Backup) -> Memory:
    """The memory after a segment, if the step that has read it is taken, otherwise with the backup's blocks."""

    def step(memory, copy):
        start, block = copy
        return remember_block(memory, block, start, jnp.broadcast_to(~taken, start.shape)), None

    return jax.lax.scan(step, memory, tuple(backup))[0]


def remember_block(memory: Memory, block: Memory, position: Int[Array, " b"], keep: Bool[Array, " b"]) -> Memory:
    """Overwrites the oldest memories with the keys and values [b, h, w, k] of a block, whose length divides m.
    `position` is the position of the block's first token in its document, and `keep` the lanes in which to write."""
    start = position % memory.key.shape[2]

    @jax.vmap
    def write(x, new, start, keep):
        old = jax.lax.dynamic_slice_in_dim(x, start, new.shape[1], axis=1)
        return jax.lax.dynamic_update_slice_in_dim(x, jnp.where(keep, new, old), start, axis=1)

    return Memory(*(write(x, new, start, keep) for x, new in zip(memory, block)))
