"""The layer of a pretrained decoder: norms, causal attention inside a window, and a feed-forward network."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from einops import rearrange
from jaxtyping import Array, Bool, Float, Int

from meliad_like.layers.attention import attend, merge_heads, split_heads
from meliad_like.layers.basic import ACTIVATIONS, LayerNorm, Linear, RMSNorm, dropout, dropout_multiplier
from meliad_like.layers.positions import rotate
from meliad_like.models.layer import Layer
from meliad_like.models.pretrained.config import PretrainedConfig

normal = jax.nn.initializers.normal(0.02)
zeros = jax.nn.initializers.zeros


class KeyValueCache(NamedTuple):
    """The keys and values of one layer while decoding, by offset in the window (`w`) and head of keys (`g`)."""

    key: Float[Array, "b g w k"]
    value: Float[Array, "b g w k"]


def make_norm(config: PretrainedConfig, rngs) -> LayerNorm | RMSNorm:
    """The norm of the architecture, with the config's epsilon."""
    kind = LayerNorm if config.architecture == "gpt2" else RMSNorm
    return kind(config.model_width, config.norm_epsilon, rngs=rngs)


class Block(Layer):
    """Causal attention and a feed-forward network, each after a norm and added to the residual stream.

    Radford et al. 2019 (GPT-2); Touvron et al. 2023 (Llama), with grouped heads (Ainslie et al. 2023). The vectors
    inserted into the window, `At.published["inserted"]`, are keys and values but not queries.
    """

    def __init__(self, config: PretrainedConfig, index: int, *, rngs):
        self.config = config
        self.has_insertions = index in config.insertion_indices
        d, f = config.model_width, config.feedforward_width
        queries, keys = config.num_heads * config.head_size, config.num_key_value_heads * config.head_size
        llama = config.architecture == "llama"

        settings = {"initializer": normal, "bias_initializer": None if llama else zeros, "rngs": rngs}

        def linear(size_in: int, size_out: int, *axes: str) -> Linear:
            return Linear(size_in, size_out, axes, matmul_dtype=config.matmul_dtype, **settings)

        self.attention_norm = make_norm(config, rngs)
        self.query = linear(d, queries, "model", "heads")
        self.key = linear(d, keys, "model", "heads")
        self.value = linear(d, keys, "model", "heads")
        self.output = linear(queries, d, "heads", "model")
        self.feedforward_norm = make_norm(config, rngs)
        self.feedforward_gate = linear(d, f, "model", "feedforward") if llama else None
        self.feedforward_hidden = linear(d, f, "model", "feedforward")
        self.feedforward_output = linear(f, d, "feedforward", "model")

    def init_cache(self, b: int) -> KeyValueCache:
        """An empty cache, for decoding."""
        config = self.config
        shape = b, config.num_key_value_heads, config.window_length, config.head_size
        empty = jnp.zeros(shape, config.activation_dtype)
        return KeyValueCache(empty, empty)

    def __call__(self, x, at, carry, dropout_key=None):
        """Reads a segment, as any `Layer`. A carry in its form for decoding gets the keys and values of the last
        window."""
        positions = at.positions
        c = positions.shape[1]
        keys = [None] * 3 if dropout_key is None else list(jax.random.split(dropout_key, 3))
        windows = rearrange(self.attention_norm(x), "b (c w) d -> (b c) w d", c=c)
        w = windows.shape[1]
        query, key, value = self._heads(windows, jnp.arange(w)[None])
        if carry is not None:
            last = (rearrange(y, "(b c) g w k -> b c g w k", c=c)[:, -1] for y in (key, value))
            carry = KeyValueCache(*last)
        offset = np.arange(w)
        visible = jnp.broadcast_to(self._sees(offset[:, None], offset), (windows.shape[0], w, w))
        mixed = self._attend(query, key, value, visible, at, positions.reshape(-1) > 0, keys[0])
        return self._finish(x, rearrange(mixed, "(b c) w i -> b (c w) i", c=c), keys[1], keys[2]), carry

    def step(self, x, at, carry: KeyValueCache):
        position = at.positions
        w, offset, lanes = self.config.window_length, self.config.offset(position), jnp.arange(x.shape[0])
        query, key, value = self._heads(self.attention_norm(x)[:, None], offset[:, None])
        carry = KeyValueCache(
            carry.key.at[lanes, :, offset].set(key[:, :, 0]), carry.value.at[lanes, :, offset].set(value[:, :, 0])
        )
        visible = self._sees(offset[:, None], jnp.arange(w))[:, None]
        mixed = self._attend(query, *carry, visible, at, position >= w, None)
        return self._finish(x, mixed[:, 0], None, None), carry

    def _sees(self, query, key):
        """Whether the token at one offset in its window attends to that at another."""
        span = self.config.sliding_window
        return (key <= query) & (key > query - span) if span else key <= query

    def _heads(self, y: Float[Array, "b t d"], offset: Int[Array, "#b t"]):
        """Queries, keys and values of tokens at these offsets in their windows, by head."""
        config, g = self.config, self.config.num_key_value_heads
        query, key, value = self.query(y), self.key(y), self.value(y)
        query, key, value = split_heads(query, config.num_heads), split_heads(key, g), split_heads(value, g)
        if config.architecture == "llama":
            scaling = config.rotary_scaling
            wavelength, scale = scaling.wavelengths(config), scaling.attention_scale
            query, key = (scale * rotate(x, offset[:, None], wavelength) for x in (query, key))
        return query, key, value

    def _attend(self, query, key, value, visible, at, present: Bool[Array, " l"], dropout_key):
        """Attention to the tokens of the window, and to the inserted vectors in windows where they are present."""
        inserted = at.published["inserted"] if self.has_insertions else None
        if inserted is not None:
            vectors, g = inserted.astype(query.dtype), self.config.num_key_value_heads
            assert self.config.summary is not None
            if self.config.summary.insertion_point == "before_norm":
                vectors = self.attention_norm(vectors)
            # No position is added to the vectors, and rotary positions do not turn them.
            key = jnp.concatenate([split_heads(self.key(vectors), g), key], axis=2)
            value = jnp.concatenate([split_heads(self.value(vectors), g), value], axis=2)
            present = jnp.broadcast_to(present[:, None, None], (*visible.shape[:2], vectors.shape[1]))
            visible = jnp.concatenate([present, visible], axis=2)
        # Each head of keys serves consecutive heads of queries.
        g, (b, h, t, k), rate = key.shape[1], query.shape, self.config.dropout_rate
        query = (query * k**-0.5).reshape(b, g, h // g * t, k)
        multiplier = None
        if dropout_key is not None and rate > 0.0:
            multiplier = dropout_multiplier(dropout_key, rate, (b, g, h // g * t, key.shape[2]), jnp.float32)
        mask = jnp.tile(visible, (1, h // g, 1))[:, None]
        return merge_heads(attend(query, key, value, mask=mask, multiplier=multiplier).reshape(b, h, t, k))

    def _finish(self, x, mixed, attention_key, feedforward_key):
        rate, activation = self.config.dropout_rate, ACTIVATIONS[self.config.activation]
        x = x + dropout(self.output(mixed), rate, attention_key)
        with jax.named_scope("feedforward"):
            y = self.feedforward_norm(x)
            hidden = self.feedforward_hidden(y)
            gate = self.feedforward_gate
            hidden = activation(hidden) if gate is None else activation(gate(y)) * hidden
            return x + dropout(self.feedforward_output(hidden), rate, feedforward_key)
