"""The decoder: Slide, Transformer-XL, Block-Recurrent and Memorizing language models.

Block-Recurrent Transformers, section 3; block feedback, appendix E.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from einops import rearrange
from flax import nnx
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from meliad_like.layers.basic import RMSNorm, parameter, rematerialise, rows, tiled_dropout
from meliad_like.layers.sequence import num_parts, of_the_last, own_blocks
from meliad_like.layers.sharding import constrain
from meliad_like.models.decoder_config import DecoderConfig
from meliad_like.models.decoder_layer import DecoderLayer, LayerCarry, ReadStates, block_positions, state_starts


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
        self.layers = nnx.List(DecoderLayer(config, i, rngs=rngs) for i in range(config.total_layers))
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
            tokens: a whole number of blocks. Under `over_sequence`: those of this device.
            carry: from the segment before, or `init_carry`; its position is a multiple of w.
            start: blocks of the whole segment with which a new document begins: nothing is remembered across.
            dropout_key: for training; none to keep everything.

        Returns:
            Hidden states for `logits`, and the carry for the next segment.
        """
        n, w = num_parts() * tokens.shape[1], self.config.window_length
        if n % w or start.shape[1] != n // w:
            raise ValueError(f"{n} tokens with {start.shape[1]} start flags are not whole blocks of window_length={w}")
        # XLA crashes where a part of a segment would look something up along the vocabulary that `tensor` cuts.
        vocabulary = "vocabulary" if num_parts() == 1 else None
        table = constrain(self.embedding[...].astype(self.dtype), vocabulary, None)
        x = constrain(table[tokens], "lanes", None, None)
        positions = block_positions(carry.position, start, w)
        # Segments are apart for the gradient, whatever it is taken with respect to.
        layers = jax.lax.stop_gradient(carry.layers)
        if self.config.feedback == "none":
            x, layers = self._stack(x, layers, positions, dropout_key)
        else:
            x, layers = self._scan_stack(x, layers, positions, dropout_key)
        x = self.final_norm(x)
        if dropout_key is not None:
            x = tiled_dropout(x, self.config.dropout_rate, jax.random.fold_in(dropout_key, len(self.layers)))
        return x, DecoderCarry(positions[:, -1] + w, of_the_last(layers))

    def _stack(
        self,
        x: Float[Array, "b n d"],
        layers: list[LayerCarry],
        positions: Int[Array, "b c"],
        dropout_key: PRNGKeyArray | None,
        read_states: list[ReadStates | None] | None = None,
    ) -> tuple[Float[Array, "b n d"], list[LayerCarry]]:
        new_layers = []
        for i, (layer, layer_carry) in enumerate(zip(self.layers, layers, strict=True)):
            key = None if dropout_key is None else jax.random.fold_in(dropout_key, i)
            call = rematerialise(type(layer).__call__, self.config.remat)
            x, layer_carry = call(layer, x, layer_carry, own_blocks(positions), key, read_states and read_states[i])
            x = constrain(x, "lanes", None, None)
            new_layers.append(layer_carry)
        return x, new_layers

    def _scan_stack(
        self,
        x: Float[Array, "b n d"],
        layers: list[LayerCarry],
        positions: Int[Array, "b c"],
        dropout_key: PRNGKeyArray | None,
    ) -> tuple[Float[Array, "b n d"], list[LayerCarry]]:
        """Block feedback: every layer reads states from before the block, so blocks go through the stack in turn.

        Dropout masks repeat from block to block, as they do along a segment without feedback.
        """
        kernels = {i: self.layers[i].cell.kernels(self.dtype) for i in sorted(self.config.recurrent_indices)}

        def step(layers, block):
            x, position, start = block
            begun = {i: self.layers[i].begin_states(layers[i].states, start, kernels[i]) for i in kernels}
            own = {i: ReadStates(heads.key, heads.value, states, heads) for i, (states, heads) in begun.items()}
            x, layers = self._stack(x, layers, position[:, None], dropout_key, self._share_states(own))
            return layers, x

        blocks = rearrange(x, "b (c w) d -> c b w d", w=self.config.window_length)
        starts = state_starts(positions, self.config)
        layers, x = jax.lax.scan(step, layers, (blocks, positions.T, starts.T))
        return rearrange(x, "c b w d -> b (c w) d"), layers

    def _share_states(self, own: dict[int, ReadStates]) -> list[ReadStates | None]:
        """What every layer reads: a recurrent one its own states, under feedback the others the last one's or all."""
        shared = None
        if self.config.feedback == "last":
            shared = ReadStates(*own[max(own)][:2])
        elif self.config.feedback == "all":
            key, value = (jnp.concatenate([own[i][j] for i in sorted(own)], axis=2) for j in (0, 1))
            shared = ReadStates(key, value)
        return [own.get(i, shared) for i in range(len(self.layers))]

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
        position = carry.position
        begun = [layer.begin_block(c, position) for layer, c in zip(self.layers, carry.layers, strict=True)]
        decoding = {i: c.decoding for i, c in enumerate(begun) if c.decoding is not None}
        read_states = self._share_states({i: ReadStates(d.state_key, d.state_value) for i, d in decoding.items()})
        layers = []
        for layer, layer_carry, states in zip(self.layers, begun, read_states, strict=True):
            x, layer_carry = layer.decode_step(x, layer_carry, position, states)
            layers.append(layer_carry)
        return self.logits(self.final_norm(x)), DecoderCarry(position + 1, layers)
