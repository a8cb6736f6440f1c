"""The decoder: Slide, Transformer-XL and Block-Recurrent language models (Block-Recurrent Transformers, section 3)."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from meliad_like.layers.basic import RMSNorm, parameter, rows, tiled_dropout
from meliad_like.layers.sharding import constrain
from meliad_like.models.decoder_config import DecoderConfig
from meliad_like.models.decoder_layer import DecoderLayer, LayerCarry

REMAT_POLICIES = {
    "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    "layers": jax.checkpoint_policies.nothing_saveable,
}


class DecoderCarry(NamedTuple):
    """All that a decoder remembers of the documents in its lanes."""

    position: Int[Array, " b"]
    """Tokens read since the lane's document began, padding included; a multiple of w between segments."""
    layers: list[LayerCarry]


class Decoder(nnx.Module):
    """A language model with a window of `w` tokens, and states that reach further."""

    def __init__(self, config: DecoderConfig, vocabulary_size: int, *, rngs: nnx.Rngs):
        self.config = config
        self.logit_scale = config.model_width**-0.5 if config.logit_scale is None else config.logit_scale
        shape = (vocabulary_size, config.model_width)
        self.embedding = parameter(rngs.params(), jax.nn.initializers.normal(1.0), shape, ("vocabulary", "model"))
        self.layers = nnx.List(
            DecoderLayer(config, recurrent=i in config.recurrent_indices, rngs=rngs) for i in range(config.total_layers)
        )
        self.final_norm = RMSNorm(config.model_width, rngs=rngs)

    @property
    def dtype(self):
        return jnp.dtype(self.config.activation_dtype)

    def init_carry(self, b: int, *, decoding: bool = False) -> DecoderCarry:
        """What `b` lanes remember before their first token; `decoding` makes room for `decode_step`."""
        layers = [layer.init_carry(b, self.dtype, decoding) for layer in self.layers]
        return DecoderCarry(jnp.zeros((b,), jnp.int32), layers)

    def __call__(
        self,
        tokens: Int[Array, "b n"],
        carry: DecoderCarry,
        start: Bool[Array, "b c"],
        dropout_key: PRNGKeyArray | None = None,
    ) -> tuple[Float[Array, "b n d"], DecoderCarry]:
        """Reads a segment.

        Args:
            tokens: a whole number of blocks.
            carry: from the segment before, or `init_carry`; its position is a multiple of w.
            start: blocks with which a new document begins: nothing is remembered across.
            dropout_key: for training; none to keep everything.

        Returns:
            Hidden states for `logits`, and the carry for the next segment.
        """
        n, w = tokens.shape[1], self.config.window_length
        if n % w or start.shape[1] != n // w:
            raise ValueError(f"{n} tokens with {start.shape[1]} start flags are not whole blocks of window_length={w}")
        table = constrain(self.embedding[...].astype(self.dtype), "vocabulary", None)
        x = constrain(table[tokens], "lanes", None, None)
        continues = carry.position > 0
        layers = []
        for i, (layer, layer_carry) in enumerate(zip(self.layers, carry.layers, strict=True)):
            key = None if dropout_key is None else jax.random.fold_in(dropout_key, i)
            call = type(layer).__call__
            if self.config.remat != "none":
                call = jax.checkpoint(call, policy=REMAT_POLICIES[self.config.remat])
            x, layer_carry = call(layer, x, layer_carry, start, continues, key)
            x = constrain(x, "lanes", None, None)
            layers.append(layer_carry)
        x = self.final_norm(x)
        if dropout_key is not None:
            x = tiled_dropout(x, self.config.dropout_rate, jax.random.fold_in(dropout_key, len(self.layers)))
        return x, DecoderCarry(_advance(carry.position, start, w), layers)

    def logits(self, hidden: Float[Array, "... d"]) -> Float[Array, "... v"]:
        """Scores of the next token, float32; the softmax shares the embedding."""
        table = self.embedding[...].astype(hidden.dtype)
        logits = self.logit_scale * jnp.einsum("nd,vd->nv", rows(hidden), table, preferred_element_type=jnp.float32)
        return logits.reshape(*hidden.shape[:-1], -1)

    def decode_step(self, token: Int[Array, " b"], carry: DecoderCarry) -> tuple[Float[Array, "b v"], DecoderCarry]:
        """Reads one more token per lane at a cost that does not depend on how much was read.

        Lanes may be at different positions. The carry comes from `init_carry(b, decoding=True)`, through whole
        segments or not. Returns the logits of the next token.
        """
        x = self.embedding[...].astype(self.dtype)[token]
        layers = []
        for layer, layer_carry in zip(self.layers, carry.layers, strict=True):
            x, layer_carry = layer.decode_step(x, layer_carry, carry.position)
            layers.append(layer_carry)
        return self.logits(self.final_norm(x)), DecoderCarry(carry.position + 1, layers)


def _advance(position: Int[Array, " b"], start: Bool[Array, "b c"], w: int) -> Int[Array, " b"]:
    """Positions after a segment: counted from the last start in it, if there is one."""
    c = start.shape[1]
    blocks_since = jnp.min(jnp.where(start, c - jnp.arange(c), c + 1), axis=1)
    return jnp.where(blocks_since <= c, blocks_since * w, position + c * w)
