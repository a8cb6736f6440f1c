"""The protocol of layers, and the layer of a decoder.

What its mixers (`meliad_like/mixers/base.py`) see is added to the residual stream, then the results of a feed-forward
network (Block-Recurrent Transformers, section 3.1).
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, PRNGKeyArray

from meliad_like.layers.basic import Linear, RMSNorm, split_key, tiled_dropout
from meliad_like.layers.flops import Flops
from meliad_like.mixers.base import MIXERS, Carry, Mixer, Shape, StatesConfig
from meliad_like.mixers.sliding_window import TokenCache

zeros = jax.nn.initializers.zeros


class Layer(Mixer):
    """A layer, with the methods of a mixer: it reads the output of the layer below, and its results are its own output.

    In a pretrained decoder `At.published` has the vectors that are inserted.
    """

    def init_carry(self, b: int, dtype: Any) -> Carry:
        """The carry of `b` lanes before their first token: nothing."""
        del b, dtype

    def begin_segment(self, carry: Carry) -> Carry:
        """The carry at the beginning of a segment."""
        return carry


class ResidualFeedForward(nnx.Module):
    """`x + feedforward(norm(x))`, or with `norm_after` `x + norm(feedforward(x))`."""

    def __init__(self, shape: Shape, *, norm_after: bool = False, rngs: nnx.Rngs):
        d, self.dropout_rate, self.norm_after = shape.model_width, shape.dropout_rate, norm_after
        self.norm = RMSNorm(d, shape.norm_epsilon, rngs=rngs)
        self.network = shape.feedforward.build(d, shape.feedforward_width, bias=shape.feedforward_bias, rngs=rngs)

    def __call__(self, x: Float[Array, "*batch d"], dropout_key: PRNGKeyArray | None) -> Float[Array, "*batch d"]:
        with jax.named_scope("feedforward"):
            y = self.norm(self.network(x)) if self.norm_after else self.network(self.norm(x))
            return x + tiled_dropout(y, self.dropout_rate, dropout_key)

    @staticmethod
    def flops(shape: Shape) -> Flops:
        return shape.feedforward.flops(shape.model_width, shape.feedforward_width)


class DecoderLayer(Layer):
    """`x + output(mixers(norm(x)))`, then `x + feedforward(norm(x))`; a layer may lack either of the two.

    With `norms_after` these are `x + norm(output(mixers(x)))` and `x + norm(feedforward(x))`, and with `doubled_input`
    the layer's input is added to the result once more.
    """

    def __init__(
        self, shape: Shape, index: int, *, doubled_input: bool = False, norms_after: bool = False, rngs: nnx.Rngs
    ):
        self.shape, self.doubled_input, self.norms_after = shape, doubled_input, norms_after
        mixers, d = {MIXERS.name_of(config): config for config in shape.layers[index]}, shape.model_width
        self.names = tuple(mixers)
        self.mixers = nnx.Dict({name: config.build(shape, rngs=rngs) for name, config in mixers.items()})
        with_states = {name: config for name, config in mixers.items() if isinstance(config, StatesConfig)}
        self.clearing = tuple(name for name, config in with_states.items() if config.clear_states)
        """The mixers that begin every segment with an empty memory."""
        self.acts_at_blocks = any(mixer.acts_at_blocks for mixer in self.mixers.values())
        if mixers:
            width = sum(config.width(shape) for config in mixers.values())
            bias = zeros if any(config.traits(shape).output_bias for config in mixers.values()) else None
            self.norm = RMSNorm(d, shape.norm_epsilon, rngs=rngs)
            self.output = Linear(width, d, ("heads", "model"), rngs=rngs, bias_initializer=bias)
        has_feedforward = index in shape.feedforward_layers
        feedforward = ResidualFeedForward(shape, norm_after=norms_after, rngs=rngs) if has_feedforward else None
        self.feedforward = feedforward

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
        y, keys = x, split_key(dropout_key, 2 + len(self.names))
        if self.names:
            inputs = x if self.norms_after else self._normed(x, keys[0])
            results, carry = [], dict(carry)
            for name, key in zip(self.names, keys[2:], strict=True):
                with jax.named_scope(name):
                    result, carry[name] = read(self.mixers[name], inputs, carry[name], key)
                results.append(result)
            mixed = self.output(jnp.concatenate(results, axis=-1))
            y = x + (self._normed(mixed, keys[0]) if self.norms_after else mixed)
        if self.feedforward is not None:
            y = self.feedforward(y, keys[1])
        return x + y if self.doubled_input else y, carry

    def _normed(self, x, dropout_key):
        return tiled_dropout(self.norm(x), self.shape.dropout_rate, dropout_key)


def is_window(node: Any) -> bool:
    """Whether a part of a carry is the cache of attention to a window."""
    return isinstance(node, TokenCache)


def empty_but_window(mixer: Any, carry: Any) -> Any:
    """A mixer's carry before its first token, but with the window's cache of `carry`."""
    empty = mixer.init_carry(jax.tree.leaves(carry)[0].shape[0], jnp.float32)
    return jax.tree.map(
        lambda new, old: old if is_window(new) else new.astype(old.dtype), empty, carry, is_leaf=is_window
    )
