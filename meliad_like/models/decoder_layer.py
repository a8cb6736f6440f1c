"""One layer of the decoder: norms, heads of its tokens, a list of mechanisms, an output and a feed-forward network."""

from typing import Any, NamedTuple

import jax
from einops import rearrange
from flax import nnx
from jaxtyping import Array, Float, Int, PRNGKeyArray

from meliad_like.layers.attention import merge_heads
from meliad_like.layers.basic import FeedForward, Linear, RMSNorm, tiled_dropout
from meliad_like.mechanisms.base import MECHANISMS, Mechanism, OneToken, SegmentTokens, Watched
from meliad_like.mechanisms.positions import Position
from meliad_like.mechanisms.token_heads import TokenCache, TokenHeads
from meliad_like.models.decoder_config import DecoderConfig


class LayerCarry(NamedTuple):
    """The carry of one layer."""

    tokens: TokenCache
    """The keys and values of the last window of tokens."""
    mechanisms: dict[str, Any]
    """The carry of each mechanism, by name."""


class DecoderLayer(nnx.Module):
    """Pre-norm attention and feed-forward with residuals (Block-Recurrent Transformers, section 3.1, vertical)."""

    def __init__(self, config: DecoderConfig, index: int, *, rngs: nnx.Rngs):
        self.config = config
        d, shape = config.model_width, config.shape
        self.attention_norm = RMSNorm(d, rngs=rngs)
        self.heads = TokenHeads(
            d,
            config.num_heads,
            config.head_size,
            config.window_length,
            config.layer_position(index),
            config.mask_empty_cache,
            rngs=rngs,
        )
        modules = {MECHANISMS.name_of(kind): kind.build(shape, index, rngs=rngs) for kind in config.mechanisms}
        self.mechanisms = nnx.Dict({name: module for name, module in modules.items() if module is not None})
        # A tree of parameters is sorted by names; mechanisms are called in the order of the config.
        self.names = tuple(name for name, module in modules.items() if module is not None)
        mixed_width = sum(kind.mixed_width(shape, index) for kind in config.mechanisms)
        self.output = Linear(mixed_width, d, ("heads", "model"), rngs=rngs)
        self.feedforward_norm = RMSNorm(d, rngs=rngs)
        self.feedforward = FeedForward(d, config.feedforward_width, d, rngs=rngs)

    def init_carry(self, b: int, dtype, decoding: bool) -> LayerCarry:
        """The carry of `b` lanes before their first token."""
        carries = {name: self.mechanisms[name].init_carry(b, dtype, decoding) for name in self.names}
        return LayerCarry(self.heads.init_cache(b, dtype, decoding), carries)

    def _each(self, method: str, carry: LayerCarry, *arguments: Any) -> LayerCarry:
        """The carry after calling the named method of each mechanism."""
        carries = {
            name: getattr(self.mechanisms[name], method)(carry.mechanisms[name], *arguments) for name in self.names
        }
        return carry._replace(mechanisms=carries)

    def begin_segment(self, carry: LayerCarry) -> LayerCarry:
        """The carry at the beginning of a segment."""
        return self._each("begin_segment", carry)

    def begin_block(self, carry: LayerCarry, position: Int[Array, " b"]) -> LayerCarry:
        """The carry at the beginning of the block whose first token is at `position` of its document."""
        carry = self._each("begin_block", carry, position == 0, self.heads.plain(carry.tokens))
        return carry._replace(tokens=self.heads.begin_block(carry.tokens))

    def end_block(self, carry: LayerCarry, position: Int[Array, " b"]) -> LayerCarry:
        """The carry at the end of a block that `decode_step` has read, the last token at `position`."""
        return self._each("end_block", carry, self.heads.plain(carry.tokens), position)

    @property
    def acts_at_blocks(self) -> bool:
        """Whether decoding has to call `begin_block` and `end_block` of this layer."""
        classes = [type(mechanism) for mechanism in self.mechanisms.values()]
        return type(self.heads.position).begin_block is not Position.begin_block or any(
            one.begin_block is not Mechanism.begin_block or one.end_block is not Mechanism.end_block for one in classes
        )

    def publish(self, carry: LayerCarry, name: str) -> Any:
        """What the named mechanism publishes for other layers, after `begin_block`."""
        return self.mechanisms[name].publish(carry.mechanisms[name])

    def _finish(
        self, x: Float[Array, "*batch d"], mixed: Float[Array, "*batch i"], dropout_key: PRNGKeyArray | None = None
    ) -> Float[Array, "*batch d"]:
        x = x + self.output(mixed)
        y = self.feedforward(self.feedforward_norm(x))
        if dropout_key is not None:
            y = tiled_dropout(y, self.config.dropout_rate, dropout_key)
        return x + y

    def __call__(
        self,
        x: Float[Array, "b n d"],
        carry: LayerCarry,
        positions: Int[Array, "b c"],
        shared: dict[str, Any],
        dropout_key: PRNGKeyArray | None = None,
    ) -> tuple[Float[Array, "b n d"], LayerCarry]:
        """Reads a segment of `c` blocks.

        Args:
            x: the hidden vectors of the tokens.
            carry: the carry after the segment before.
            positions: position of each block's first token in its document; 0 where a document begins.
            shared: by mechanism, what other layers have published before the segment, which is then a single block.
            dropout_key: random key; None: no dropout.
        """
        num_keys = 2 + len(self.names)
        keys = [None] * num_keys if dropout_key is None else list(jax.random.split(dropout_key, num_keys))
        normed = tiled_dropout(self.attention_norm(x), self.config.dropout_rate, keys[0])
        tile, cache = self.heads.tile(normed, carry.tokens, positions)
        tokens, mixed, carries = SegmentTokens(normed, tile, positions, shared), [], {}
        for name, key in zip(self.names, keys[2:], strict=True):
            own, carries[name] = self.mechanisms[name](tokens, carry.mechanisms[name], key)
            mixed = self.mechanisms[name].combine(mixed, own)
        x = self._finish(x, rearrange(merge_heads(*mixed), "b c w i -> b (c w) i"), keys[1])
        return x, LayerCarry(cache, carries)

    def decode_step(
        self, x: Float[Array, "b d"], carry: LayerCarry, position: Int[Array, " b"], shared: dict[str, Any]
    ) -> tuple[Float[Array, "b d"], LayerCarry]:
        """Reads one token of every lane.

        Args:
            x: the hidden vector of each lane's token.
            carry: the carry, after `begin_block` at the beginning of a block.
            position: the number of earlier tokens of its document.
            shared: as in `__call__`.
        """
        normed = self.attention_norm(x)
        tile, cache = self.heads.token(normed, carry.tokens, position)
        token, mixed, carries = OneToken(normed, tile, position, shared), [], {}
        for name in self.names:
            own, carries[name] = self.mechanisms[name].decode_step(token, carry.mechanisms[name])
            mixed = self.mechanisms[name].combine(mixed, own)
        return self._finish(x, merge_heads(*mixed)[:, 0]), LayerCarry(cache, carries)

    def watch(self, before: LayerCarry, after: LayerCarry, position: Int[Array, " b"]) -> dict[str, Watched]:
        """The internal values of a block for studies, by mechanism.

        Args:
            before, after: the carries before and after the block.
            position: position of the block's first token in its document.
        """
        tile = self.heads.tile_of_caches(before.tokens, after.tokens, position)
        watched = {
            name: self.mechanisms[name].watch(before.mechanisms[name], after.mechanisms[name], tile, position == 0)
            for name in self.names
        }
        return {name: one for name, one in watched.items() if one is not None}
