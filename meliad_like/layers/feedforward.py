"""Kinds of feed-forward networks of a layer."""

import dataclasses

import jax
from flax import nnx
from jaxtyping import Array, Float

from meliad_like.layers.basic import ACTIVATIONS, Activation, FeedForward, Linear, project
from meliad_like.layers.flops import Flops
from meliad_like.registry import Registry
from meliad_like.validation import check_choices

FEEDFORWARDS = Registry("feed-forward network")


@dataclasses.dataclass(frozen=True)
class FeedForwardConfig:
    """The config of a kind of feed-forward network. Its width is `DecoderConfig.feedforward_width`."""

    activation: Activation = "relu"
    """The activation of the hidden layer, or of the gate."""

    def __post_init__(self):
        check_choices(self)

    def build(self, model_width: int, feedforward_width: int, *, bias: bool, rngs: nnx.Rngs) -> nnx.Module:
        """The network of one layer; `bias` is `DecoderConfig.feedforward_bias`."""
        raise NotImplementedError

    def flops(self, model_width: int, feedforward_width: int) -> Flops:
        """The operations of one token."""
        raise NotImplementedError


@FEEDFORWARDS.register("feedforward")
class PlainFeedForward(FeedForwardConfig):
    """`activation(x W1) W2`."""

    def build(self, model_width, feedforward_width, *, bias, rngs):
        return FeedForward(
            model_width, feedforward_width, model_width, rngs=rngs, bias=bias, activation=self.activation
        )

    def flops(self, model_width, feedforward_width):
        return Flops.of_products(4 * model_width * feedforward_width)


@FEEDFORWARDS.register("gated_feedforward")
class GatedFeedForward(FeedForwardConfig):
    """`(activation(x W1) * x W2) W3` (Shazeer 2020)."""

    activation: Activation = "silu"

    def build(self, model_width, feedforward_width, *, bias, rngs):
        return GatedNetwork(self, model_width, feedforward_width, bias=bias, rngs=rngs)

    def flops(self, model_width, feedforward_width):
        return Flops.of_products(6 * model_width * feedforward_width)


class GatedNetwork(nnx.Module):
    """A feed-forward network whose hidden layer is multiplied by a gate."""

    def __init__(self, config: GatedFeedForward, d: int, f: int, *, bias: bool, rngs: nnx.Rngs):
        self.config = config
        biased = {"rngs": rngs, "bias_initializer": jax.nn.initializers.zeros if bias else None}
        self.gate, self.hidden = (Linear(d, f, ("model", "feedforward"), **biased) for _ in range(2))
        self.output = Linear(f, d, ("feedforward", "model"), **biased)

    def __call__(self, x: Float[Array, "... d"]) -> Float[Array, "... d"]:
        gate, hidden = project(x, self.gate, self.hidden)
        return self.output(ACTIVATIONS[self.config.activation](gate) * hidden)
