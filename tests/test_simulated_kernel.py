"""The kernels for TPUs in Pallas's simulation of a TPU: no races, no reads out of bounds or of unwritten memory."""

import forked
import pytest
from tiny_run import environment

SMALLEST = (8, 4, 4, "float32", 2, "on_wait")
"""Window, rows and head size, so that there are two rows of queries; cores, and when copies are made."""
SWEEP = [
    (w, 128, 128, dtype, cores, dma)
    for w in (128, 256, 512)
    for dtype, cores, dma in (("float32", 1, "eager"), ("float32", 2, "on_wait"), ("bfloat16", 2, "eager"))
]


def simulate(*setting):
    # With fewer threads, two cores wait for each other for ever.
    variables = environment(num_devices=1) | {"NPROC": "16"}
    result = forked.run("-m", "simulated_kernel", *map(str, setting), environment=variables)
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.mark.parametrize("setting", [SMALLEST, *(pytest.param(s, marks=pytest.mark.exhaustive) for s in SWEEP)])
@pytest.mark.parametrize("subject", [[], ["wide"], ["states"], ["memory"], ["recurrence"]])
@pytest.mark.thorough
def test_the_kernel_is_sound(setting, subject):
    output = simulate(*setting, *subject)
    assert "RACE DETECTED" not in output
    assert float(output.split()[-1]) < (0.02 if "bfloat16" in setting else 1e-5)


def test_a_kernel_with_a_race_is_refused():
    assert "RACE DETECTED" in simulate(*SMALLEST, "broken")
