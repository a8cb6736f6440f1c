"""Where metrics are shown: any registered kind gets them, and the services work offline."""

import dataclasses
import json
import math
import os
import re
import subprocess
import sys

import pytest
import tiny_run
from absl import logging
from tiny_run import parse, read_metrics, train

from meliad_like.config import check_workdir
from meliad_like.errors import UserError
from meliad_like.trackers import TRACKERS, TensorBoard, TrackedRun, Tracker, TrackerConfig, WandbTracker
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
    return [*tiny_run.make_bindings(tmp_path_factory.mktemp("documents")), "MeshConfig.data = 1"]


@pytest.mark.thorough
def test_any_kind_gets_the_metrics_of_the_run_and_of_its_resumption(bindings, tmp_path):
    WRITTEN.clear()
    tracked = [
        "RunConfig.trackers = ('tensorboard', 'list')",
        "ListTracker.comment = 'bound'",
        "TrainingConfig.evaluate_every = 2",
    ]
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


def test_all_trackers_of_a_run_know_it_by_the_same_identity(tmp_path):
    WRITTEN.clear()
    for start in (0, 1):
        with MetricsWriter(tmp_path, start, 2, (ListTracker(), ListTracker()), {KEY: 2}):
            pass
    assert len({identity for _, identity, *_ in (row for row in WRITTEN if row[0] != "closed")}) == 1


def test_a_narrow_terminal_shows_the_time_left_and_warnings_above_it(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "60")
    with MetricsWriter(tmp_path, 0, 500_000, ()) as writer:
        writer.show(7, "1.234 bits/byte  12,345 tokens/s  0.1 epochs")
        # Where orbax's warnings go.
        logging.get_absl_handler().python_handler.stream.write("a warning\n")
    shown = re.split(r"[\r\n]|\x1b\[[^a-zA-Z]*[a-zA-Z]", capsys.readouterr().out)
    assert "a warning" in shown
    assert any(len(line) <= 60 and re.fullmatch(r"step 7/500000  [\w, :]+ left  1.234 .*…", line) for line in shown)


def test_a_package_that_is_not_installed(bindings, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    run = parse(bindings, files=("option/wandb.gin",))
    assert [type(tracker) for tracker in run.trackers] == [TensorBoard, WandbTracker]
    with pytest.raises(UserError, match=r'wandb is not installed \(.*\): pip install "meliad_like\[wandb\]"'):
        train(run, tmp_path)


# A run of four steps that is resumed after the second one.
PROGRAM = """
import sys
from meliad_like.trackers import WandbTracker
from meliad_like.training.metrics import MetricsWriter

for start in (0, 2):
    with MetricsWriter(sys.argv[1], start, 4, (WandbTracker(),), {"TrainingConfig.num_steps": 4}) as writer:
        for step in (start + 1, start + 2):
            writer.write(step, {"loss": 1 / step})
            writer.write(step, {"bits_per_byte": 2.0}, kind="validation")
"""
EXPECTED = {step: {"train/loss": 1 / step, "validation/bits_per_byte": 2.0} for step in (1, 2, 3, 4)}


def test_weights_and_biases_offline(tmp_path):
    pytest.importorskip("wandb", reason='optional: pip install "meliad_like[wandb]"')
    workdir = tmp_path / "mine"
    workdir.mkdir()
    subprocess.run([sys.executable, "-c", PROGRAM, workdir], env=os.environ | {"WANDB_MODE": "offline"}, check=True)
    identity = (workdir / "tracked_as").read_text()
    from wandb.proto.wandb_internal_pb2 import Record

    found = {}
    for path in sorted((tmp_path / "mine").glob("wandb/offline-run-*/*.wandb")):
        # A log of records: after 7 bytes, each with a checksum (4 bytes), a length (2), a type (1) and its content.
        data = path.read_bytes()[7:]
        while data:
            end = 7 + int.from_bytes(data[4:6], "little")
            record, data = Record.FromString(data[7:end]), data[end:]
            kind = record.WhichOneof("record_type")
            if kind == "run":
                run = record.run
                assert (run.run_id, run.project, run.display_name) == (identity, "meliad_like", "mine")
                assert {item.key: item.value_json for item in run.config.update}["TrainingConfig.num_steps"] == "4"
            elif kind == "history":
                row = {
                    item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item
                }
                found[row["_step"]] = {name: value for name, value in row.items() if name[0] != "_"}
    assert found == EXPECTED
