"""External memory: attention to the nearest few of a document's past keys (Memorizing Transformers, section 3).

This is a baseline of Block-Recurrent Transformers (table 1). The layer's window has no positions either.
"""

from typing import Any, ClassVar, Literal, NamedTuple

import jax
import jax.numpy as jnp
from einops import rearrange
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from meliad_like.errors import UserError
from meliad_like.layers.attention import merge_heads
from meliad_like.layers.basic import parameter
from meliad_like.layers.flops import Flops
from meliad_like.layers.memory_search import Memory, MemorySearch, attend_memories, recall, remember_block, search
from meliad_like.mixers.base import MIXERS, Mixer, MixerConfig, Shape
from meliad_like.mixers.sliding_window import WindowAttention, tokens_of, window_traits
from meliad_like.mixers.token_heads import Tile, TokenCache
from meliad_like.registry import size
from meliad_like.validation import check_choices, check_positive

Update = Literal["block", "segment"]


class MemoryCarry(NamedTuple):
    """What a layer with a memory remembers."""

    window: TokenCache
    memory: Memory
    position: Int[Array, " b"]
    """The number of tokens of the document that have been remembered, or overwritten since."""


class MemoryAttention(Mixer):
    """Attention to the window and to a memory, mixed by a learned share per head."""

    acts_at_blocks = True

    def __init__(self, config: "ExternalMemory", shape: Shape, *, rngs: nnx.Rngs):
        self.config, self.shape = config, shape
        self.window = WindowAttention(shape, rngs=rngs, with_positions=False)
        self.gate = parameter(rngs.params(), jax.nn.initializers.zeros, (shape.num_heads,), ("heads",))

    def init_carry(self, b, dtype):
        empty = jnp.zeros((b, self.shape.num_heads, self.config.num_slots, self.shape.head_size), dtype)
        return MemoryCarry(self.window.init_carry(b, dtype), Memory(empty, empty), jnp.zeros((b,), jnp.int32))

    def __call__(self, x, at, carry, dropout_key):
        window, tile, cache = self.window.attend(x, at, carry.window, dropout_key)
        positions, position = at.count(carry.position, self.shape.window_length)
        memory, memories = self._scan(carry.memory, tile, positions)
        return tokens_of(self._mix(window, tile.query, *memories)), MemoryCarry(cache, memory, position)

    def begin_decoding(self, carry):
        return carry._replace(window=self.window.begin_decoding(carry.window))

    def end_decoding(self, carry):
        return carry._replace(window=self.window.end_decoding(carry.window))

    def step(self, x, at, carry):
        window, tile, cache = self.window.attend_token(x, carry.window)
        mixed = self._mix(window, tile.query, *self._find(carry.memory, tile.query, carry.position))
        return merge_heads(mixed)[:, 0], carry._replace(window=cache)

    def end_block(self, carry):
        key, value, _ = self.window.heads.keys_and_values(carry.window)
        everywhere = jnp.ones_like(carry.position, bool)
        memory = remember_block(carry.memory, key, value, carry.position, everywhere)
        return MemoryCarry(self.window.end_block(carry.window), memory, carry.position + self.shape.window_length)

    def _mix(
        self,
        window: Float[Array, "*batch h t k"],
        query: Float[Array, "*batch h t k"],
        key: Float[Array, "*batch h t j k"],
        value: Float[Array, "*batch h t j k"],
        valid: Bool[Array, "*batch h t j"],
    ) -> Float[Array, "*batch h t k"]:
        """Mixes the results of attention to the window with those of attention to the memories of each query."""
        if not self.shape.mask_empty_cache:
            key, value = (jnp.where(valid[..., None], y, 0) for y in (key, value))
            valid = jnp.ones_like(valid)
        read = attend_memories(query, key, value, valid)
        share = jax.nn.sigmoid(self.gate[...])[:, None, None]
        # In float32, because the gate's gradient is a sum over all tokens and channels of a head.
        mixed = (1 - share) * window.astype(jnp.float32) + share * read.astype(jnp.float32)
        return mixed.astype(read.dtype)

    def _scan(self, memory: Memory, tile: Tile, positions: Int[Array, "b c"]):
        """Searches the memory and adds to it, block by block or all at once (`config.update`). Returns the memory, and
        keys [b, c, h, w, j, k], values and validity of the memories for each query."""
        w = self.shape.window_length
        per_turn = positions.shape[1] if self.config.update == "segment" else 1

        def write(memory, block: Any):
            return remember_block(memory, *block), None

        def step(memory, turn):
            query, key, value, position = turn
            # Memories of an earlier document of the same segment are neither found nor kept.
            first, last = position[:, :1], position[:, -1:]
            same_as_before = jnp.repeat(position == first + w * jnp.arange(per_turn), w, axis=1)
            same_as_last = position == last - w * jnp.arange(per_turn)[::-1]
            *recalled, valid = self._find(memory, query, first[:, 0])
            valid = valid & same_as_before[:, None, :, None]
            blocks = [rearrange(y, "b h (u w) k -> u b h w k", w=w) for y in (key, value)]
            blocks = (*blocks, position.T, same_as_last.T)
            memory, _ = jax.lax.scan(write, memory, blocks)
            return memory, (*recalled, valid)

        # The gradient is stopped outside of the scan, so that the scan has none. Otherwise JAX would compute and keep
        # for all pieces of the memory what does not change from turn to turn, such as the slots for every query.
        without_gradient = jax.lax.stop_gradient((tile.query, tile.block.key, tile.block.value))
        turns = (rearrange(y, "b (i u) h w k -> i b h (u w) k", u=per_turn) for y in without_gradient)
        turns = (*turns, rearrange(positions, "b (i u) -> i b u", u=per_turn))
        memory, recalled = jax.lax.scan(step, memory, turns)
        return memory, [rearrange(y, "i b h (u w) ... -> b (i u) h w ...", u=per_turn) for y in recalled]

    def _find(self, memory: Memory, query: Float[Array, "b h t k"], filled: Int[Array, " b"]):
        """The keys, values and validity of the memories for each query."""
        hits = search(query, memory.key, filled, self.config.num_neighbors, self.config.search)
        return *recall(memory, hits.slot), hits.valid


@MIXERS.register("external_memory")
class ExternalMemory(MixerConfig):
    """The memory of a Memorizing Transformer, with its layers' attention to the window."""

    num_slots: int = size(65_536, "length")
    """The number of keys and values that a memory holds for each lane and head; the oldest are overwritten."""
    num_neighbors: int = size(128, "length")
    """The number of memories that a token attends to."""
    search: MemorySearch = "exact"
    """`exact`: the nearest memories, by sorting, which accelerators do slowly. `bucketed` (the reference): the nearest
    in each of `num_neighbors` buckets."""
    update: Update = "block"
    """When tokens become memories: after their `block`, or as in the reference after their `segment`, so that results
    depend on where segments begin. With segments of one block both are the same."""

    has_window: ClassVar[bool] = True

    def __post_init__(self):
        check_choices(self)
        check_positive(self, ("num_slots", "num_neighbors"))

    def check(self, shape):
        if self.num_slots % shape.window_length:
            raise UserError(
                f"ExternalMemory.num_slots={self.num_slots} must be a multiple of window_length={shape.window_length}: "
                "tokens are remembered a block at a time"
            )
        if self.num_slots < self.num_neighbors or (self.search == "bucketed" and self.num_slots % self.num_neighbors):
            rule = "a multiple of" if self.search == "bucketed" else "at least"
            raise UserError(
                f"ExternalMemory.num_slots={self.num_slots} must be {rule} num_neighbors={self.num_neighbors} "
                f"for search={self.search!r}"
            )

    def build(self, shape, *, rngs):
        return MemoryAttention(self, shape, rngs=rngs)

    def flops(self, shape):
        """The operations of the window, the search and the attention, whose memories have no gradient."""
        searching = 2 * self.num_slots * shape.inner_width
        attention = 2 * 2 * self.num_neighbors * shape.inner_width
        return WindowAttention.flops(shape) + Flops(searching + attention, attention)

    def traits(self, shape):
        reason = f"with ExternalMemory.layers={self.layers} a block searches the memories of the blocks before it"
        needs_segments = "ExternalMemory.update='segment'" if self.update == "segment" else None
        return window_traits(shape)._replace(sequential_because=reason, needs_segments=needs_segments)
