"""Where metrics are shown: any registered kind gets them, and the services work offline."""

import dataclasses
import math
import sys

import pytest
import tiny_run
from tiny_run import parse, read_metrics, train

from meliad_like.config import check_workdir
from meliad_like.errors import UserError
from meliad_like.trackers import TRACKERS, TrackedRun, Tracker, TrackerConfig
from meliad_like.training.metrics import MetricsWriter

WRITTEN: list = []
KEY = "TrainingConfig.num_steps"


@dataclasses.dataclass
class Recorder(Tracker):
    def write(self, step, metrics):
        WRITTEN.append((step, dict(metrics)))

    def close(self, failed):
        WRITTEN.append(("closed", failed))


@TRACKERS.register("list")
@dataclasses.dataclass(frozen=True)
class ListTracker(TrackerConfig):
    comment: str = ""

    def open(self, run: TrackedRun) -> Tracker:
        WRITTEN.append((run.name, run.identity(), run.start_step, run.settings[KEY]))
        return Recorder()


@pytest.fixture(scope="module")
def bindings(tmp_path_factory):
    return [*tiny_run.make_bindings(tmp_path_factory.mktemp("documents")), "RunConfig.schedule = 'constant'"]


def test_any_kind_gets_the_metrics_of_the_run_and_of_its_resumption(bindings, tmp_path):
    WRITTEN.clear()
    tracked = ["ListTracker.comment = 'chosen by binding a field'", "TrainingConfig.evaluate_every = 2"]
    train(parse(bindings, *tracked, "TrainingConfig.num_steps = 2"), tmp_path / "mine")
    (name, identity, start, num_steps), *rows, last = WRITTEN
    assert (name, start, num_steps, last) == ("mine", 0, 2, ("closed", False))
    losses = [row["train/loss"] for _, row in rows if "train/loss" in row]
    assert losses == [row["loss"] for row in read_metrics(tmp_path / "mine")]
    assert [step for step, row in rows if "validation/bits_per_byte" in row] == [2]
    assert any(path.name.startswith("events.out.tfevents") for path in (tmp_path / "mine").iterdir())

    # A run may resume with other trackers.
    check_workdir(parse(bindings, "RunConfig.trackers = []", "TrainingConfig.num_steps = 3"), tmp_path / "mine")
    WRITTEN.clear()
    with pytest.raises(KeyError), MetricsWriter(tmp_path / "mine", 2, 3, (ListTracker(),), {KEY: 3}) as writer:
        writer.write(3, {"loss": 1.5, "share_of_peak": math.nan})
        raise KeyError
    assert WRITTEN == [("mine", identity, 2, 3), (3, {"train/loss": 1.5}), ("closed", True)]


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_a_package_that_is_not_installed(bindings, tmp_path, monkeypatch, name):
    monkeypatch.setitem(sys.modules, name, None)
    run = parse(bindings, files=(f"option/{name}.gin",))
    assert [type(tracker).__name__.lower() for tracker in run.trackers] == ["tensorboard", f"{name}tracker"]
    with pytest.raises(
        UserError, match=rf'needs a package that is not installed \(.*\): pip install -e "\.\[{name}\]"'
    ):
        train(run, tmp_path)
