"""The protocol of layers, the standard layer of a decoder, and the registry of other kinds of layers.

In the standard layer what its mixers (`meliad_like/mixers/base.py`) see is added to the residual stream, then the
results of a feed-forward network (Block-Recurrent Transformers, section 3.1). Another kind changes this order.
"""

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, PRNGKeyArray

from meliad_like.layers.basic import Linear, RMSNorm, tiled_dropout
from meliad_like.layers.flops import Flops
from meliad_like.mixers.base import MIXERS, Carry, Mixer, Shape, StatesConfig, Traits
from meliad_like.mixers.sliding_window import TokenCache
from meliad_like.registry import Registry, size

LAYERS = Registry("kind of layer", "meliad_like.models.melodi")
zeros = jax.nn.initializers.zeros


Stream = tuple[Float[Array, "b n d"], Float[Array, "b u2 d"] | None]
"""What goes up the stack: the vectors of the tokens, and those of the summary tokens of all blocks if there are any."""


class Layer(Mixer):
    """A layer, with the methods of a mixer: it reads the output of the layer below, and its results are its own output.

    In a pretrained decoder `At.published` has the vectors that are inserted.
    """

    takes_summaries = False
    """Whether it reads and returns a `Stream`, with `end_window` instead of `end_block`."""

    def init_carry(self, b: int, dtype: Any) -> Carry:
        """The carry of `b` lanes before their first token: nothing."""
        del b, dtype

    def begin_segment(self, carry: Carry) -> Carry:
        """The carry at the beginning of a segment."""
        return carry

    def end_window(self, carry: Carry, summaries: Float[Array, "b u d"]) -> tuple[Carry, Float[Array, "b u d"]]:
        """As `end_block`, with the block's summary tokens: those from the layer below, and those for the next layer."""
        raise NotImplementedError


class ResidualFeedForward(nnx.Module):
    """`x + feedforward(norm(x))`."""

    def __init__(self, shape: Shape, *, rngs: nnx.Rngs):
        d, self.dropout_rate = shape.model_width, shape.dropout_rate
        self.norm = RMSNorm(d, shape.norm_epsilon, rngs=rngs)
        self.network = shape.feedforward.build(d, shape.feedforward_width, bias=shape.feedforward_bias, rngs=rngs)

    def __call__(self, x: Float[Array, "*batch d"], dropout_key: PRNGKeyArray | None) -> Float[Array, "*batch d"]:
        with jax.named_scope("feedforward"):
            return x + tiled_dropout(self.network(self.norm(x)), self.dropout_rate, dropout_key)

    @staticmethod
    def flops(shape: Shape) -> Flops:
        return shape.feedforward.flops(shape.model_width, shape.feedforward_width)


class DecoderLayer(Layer):
    """`x + output(mixers(norm(x)))`, then `x + feedforward(norm(x))`; a layer may lack either of the two."""

    def __init__(self, shape: Shape, index: int, *, rngs: nnx.Rngs):
        self.shape = shape
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
    empty = mixer.init_carry(jax.tree.leaves(carry)[0].shape[0], jnp.float32)
    return jax.tree.map(
        lambda new, old: old if is_window(new) else new.astype(old.dtype), empty, carry, is_leaf=is_window
    )


@dataclasses.dataclass(frozen=True)
class LayerConfig:
    """The config of a kind of layer, and of the standard layer."""

    layers: tuple[int, ...] | None = size(None, "layer_indices")
    """The layers of this kind, counted from 0; negative numbers count from the end. None: all layers."""

    takes_mixers: ClassVar[bool] = True
    """Whether its layers have mixers, as the standard layer."""

    @property
    def summary_tokens(self) -> int:
        """The number of learned vectors behind every block's tokens, which go up the stack with them. Layers of other
        kinds don't change them, and no token sees them."""
        return 0

    def check(self, shape: Shape) -> None:
        """Raises a UserError if a decoder of this shape can't have layers of this kind."""

    def build(self, shape: Shape, index: int, *, rngs: nnx.Rngs) -> Layer:
        """The module of layer `index`."""
        return DecoderLayer(shape, index, rngs=rngs)

    def flops(self, shape: Shape, index: int) -> Flops:
        """The operations of one token in layer `index`."""
        return DecoderLayer.flops(shape, index)

    def traits(self, shape: Shape) -> Traits:
        return Traits()


class LayerWithNormsAfter(DecoderLayer):
    """`x + norm(output(mixers(x)))`, then `x + norm(feedforward(x))`."""

    def _read(self, x, carry, dropout_key, read):
        num_keys = 2 + len(self.names)
        keys = [None] * num_keys if dropout_key is None else list(jax.random.split(dropout_key, num_keys))
        if self.names:
            results, carry = [], dict(carry)
            for name, key in zip(self.names, keys[2:], strict=True):
                with jax.named_scope(name):
                    result, carry[name] = read(self.mixers[name], x, carry[name], key)
                results.append(result)
            y = self.norm(self.output(jnp.concatenate(results, axis=-1)))
            x = x + tiled_dropout(y, self.shape.dropout_rate, keys[0])
        if self.feedforward is None:
            return x, carry
        with jax.named_scope("feedforward"):
            y = self.feedforward.norm(self.feedforward.network(x))
            return x + tiled_dropout(y, self.shape.dropout_rate, keys[1]), carry


@LAYERS.register("norms_after")
class NormsAfter(LayerConfig):
    """Layers whose norms come after the mixers and after the feed-forward network, and not before them (OLMo)."""

    def build(self, shape, index, *, rngs):
        return LayerWithNormsAfter(shape, index, rngs=rngs)


class RepeatedInputLayer(DecoderLayer):
    """A standard layer whose input is added to its output once more (google-research/meliad, `memory2/`)."""

    def _read(self, x, carry, dropout_key, read):
        y, carry = super()._read(x, carry, dropout_key, read)
        return x + y, carry


@LAYERS.register("repeated_input")
class RepeatedInput(LayerConfig):
    """Layers whose input is added to their output once more, as that with the reference's dense memory."""

    def build(self, shape, index, *, rngs):
        return RepeatedInputLayer(shape, index, rngs=rngs)
