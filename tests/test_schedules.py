from pathlib import Path

import numpy as np
import pytest

from meliad_like.errors import UserError
from meliad_like.optimization.schedules import (
    SCHEDULES,
    ConstantSchedule,
    CosineAfterWarmupSchedule,
    CosineSchedule,
    ScheduleConfig,
    WarmupStableDecaySchedule,
    make_schedule,
)

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
    return SCHEDULES[REFERENCE_NAMES[schedule]](warmup_steps=warmup), num_steps


SPECIAL = {
    "cosine_num100000_warm1000_mult0.5_maxsched250000": (
        CosineSchedule(multiplier=0.5, max_scheduled_steps=250_000),
        100_000,
    ),
    "cosine_spike10000_0.04_num100000_warm1000": (CosineSchedule(spike_steps=10_000, spike_rate=0.04), 100_000),
}


@pytest.mark.parametrize("key", [key for key in GOLDEN if key != "steps"])
def test_golden_learning_rates(key):
    config, num_steps = SPECIAL[key] if key in SPECIAL else golden_config(key)
    schedule = make_schedule(config, num_steps)
    # The absolute term allows for the cosine's cancellation at its trough, 1e-7 of its peak.
    np.testing.assert_allclose(schedule(GOLDEN["steps"]), GOLDEN[key], rtol=2e-6, atol=1e-9)


def test_the_shortformers_schedule_is_fairseqs():
    arrays = np.load(Path(__file__).parent / "golden" / "pia_lr_schedule.npz")
    config = CosineAfterWarmupSchedule(max_rate=1.0, min_rate=1e-4, first_rate=1e-7, warmup_steps=16_000)
    schedule = make_schedule(config, num_steps=286_000)
    # A step is the number of updates before it. The paper's runs end before theirs would begin another wave.
    used = arrays["updates"] < 286_000
    assert used.sum() == 9
    np.testing.assert_allclose(schedule(arrays["updates"][used]), arrays["lr"][used], rtol=2e-6)


def test_warmup_stable_decay():
    config = WarmupStableDecaySchedule(warmup_steps=10, max_rate=0.4, min_rate=0.1, decay_steps=20)
    rates = make_schedule(config, 100)(np.array([0, 5, 10, 80, 90, 100, 150]))
    np.testing.assert_allclose(rates, [0, 0.2, 0.4, 0.4, 0.25, 0.1, 0.1], rtol=1e-6)
    with pytest.raises(UserError, match="warmup_steps=10 and decay_steps=20 are more than 29 steps"):
        make_schedule(config, 29)


def test_the_wave_after_the_warmup_ends_at_the_lowest_rate():
    schedule = make_schedule(CosineAfterWarmupSchedule(warmup_steps=10), num_steps=100)
    np.testing.assert_allclose([schedule(step) for step in (10, 55, 100, 500)], [0.01, 0.0055, 0.001, 0.001], rtol=1e-6)
    with pytest.raises(UserError, match="warmup_steps=100 leaves nothing of 100 steps to cosine_after_warmup"):
        make_schedule(CosineAfterWarmupSchedule(warmup_steps=100), num_steps=100)


@pytest.mark.parametrize("name", SCHEDULES)
def test_step_zero_of_a_warmup_has_rate_zero(name):
    schedule = make_schedule(SCHEDULES[name](warmup_steps=10), num_steps=2000)
    assert schedule(0) == 0
    assert schedule(1) > 0


def test_constant():
    schedule = make_schedule(ConstantSchedule(rate=0.3, warmup_steps=4), num_steps=10)
    np.testing.assert_allclose([schedule(step) for step in (0, 1, 2, 4, 1000)], [0, 0.075, 0.15, 0.3, 0.3], rtol=1e-6)


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"min_rate": 0.1}, "min_rate=0.1 must be positive and at most max_rate=0.01"),
        ({"first_rate": 0.02}, "first_rate=0.02 must be from 0 to max_rate=0.01"),
        ({"warmup_steps": -1}, "warmup_steps=-1"),
        ({"multiplier": -1.0}, "CosineSchedule.multiplier=-1.0 must be above 0"),
        ({"max_scheduled_steps": 0}, "max_scheduled_steps=0"),
    ],
)
def test_wrong_fields_are_named(fields, message):
    with pytest.raises(UserError, match=message):
        CosineSchedule(**fields)
