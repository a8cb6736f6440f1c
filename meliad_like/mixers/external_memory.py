"""External memory: attention to the nearest few of a document's past keys (Memorizing Transformers, section 3).

This is a baseline of Block-Recurrent Transformers (table 1). The layer's window has no positions either.
"""

import functools
from typing import Any, ClassVar, Literal, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from meliad_like.errors import UserError
from meliad_like.kernels.registry import kernel_of_memory
from meliad_like.layers.attention import merge_heads
from meliad_like.layers.basic import parameter
from meliad_like.layers.flops import Flops
from meliad_like.layers.lanes import at_lanes
from meliad_like.layers.memory_search import (
    Backup,
    Lookup,
    Memory,
    MemorySearch,
    Operations,
    back_up,
    memory_or_backup,
    read_segment,
    remember_block,
)
from meliad_like.mixers.base import MIXERS, DecoderShape, Mixer, MixerConfig
from meliad_like.mixers.sliding_window import TokenCache, WindowAttention, tokens_of, window_traits
from meliad_like.registry import size
from meliad_like.validation import check_choices, check_positive


class MemoryCarry(NamedTuple):
    """The carry of a layer with an external memory."""

    window: TokenCache
    memory: Memory | Backup
    position: Int[Array, " b"]
    """The number of tokens of the document that have been remembered, or overwritten since."""

    def with_backup(self, num_tokens: int) -> tuple["MemoryCarry", "MemoryCarry"]:
        """Implements `lanes.HasBackup`; the backup is a carry that has only a backup of the memory."""
        w = self.window.key.shape[-2]
        backup = back_up(self.memory, self.position, w, -(-num_tokens // w))
        # Where blocks are written depends on the position, and the position now on the backup. So the memory, which
        # nobody reads after that, can be changed in place.
        position, backup = jax.lax.optimization_barrier((self.position, backup))
        return self._replace(position=position), self._replace(memory=backup)

    def or_backup(self, taken: Bool[Array, ""], backup: "MemoryCarry") -> "MemoryCarry":
        """Implements `lanes.HasBackup`."""
        memory = memory_or_backup(taken, self.memory, backup.memory)
        carries = (carry._replace(memory=None) for carry in (self, backup))
        return jax.tree.map(functools.partial(jnp.where, taken), *carries)._replace(memory=memory)


class MemoryAttention(Mixer):
    """Attention to the window and to a memory, mixed by a learned share per head."""

    def __init__(self, config: "ExternalMemory", shape: DecoderShape, *, rngs: nnx.Rngs):
        self.config, self.shape = config, shape
        self.lookup = Lookup(config.num_neighbors, config.search, shape.mask_empty_cache)
        # For the few tokens of decoding, products with the whole memory take longer than to look up what they need.
        kernel = config.kernel(shape)
        self.segment_lookup = self.lookup._replace(operations=kernel) if kernel else self.lookup
        self.window = WindowAttention(shape, rngs=rngs, with_positions=False)
        self.gate = parameter(rngs.params(), jax.nn.initializers.zeros, (shape.num_heads,), ("heads",), "bias")

    def init_carry(self, b, dtype):
        empty = jnp.zeros((b, self.shape.num_heads, self.config.num_slots, self.shape.head_size), dtype)
        return MemoryCarry(self.window.init_carry(b, dtype), Memory(empty, empty), jnp.zeros((b,), jnp.int32))

    def __call__(self, x, context, carry, dropout_key):
        window, inputs, cache = self.window.attend(x, context, carry.window, dropout_key)
        positions, position = context.count(carry.position, self.shape.window_length)
        blocks_per_turn = positions.shape[1] if self.config.update == "segment" else 1
        tokens = inputs.query, inputs.block.key, inputs.block.value
        results: Any = read_segment(self.segment_lookup, blocks_per_turn, *tokens, carry.memory, positions)
        read, memory = results
        return tokens_of(self._mix(window, read)), MemoryCarry(cache, memory, position)

    def decode(self, x, counts, context, carry):
        window, inputs, cache = self.window.attend_tokens(x, counts, carry.window)
        hits = self.lookup.find(inputs.query, carry.memory, carry.position)
        mixed = merge_heads(self._mix(window, self.lookup.attend(hits, carry.memory.value)))
        ends = context.block_ends(counts, self.shape.window_length)
        return at_lanes(ends, self._end_block, mixed, carry._replace(window=cache))

    def _end_block(self, carry: MemoryCarry) -> MemoryCarry:
        block = Memory(carry.window.key, carry.window.value)
        memory = remember_block(carry.memory, block, carry.position, jnp.ones_like(carry.position, bool))
        return MemoryCarry(carry.window, memory, carry.position + self.shape.window_length)

    def _mix(
        self, window: Float[Array, "*batch h t k"], read: Float[Array, "*batch h t k"]
    ) -> Float[Array, "*batch h t k"]:
        """Mixes the results of the attention to the window and of the attention to the memories."""
        share = jax.nn.sigmoid(self.gate[...])[:, None, None]
        # In float32, because the gate's gradient is a sum over all tokens and channels of a head.
        mixed = (1 - share) * window.astype(jnp.float32) + share * read.astype(jnp.float32)
        return mixed.astype(read.dtype)


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
    update: Literal["block", "segment"] = "block"
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

    def kernel(self, shape: DecoderShape) -> Operations | None:
        """The kernels of the search and of the attention to its results."""
        return kernel_of_memory(shape.attention_kernel, self.search, self.num_neighbors, shape.head_size)

    def has_kernel(self, shape, kind):
        return kind == "attention" and self.kernel(shape) is not None

    def flops(self, shape):
        """The operations of the window, the search and the attention, whose memories have no gradient."""
        searching = 2 * self.num_slots * shape.inner_width
        attention = 2 * 2 * self.num_neighbors * shape.inner_width
        return WindowAttention.flops(shape) + Flops(searching + attention, attention)

    def traits(self, shape):
        reason = "with ExternalMemory a block searches the memories of the blocks before it"
        needs_segments = "ExternalMemory.update='segment'" if self.update == "segment" else None
        return window_traits(shape)._replace(sequential_because=reason, needs_segments=needs_segments)
