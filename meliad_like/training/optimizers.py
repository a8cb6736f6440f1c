"""Optimizers, all from optax: their fields, their defaults, and what the gradient they are given means.

The objective is the sum of the losses over the tokens divided by the constant number of positions in a batch (see
`training/step.py`), so its gradient is nearly that of the mean. Adafactor divides the gradient by its own running size,
so a constant factor changes nothing; Adam nearly so (its epsilon). `clip_norm` does see the factor.
"""

from dataclasses import dataclass

import optax

from meliad_like.errors import UserError

DEFAULT_BASE_RATE = {"adafactor": 1.0, "adam": 0.05}
DEFAULT_WEIGHT_DECAY = {"adafactor": 0.0, "adam": 1e-4}


@dataclass(frozen=True)
class OptimizerConfig:
    """Which optimizer, and its settings. The defaults are the reference's."""

    name: str = "adafactor"
    """adafactor or adam."""
    base_rate: float | None = None
    """Factor on the schedule's learning rate. None: 1 for adafactor (whose steps are also scaled by each parameter's
    own size), 0.05 for adam."""
    momentum: float = 0.9
    """Adafactor: average of the scaled updates, 0 for none (and no memory for it). Adam: its first decay."""
    adafactor_decay: float = 0.8
    """Adafactor: after t updates the second moment's decay is 1 - t ** -adafactor_decay."""
    adafactor_size: int = 128
    """Adafactor: a parameter's second moment is kept as two vectors when its two largest dimensions reach this."""
    adam_second_decay: float = 0.98
    """Adam: decay of the second moment."""
    weight_decay: float | None = None
    """Share of a parameter removed by a step: for adam times the learning rate (AdamW), for adafactor as it is.
    None: 0 for adafactor, 1e-4 for adam."""
    clip_norm: float | None = None
    """Largest norm of the whole gradient (of the loss per position); None: no clipping."""

    def __post_init__(self):
        if self.name not in DEFAULT_BASE_RATE:
            raise UserError(f"OptimizerConfig.name={self.name!r} is none of {', '.join(DEFAULT_BASE_RATE)}")
        for field in ("momentum", "adam_second_decay"):
            if not 0 <= getattr(self, field) < 1:
                raise UserError(f"{field}={getattr(self, field)} must be at least 0 and below 1")
        for field in ("base_rate", "clip_norm"):
            if getattr(self, field) is not None and getattr(self, field) <= 0:
                raise UserError(f"{field}={getattr(self, field)} must be positive")
        if self.weight_decay is not None and self.weight_decay < 0:
            raise UserError(f"weight_decay={self.weight_decay} must not be negative")


def applied_rate(config: OptimizerConfig, schedule: optax.Schedule) -> optax.Schedule:
    """The learning rate that the optimizer applies at a step, for the optimizer and for the logs."""
    base_rate = DEFAULT_BASE_RATE[config.name] if config.base_rate is None else config.base_rate
    return lambda step: base_rate * schedule(step)


def make_optimizer(config: OptimizerConfig, schedule: optax.Schedule) -> optax.GradientTransformation:
    """The optax transformation; its state has the dtype of the parameters (float32) and its own count of updates.

    The first update uses the schedule's rate of step 0, which with a warmup is 0.
    """
    rate = applied_rate(config, schedule)
    weight_decay = DEFAULT_WEIGHT_DECAY[config.name] if config.weight_decay is None else config.weight_decay
    if config.name == "adafactor":
        optimizer = optax.adafactor(
            rate,
            min_dim_size_to_factor=config.adafactor_size,
            decay_rate=config.adafactor_decay,
            multiply_by_parameter_scale=True,
            clipping_threshold=1.0,
            momentum=config.momentum or None,
            weight_decay_rate=weight_decay or None,
            eps=1e-30,
        )
    else:
        optimizer = optax.adamw(rate, b1=config.momentum, b2=config.adam_second_decay, weight_decay=weight_decay)
    if config.clip_norm is None:
        return optimizer
    return optax.chain(optax.clip_by_global_norm(config.clip_norm), optimizer)
