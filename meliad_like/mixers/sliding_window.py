"""Sliding-window attention: every token sees the `w` tokens before it (Block-Recurrent Transformers, section 3)."""

from typing import ClassVar

import numpy as np
from einops import rearrange
from flax import nnx
from jaxtyping import Array, Float, PRNGKeyArray

from meliad_like.errors import UserError
from meliad_like.layers.attention import attend, attend_window, merge_heads
from meliad_like.layers.backend import platform
from meliad_like.layers.basic import kept_by_dropout, multiplier_of
from meliad_like.layers.flops import Flops
from meliad_like.layers.kernels import KERNELS
from meliad_like.mixers.base import MIXERS, At, Mixer, MixerConfig, Shape, Traits
from meliad_like.mixers.token_heads import Tile, TokenCache, TokenHeads, TokenTile
from meliad_like.registry import size


class WindowAttention(Mixer):
    """Attention of a layer's tokens to the window.

    Memories that share its keys and values hold one, and call `attend` and `attend_token`, which also return the tile.
    """

    def __init__(self, shape: Shape, *, rngs: nnx.Rngs, with_positions: bool = True):
        self.shape = shape
        self.heads = TokenHeads(shape, rngs=rngs, with_positions=with_positions)
        self.acts_at_blocks = self.heads.position.changes_keys

    def init_carry(self, b, dtype):
        return self.heads.init_cache(b, dtype)

    def __call__(self, x, at, carry, dropout_key):
        mixed, _, carry = self.attend(x, at, carry, dropout_key)
        return tokens_of(mixed), carry

    def step(self, x, at, carry):
        mixed, _, carry = self.attend_token(x, carry)
        return merge_heads(mixed)[:, 0], carry

    def begin_decoding(self, carry: TokenCache) -> TokenCache:
        return self.heads.begin_block(carry)

    def end_decoding(self, carry: TokenCache) -> TokenCache:
        return carry._replace(placed_key=None)

    end_block = begin_decoding

    def attend(
        self, x: Float[Array, "b n d"], at: At, cache: TokenCache, dropout_key: PRNGKeyArray | None
    ) -> tuple[Float[Array, "b c h w k"], Tile, TokenCache]:
        """The results of the tokens of a segment, by head, their tile, and the cache after them."""
        tile, cache = self.heads.tile(x, at, cache)
        w = self.shape.window_length
        rate = self.shape.dropout_rate
        kept = kept_by_dropout(dropout_key, rate, (self.shape.num_heads, w, w))
        if self.shape.has_kernel:
            return self._attend_in_kernel(tile, kept), tile, cache
        keys_and_values = tile.placed_key, tile.block.value, tile.placed_previous_key, tile.before.value
        seen, multiplier = tile.before.visible, multiplier_of(kept, rate)
        mixed = attend_window(tile.placed_query, *keys_and_values, tile.bias, seen, multiplier)
        return mixed, tile, cache

    def _attend_in_kernel(self, tile: Tile, kept) -> Float[Array, "b c h w k"]:
        shape, kernel = self.shape, KERNELS[self.shape.attention_kernel]
        w, k = shape.window_length, shape.head_size
        instead = "set it to 'none' (--gin_param=\"DecoderConfig.attention_kernel = 'none'\")"
        if self.heads.position.changes_keys:
            raise UserError(
                f"DecoderConfig.attention_kernel={shape.attention_kernel!r} needs a DecoderConfig.position that is "
                f"none, t5, alibi or another bias, because the others change keys: {instead}"
            )
        if not kernel.runs(w, k):
            raise UserError(
                f"DecoderConfig.attention_kernel={shape.attention_kernel!r} needs {kernel.needs}, not {platform()}, "
                f"window_length={w} and head_size={k}: {instead}"
            )
        mixed = kernel.attend(
            tile.projected,
            self.heads.scale,
            tile.bias,
            tile.positions > 0,
            kept,
            dropout_rate=shape.dropout_rate,
            mask_previous=shape.mask_empty_cache,
        )
        return rearrange(mixed, "b (c w) (h k) -> b c h w k", h=shape.num_heads, w=w)

    def attend_token(
        self, x: Float[Array, "b d"], cache: TokenCache
    ) -> tuple[Float[Array, "b h 1 k"], TokenTile, TokenCache]:
        """The same as `attend` for one token of every lane."""
        tile, cache = self.heads.token(x, cache)
        seen = tile.seen[:, None, None]
        mixed = attend(tile.placed_query, tile.placed_key, tile.value, tile.bias[:, :, None], seen)
        return mixed, tile, cache

    @staticmethod
    def flops(shape: Shape) -> Flops:
        """The operations of full tiles of `w` queries by `2w` keys, although a query sees half of its tile."""
        attention = 2 * 2 * (2 * shape.window_length) * shape.inner_width
        return TokenHeads.flops(shape) + Flops.of_products(attention)


def tokens_of(*mixed: Float[Array, "b c h w k"]) -> Float[Array, "b n i"]:
    """The results of tokens, from one or several results by block and head, which are concatenated."""
    return rearrange(merge_heads(*mixed), "b c w i -> b (c w) i")


def window_traits(shape: Shape) -> Traits:
    """The traits of a mixer that attends to the window."""
    return Traits(attends_to=lambda position: np.minimum(position, shape.window_length))


@MIXERS.register("sliding_window")
class SlidingWindow(MixerConfig):
    """Attention to the `window_length` tokens before each token."""

    layers: tuple[int, ...] | None = size(None, "layer_indices")
    """The layers that attend to the window alone; negative numbers count from the end. None: those of
    `DecoderConfig.pattern`, or without a pattern all layers that have no other mixer with attention to the window."""

    has_window: ClassVar[bool] = True

    def build(self, shape, *, rngs):
        return WindowAttention(shape, rngs=rngs)

    def flops(self, shape):
        return WindowAttention.flops(shape)

    def traits(self, shape):
        return window_traits(shape)
