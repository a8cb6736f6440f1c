from pathlib import Path

import numpy as np
import pytest

from meliad_like.errors import UserError
from meliad_like.training.schedules import SCHEDULES, ScheduleConfig, make_schedule

GOLDEN = np.load(Path(__file__).parent / "golden" / "f_learning_rate.npz")
REFERENCE_NAMES = {
    "cosine": "cosine",
    "linear": "linear",
    "exponential": "exponential",
    "rsqrt": "scaled_inverse_square_root",
    "rsqrt_std": "inverse_square_root",
}


def golden_config(key: str) -> tuple[ScheduleConfig, int]:
    """The configuration and the number of steps that the name of a golden array stands for."""
    schedule, numbers = key.split("_num")
    num_steps, warmup = (int(number) for number in numbers.split("_warm"))
    return ScheduleConfig(name=REFERENCE_NAMES[schedule], warmup_steps=warmup), num_steps


SPECIAL = {
    "cosine_num100000_warm1000_mult0.5_maxsched250000": (
        ScheduleConfig(multiplier=0.5, max_scheduled_steps=250_000),
        100_000,
    ),
    "cosine_spike10000_0.04_num100000_warm1000": (ScheduleConfig(spike_steps=10_000, spike_rate=0.04), 100_000),
}


@pytest.mark.parametrize("key", [key for key in GOLDEN if key != "steps"])
def test_golden_learning_rates(key):
    config, num_steps = SPECIAL[key] if key in SPECIAL else golden_config(key)
    schedule = make_schedule(config, num_steps)
    # The absolute term allows for the cosine's cancellation at its trough, 1e-7 of its peak.
    np.testing.assert_allclose(schedule(GOLDEN["steps"]), GOLDEN[key], rtol=2e-6, atol=1e-9)


@pytest.mark.parametrize("name", SCHEDULES)
def test_step_zero_of_a_warmup_has_rate_zero(name):
    schedule = make_schedule(ScheduleConfig(name=name, warmup_steps=10), num_steps=100)
    assert schedule(0) == 0
    assert schedule(1) > 0


def test_constant():
    schedule = make_schedule(ScheduleConfig(name="constant", max_rate=0.3, warmup_steps=4), num_steps=10)
    np.testing.assert_allclose([schedule(step) for step in (0, 1, 2, 4, 1000)], [0, 0.075, 0.15, 0.3, 0.3], rtol=1e-6)


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"name": "cosin"}, "'cosin' is none of cosine"),
        ({"min_rate": 0.1}, "min_rate=0.1 must be positive and at most max_rate=0.01"),
        ({"name": "linear", "spike_steps": 5}, "needs the cosine schedule, not linear"),
        ({"warmup_steps": -1}, "warmup_steps=-1"),
        ({"max_scheduled_steps": 0}, "max_scheduled_steps=0"),
    ],
)
def test_wrong_fields_are_named(fields, message):
    with pytest.raises(UserError, match=message):
        ScheduleConfig(**fields)
