"""The config of the training loop."""

from dataclasses import dataclass
from typing import Any, Literal

from meliad_like.errors import UserError
from meliad_like.registry import resumable
from meliad_like.validation import check_choices, check_not_negative, check_positive, check_seeds, check_steps

Nonfinite = Literal["stop", "skip"]


def _compares_no_evaluations(old: Any, new: Any) -> bool:
    """Whether no evaluation of earlier steps is compared with later ones, which would be of other tokens."""
    return not old.training.keep_best


@dataclass(frozen=True)
class TrainingConfig:
    """The number of steps, and what happens how often. Every `..._every` is a number of steps; 0 is never."""

    num_steps: int = resumable(500_000, lambda old, new: not new.schedule.reads_num_steps)
    """A run may resume with another number, unless the learning rates of earlier steps depend on it."""
    seed: int = 0
    """Decides the initial parameters, the order of the documents and the dropout; below 2**32."""
    gradient_accumulation: int = 1
    """Parts that the lanes of a step are worked through in, one after the other, to save memory. The gradient is that
    of all of them together, whatever their numbers of tokens. Dropout that is drawn lane by lane, as all but the
    decoder's is, has the same masks in each part."""
    loss_slice: int = resumable(1024)
    """Tokens of a lane whose logits exist at once."""
    nonfinite: Nonfinite = resumable("stop", lambda old, new: old.training.nonfinite == "stop")
    """After a loss or gradient that is not finite: stop with a saved state, or skip the step and count it. A run that
    has stopped may resume with `skip`; one that may have skipped steps can't resume with `stop`."""
    log_every: int = resumable(10)
    evaluate_every: int = resumable(0)
    evaluate_split: str = resumable("validation", _compares_no_evaluations)
    evaluate_max_tokens: int | None = resumable(None, _compares_no_evaluations)
    """These evaluations read a random subset of the split, of this number of tokens at most; None: all of it."""
    keep_best: bool = resumable(False)
    """Whether the parameters with the fewest bits per token in these evaluations are kept, in the run's folder `best`,
    which is a checkpoint folder of its own."""
    checkpoint_every: int = resumable(1000)
    checkpoints_kept: int = resumable(3)
    """Number of newest checkpoints that are kept."""
    checkpoint_keep_every: int = resumable(0)
    """Checkpoints of steps that are a multiple of this stay for good."""
    sample_every: int = resumable(0)
    sample_tokens: int = resumable(200)

    def __post_init__(self):
        check_choices(self)
        if self.keep_best and not self.evaluate_every:
            raise UserError("keep_best=True needs an evaluate_every")
        if self.sample_every and not self.sample_tokens:
            raise UserError(f"sample_every={self.sample_every} needs sample_tokens of at least 1")
        check_seeds(self, ("seed",))
        check_positive(self, ("num_steps", "gradient_accumulation", "loss_slice", "log_every", "checkpoints_kept"))
        check_steps(self, ("num_steps",))
        periods = ("evaluate_every", "checkpoint_every", "checkpoint_keep_every", "sample_every")
        check_not_negative(self, (*periods, "sample_tokens"))
