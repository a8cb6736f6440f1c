"""The config of MELODI, and its operations."""

import functools
from typing import ClassVar

from jaxtyping import Array, Float

from meliad_like.errors import UserError
from meliad_like.layers.feedforward import FeedForwardConfig, PlainFeedForward
from meliad_like.layers.flops import Flops
from meliad_like.mixers.base import DecoderShape
from meliad_like.models.config import MODELS, ModelTraits
from meliad_like.models.decoder import StackConfig
from meliad_like.registry import size
from meliad_like.validation import check_positive, layer_indices


@MODELS.register("melodi")
class MelodiConfig(StackConfig):
    """A decoder whose layers all have MELODI's memories, by default of the sizes in the reference's code."""

    feedforward: ClassVar[FeedForwardConfig] = PlainFeedForward()

    feedforward_bias: bool = True
    long_layers: tuple[int, ...] = size((), "layer_indices")
    """The layers that also have a long-term memory; negative numbers count from the end."""
    num_summaries: int = size(64, "length")
    """The number of summary tokens behind every window (u)."""
    short_length: int = size(64, "length")
    """The number of vectors of a short-term memory (r, the paper's S). If it is not `num_summaries`, they are made
    without norms and residual, as in the reference."""
    long_length: int = size(32, "length")
    """The number of vectors that a window adds to a long-term memory (e, the paper's L)."""
    long_slots: int = size(4096, "length")
    """The number of vectors in a long-term memory (m); the oldest are overwritten."""

    def __post_init__(self):
        super().__post_init__()
        check_positive(self, ("num_summaries", "short_length", "long_length"))
        if self.long_slots < self.long_length:
            raise UserError(f"long_slots={self.long_slots} must be at least long_length={self.long_length}")
        self.long_indices  # noqa: B018

    @functools.cached_property
    def long_indices(self) -> frozenset[int]:
        """The layers with a long-term memory, counted from 0."""
        return layer_indices("MelodiConfig.long_layers", self.long_layers, self.total_layers)

    @functools.cached_property
    def shape(self) -> DecoderShape:
        """The sizes of the decoder, whose layers have no mixers."""
        n, no_kernels = self.total_layers, {"attention_kernel": "none", "recurrence_kernel": "none"}
        return DecoderShape.of(self, layers=((),) * n, feedforwards=(self.feedforward,) * n, **no_kernels)

    def is_last(self, index: int) -> bool:
        """Whether nothing reads the output of layer `index` for the summary tokens."""
        return index == self.total_layers - 1

    def split_window(self, x: Float[Array, "*batch s d"]) -> tuple[Float[Array, "*batch _ d"], ...]:
        """The vectors of a window's tokens, and the vectors of its summary tokens."""
        return x[..., : self.window_length, :], x[..., self.window_length :, :]

    def flops(self, vocabulary_size):
        """The operations of memories and summary tokens, and of attention in full tiles.

        Not counted is what depends on the length n of segments: the projection of the long-term memory, 4 d i m / n
        operations a token, and attention to the places of the segment's own vectors in addition to the m slots.
        """
        flops = Flops.of_products(2 * self.model_width * vocabulary_size)
        for index in range(self.total_layers):
            flops += Flops.of_products(self._flops_of_layer(index))
        return flops

    def _flops_of_layer(self, index: int) -> float:
        d, inner, w = self.model_width, self.shape.inner_width, self.window_length
        u, r, e, m = self.num_summaries, self.short_length, self.long_length, self.long_slots
        feedforward = self.feedforward.flops(d, self.feedforward_width).forward
        of_tokens = 2 * d * 4 * inner + feedforward
        flops = u * (8 * d * inner + feedforward)
        flops += 4 * d * inner * r + 4 * inner * (w + u) * (r + w + u)
        flops += 2 * d * (w + u) * (r + u * (not self.is_last(index)))
        if index in self.long_indices:
            flops += 4 * inner * (w + u) * m + 4 * d * inner * e + 2 * d * (w + u) * e
        return of_tokens + flops / w

    @property
    def traits(self):
        return ModelTraits(
            # Earlier tokens are seen through memories alone.
            lambda position: position % self.window_length + 1,
            sequential_because="a window of a layer waits for the memory that the window before it leaves",
            needs_segments=self.clears_states,
            memory="melodi",
            states=("short",),
        )
