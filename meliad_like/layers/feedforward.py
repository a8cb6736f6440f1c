"""Kinds of feed-forward networks of a layer."""

import dataclasses
from typing import ClassVar

from flax import nnx

from meliad_like.layers.basic import Activation, FeedForward
from meliad_like.layers.flops import Flops
from meliad_like.registry import Registry
from meliad_like.validation import check_choices

FEEDFORWARDS = Registry("feed-forward network")


@dataclasses.dataclass(frozen=True)
class FeedForwardConfig:
    """The config of a kind of feed-forward network. Its width is `DecoderConfig.feedforward_width`."""

    gated: ClassVar[bool] = False
    """Whether the hidden layer is multiplied by a gate."""
    activation: Activation = "relu"
    """The activation of the hidden layer, or of the gate."""

    def __post_init__(self):
        check_choices(self)

    def build(self, model_width: int, feedforward_width: int, *, bias: bool, rngs: nnx.Rngs) -> nnx.Module:
        """The network of one layer; `bias` is `DecoderConfig.feedforward_bias`."""
        settings = {"bias": bias, "activation": self.activation, "gated": self.gated}
        return FeedForward(model_width, feedforward_width, model_width, rngs=rngs, **settings)

    def flops(self, model_width: int, feedforward_width: int) -> Flops:
        """The operations of one token."""
        return Flops.of_products((6 if self.gated else 4) * model_width * feedforward_width)


@FEEDFORWARDS.register("feedforward")
class PlainFeedForward(FeedForwardConfig):
    """`activation(x W1) W2`."""


@FEEDFORWARDS.register("gated_feedforward")
class GatedFeedForward(FeedForwardConfig):
    """`(activation(x W1) * x W2) W3` (Shazeer 2020)."""

    gated = True
    activation: Activation = "silu"
