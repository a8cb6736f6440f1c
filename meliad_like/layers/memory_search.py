"""External memory: keys and values of a document's past, of which every token attends to the nearest few.

Memorizing Transformers (Wu et al. 2022), section 3, a baseline of Block-Recurrent Transformers (table 1).

A memory is a ring: the token at position `p` of its document lies in slot `p % m`. So the number of filled
slots follows from the position in the document, and nothing needs to be erased when the next document begins.
Neither the search nor the memories have a gradient; attention to the memories found has one, through the query.
"""

from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
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
    valid: Bool[Array, "b h t j"]
    """Whether a memory was found; where none was, the slot has no meaning."""


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
    query, key = jax.lax.stop_gradient((query, key))
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
    return Hits(slot, scores > -jnp.inf)


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


def recall(memory: Memory, slot: Int[Array, "b h t j"]) -> tuple[Float[Array, "b h t j k"], Float[Array, "b h t j k"]]:
    """Looks up the keys and values in the slots that a search found."""

    def gather(x):
        rows = jnp.take_along_axis(x, rearrange(slot, "b h t j -> b h (t j) 1"), axis=2, mode="promise_in_bounds")
        return rearrange(rows, "b h (t j) k -> b h t j k", j=slot.shape[-1])

    return gather(jax.lax.stop_gradient(memory.key)), gather(jax.lax.stop_gradient(memory.value))


def attend_memories(
    query: Float[Array, "*batch t k"],
    key: Float[Array, "*batch t j k"],
    value: Float[Array, "*batch t j k"],
    valid: Bool[Array, "*batch t j"],
) -> Float[Array, "*batch t k"]:
    """Attention of every query to the memories found for it; the result is 0 where there are none."""
    scores = jnp.einsum("...tk,...tjk->...tj", query, key, preferred_element_type=jnp.float32)
    weights, total = weigh(jnp.where(valid, scores, MASKED), jnp.float32)
    mixed = jnp.einsum("...tj,...tjk->...tk", weights.astype(value.dtype), value, preferred_element_type=jnp.float32)
    return average(mixed, total, value.dtype)


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


def remember_block(
    memory: Memory,
    key: Float[Array, "b h w k"],
    value: Float[Array, "b h w k"],
    position: Int[Array, " b"],
    keep: Bool[Array, " b"],
) -> Memory:
    """Overwrites the oldest memories with the keys and values of a block, whose length divides m. `position` is that of
    the block's first token in its document, and `keep` tells the lanes in which to write."""
    start = position % memory.key.shape[2]

    @jax.vmap
    def write(x, new, start, keep):
        old = jax.lax.dynamic_slice_in_dim(x, start, new.shape[1], axis=1)
        return jax.lax.dynamic_update_slice_in_dim(x, jnp.where(keep, new, old), start, axis=1)

    return Memory(write(memory.key, key, start, keep), write(memory.value, value, start, keep))
