"""Learning rates as functions of the step, as in the training loop and optimizers of google-research/meliad.

The rate that is applied at a step is `multiplier * schedule(max(step, warmup)) * min(step, warmup) / warmup`: a line
from 0 (at step 0 nothing is learned) up to where the schedule stands when the warmup ends, then the schedule. The
schedule's own clock starts at step 0, not at the end of the warmup. Both are what `first_rate` and
`cosine_after_warmup` do otherwise.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import jax.numpy as jnp
from optax import Schedule

from meliad_like.errors import UserError
from meliad_like.validation import check_not_negative, check_steps

# The inverse square roots would be infinite at step 0.
FIRST_STEP_OF_INVERSE_SQUARE_ROOT = 100


@dataclass(frozen=True)
class ScheduleConfig:
    """How the learning rate moves with the step."""

    name: str = "cosine"
    """One of SCHEDULES: cosine, cosine_after_warmup (half a wave that begins where the warmup ends), linear,
    exponential, inverse_square_root (the Block-Recurrent paper's: 1 / sqrt(step)), scaled_inverse_square_root
    (min_rate / sqrt(step / num_steps), at most max_rate), constant."""
    max_rate: float | None = None
    """The highest rate. None: 0.01, or 0.05 for scaled_inverse_square_root. inverse_square_root has none."""
    min_rate: float = 0.001
    """The rate at the last scheduled step. Cosine and linear then halve every num_steps; cosine_after_warmup stays
    there; exponential and the inverse square roots continue."""
    warmup_steps: int = 1000
    """Steps over which the rate grows from first_rate; 0: none."""
    first_rate: float = 0.0
    """The rate at step 0, where there is a warmup."""
    multiplier: float = 1.0
    """Factor on everything above."""
    max_scheduled_steps: int | None = None
    """The schedule's length in steps where it is not that of the run."""
    spike_steps: int = 0
    """Cosine only: a second line, from spike_rate at step 0 to zero at this step; the higher of the two counts."""
    spike_rate: float = 0.0
    """Cosine only: where that line begins."""

    def __post_init__(self):
        if self.name not in SCHEDULES:
            raise UserError(f"ScheduleConfig.name={self.name!r} is none of {', '.join(SCHEDULES)}")
        check_not_negative(self, ("warmup_steps", "spike_steps"))
        check_steps(self, ("warmup_steps", "spike_steps", "max_scheduled_steps"))
        if self.max_scheduled_steps is not None and self.max_scheduled_steps < 1:
            raise UserError(f"max_scheduled_steps={self.max_scheduled_steps} must be at least 1")
        if not 0 < self.min_rate <= self.highest_rate:
            raise UserError(f"min_rate={self.min_rate} must be positive and at most max_rate={self.highest_rate}")
        if not 0 <= self.first_rate <= self.highest_rate:
            raise UserError(f"first_rate={self.first_rate} must be from 0 to max_rate={self.highest_rate}")
        if self.spike_steps and self.name != "cosine":
            raise UserError(f"spike_steps={self.spike_steps} needs the cosine schedule, not {self.name}")

    @property
    def reads_num_steps(self) -> bool:
        """Whether the rates depend on the number of steps of the run."""
        return self.max_scheduled_steps is None and self.name not in ("inverse_square_root", "constant")

    @property
    def highest_rate(self) -> float:
        if self.max_rate is not None:
            return self.max_rate
        return 0.05 if self.name == "scaled_inverse_square_root" else 0.01


def make_schedule(config: ScheduleConfig, num_steps: int) -> Schedule:
    """A function from the step (int32 scalar, from 0) to the learning rate (float32 scalar) of a run of `num_steps`."""
    length = config.max_scheduled_steps or num_steps
    if config.name == "cosine_after_warmup" and config.warmup_steps >= length:
        raise UserError(f"warmup_steps={config.warmup_steps} leaves nothing of {length} steps to {config.name}")
    base_schedule = SCHEDULES[config.name]
    warmup = config.warmup_steps

    def learning_rate(step):
        # float32 holds every whole number up to 16.7 million exactly.
        step = jnp.asarray(step, jnp.float32)
        rate = base_schedule(config, length, jnp.maximum(step, warmup))
        if warmup:
            first = config.first_rate
            rate = jnp.where(step < warmup, first + (rate - first) * step / warmup, rate)
        return rate * config.multiplier

    return learning_rate


def _decay_after(config: ScheduleConfig, length: int, step, rate):
    """`rate` for the first `length` steps, then half of min_rate for every further `length` steps (continuous)."""
    return jnp.where(step < length, rate, 2 * config.min_rate * 0.5 ** (step / length))


def _cosine(config: ScheduleConfig, length: int, step):
    wave = 0.5 * (1 + jnp.cos(math.pi * jnp.minimum(step, length) / length))
    rate = _decay_after(config, length, step, config.min_rate + wave * (config.highest_rate - config.min_rate))
    if config.spike_steps:
        rate = jnp.maximum(rate, config.spike_rate * (config.spike_steps - step) / config.spike_steps)
    return rate


def _cosine_after_warmup(config: ScheduleConfig, length: int, step):
    # The square of a sine is accurate where the rate is low; 1 + cos is not.
    left = (length - jnp.minimum(step, length)) / (length - config.warmup_steps)
    return config.min_rate + jnp.sin(0.5 * math.pi * left) ** 2 * (config.highest_rate - config.min_rate)


def _linear(config: ScheduleConfig, length: int, step):
    rate = config.highest_rate - (config.highest_rate - config.min_rate) * step / length
    return _decay_after(config, length, step, rate)


def _exponential(config: ScheduleConfig, length: int, step):
    return config.highest_rate * (config.min_rate / config.highest_rate) ** (step / length)


def _inverse_square_root(config: ScheduleConfig, length: int, step):
    return 1 / jnp.sqrt(jnp.maximum(step, FIRST_STEP_OF_INVERSE_SQUARE_ROOT))


def _scaled_inverse_square_root(config: ScheduleConfig, length: int, step):
    rate = config.min_rate / jnp.sqrt(jnp.maximum(step, FIRST_STEP_OF_INVERSE_SQUARE_ROOT) / length)
    return jnp.minimum(rate, config.highest_rate)


def _constant(config: ScheduleConfig, length: int, step):
    return jnp.full_like(step, config.highest_rate)


SCHEDULES: dict[str, Callable] = {
    "cosine": _cosine,
    "cosine_after_warmup": _cosine_after_warmup,
    "linear": _linear,
    "exponential": _exponential,
    "inverse_square_root": _inverse_square_root,
    "scaled_inverse_square_root": _scaled_inverse_square_root,
    "constant": _constant,
}
