"""The decoder: Slide, Transformer-XL, Block-Recurrent, Memorizing and every other mix of memory mechanisms.

Block-Recurrent Transformers, section 3; block feedback, appendix E.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from meliad_like.layers.basic import RMSNorm, embed, parameter, rows, tiled_dropout
from meliad_like.layers.sequence import num_parts
from meliad_like.layers.sharding import constrain
from meliad_like.mechanisms.base import MECHANISMS
from meliad_like.models.decoder_config import DecoderConfig
from meliad_like.models.decoder_layer import DecoderLayer, LayerCarry
from meliad_like.models.skeleton import DecoderCarry, Skeleton


class Decoder(Skeleton):
    """A language model with a window of `w` tokens, and memory mechanisms that may reach further back."""

    def __init__(self, config: DecoderConfig, vocabulary_size: int, *, rngs: nnx.Rngs):
        self.config = config
        self.block_by_block = config.publishes
        self.logit_scale = config.model_width**-0.5 if config.logit_scale is None else config.logit_scale
        shape = (vocabulary_size, config.model_width)
        self.embedding = parameter(rngs.params(), jax.nn.initializers.normal(1.0), shape, ("vocabulary", "model"))
        self.layers = nnx.List(DecoderLayer(config, i, rngs=rngs) for i in range(config.total_layers))
        self.final_norm = RMSNorm(config.model_width, rngs=rngs)

    def embed(self, tokens, position, dropout_key):
        # XLA crashes on a lookup along the vocabulary, sharded over `tensor`, inside of `over_sequence`.
        vocabulary = "vocabulary" if num_parts() == 1 else None
        table = self.embedding[...].astype(self.dtype)
        return embed(table if tokens.ndim == 1 else constrain(table, vocabulary, None), tokens)

    def finish(self, x, dropout_key):
        x = self.final_norm(x)
        return x if dropout_key is None else tiled_dropout(x, self.config.dropout_rate, dropout_key)

    def logits(self, hidden: Float[Array, "*batch d"]) -> Float[Array, "*batch v"]:
        """The logits of the next token, float32; the softmax shares the embedding's parameters."""
        table = self.embedding[...].astype(hidden.dtype)
        logits = self.logit_scale * jnp.einsum("nd,vd->nv", rows(hidden), table, preferred_element_type=jnp.float32)
        return logits.reshape(*hidden.shape[:-1], -1)

    def shared(self, layers: list[LayerCarry]) -> dict[str, Any]:
        shared = {}
        for kind in self.config.mechanisms:
            if kind.publishes:
                name, indices = MECHANISMS.name_of(kind), sorted(kind.indices(len(self.layers)))
                shared[name] = kind.share({i: self.layers[i].publish(layers[i], name) for i in indices})
        return shared


def carry_axes(config: DecoderConfig, carry: DecoderCarry) -> DecoderCarry:
    """The logical axes of every array of a carry, from the first axis: the same tree, of tuples of names."""
    axes = {MECHANISMS.name_of(kind): kind.carry_axes for kind in config.mechanisms}

    def of_layer(layer: LayerCarry) -> LayerCarry:
        mechanisms = {name: jax.tree.map(lambda _, n=name: axes[n], one) for name, one in layer.mechanisms.items()}
        return LayerCarry(jax.tree.map(lambda _: ("lanes",), layer.tokens), mechanisms)

    return DecoderCarry(("lanes",), [of_layer(layer) for layer in carry.layers])  # type: ignore[arg-type]
