"""The rows of MELODI's table: their protocol, and their models' sizes."""

import pytest

from meliad_like import config
from meliad_like.experiments.tables import SUBJECTS
from meliad_like.experiments.tables.block_recurrent import SCALES
from meliad_like.experiments.tables.table import configure
from meliad_like.families.melodi import MelodiConfig
from meliad_like.models.model import Model
from meliad_like.optimization.schedules import CosineSchedule
from meliad_like.registry import configs_in

ROWS = {row.name: row for row in SUBJECTS["melodi"].rows}


def idle(width, u=64, window=512):
    """The parameters with which the reference's last layer mixes summaries that nothing reads."""
    return (window + u) * u + u + 2 * width


# The reference's numbers, with a vocabulary of 32,000.
SIZES = {
    "small_37m": 55_142_016,
    "small_75m": 92_915_840,
    "medium_150m": 184_873_600,
    "medium_300m": 335_921_888,
    "large_600m": 670_832_352,
    "large_1200m": 1_274_918_816,
}


@pytest.mark.parametrize("name", ROWS)
def test_the_protocol_of_a_row(name):
    run = config.parse([ROWS[name].gin_file])
    assert (run.data.segment_length, run.data.tokens_per_step) == (4096, 32 * 4096)
    assert isinstance(run.schedule, CosineSchedule) and run.training.num_steps == 500_000


@pytest.mark.parametrize(
    "size", [pytest.param(size, marks=() if size == "small_37m" else pytest.mark.exhaustive) for size in SIZES]
)
def test_parameters_of_a_size(size):
    model = config.parse([f"size/{size}.gin", "melodi/base.gin"]).model
    assert Model(model, 32_000).num_parameters == SIZES[size] - idle(model.model_width)


@pytest.mark.parametrize("name", ROWS)
def test_a_row_keeps_its_proportions_at_tiny(name):
    whole, tiny = config.parse([ROWS[name].gin_file]).model, configure(ROWS[name], SCALES["tiny"]).model
    assert [type(part) for part in configs_in(tiny)] == [type(part) for part in configs_in(whole)]
    if isinstance(whole, MelodiConfig):
        assert tiny.long_slots * whole.long_length == whole.long_slots * tiny.long_length or name == "window_128"
        assert len(tiny.long_layers) == len(whole.long_layers)


def test_operations_of_the_base_by_hand():
    """The figures of MELODI's paper and code: 32.08M a layer, and 1.16 times 12 layers with a window."""
    base, slide = (config.parse([name]).model for name in ("melodi/base.gin", "block_recurrent/slide_12l.gin"))
    d, w, u = 1024, 512, 64
    layer = ((w + u) * 24 * d**2 + 4 * d**2 * 64 + 4 * d * (w + u) * (w + 2 * u) + 2 * d * (w + u) * 2 * u) / w
    assert layer / 1e6 == pytest.approx(32.08, abs=0.005)
    last = 2 * d * (w + u) * u / w
    long = (4 * d * (w + u) * 4096 + 4 * d**2 * 32 + 2 * d * (w + u) * 32) / w
    assert base.flops(0).forward == pytest.approx(12 * layer - last + long)
    # Once a segment the long-term memory is projected, which is not counted.
    once = 4 * d**2 * 4096 / 4096
    assert (12 * layer + long + once) / slide.flops(0).forward == pytest.approx(1.16, abs=0.01)
