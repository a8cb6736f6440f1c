"""Attention of a pretrained decoder: to the tokens of a window, with positions of its own, and to inserted vectors."""

import dataclasses
from typing import ClassVar

import jax.numpy as jnp
import numpy as np
from einops import rearrange
from jaxtyping import Array, Bool, Float, Int

from meliad_like.layers.attention import attend, split_heads
from meliad_like.layers.basic import dropout_multiplier
from meliad_like.layers.rotary import rotate
from meliad_like.mixers.dot_product_attention import AttentionCache, SpanAttention, SpanAttentionConfig
from meliad_like.models.model import block_offset

INSERTED = "inserted"
"""The name in `LayerContext.published` of the vectors that are inserted into a window, after the layer's norm."""


class WindowAttention(SpanAttention):
    """Attention to a span of tokens of the same window. The vectors that are inserted into the window are keys and
    values without a position, and not queries. Only while decoding there is a carry."""

    config: "WindowAttentionConfig"

    def __call__(self, x, context, carry, dropout_key):
        c = context.positions.shape[1]
        windows = rearrange(x, "b (c w) d -> (b c) w d", c=c)
        offset = jnp.arange(windows.shape[1])[None]
        query, key, value, gate = self._heads(windows, offset)
        if carry is not None:
            # The last window is the current one.
            keys, values = (rearrange(y, "(b c) g w k -> b c g w k", c=c)[:, -1] for y in (key, value))
            carry = AttentionCache(keys, values, carry.position)
        mixed = self._attend(query, key, value, offset, context, context.positions.reshape(-1) > 0, dropout_key)
        return rearrange(self._output(mixed, gate), "(b c) w i -> b (c w) i", c=c), carry

    def decode(self, x, counts, context, carry):
        position = context.positions
        offset = block_offset(position, self.w, self.config.overlap)[:, None] + np.arange(x.shape[1])
        query, key, value, gate = self._heads(x, offset)
        carry = carry.with_tokens(key, value, offset, counts)
        keys, values = (cached[:, :, : context.longest] for cached in (carry.key, carry.value))
        mixed = self._attend(query, keys, values, offset, context, position >= self.w, None)
        return self._output(mixed, gate), carry._replace(position=position + counts)

    def _heads(self, x: Float[Array, "l t d"], offset: Int[Array, "#l t"]):
        """The results of `_project` with positions, for tokens at these offsets in their windows."""
        query, key, value, gate = self._project(x)
        if self.table is not None:
            # Angles are computed, because a table would be a large constant in every layer's program.
            wavelengths, scale = self.table.wavelengths, self.table.scaling.attention_scale
            query, key = (scale * rotate(y, offset[:, None], wavelengths) for y in (query, key))
        return query, key, value, gate

    def _attend(self, query, key, value, offset: Int[Array, "#l t"], context, present: Bool[Array, " l"], dropout_key):
        """Attention of tokens at these offsets to keys from the window's beginning on, and to the vectors of windows
        into which vectors are inserted (`present`)."""
        g, t = self.key_heads, query.shape[2]
        away = offset[:, :, None] - np.arange(key.shape[2])
        seen = (away >= 0) & (away < self.config.span)
        if (vectors := context.published[INSERTED]) is not None:
            inserted = (split_heads(projection(vectors), g) for projection in (self.key, self.value))
            key, value = (jnp.concatenate(pair, axis=2) for pair in zip(inserted, (key, value)))
            present = jnp.broadcast_to(present[:, None, None], (present.shape[0], t, vectors.shape[1]))
            seen = jnp.concatenate([present, jnp.broadcast_to(seen, (present.shape[0], *seen.shape[1:]))], axis=2)
        query = rearrange(query, "l (g j) t k -> l g (j t) k", g=g)
        multiplier = dropout_multiplier(dropout_key, self.shape.dropout_rate, (*query.shape[:-1], key.shape[2]))
        seen = jnp.tile(seen, (1, query.shape[2] // t, 1))[:, None]
        mixed = attend(query, key, value, mask=seen, multiplier=multiplier)
        return rearrange(mixed, "l g (j t) k -> l (g j) t k", t=t)


@dataclasses.dataclass(frozen=True)
class WindowAttentionConfig(SpanAttentionConfig):
    """Attention to the last `span` tokens of the window."""

    begins_again: ClassVar[bool] = True
    overlap: int = 0
    """The number of tokens that a window repeats (`PretrainedConfig.overlap`)."""
    longer: float = 1.0
    """The ratio that `RotaryScaling.wavelengths` describes."""

    def table(self, shape):
        table = super().table(shape)
        return table and dataclasses.replace(table, longer=self.longer)

    def build(self, shape, *, rngs):
        return WindowAttention(self, shape, rngs=rngs)
