"""Learning rates as functions of the step, as in the training loop and optimizers of google-research/meliad.

The rate that is applied at a step is `multiplier * schedule(max(step, warmup)) * min(step, warmup) / warmup`: a line
from 0 at step 0 to the schedule's value at the end of the warmup, then the schedule, whose own
clock starts at step 0, not at the end of the warmup. `first_rate` changes the value at step 0, and
`cosine_after_warmup` the beginning of the clock.
"""

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from optax import Schedule

from meliad_like.errors import UserError
from meliad_like.registry import Registry
from meliad_like.validation import check_above_zero, check_not_negative, check_positive

# The inverse square roots would be infinite at step 0.
FIRST_STEP_OF_INVERSE_SQUARE_ROOT = 100
SCHEDULES = Registry("schedule")


@dataclass(frozen=True)
class ScheduleConfig:
    """The fields of all schedules."""

    warmup_steps: int = 1000
    """The number of steps in which the rate grows from first_rate; 0: no warmup."""
    first_rate: float = 0.0
    """The rate at step 0, if there is a warmup."""
    multiplier: float = 1.0
    """Factor on all rates of the schedule."""

    def __post_init__(self):
        check_not_negative(self, ("warmup_steps", "first_rate"))
        check_above_zero(self, ("multiplier",))

    def length(self, num_steps: int) -> int:
        """The schedule's length in steps, in a run of `num_steps`."""
        return num_steps

    def num_independent(self, num_steps: int) -> float:
        """The number of first steps, of a run of `num_steps`, whose rates a run of another length has too."""
        return math.inf

    def base_rate(self, length: int, step: jax.Array) -> jax.Array:
        """The rate (float32) without warmup and multiplier, at a step that is not before the end of the warmup."""
        raise NotImplementedError


@dataclass(frozen=True)
class DecayingScheduleConfig(ScheduleConfig):
    """The fields of schedules that fall from one rate to another."""

    max_rate: float = 0.01
    """The highest rate."""
    min_rate: float = 0.001
    """The rate at the last scheduled step."""
    max_scheduled_steps: int | None = None
    """The schedule's length in steps; None: the length of the run."""

    def __post_init__(self):
        super().__post_init__()
        check_above_zero(self, ("max_scheduled_steps",))
        if not 0 < self.min_rate <= self.max_rate:
            raise UserError(f"min_rate={self.min_rate} must be positive and at most max_rate={self.max_rate}")
        if self.first_rate > self.max_rate:
            raise UserError(f"first_rate={self.first_rate} must be from 0 to max_rate={self.max_rate}")

    def num_independent(self, num_steps: int) -> float:
        return 0 if self.max_scheduled_steps is None else math.inf

    def length(self, num_steps: int) -> int:
        return self.max_scheduled_steps or num_steps

    def _after(self, length: int, step: jax.Array, rate: jax.Array) -> jax.Array:
        """`rate` for the first `length` steps, then half of min_rate for every further `length` steps (continuous)."""
        return jnp.where(step < length, rate, 2 * self.min_rate * 0.5 ** (step / length))


@SCHEDULES.register("cosine")
class CosineSchedule(DecayingScheduleConfig):
    """Half a cosine wave that begins at step 0; after the last scheduled step the rate halves every `length` steps."""

    spike_steps: int = 0
    """The end of a line from spike_rate at step 0 to zero at this step; the rate is the maximum of line and cosine."""
    spike_rate: float = 0.0
    """The value of that line at step 0."""

    def __post_init__(self):
        super().__post_init__()
        check_not_negative(self, ("spike_steps",))

    def base_rate(self, length: int, step: jax.Array) -> jax.Array:
        wave = 0.5 * (1 + jnp.cos(math.pi * jnp.minimum(step, length) / length))
        rate = self._after(length, step, self.min_rate + wave * (self.max_rate - self.min_rate))
        if self.spike_steps:
            rate = jnp.maximum(rate, self.spike_rate * (self.spike_steps - step) / self.spike_steps)
        return rate


@SCHEDULES.register("cosine_after_warmup")
class CosineAfterWarmupSchedule(DecayingScheduleConfig):
    """Half a cosine wave that begins where the warmup ends; then the rate stays at min_rate."""

    def length(self, num_steps: int) -> int:
        length = super().length(num_steps)
        if self.warmup_steps >= length:
            raise UserError(f"warmup_steps={self.warmup_steps} leaves nothing of {length} steps to cosine_after_warmup")
        return length

    def base_rate(self, length: int, step: jax.Array) -> jax.Array:
        # The square of a sine is accurate where the rate is low; 1 + cos is not.
        left = (length - jnp.minimum(step, length)) / (length - self.warmup_steps)
        return self.min_rate + jnp.sin(0.5 * math.pi * left) ** 2 * (self.max_rate - self.min_rate)


@SCHEDULES.register("linear")
class LinearSchedule(DecayingScheduleConfig):
    """A linear decay; after the last scheduled step the rate halves every `length` steps."""

    def base_rate(self, length: int, step: jax.Array) -> jax.Array:
        return self._after(length, step, self.max_rate - (self.max_rate - self.min_rate) * step / length)


@SCHEDULES.register("warmup_stable_decay")
class WarmupStableDecaySchedule(DecayingScheduleConfig):
    """max_rate, then in the last decay_steps a line to min_rate, which later steps keep (Hu et al. 2024, section 4).

    Before the line a run may resume with another number of steps.
    """

    decay_steps: int = 1000
    """The length of the line, in steps."""

    def __post_init__(self):
        super().__post_init__()
        check_positive(self, ("decay_steps",))

    def length(self, num_steps: int) -> int:
        length = super().length(num_steps)
        if self.warmup_steps + self.decay_steps > length:
            both = f"warmup_steps={self.warmup_steps} and decay_steps={self.decay_steps}"
            raise UserError(f"{both} are more than {length} steps, so that warmup_stable_decay never reaches max_rate")
        return length

    def num_independent(self, num_steps: int) -> float:
        return max(super().num_independent(num_steps), self.length(num_steps) - self.decay_steps)

    def base_rate(self, length: int, step: jax.Array) -> jax.Array:
        left = jnp.clip((length - step) / self.decay_steps, 0, 1)
        return self.min_rate + left * (self.max_rate - self.min_rate)


@SCHEDULES.register("exponential")
class ExponentialSchedule(DecayingScheduleConfig):
    """Exponential decay, which continues after the last scheduled step."""

    def base_rate(self, length: int, step: jax.Array) -> jax.Array:
        return self.max_rate * (self.min_rate / self.max_rate) ** (step / length)


@SCHEDULES.register("inverse_square_root")
class InverseSquareRootSchedule(ScheduleConfig):
    """The Block-Recurrent paper's: 1 / sqrt(step)."""

    def base_rate(self, length: int, step: jax.Array) -> jax.Array:
        return 1 / jnp.sqrt(jnp.maximum(step, FIRST_STEP_OF_INVERSE_SQUARE_ROOT))


@SCHEDULES.register("scaled_inverse_square_root")
class ScaledInverseSquareRootSchedule(DecayingScheduleConfig):
    """min_rate / sqrt(step / length), at most max_rate."""

    max_rate: float = 0.05

    def base_rate(self, length: int, step: jax.Array) -> jax.Array:
        rate = self.min_rate / jnp.sqrt(jnp.maximum(step, FIRST_STEP_OF_INVERSE_SQUARE_ROOT) / length)
        return jnp.minimum(rate, self.max_rate)


@SCHEDULES.register("constant")
class ConstantSchedule(ScheduleConfig):
    """The same rate at every step after the warmup."""

    rate: float = 0.01

    def __post_init__(self):
        super().__post_init__()
        if not 0 <= self.first_rate <= self.rate or self.rate <= 0:
            raise UserError(f"first_rate={self.first_rate} must be from 0 to rate={self.rate}, which is positive")

    def base_rate(self, length: int, step: jax.Array) -> jax.Array:
        return jnp.full_like(step, self.rate)


def make_schedule(config: ScheduleConfig, num_steps: int) -> Schedule:
    """A function from the step (int32 scalar, from 0) to the learning rate (float32 scalar) of a run of `num_steps`."""
    length, warmup = config.length(num_steps), config.warmup_steps

    def learning_rate(step):
        # float32 holds every whole number up to 16.7 million exactly.
        step = jnp.asarray(step, jnp.float32)
        rate = config.base_rate(length, jnp.maximum(step, warmup))
        if warmup:
            first = config.first_rate
            rate = jnp.where(step < warmup, first + (rate - first) * step / warmup, rate)
        return rate * config.multiplier

    return learning_rate
