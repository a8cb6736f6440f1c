"""External memory: attention to the nearest few of a document's past keys (Memorizing Transformers, section 3).

This is a baseline of Block-Recurrent Transformers (table 1). A layer with a memory compares its memories with its
window, so both have no positions.
"""

import dataclasses
from typing import ClassVar, Literal

import jax
import jax.numpy as jnp
from einops import rearrange
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from meliad_like.errors import UserError
from meliad_like.layers.basic import parameter
from meliad_like.layers.flops import Flops
from meliad_like.layers.memory_search import Memory, MemorySearch, attend_memories, recall, remember_block, search
from meliad_like.mechanisms.base import MECHANISMS, Mechanism, MechanismConfig, Shape
from meliad_like.mechanisms.sliding_window import SlidingWindow
from meliad_like.registry import size
from meliad_like.validation import check_choices, check_positive

Update = Literal["block", "segment"]


class MemoryAttention(Mechanism):
    """Attention to a memory, mixed with the window's result by a learned share per head; the carry is the memory."""

    def __init__(self, config: "ExternalMemory", shape: Shape, *, rngs: nnx.Rngs):
        self.config, self.shape = config, shape
        self.gate = parameter(rngs.params(), jax.nn.initializers.zeros, (shape.num_heads,), ("heads",))

    def init_carry(self, b, dtype, decoding):
        empty = jnp.zeros((b, self.shape.num_heads, self.config.num_slots, self.shape.head_size), dtype)
        return Memory(empty, empty)

    def __call__(self, tokens, carry, dropout_key):
        tile = tokens.tile
        memory, found = self._scan(carry, tile.query, tile.key, tile.value, tokens.positions)
        return self._attend(tile.query, *found), memory

    def decode_step(self, token, carry):
        query, filled = token.tile.query, token.position - token.position % self.shape.window_length
        return self._attend(query, *self._find(carry, query, filled)), carry

    def end_block(self, carry, cache, position):
        w = self.shape.window_length
        return remember_block(carry, cache.key, cache.value, position - w + 1, jnp.ones_like(position, bool))

    def combine(self, others, own):
        share = jax.nn.sigmoid(self.gate[...])[:, None, None]
        window, *rest = others
        # In float32, because the gate's gradient is a sum over all tokens and channels of a head.
        mixed = (1 - share) * window.astype(jnp.float32) + share * own.astype(jnp.float32)
        return [mixed.astype(own.dtype), *rest]

    def _scan(
        self,
        memory: Memory,
        query: Float[Array, "b c h w k"],
        key: Float[Array, "b c h w k"],
        value: Float[Array, "b c h w k"],
        positions: Int[Array, "b c"],
    ):
        """Searches the memory and adds to it, block by block or all at once (`config.update`).

        Returns:
            The memory, and keys [b, c, h, w, j, k], values and validity of the memories found.
        """
        w = self.shape.window_length
        per_turn = positions.shape[1] if self.config.update == "segment" else 1

        def write(memory, block):
            key, value, position, keep = block
            return remember_block(memory, key, value, position, keep), None

        def step(memory, turn):
            query, key, value, position = turn
            # Memories of an earlier document of the same segment are neither found nor kept.
            first, last = position[:, :1], position[:, -1:]
            same_as_before = jnp.repeat(position == first + w * jnp.arange(per_turn), w, axis=1)
            same_as_last = position == last - w * jnp.arange(per_turn)[::-1]
            found_key, found_value, valid = self._find(memory, query, first[:, 0])
            valid = valid & same_as_before[:, None, :, None]
            blocks = [rearrange(y, "b h (u w) k -> u b h w k", w=w) for y in (key, value)]
            blocks = (*blocks, position.T, same_as_last.T)
            memory, _ = jax.lax.scan(write, memory, blocks)
            return memory, (found_key, found_value, valid)

        # The gradient is stopped outside of the scan, so that the scan has none. Otherwise JAX would compute and keep
        # for all pieces of the memory what does not change from turn to turn, such as the slots for every query.
        without_gradient = jax.lax.stop_gradient((query, key, value))
        turns = (rearrange(y, "b (i u) h w k -> i b h (u w) k", u=per_turn) for y in without_gradient)
        turns = (*turns, rearrange(positions, "b (i u) -> i b u", u=per_turn))
        memory, found = jax.lax.scan(step, memory, turns)
        return memory, [rearrange(y, "i b h (u w) ... -> b (i u) h w ...", u=per_turn) for y in found]

    def _find(self, memory: Memory, query: Float[Array, "b h t k"], filled: Int[Array, " b"]):
        found = search(query, memory.key, filled, self.config.num_neighbors, self.config.search)
        return *recall(memory, found.slot), found.valid

    def _attend(
        self,
        query: Float[Array, "*batch h t k"],
        key: Float[Array, "*batch h t j k"],
        value: Float[Array, "*batch h t j k"],
        valid: Bool[Array, "*batch h t j"],
    ) -> Float[Array, "*batch h t k"]:
        if not self.shape.mask_empty_cache:
            key, value = (jnp.where(valid[..., None], y, 0) for y in (key, value))
            valid = jnp.ones_like(valid)
        return attend_memories(query, key, value, valid)


@MECHANISMS.register("external_memory")
@dataclasses.dataclass(frozen=True)
class ExternalMemory(MechanismConfig):
    """The memory of a Memorizing Transformer."""

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

    carry_axes: ClassVar[tuple[str, ...]] = ("lanes", "heads")
    without_positions: ClassVar[bool] = True
    rank: ClassVar[int] = 1

    def __post_init__(self):
        check_choices(self)
        check_positive(self, ("num_slots", "num_neighbors"))

    def check(self, shape, others):
        super().check(shape, others)
        windows = [other.indices(shape.num_layers) for other in others if isinstance(other, SlidingWindow)]
        if not windows or not self.indices(shape.num_layers) <= windows[0]:
            raise UserError(f"ExternalMemory.layers={self.layers} need a SlidingWindow, which memories are mixed with")
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

    @property
    def needs_segments(self) -> str | None:
        return "ExternalMemory.update='segment'" if self.update == "segment" else None

    @property
    def waits_for(self) -> str | None:
        return f"with ExternalMemory.layers={self.layers} a block searches the memories of the blocks before it"

    def build(self, shape, index, *, rngs):
        return MemoryAttention(self, shape, rngs=rngs)

    def mixed_width(self, shape):
        return 0

    def flops(self, shape, index):
        """The operations of the search, which has no gradient, and of attention, whose memories have no gradient."""
        searching = 2 * self.num_slots * shape.inner_width
        attention = 2 * 2 * self.num_neighbors * shape.inner_width
        return Flops(searching + attention, attention)
