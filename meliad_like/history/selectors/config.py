"""How a selector is trained."""

import dataclasses

from meliad_like.errors import UserError
from meliad_like.validation import check_not_negative, check_positive, check_seed, check_shares


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
