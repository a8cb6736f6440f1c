"""The config of a decoder: the sizes of its layers, and their memory mechanisms."""

import dataclasses
import functools
from typing import Literal, TypeVar

import numpy as np
from jaxtyping import Int

from meliad_like.errors import UserError
from meliad_like.layers.flops import Flops
from meliad_like.mechanisms.base import MECHANISMS, MechanismConfig, Shape
from meliad_like.mechanisms.positions import POSITIONS, T5, NoPosition, PositionConfig
from meliad_like.mechanisms.sliding_window import SlidingWindow
from meliad_like.registry import kind_field, resumable
from meliad_like.sizes import size
from meliad_like.validation import check_choices, check_not_negative, check_positive, check_shares

ActivationDtype = Literal["float32", "bfloat16"]
Remat = Literal["none", "dots", "layers"]
AnyMechanism = TypeVar("AnyMechanism", bound=MechanismConfig)


@dataclasses.dataclass(frozen=True)
class DecoderConfig:
    """A stack of layers that see earlier tokens through memory mechanisms.

    The defaults are the paper's 12-layer model with a sliding window.
    """

    num_layers: int = size(12, "layers")
    """The number of layers without `extra_layers`."""
    extra_layers: int = size(0, "fixed")
    """Added to `num_layers`. The paper's 13-layer baselines have one extra layer; so do those of other sizes."""
    model_width: int = size(1024, "width")
    num_heads: int = size(8, "heads")
    head_size: int = size(128, "heads")
    feedforward_width: int = size(4096, "width")
    window_length: int = size(512, "length")
    """The number of tokens that a token sees, and of tokens in a block."""
    position: PositionConfig = kind_field(POSITIONS, T5)
    """The position strategy of attention inside the window."""
    mechanisms: tuple[MechanismConfig, ...] = kind_field(MECHANISMS, lambda: (SlidingWindow(),), many=True)
    """The memory mechanisms: the ways in which layers see earlier tokens (`meliad_like/mechanisms`)."""
    dropout_rate: float = 0.0
    logit_scale: float | None = None
    """Factor on the hidden vectors before the softmax; by default 1 / sqrt(model_width)."""
    mask_empty_cache: bool = True
    """Whether the empty cache is masked for a document's first tokens. In the reference they attend to zeros."""
    activation_dtype: ActivationDtype = "float32"
    remat: Remat = resumable("none")
    """What the backward pass computes again: nothing, all but matrix products (`dots`), or whole layers."""

    def __post_init__(self):
        check_choices(self)
        sizes = ("num_layers", "model_width", "num_heads", "head_size", "feedforward_width", "window_length")
        check_positive(self, sizes)
        check_not_negative(self, ("extra_layers",))
        check_shares(self, ("dropout_rate",))
        self.position.check(self.model_width, self.head_size, self.mask_empty_cache)
        ordered = sorted(self.mechanisms, key=lambda mechanism: (mechanism.rank, MECHANISMS.name_of(mechanism)))
        object.__setattr__(self, "mechanisms", tuple(ordered))
        for mechanism in self.mechanisms:
            others = tuple(other for other in self.mechanisms if other is not mechanism)
            if any(type(other) is type(mechanism) for other in others):
                raise UserError(f"mechanisms hold two {type(mechanism).__name__}: name all of its layers in one")
            mechanism.check(self.shape, others)

    @property
    def total_layers(self) -> int:
        return self.num_layers + self.extra_layers

    @functools.cached_property
    def shape(self) -> Shape:
        """The sizes of the decoder that its mechanisms receive."""
        same = (field.name for field in dataclasses.fields(Shape) if field.name != "num_layers")
        return Shape(num_layers=self.total_layers, **{name: getattr(self, name) for name in same})

    def mechanism(self, kind: type[AnyMechanism]) -> AnyMechanism | None:
        """The config of the mechanism of this class; None if the decoder has none."""
        return next((mechanism for mechanism in self.mechanisms if isinstance(mechanism, kind)), None)

    def with_mechanism(self, mechanism: MechanismConfig) -> "DecoderConfig":
        """The same decoder with this mechanism, which replaces a mechanism of the same class or is added."""
        others = (other for other in self.mechanisms if type(other) is not type(mechanism))
        return dataclasses.replace(self, mechanisms=(*others, mechanism))

    def without_mechanism(self, kind: type[MechanismConfig]) -> "DecoderConfig":
        """The same decoder without the mechanism of this class."""
        others = tuple(other for other in self.mechanisms if not isinstance(other, kind))
        return dataclasses.replace(self, mechanisms=others)

    def cleared(self) -> "DecoderConfig | None":
        """The same decoder with states that are reset in every segment; None if it has no states."""
        cleared = [mechanism.cleared() for mechanism in self.mechanisms]
        if all(mechanism is None for mechanism in cleared):
            return None
        kept = zip(cleared, self.mechanisms)
        return dataclasses.replace(self, mechanisms=tuple(new or old for new, old in kept))

    def layer_position(self, index: int) -> PositionConfig:
        """The position strategy of layer `index`, counted from 0."""
        of_layer = (m for m in self.mechanisms if index in m.indices(self.total_layers))
        return NoPosition() if any(mechanism.without_positions for mechanism in of_layer) else self.position

    @property
    def publishes(self) -> bool:
        """Whether layers read what others publish. If so, all layers read a block before the next block."""
        return any(mechanism.publishes for mechanism in self.mechanisms)

    @property
    def needs_segments(self) -> bool:
        """Whether the carry depends on where segments end."""
        return any(mechanism.needs_segments for mechanism in self.mechanisms)

    @property
    def waits_for(self) -> str | None:
        """The reason why a segment can't be sharded over devices; None if it can."""
        return next((m.waits_for for m in self.mechanisms if m.waits_for is not None), None)

    def flops(self, vocabulary_size: int) -> Flops:
        """The operations of one token in all layers, and of its logits (`layers/flops.py`)."""
        d, inner = self.model_width, self.shape.inner_width
        parts = [Flops.of_products(2 * d * vocabulary_size)]
        for index in range(self.total_layers):
            mixed = sum(mechanism.mixed_width(self.shape, index) for mechanism in self.mechanisms)
            parts.append(Flops.of_products(2 * d * 3 * inner + 2 * mixed * d + 4 * d * self.feedforward_width))
            parts += [mechanism.flops(self.shape, index) for mechanism in self.mechanisms]
        return Flops(*(sum(kind) for kind in zip(*parts)))

    def num_visible(self, position: Int[np.ndarray, "..."]) -> Int[np.ndarray, "..."]:
        """The number of tokens, itself included, that a token at each position attends to in a layer."""
        visible = [mechanism.num_visible(self.shape, position) for mechanism in self.mechanisms]
        return np.asarray(np.maximum.reduce(visible))
