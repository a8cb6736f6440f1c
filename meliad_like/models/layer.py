"""The protocol of layers, and the registry of the kinds of layers other than the standard one.

A kind of layer changes the order of what happens inside of a layer. What a layer mixes in is a mixer
(`meliad_like/mixers/base.py`).
"""

import dataclasses
from typing import Any, ClassVar

from flax import nnx
from jaxtyping import Array, Float

from meliad_like.layers.flops import Flops
from meliad_like.mixers.base import Carry, Mixer, Shape, Traits
from meliad_like.registry import Registry, size

LAYERS = Registry("kind of layer", "meliad_like.models.melodi", "meliad_like.models.repeated_input")


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


@dataclasses.dataclass(frozen=True)
class LayerConfig:
    """The config of a kind of layer."""

    layers: tuple[int, ...] | None = size(None, "layer_indices")
    """The layers of this kind, counted from 0; negative numbers count from the end. None: all layers."""

    takes_mixers: ClassVar[bool] = False
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
        raise NotImplementedError

    def flops(self, shape: Shape, index: int) -> Flops:
        """The operations of one token in layer `index`."""
        raise NotImplementedError

    def traits(self, shape: Shape) -> Traits:
        return Traits()
