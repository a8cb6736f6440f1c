"""Sliding-window attention: every token sees the `w` tokens before it (Block-Recurrent Transformers, section 3)."""

import functools
from collections.abc import Callable
from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from einops import rearrange
from flax import nnx
from jaxtyping import Array, Float, Int, PRNGKeyArray

from meliad_like.errors import UserError
from meliad_like.kernels.registry import KERNELS
from meliad_like.kernels.states_tpu import ProjectedKeys
from meliad_like.kernels.window_tpu import Projected
from meliad_like.layers.attention import (
    KeysAndValues,
    attend,
    attend_folded,
    attend_window,
    largest_bias,
    merge_heads,
    ring_square,
    scaled,
    split_heads,
    unit,
    with_tokens,
)
from meliad_like.layers.backend import platform
from meliad_like.layers.basic import Linear, kept_by_dropout, multiplier_of, parameter
from meliad_like.layers.flops import Flops
from meliad_like.layers.lanes import at_lanes
from meliad_like.layers.sharding import from_left
from meliad_like.mixers.base import MIXERS, DecoderShape, LayerContext, Mixer, MixerConfig, Traits
from meliad_like.mixers.positions import Position, PositionConfig


class TokenCache(NamedTuple):
    """The keys and values of a layer's last `w` tokens as a ring: column `s` holds the last with block offset `s`."""

    key: Float[Array, "b h w k"]
    """Keys of unit length, without positions."""
    value: Float[Array, "b h w k"]
    position: Int[Array, " b"]
    """The number of tokens of the document that have been read."""
    placed_key: Float[Array, "b h w k"] | None = None
    """The keys with their positions in the tile of the current block; only while decoding, if positions change keys."""


class WindowInputs(NamedTuple):
    """The queries of each block, and the keys and values of the block and of the block before it."""

    query: Float[Array, "b c h w k"]
    """Queries of unit length times the attention scale, without positions."""
    before: KeysAndValues
    """Keys of unit length, without positions, and values of the block before. It is visible if it belongs to the same
    document, or if empty places are not masked."""
    block: KeysAndValues
    """Keys of unit length, without positions, and values of the block itself."""
    positions: Int[Array, "b c"]
    """The number of tokens of the document before each block."""
    placed_query: Float[Array, "b c h w k"]
    """Queries with positions; the keys of the next two fields have them, too."""
    placed_key: Float[Array, "b c h w k"]
    placed_previous_key: Float[Array, "b c h w k"]
    bias: Float[Array, "h w"]
    """The bias of the scores at the distances 1 to w, times the attention scale."""
    projected: Projected
    """Queries, keys and values as they are projected, for a kernel."""


class TokenInputs(NamedTuple):
    """The queries of the next tokens of every lane, and the rings of keys and values before and after these tokens."""

    query: Float[Array, "b h n k"]
    """Queries of unit length times the attention scale, without positions."""
    placed_query: Float[Array, "b h n k"]
    old: tuple[Float[Array, "b h w k"], Float[Array, "b h w k"]]
    """Keys with positions, and values, before these tokens."""
    new: tuple[Float[Array, "b h w k"], Float[Array, "b h w k"]]
    """The same after the first `counts` of them."""
    offset: Int[Array, "b n"]
    """The offsets of the tokens in their block; those of padding may be `w` or more."""


class TokenHeads(nnx.Module):
    """Keys, values and queries of a layer's tokens, the attention scale of each head, and the position strategy."""

    def __init__(
        self, shape: DecoderShape, *, rngs: nnx.Rngs, with_positions: bool = True, attention_scale: float = 1.0
    ):
        self.num_heads, self.head_size, self.w = shape.num_heads, shape.head_size, shape.window_length
        self.mask_empty_cache, self.for_kernel = shape.mask_empty_cache, shape.has_kernel
        d, inner = shape.model_width, shape.inner_width
        self.key, self.value, self.query = (Linear(d, inner, ("model", "heads"), rngs=rngs) for _ in range(3))
        scale = jax.nn.initializers.constant(attention_scale)
        self.attention_scale = parameter(rngs.params(), scale, (self.num_heads,), ("heads",), "scale")
        position = shape.position if with_positions else PositionConfig()
        self.position: Position = position.build(self.w, self.num_heads, rngs=rngs)

    @staticmethod
    def flops(shape: DecoderShape) -> Flops:
        """The operations of the projections of one token."""
        return Flops.of_products(2 * shape.model_width * 3 * shape.inner_width)

    def init_cache(self, b: int, dtype) -> TokenCache:
        """An empty cache."""
        empty = jnp.zeros((b, self.num_heads, self.w, self.head_size), dtype)
        return TokenCache(empty, empty, jnp.zeros((b,), jnp.int32))

    @property
    def scale(self) -> Float[Array, " h"]:
        """The attention scale of each head: the absolute value of its parameter."""
        return jnp.abs(self.attention_scale[...])

    def bias(self, longest: int) -> Float[Array, "h longest"]:
        """The bias at the distances 1 to `longest`, times the attention scale, which multiplies the bias as well."""
        return self.position.bias(self.num_heads, longest) * self.scale[:, None]

    def of(self, y: Float[Array, "b n d"]) -> tuple[Float[Array, "b h n k"], ...]:
        """The heads of vectors without positions: keys of unit length, values, and queries as in `WindowInputs`. A
        compiled program leaves out those that nothing uses."""
        key, value, query = self._split(self.key(y), self.value(y), self.query(y))
        return key, value, scaled(query, self.attention_scale)

    def _split(self, *projected: Float[Array, "b n i"]) -> tuple[Float[Array, "b h n k"], ...]:
        """The heads of keys, values and queries; keys and queries of unit length."""
        key, value, query = (split_heads(x, self.num_heads) for x in projected)
        return unit(key), value, unit(query)

    def segment(
        self, y: Float[Array, "b n d"], context: LayerContext, cache: TokenCache
    ) -> tuple[WindowInputs, TokenCache]:
        """The heads of a segment, from the layer's input after its norm, and the cache after the segment."""
        projected = self.key(y), self.value(y), self.query(y)
        # Heads before blocks: an axis for the lengths of the blocks costs XLA two copies a layer.
        key, value, query = (rearrange(x, "b h (c w) k -> b c h w k", w=self.w) for x in self._split(*projected))
        last_key, last_value = key[:, -1], value[:, -1]
        if self.for_kernel:
            # Computed by itself, so that the other blocks' keys get unit length only in the kernel.
            last_key, last_value, _ = self._split(*(x[:, -self.w :] for x in projected))
        before_key, before_value = from_left((last_key, last_value), (cache.key, cache.value))
        positions, read = context.count(cache.position, self.w)
        previous_valid = positions > 0
        previous_key, previous_value = _block_before(key, before_key), _block_before(value, before_value)
        if not self.mask_empty_cache:
            empty = ~previous_valid[:, :, None, None, None]
            previous_key, previous_value = jnp.where(empty, 0, previous_key), jnp.where(empty, 0, previous_value)
            previous_valid = jnp.ones_like(previous_valid)
        of_before = [merge_heads(x.astype(y.dtype)) for x, y in zip((before_key, before_value), projected)]
        before, block = np.arange(self.w), np.arange(self.w, 2 * self.w)
        inputs = WindowInputs(
            query=scaled(query, self.attention_scale),
            before=KeysAndValues(previous_key, previous_value, previous_valid),
            block=KeysAndValues(key, value),
            positions=positions,
            placed_query=self.placed_query(query, block),
            placed_key=self.position.placed(key, block),
            placed_previous_key=self.position.placed(previous_key, before),
            bias=self.bias(self.w),
            projected=Projected(projected[2], *projected[:2], *of_before),
        )
        return inputs, TokenCache(last_key, last_value, read)

    def projected_keys(self, inputs: WindowInputs) -> tuple[ProjectedKeys, ProjectedKeys]:
        """Keys and values of the block before and of the block, as they are projected, for a kernel: [c, b, w, i]."""
        positions, projected = inputs.positions.T, inputs.projected

        def with_before(x, cached):
            blocks = rearrange(x, "b (c w) i -> c b w i", w=self.w)
            before = jnp.concatenate([cached[None], blocks[:-1]])
            return blocks, before if self.mask_empty_cache else jnp.where(positions[:, :, None, None] > 0, before, 0)

        key, key_before = with_before(projected.key, projected.before_key)
        value, value_before = with_before(projected.value, projected.before_value)
        visible = positions > 0 if self.mask_empty_cache else None
        from_cache = jnp.broadcast_to(np.arange(len(positions))[:, None] == 0, positions.shape)
        return ProjectedKeys(key_before, value_before, visible, from_cache), ProjectedKeys(key, value)

    def placed_query(self, query: Float[Array, "*batch h n k"], place) -> Float[Array, "*batch h n k"]:
        """Queries with their positions (`Position.placed`), times the attention scale."""
        return scaled(self.position.placed(query, place), self.attention_scale)

    def begin_block(self, cache: TokenCache) -> TokenCache:
        """The cache before the first token of a block is decoded: the keys get the positions of the block before."""
        if not self.position.changes_keys:
            return cache
        return cache._replace(placed_key=self.position.placed(cache.key, np.arange(self.w)))

    def tokens(
        self, y: Float[Array, "b n d"], counts: Int[Array, " b"], cache: TokenCache
    ) -> tuple[TokenInputs, TokenCache]:
        """The heads of the next tokens of each lane's block, and the cache with the first `counts` of them."""
        key, value, query = self._split(self.key(y), self.value(y), self.query(y))
        offset = (cache.position % self.w)[:, None] + np.arange(y.shape[1])
        place, write = (self.w + offset)[:, None], functools.partial(with_tokens, places=offset, counts=counts, axis=2)
        after = TokenCache(write(cache.key, key), write(cache.value, value), cache.position + counts)
        if cache.placed_key is not None:
            after = after._replace(placed_key=write(cache.placed_key, self.position.placed(key, place)))
        inputs = TokenInputs(
            query=scaled(query, self.attention_scale),
            placed_query=self.placed_query(query, place),
            old=(cache.key if cache.placed_key is None else cache.placed_key, cache.value),
            new=(after.key if after.placed_key is None else after.placed_key, after.value),
            offset=offset,
        )
        return inputs, after

    def bias_at(
        self,
        distance: Int[Array, "b n s"],
        offset: Int[Array, "b n"],
        longest: int,
        square: Callable[[Float[Array, "h longest"]], Float[Array, "h w s"]],
    ) -> Float[Array, "b h n s"]:
        """The bias of tokens at these offsets for keys at these distances, where they are between 1 and `longest`. One
        token looks up its distances, several the rows of `square(bias)`, one for each offset."""
        by_distance = self.bias(longest)
        if distance.shape[1] == 1:
            return jnp.moveaxis(jnp.take(by_distance, distance - 1, axis=1, mode="clip"), 0, 1)
        # Looking up whole rows is much faster than single numbers.
        return jnp.moveaxis(jnp.take(square(by_distance), offset, axis=1, mode="clip"), 0, 1)


def _block_before(blocks: Float[Array, "b c h w k"], cached: Float[Array, "b h w k"]) -> Float[Array, "b c h w k"]:
    """The block before each block; for the first block, the cached one."""
    # A slice and a concatenation would be two copies on a TPU, and as many in the backward pass.
    unpadded = (0, 0, 0)
    moved = jax.lax.pad(blocks, jnp.zeros((), blocks.dtype), (unpadded, (1, -1, 0), *[unpadded] * 3))
    is_first = jnp.arange(blocks.shape[1])[:, None, None, None] == 0
    return jnp.where(is_first, cached.astype(blocks.dtype)[:, None], moved)


class WindowAttention(Mixer):
    """Attention of a layer's tokens to the window.

    Memories that share its keys and values hold one, and call `attend` and `attend_tokens`.
    """

    def __init__(self, shape: DecoderShape, *, rngs: nnx.Rngs, with_positions: bool = True):
        self.shape = shape
        self.heads = TokenHeads(shape, rngs=rngs, with_positions=with_positions)

    def init_carry(self, b, dtype):
        return self.heads.init_cache(b, dtype)

    def __call__(self, x, context, carry, dropout_key):
        mixed, _, carry = self.attend(x, context, carry, dropout_key)
        return tokens_of(mixed), carry

    def decode(self, x, counts, context, carry):
        mixed, _, carry = self.attend_tokens(x, counts, carry)
        mixed = merge_heads(mixed)
        if self.heads.position.changes_keys:
            ends = context.block_ends(counts, self.shape.window_length)
            return at_lanes(ends, self.begin_decoding, mixed, carry)
        return mixed, carry

    def begin_decoding(self, carry: TokenCache) -> TokenCache:
        return self.heads.begin_block(carry)

    def attend(
        self, x: Float[Array, "b n d"], context: LayerContext, cache: TokenCache, dropout_key: PRNGKeyArray | None
    ) -> tuple[Float[Array, "b c h w k"], WindowInputs, TokenCache]:
        """The results of the tokens of a segment, by head, their keys, values and queries, and the cache after them."""
        inputs, cache = self.heads.segment(x, context, cache)
        w = self.shape.window_length
        rate = self.shape.dropout_rate
        kept = kept_by_dropout(dropout_key, rate, (self.shape.num_heads, w, w))
        if self.shape.has_kernel:
            return self._attend_in_kernel(inputs, kept), inputs, cache
        keys_and_values = inputs.placed_key, inputs.block.value, inputs.placed_previous_key, inputs.before.value
        seen, multiplier = inputs.before.visible, multiplier_of(kept, rate)
        mixed = attend_window(inputs.placed_query, *keys_and_values, inputs.bias, seen, multiplier)
        return mixed, inputs, cache

    def _attend_in_kernel(self, inputs: WindowInputs, kept) -> Float[Array, "b c h w k"]:
        shape, kernel = self.shape, KERNELS[self.shape.attention_kernel]
        w, k = shape.window_length, shape.head_size
        if self.heads.position.changes_keys or not kernel.runs(w, k):
            setting = f"DecoderConfig.attention_kernel={shape.attention_kernel!r}"
            present = f"{platform()}, window_length={w}, head_size={k} and {type(shape.position).__name__}"
            instead = "set it to 'none' (--gin_param=\"DecoderConfig.attention_kernel = 'none'\")"
            raise UserError(f"{setting} needs {kernel.needs}, not {present}: {instead}")
        mixed = kernel.attend(
            inputs.projected,
            self.heads.scale,
            inputs.bias,
            inputs.positions > 0,
            kept,
            dropout_rate=shape.dropout_rate,
            mask_previous=shape.mask_empty_cache,
        )
        return rearrange(mixed, "b (c w) (h k) -> b c h w k", h=shape.num_heads, w=w)

    def attend_tokens(
        self, x: Float[Array, "b n d"], counts: Int[Array, " b"], cache: TokenCache
    ) -> tuple[Float[Array, "b h n k"], TokenInputs, TokenCache]:
        """The same as `attend` for the next tokens of each lane's block (`Mixer.decode`)."""
        w = self.shape.window_length
        inputs, after = self.heads.tokens(x, counts, cache)
        column, offset = np.arange(w), inputs.offset[..., None]
        bias = self.heads.bias_at((offset - column - 1) % w + 1, inputs.offset, w, ring_square)
        # The columns at a token's own offset and after it hold tokens of the block before.
        seen = column < offset
        seen |= (cache.position >= w)[:, None, None] if self.shape.mask_empty_cache else True
        query, old, new, seen = inputs.placed_query, inputs.old, inputs.new, seen[:, None]
        # A token doesn't see itself, so one alone sees the ring as it was.
        if x.shape[1] == 1:
            return attend(query, *old, bias, seen), inputs, after
        is_new = ((offset[:, :1] <= column) & (column < offset))[:, None]
        return attend_folded(query, old, new, is_new, seen, bias - largest_bias(bias, seen)), inputs, after

    @staticmethod
    def flops(shape: DecoderShape) -> Flops:
        """The operations of full tiles of `w` queries by `2w` keys, although a query sees half of its tile."""
        attention = 2 * 2 * (2 * shape.window_length) * shape.inner_width
        return TokenHeads.flops(shape) + Flops.of_products(attention)


def tokens_of(*mixed: Float[Array, "b c h w k"]) -> Float[Array, "b n i"]:
    """The results of tokens, from one or several results by block and head, which are concatenated."""
    return rearrange(merge_heads(*mixed), "b c w i -> b (c w) i")


def window_traits(shape: DecoderShape) -> Traits:
    """The traits of a mixer that attends to the window."""
    return Traits(attends_to=lambda position: np.minimum(position, shape.window_length))


@MIXERS.register("sliding_window")
class SlidingWindow(MixerConfig):
    """Attention to the `window_length` tokens before each token."""

    has_window: ClassVar[bool] = True

    def build(self, shape, *, rngs):
        return WindowAttention(shape, rngs=rngs)

    def flops(self, shape):
        return WindowAttention.flops(shape)

    def traits(self, shape):
        return window_traits(shape)
