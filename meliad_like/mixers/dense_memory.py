"""The dense memory of the reference's newer code: attention to all of a document's last tokens, without a search.

A Memorizing Transformer without top-k (google-research/meliad, `memory2/dense_kv_memory.py`). One softmax covers the
memory and the tokens of the segment before the query, whose keys and values have a gradient; memories have none.
The layer has no positions.
"""

import functools
from typing import ClassVar, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from einops import rearrange
from flax import nnx
from jaxtyping import Array, Float, Int

from meliad_like.layers.attention import LOWEST, MASKED, attend, average, merge_heads
from meliad_like.layers.basic import only_first
from meliad_like.layers.flops import Flops
from meliad_like.layers.memory_search import PIECE, Memory, remember
from meliad_like.mixers.base import MIXERS, DecoderShape, Mixer, MixerConfig, Traits
from meliad_like.mixers.sliding_window import TokenHeads, tokens_of
from meliad_like.registry import size
from meliad_like.validation import check_choices, check_positive


class DenseCarry(NamedTuple):
    """A ring of the document's last m tokens: the token at position `p` is in slot `p % m`."""

    memory: Memory
    position: Int[Array, " b"]
    """The number of tokens of the document that have been read."""


class DenseAttention(Mixer):
    """Attention to the document's last m tokens."""

    def __init__(self, config: "DenseMemory", shape: DecoderShape, *, rngs: nnx.Rngs):
        self.config, self.shape = config, shape
        self.heads = TokenHeads(shape, rngs=rngs, with_positions=False, attention_scale=config.attention_scale)

    def init_carry(self, b, dtype):
        empty = jnp.zeros((b, self.shape.num_heads, self.config.num_slots, self.shape.head_size), dtype)
        return DenseCarry(Memory(empty, empty), jnp.zeros((b,), jnp.int32))

    def __call__(self, x, context, carry, dropout_key):
        w, m = self.shape.window_length, self.config.num_slots
        positions, position = context.count(carry.position, w)
        c = positions.shape[1]
        key, value, query = self.heads.of(x)
        # The ring in the order of the document, before the segment: token i of the segment is in column m + i.
        slot = (positions[:, :1] + np.arange(m)) % m
        before = (jnp.take_along_axis(y, slot[:, None, :, None], axis=2) for y in jax.lax.stop_gradient(carry.memory))
        keys, values = (jnp.concatenate(pair, axis=2) for pair in zip(before, (key, value)))
        whole = self.config.horizon == "segment"

        def read(_, block):
            query, position, number = block
            first = 0 if whole else number * w
            row = m + number * w + np.arange(w)
            lowest = jnp.zeros_like(row) if whole else row - m
            begin = m + number * w - position
            count = m + (c * w if whole else w)
            return None, self._attend(query, keys, values, first, count, (lowest, row), begin)

        blocks = rearrange(query, "b h (c w) k -> c b h w k", w=w), positions.T, jnp.arange(c)
        _, result = jax.lax.scan(read, None, blocks)
        # Only the last m are written: of two writes to a slot either may be the last.
        token = (positions[:, -1:] + np.arange(w - c * w, w))[:, -m:]
        memory = remember(carry.memory, key[:, :, -m:], value[:, :, -m:], token, token >= 0)
        return tokens_of(jnp.moveaxis(result, 0, 1)), DenseCarry(memory, position)

    def _attend(self, query, keys, values, first, count: int, limits, begin) -> Float[Array, "b h w k"]:
        """Attention of a block to `count` columns from `first` on, a piece of them at a time, with a running maximum.

        A query sees the columns from the first of its `limits` to the one before the second. A lane's document begins
        with the column `begin`.
        """
        size = min(PIECE, count)

        # The backward pass computes the scores of a piece again: together they would be m numbers for every query.
        @functools.partial(jax.checkpoint, prevent_cse=False)
        def add(state, index):
            highest, total, mixed = state
            # The last piece ends with the columns, and may overlap the piece before it.
            start = first + jnp.minimum(index * size, count - size)
            some_key, some_value = (jax.lax.dynamic_slice_in_dim(y, start, size, axis=2) for y in (keys, values))
            column = start + jnp.arange(size)
            new = column >= first + index * size
            seen = new & (column >= limits[0][:, None]) & (column < limits[1][:, None])
            real = (column >= begin[:, None])[:, None, None]
            scores = jnp.einsum("bhtk,bhsk->bhts", query, some_key, preferred_element_type=jnp.float32)
            if self.shape.mask_empty_cache:
                seen = seen & real
            scores = jnp.where(seen, jnp.where(real, scores, 0.0), MASKED)
            now = jax.lax.stop_gradient(jnp.maximum(highest, jnp.max(scores, axis=-1, keepdims=True)))
            weights, before = jnp.exp(scores - now), jnp.exp(highest - now)
            weighed = (weights * real).astype(query.dtype)
            more = jnp.einsum("bhts,bhsk->bhtk", weighed, some_value, preferred_element_type=jnp.float32)
            return (now, before * total + jnp.sum(weights, axis=-1, keepdims=True), before * mixed + more), None

        highest = jnp.full((*query.shape[:3], 1), LOWEST)
        state = highest, jnp.zeros_like(highest), jnp.zeros(query.shape, jnp.float32)
        (_, total, mixed), _ = jax.lax.scan(add, state, jnp.arange(-(-count // size)))
        return average(mixed, total, query.dtype)

    def decode(self, x, counts, context, carry):
        m, n, (key, value, query) = self.config.num_slots, x.shape[1], self.heads.of(x)
        token, (keys, values) = np.arange(n), carry.memory
        # The distance from each new token to the token in each slot, and if there are several, to the other new ones.
        distance = (carry.position[:, None, None] - np.arange(m) - 1) % m + 1 + token[:, None]
        if n > 1:
            among = jnp.broadcast_to(token[:, None] - token, (x.shape[0], n, n))
            distance = jnp.concatenate([distance, among], axis=-1)
            keys, values = (keys, key), (values, only_first(value, counts, axis=2))
        seen = (0 < distance) & (distance <= m)
        if self.shape.mask_empty_cache:
            seen &= distance <= (carry.position[:, None] + token)[..., None]
        result = merge_heads(attend(query, keys, values, mask=seen[:, None]))
        # Of two writes to a slot either may be the last.
        is_written = (counts[:, None] - m <= token) & (token < counts[:, None])
        memory = remember(carry.memory, key, value, carry.position[:, None] + token, is_written)
        return result, DenseCarry(memory, carry.position + counts)


@MIXERS.register("dense_memory")
class DenseMemory(MixerConfig):
    """Attention to all of the document's last tokens, instead of the window."""

    num_slots: int = size(4096, "length")
    """The number of keys and values that a memory holds for each lane and head; the oldest are overwritten (m)."""
    horizon: Literal["tokens", "segment"] = "tokens"
    """The span that a token sees: the last `num_slots` `tokens` before it, or as in the reference its whole `segment`
    before it and `num_slots` tokens before the segment, so that results depend on where segments begin."""
    attention_scale: float = 1.0
    """The attention scale at the start of training. Keys and queries have unit length: with 1 a token attends to
    hundreds of others about equally, and small models learn late to find single ones."""

    has_window: ClassVar[bool] = True

    def __post_init__(self):
        check_choices(self)
        check_positive(self, ("num_slots", "attention_scale"))

    def build(self, shape, *, rngs):
        return DenseAttention(self, shape, rngs=rngs)

    def flops(self, shape):
        """The operations of the projections, and of attention to all slots and to one window of the segment.

        With `horizon="segment"` it is the whole segment instead, whose length a config of a model does not know.
        """
        # Memories have no gradient; the window's keys and values, and the queries, have one.
        memory, window = (2 * 2 * length * shape.inner_width for length in (self.num_slots, shape.window_length))
        return TokenHeads.flops(shape) + Flops(memory + window, memory + 2 * window)

    def traits(self, shape):
        """The traits, which count `num_slots` tokens; with `horizon="segment"` a token attends to at least as many."""
        return Traits(
            attends_to=lambda position: np.minimum(position, self.num_slots),
            sequential_because="with DenseMemory a block attends to many blocks before it",
            needs_segments="DenseMemory.horizon='segment'" if self.horizon == "segment" else None,
        )
