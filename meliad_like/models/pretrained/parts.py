"""The parts of a pretrained decoder: norms, feed-forward networks, causal attention, and the block that they make."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from meliad_like.layers.attention import merge_heads, split_heads
from meliad_like.layers.basic import LayerNorm, Linear, RMSNorm, dropout
from meliad_like.layers.positions import rotate
from meliad_like.models.pretrained.config import Activation, PretrainedConfig

normal = jax.nn.initializers.normal(0.02)
zeros = jax.nn.initializers.zeros


class KeyValueCache(NamedTuple):
    """The keys and values of one layer, by position in the window (`s`) and head of keys and values (`g`)."""

    key: Float[Array, "b g s k"]
    value: Float[Array, "b g s k"]


class Inserted(NamedTuple):
    """The vectors that a window receives from the window before; they are keys and values but not queries."""

    vectors: Float[Array, "b e d"]
    present: Bool[Array, " b"]
    """False in a document's first window."""


def make_norm(config: PretrainedConfig, rngs: nnx.Rngs) -> LayerNorm | RMSNorm:
    """The norm of the architecture, with the config's epsilon."""
    if config.architecture == "gpt2":
        return LayerNorm(config.model_width, config.norm_epsilon, rngs=rngs)
    norm = RMSNorm(config.model_width, rngs=rngs)
    norm.epsilon = config.norm_epsilon
    return norm


def activate(x: Float[Array, "..."], name: Activation) -> Float[Array, "..."]:
    """An activation by its name in the config."""
    if name in ("gelu", "gelu_tanh"):
        return jax.nn.gelu(x, approximate=name == "gelu_tanh")
    return {"relu": jax.nn.relu, "silu": jax.nn.silu, "tanh": jnp.tanh}[name](x)


class Block(nnx.Module):
    """Causal attention and a feed-forward network, each after a norm and added to the residual stream.

    Radford et al. 2019 (GPT-2); Touvron et al. 2023 (Llama), with grouped heads (Ainslie et al. 2023).
    """

    def __init__(self, config: PretrainedConfig, *, rngs: nnx.Rngs):
        self.config = config
        d, f = config.model_width, config.feedforward_width
        queries, keys = config.num_heads * config.head_size, config.num_key_value_heads * config.head_size
        llama = config.architecture == "llama"

        def linear(size_in: int, size_out: int, *axes: str) -> Linear:
            return Linear(
                size_in,
                size_out,
                axes,
                rngs=rngs,
                initializer=normal,
                bias_initializer=None if llama else zeros,
                matmul_dtype=config.matmul_dtype,
            )

        self.attention_norm = make_norm(config, rngs)
        self.query = linear(d, queries, "model", "heads")
        self.key = linear(d, keys, "model", "heads")
        self.value = linear(d, keys, "model", "heads")
        self.output = linear(queries, d, "heads", "model")
        self.feedforward_norm = make_norm(config, rngs)
        self.feedforward_gate = linear(d, f, "model", "feedforward") if llama else None
        self.feedforward_hidden = linear(d, f, "model", "feedforward")
        self.feedforward_output = linear(f, d, "feedforward", "model")

    def init_cache(self, b: int, dtype) -> KeyValueCache:
        """An empty cache for a window."""
        config = self.config
        shape = (b, config.num_key_value_heads, config.window_length, config.head_size)
        return KeyValueCache(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype))

    def __call__(
        self,
        x: Float[Array, "b t d"],
        position: Int[Array, "b t"],
        cache: KeyValueCache | None = None,
        inserted: Inserted | None = None,
        dropout_key: PRNGKeyArray | None = None,
    ) -> tuple[Float[Array, "b t d"], KeyValueCache | None]:
        """Applies the block to consecutive tokens of a window.

        Args:
            x: the tokens' vectors.
            position: where they stand in the window, one after the other.
            cache: of the tokens of the window before them; None: these are all.
            inserted: the vectors from the window before.
            dropout_key: random key in training; None: no dropout.

        Returns:
            The block's output, and the cache with these tokens in it.
        """
        keys = [None] * 3 if dropout_key is None else list(jax.random.split(dropout_key, 3))
        attended, cache = self._attention(self.attention_norm(x), position, cache, inserted, keys[0])
        x = x + dropout(self.output(attended), self.config.dropout_rate, keys[1])
        y = self.feedforward_norm(x)
        hidden = self.feedforward_hidden(y)
        if self.feedforward_gate is None:
            hidden = activate(hidden, self.config.activation)
        else:
            hidden = activate(self.feedforward_gate(y), self.config.activation) * hidden
        return x + dropout(self.feedforward_output(hidden), self.config.dropout_rate, keys[2]), cache

    def _attention(self, y, position, cache, inserted, dropout_key):
        config, g = self.config, self.config.num_key_value_heads
        query = split_heads(self.query(y), config.num_heads)
        key, value = split_heads(self.key(y), g), split_heads(self.value(y), g)
        if config.architecture == "llama":
            query, key = (rotate(x, position[:, None], config.rotary_base) for x in (query, key))
        if cache is not None:
            cache = KeyValueCache(*map(_write, cache, (key, value), (position[:, 0], position[:, 0])))
            key, value = cache
            visible = jnp.arange(key.shape[2]) <= position[:, :, None]
        else:
            visible = jnp.broadcast_to(jnp.tri(y.shape[1], dtype=bool), (y.shape[0], y.shape[1], y.shape[1]))
        if inserted is not None:
            vectors = inserted.vectors.astype(y.dtype)
            if config.insertion_point == "before_norm":
                vectors = self.attention_norm(vectors)
            # No position is added to them, and rotary positions do not turn them.
            key = jnp.concatenate([split_heads(self.key(vectors), g), key], axis=2)
            value = jnp.concatenate([split_heads(self.value(vectors), g), value], axis=2)
            present = jnp.broadcast_to(inserted.present[:, None, None], (*y.shape[:2], vectors.shape[1]))
            visible = jnp.concatenate([present, visible], axis=2)
        return merge_heads(attend(query, key, value, visible, config.dropout_rate, dropout_key)), cache


def attend(
    query: Float[Array, "b h t k"],
    key: Float[Array, "b g s k"],
    value: Float[Array, "b g s k"],
    visible: Bool[Array, "b t s"],
    dropout_rate: float = 0.0,
    dropout_key: PRNGKeyArray | None = None,
) -> Float[Array, "b h t k"]:
    """Scaled dot-product attention, in which each head of keys serves h / g consecutive heads of queries.

    The softmax is float32. Every query must see a key.
    """
    b, h, t, k = query.shape
    grouped = query.reshape(b, key.shape[1], -1, t, k)
    scores = jnp.einsum("bgqtk,bgsk->bgqts", grouped, key, preferred_element_type=jnp.float32) * k**-0.5
    weights = jax.nn.softmax(jnp.where(visible[:, None, None], scores, -jnp.inf), axis=-1).astype(value.dtype)
    weights = dropout(weights, dropout_rate, dropout_key)
    return jnp.einsum("bgqts,bgsk->bgqtk", weights, value).reshape(b, h, t, k)


def _write(
    cached: Float[Array, "b g s k"], new: Float[Array, "b g t k"], first: Int[Array, " b"]
) -> Float[Array, "b g s k"]:
    """`cached` with `new` from position `first` of each lane on."""
    return jax.vmap(lambda old, new, first: jax.lax.dynamic_update_slice_in_dim(old, new, first, axis=1))(
        cached, new.astype(cached.dtype), first
    )
