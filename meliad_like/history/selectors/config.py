"""What a selector is, and how it is trained."""

import dataclasses
from typing import Literal

from meliad_like.errors import UserError
from meliad_like.models.decoder_config import ActivationDtype
from meliad_like.validation import check_choices, check_not_negative, check_positive, check_seed, check_shares

Kind = Literal["joint", "light"]
Part = Literal["pair", "span", "context"]
"""What the encoder reads at once: span and context together (`joint`), or either of them alone (`light`)."""


@dataclasses.dataclass(frozen=True)
class SelectorConfig:
    """A selector, by default the paper's."""

    kind: Kind = "joint"
    """`joint`: the paper's, which reads every candidate together with the context. `light`: reads them apart."""
    context_tokens: int | None = None
    """Tokens before the targets that are read beside the span; None: the necessary prefix of the window, which is
    k - j - s of them. Where the targets are read too (`HistoryConfig.selector_context`), these decide."""
    encoder_layers: int = 0
    """Layers of the pretrained decoder that are used, counted from the first; 0: all."""
    head_width: int = 256
    """Of the hidden layer of the joint selector's head, and of the vectors that the light selector multiplies."""
    train_encoder: bool = True
    """Whether the decoder is trained with the head. If not, its vectors are computed once and kept."""
    dropout_rate: float = 0.1
    """In the decoder, while it is trained."""
    activation_dtype: ActivationDtype = "float32"

    def __post_init__(self):
        check_choices(self)
        check_positive(self, ("head_width",) if self.context_tokens is None else ("head_width", "context_tokens"))
        check_not_negative(self, ("encoder_layers",))
        check_shares(self, ("dropout_rate",))


@dataclasses.dataclass(frozen=True)
class SelectorTrainingConfig:
    """How a selector is trained, by default as the authors' code does. Every `..._every` of steps: 0 is never."""

    num_steps: int = 45_541
    """By default one epoch of the authors' 728,654 pairs; they don't say how many they had."""
    batch_size: int = 16
    learning_rate: float = 1e-5
    """Of AdamW, from the first step to the last (section 3)."""
    first_decay: float = 0.9
    second_decay: float = 0.999
    epsilon: float = 1e-6
    weight_decay: float = 0.0
    """Share of a parameter that a step removes, times the learning rate."""
    seed: int = 0
    """Decides the head's first parameters, the order of the pairs, and the dropout."""
    validation_every: int = 9
    """Documents whose index this divides are held out."""
    validation_pairs: int | None = None
    """About how many pairs an evaluation has, all those of strides that are evenly spread; None: all held out."""
    encode_batch: int = 64
    """Texts that are encoded at once where nothing is trained."""
    log_every: int = 10
    evaluate_every: int = 1000
    checkpoint_every: int = 1000
    checkpoints_kept: int = 2

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
