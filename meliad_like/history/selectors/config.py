"""The configs of a selector and of its training."""

import dataclasses
from typing import Literal

from meliad_like.errors import UserError
from meliad_like.models.base import ActivationDtype
from meliad_like.registry import resumable
from meliad_like.validation import check_choices, check_not_negative, check_positive, check_seed, check_shares

Kind = Literal["joint", "light"]
Part = Literal["pair", "span", "context"]
"""What the encoder reads at once: span and context together (`joint`), or either of them alone (`light`)."""


@dataclasses.dataclass(frozen=True)
class SelectorConfig:
    """A selector, by default the paper's."""

    kind: Kind = "joint"
    """`joint`: the paper's, which reads each candidate together with the context. `light`: reads them separately."""
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

    def __post_init__(self):
        check_choices(self)
        check_positive(self, ("head_width",) if self.context_tokens is None else ("head_width", "context_tokens"))
        check_not_negative(self, ("encoder_layers",))
        check_shares(self, ("dropout_rate",))


@dataclasses.dataclass(frozen=True)
class SelectorTrainingConfig:
    """How a selector is trained, by default as in the authors' code. Each `..._every` counts steps; 0: at the end."""

    num_steps: int = resumable(45_541)
    """By default one epoch of the authors' 728,654 pairs; their number of epochs is not known."""
    batch_size: int = 16
    learning_rate: float = 1e-5
    """Constant learning rate of AdamW (section 3)."""
    first_decay: float = 0.9
    second_decay: float = 0.999
    epsilon: float = 1e-6
    weight_decay: float = 0.0
    """Weight decay of AdamW."""
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
        check_seed(self)
        check_shares(self, ("first_decay", "second_decay"))
        if self.learning_rate <= 0 or self.epsilon <= 0 or self.weight_decay < 0:
            raise UserError(
                f"learning_rate={self.learning_rate} and epsilon={self.epsilon} must be positive, and "
                f"weight_decay={self.weight_decay} not negative"
            )
        if self.validation_every < 2:
            raise UserError(f"validation_every={self.validation_every} must be at least 2, or nothing is trained on")
