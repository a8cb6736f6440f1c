"""The protocol of layers, and the registry of the kinds of layers other than the standard one.

A kind of layer changes the order of what happens inside of a layer. What a layer mixes in is a mixer
(`meliad_like/mixers/base.py`).
"""

import dataclasses
from typing import Any, ClassVar

import jax
from flax import nnx
from jaxtyping import Array, Float, Int, PRNGKeyArray

from meliad_like.layers.flops import Flops
from meliad_like.mixers.base import At, Carry, Shape, Traits
from meliad_like.registry import Registry, size

LAYERS = Registry("kind of layer", "meliad_like.models.melodi", "meliad_like.models.repeated_input")


Stream = tuple[Float[Array, "b n d"], Float[Array, "b u2 d"] | None]
"""What goes up the stack: the vectors of the tokens, and those of the summary tokens of all blocks if there are any."""


class Layer(nnx.Module):
    """A layer, with the methods that a layer without a carry need not override.

    As that of a mixer, its carry may have another form while decoding.
    """

    acts_at_blocks = False
    """Whether decoding has to call `end_block`."""
    takes_summaries = False
    """Whether `x` in `__call__`, and its result, are the vectors of the tokens and of the summary tokens (`Stream`)."""

    def init_carry(self, b: int, dtype: Any) -> Carry:
        """The carry of `b` lanes before their first token: a pytree of arrays with the lane axis first."""
        del b, dtype

    def carry_axes(self, carry: Carry) -> Any:
        """As in `Mixer`."""
        return jax.tree.map(lambda _: ("lanes",), carry)

    def begin_segment(self, carry: Carry) -> Carry:
        """The carry at the beginning of a segment."""
        return carry

    def __call__(
        self, x: Float[Array, "b n d"], at: At, carry: Carry, dropout_key: PRNGKeyArray | None = None
    ) -> tuple[Float[Array, "b n d"], Carry]:
        """Reads a segment of `c` blocks.

        Args:
            x: the hidden vectors of the tokens.
            at: where documents begin, and what other layers have published before each block; in a pretrained decoder
                the vectors that are inserted.
            carry: the carry after the segment before.
            dropout_key: random key; None: no dropout.
        """
        raise NotImplementedError

    def begin_decoding(self, carry: Carry, position: Int[Array, " b"]) -> Carry:
        """The carry's form for decoding.

        Args:
            carry: the carry between two segments.
            position: the number of tokens of the document that have been read, whole blocks.
        """
        del position
        return carry

    def end_decoding(self, carry: Carry) -> Carry:
        """The carry's form for segments, at the beginning of a block."""
        return carry

    def decode_step(self, x: Float[Array, "b d"], at: At, carry: Carry) -> tuple[Float[Array, "b d"], Carry]:
        """Reads one token of every lane, with the carry's form for decoding."""
        raise NotImplementedError

    def end_block(
        self, summaries: Float[Array, "b u d"] | None, carry: Carry, position: Int[Array, " b"]
    ) -> tuple[Float[Array, "b u d"] | None, Carry]:
        """The carry after a block whose last token has been decoded, and the block's summary tokens for the next layer.

        Args:
            summaries: the summary tokens from the layer below; None in a stack without them.
            carry: the carry after the last token.
            position: the number of tokens of the document that have been read.
        """
        del position
        return summaries, carry


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
        """Checks that a decoder of this shape can have layers of this kind.

        Raises:
            UserError: it can't.
        """

    def build(self, shape: Shape, index: int, *, rngs: nnx.Rngs) -> Layer:
        """The module of layer `index`."""
        raise NotImplementedError

    def flops(self, shape: Shape, index: int) -> Flops:
        """The operations of one token in layer `index`."""
        raise NotImplementedError

    def traits(self, shape: Shape) -> Traits:
        return Traits()
