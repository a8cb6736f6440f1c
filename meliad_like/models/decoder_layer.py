"""The standard layer of a decoder: what its mixers see is added to the residual stream, then a feed-forward network.

Block-Recurrent Transformers, section 3.1.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, PRNGKeyArray

from meliad_like.layers.basic import FeedForward, Linear, RMSNorm, tiled_dropout
from meliad_like.layers.flops import Flops
from meliad_like.mixers.base import MIXERS, Shape
from meliad_like.mixers.token_heads import TokenCache
from meliad_like.models.layer import Layer

zeros = jax.nn.initializers.zeros


class ResidualFeedForward(nnx.Module):
    """`x + feedforward(norm(x))`."""

    def __init__(self, shape: Shape, *, rngs: nnx.Rngs):
        d, self.dropout_rate = shape.model_width, shape.dropout_rate
        self.norm = RMSNorm(d, rngs=rngs)
        self.network = FeedForward(d, shape.feedforward_width, d, rngs=rngs, bias=shape.feedforward_bias)

    def __call__(self, x: Float[Array, "*batch d"], dropout_key: PRNGKeyArray | None) -> Float[Array, "*batch d"]:
        with jax.named_scope("feedforward"):
            return x + tiled_dropout(self.network(self.norm(x)), self.dropout_rate, dropout_key)

    @staticmethod
    def flops(shape: Shape) -> Flops:
        return Flops.of_products(4 * shape.model_width * shape.feedforward_width)


class DecoderLayer(Layer):
    """`x + output(mixers(norm(x)))`, then `x + feedforward(norm(x))`; a layer may lack either of the two."""

    def __init__(self, shape: Shape, index: int, *, rngs: nnx.Rngs):
        self.shape = shape
        mixers, d = {MIXERS.name_of(config): config for config in shape.layers[index]}, shape.model_width
        self.names = tuple(mixers)
        self.mixers = nnx.Dict({name: config.build(shape, rngs=rngs) for name, config in mixers.items()})
        self.clearing = tuple(name for name, config in mixers.items() if getattr(config, "clear_states", False))
        """The mixers that begin every segment with an empty memory."""
        self.acts_at_blocks = any(mixer.acts_at_blocks for mixer in self.mixers.values())
        if mixers:
            width = sum(config.width(shape) for config in mixers.values())
            bias = zeros if any(config.traits(shape).output_bias for config in mixers.values()) else None
            self.norm = RMSNorm(d, rngs=rngs)
            self.output = Linear(width, d, ("heads", "model"), rngs=rngs, bias_initializer=bias)
        has_feedforward = index in shape.feedforward_layers
        self.feedforward = ResidualFeedForward(shape, rngs=rngs) if has_feedforward else None

    @staticmethod
    def flops(shape: Shape, index: int) -> Flops:
        """The operations of one token in layer `index`."""
        flops = ResidualFeedForward.flops(shape) if index in shape.feedforward_layers else Flops(0, 0)
        for config in shape.layers[index]:
            flops += config.flops(shape) + Flops.of_products(2 * config.width(shape) * shape.model_width)
        return flops

    def init_carry(self, b, dtype):
        return {name: self.mixers[name].init_carry(b, dtype) for name in self.names}

    def carry_axes(self, carry):
        return {name: self.mixers[name].carry_axes(carry[name]) for name in self.names}

    def begin_segment(self, carry):
        cleared = {name: self.mixers[name] for name in self.clearing}
        return carry | {name: empty_but_window(mixer, carry[name]) for name, mixer in cleared.items()}

    def begin_decoding(self, carry):
        return {name: self.mixers[name].begin_decoding(carry[name]) for name in self.names}

    def end_decoding(self, carry):
        return {name: self.mixers[name].end_decoding(carry[name]) for name in self.names}

    def end_block(self, carry):
        return {name: self.mixers[name].end_block(carry[name]) for name in self.names}

    def __call__(self, x, at, carry, dropout_key=None):
        return self._read(x, carry, dropout_key, lambda mixer, x, carry, key: mixer(x, at, carry, key))

    def step(self, x, at, carry):
        return self._read(x, carry, None, lambda mixer, x, carry, key: mixer.step(x, at, carry))

    def _read(self, x, carry, dropout_key, read):
        """The layer's output, and the carry; `read(mixer, x, carry, key)` returns those of a mixer."""
        num_keys = 2 + len(self.names)
        keys = [None] * num_keys if dropout_key is None else list(jax.random.split(dropout_key, num_keys))
        if self.names:
            normed, results, carry = tiled_dropout(self.norm(x), self.shape.dropout_rate, keys[0]), [], dict(carry)
            for name, key in zip(self.names, keys[2:], strict=True):
                with jax.named_scope(name):
                    result, carry[name] = read(self.mixers[name], normed, carry[name], key)
                results.append(result)
            x = x + self.output(jnp.concatenate(results, axis=-1))
        return x if self.feedforward is None else self.feedforward(x, keys[1]), carry


def is_window(node: Any) -> bool:
    """Whether a part of a carry is the cache of attention to a window."""
    return isinstance(node, TokenCache)


def empty_but_window(mixer: Any, carry: Any) -> Any:
    """A mixer's carry before its first token, but with the window's cache of `carry`."""
    empty = mixer.init_carry(len(jax.tree.leaves(carry)[0]), jnp.float32)
    return jax.tree.map(
        lambda new, old: old if is_window(new) else new.astype(old.dtype), empty, carry, is_leaf=is_window
    )
