"""The configs of a selector and of its training."""

import dataclasses
from typing import Any, ClassVar, Literal

from meliad_like.errors import UserError
from meliad_like.models.base import ActivationDtype
from meliad_like.optimization.optimizers import OPTIMIZERS, Adam
from meliad_like.registry import Registry, kind_field, resumable
from meliad_like.validation import check_choices, check_not_negative, check_positive, check_seeds, check_shares

SELECTORS = Registry("selector")

Part = Literal["pair", "span", "context"]
"""What the encoder reads at once: span and context together, or either of them alone."""


@dataclasses.dataclass(frozen=True)
class SelectorConfig:
    """The fields of all selectors, by default the paper's."""

    context_tokens: int | None = None
    """Tokens before the targets that are read beside the span; None: the window's necessary prefix. It must be None
    where the targets are read too (`HistoryConfig.selector_context`)."""
    encoder_layers: int = 0
    """Number of layers of the pretrained decoder that are used, from the first one; 0: all."""
    head_width: int = 256
    """Width of the hidden layer of the joint selector's head, and of the vectors that the light selector multiplies."""
    train_encoder: bool = True
    """Whether the decoder is trained too. If not, its vectors are computed once and kept."""
    dropout_rate: float = 0.1
    """Dropout in the decoder, while it is trained."""
    activation_dtype: ActivationDtype = "float32"

    name: ClassVar[str]
    """Name of the trained selector in tables."""
    parts: ClassVar[tuple[Part, ...]]
    """The texts that are encoded for a score."""
    pools_mean: ClassVar[bool]
    """Whether the vector of a text is that of its last token after the mean over all its tokens, or without it."""

    def __post_init__(self):
        check_choices(self)
        check_positive(self, ("head_width",) if self.context_tokens is None else ("head_width", "context_tokens"))
        check_not_negative(self, ("encoder_layers",))
        check_shares(self, ("dropout_rate",))


@SELECTORS.register("joint")
@dataclasses.dataclass(frozen=True)
class JointSelectorConfig(SelectorConfig):
    """The paper's, which reads each candidate together with the context."""

    name = "learned_selector"
    parts = ("pair",)
    pools_mean = False


@SELECTORS.register("light")
@dataclasses.dataclass(frozen=True)
class LightSelectorConfig(SelectorConfig):
    """A selector that reads spans and contexts separately."""

    name = "light_selector"
    parts = ("span", "context")
    # Topics are in many tokens, and the last token of a span is a separator.
    pools_mean = True


@dataclasses.dataclass(frozen=True)
class SelectorTrainingConfig:
    """How a selector is trained, by default as in the authors' code. Each `..._every` counts steps; 0: at the end."""

    num_steps: int = resumable(45_541)
    """By default one epoch of the authors' 728,654 pairs; their number of epochs is not known."""
    batch_size: int = 16
    optimizer: Any = kind_field(
        OPTIMIZERS, lambda: Adam(base_rate=1e-5, weight_decay=0.0, second_decay=0.999, epsilon=1e-6)
    )
    """The optimizer; its `base_rate` is the learning rate of all steps (section 3)."""
    seed: int = 0
    """Seed of the head's initial parameters, of the order of the pairs, and of the dropout."""
    validation_every: int = 9
    """Documents whose index is a multiple of this are held out."""
    validation_pairs: int | None = None
    """About the number of pairs of an evaluation, which are those of evenly spaced strides; None: all held out."""
    encode_batch: int = resumable(64)
    """Number of texts that are encoded at once where nothing is trained."""
    log_every: int = resumable(10)
    evaluate_every: int = resumable(1000)
    checkpoint_every: int = resumable(1000)
    checkpoints_kept: int = resumable(2)

    def __post_init__(self):
        positive = ("num_steps", "batch_size", "encode_batch", "log_every", "checkpoints_kept")
        check_positive(self, positive if self.validation_pairs is None else (*positive, "validation_pairs"))
        check_not_negative(self, ("evaluate_every", "checkpoint_every"))
        check_seeds(self, ("seed",))
        if self.validation_every < 2:
            raise UserError(f"validation_every={self.validation_every} must be at least 2, or nothing is trained on")
