"""Files that a run rewrites at each start: after a kill or with a full disk, the old content is still there."""

import errno
import os
import re

import pytest

from meliad_like import config, remote
from meliad_like.errors import UserError
from meliad_like.remote import replacing, write_whole
from meliad_like.training import metrics
from meliad_like.training.metrics import MetricsWriter

LONGER = ["TrainingConfig.num_steps = 600000"]


@pytest.fixture
def full_disk(monkeypatch):
    def no_space(_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(remote.os, "fsync", no_space)


def written(folder):
    return {path.name: (path.read_bytes(), path.stat().st_ino) for path in folder.iterdir()}


def test_what_is_cut_off_is_as_before(tmp_path):
    write_whole(tmp_path / "file", "é")
    with pytest.raises(KeyboardInterrupt), replacing(tmp_path / "file") as file:
        file.write(b"half")
        raise KeyboardInterrupt
    assert [path.name for path in tmp_path.iterdir()] == ["file"] and (tmp_path / "file").read_text() == "é"


def test_a_disk_that_is_full_at_the_start_loses_neither_config_nor_metrics(tmp_path, full_disk, monkeypatch):
    with monkeypatch.context() as room:
        room.setattr(remote.os, "fsync", lambda _: None)
        config.save(config.parse(), tmp_path)
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "kind": "train"}\n{"step": 2, "kind": "train"}\n')
    before = written(tmp_path)
    with pytest.raises(OSError, match="No space left"):
        config.save(config.parse(gin_params=LONGER), tmp_path)
    with pytest.raises(OSError, match="No space left"):
        MetricsWriter(tmp_path, 1, 3)
    assert written(tmp_path) == before


def test_what_is_there_already_is_not_written_again(tmp_path):
    config.save(config.parse(), tmp_path)
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "kind": "train"}\n')
    before = written(tmp_path)
    config.save(config.parse(), tmp_path)
    with MetricsWriter(tmp_path, 1, 3):
        pass
    assert before.items() <= written(tmp_path).items()


@pytest.mark.parametrize("content", [b"", b"\xff", b'{"model": 3}'])
def test_a_damaged_config_is_named_with_the_way_out(tmp_path, content):
    path = tmp_path / "config.json"
    path.write_bytes(content)
    (tmp_path / "checkpoints" / "3").mkdir(parents=True)
    with pytest.raises(
        UserError, match=rf"^{re.escape(str(path))}: the saved config:? .*; if it is damaged, delete it: "
    ):
        config.check_workdir(config.parse(), tmp_path)
    path.unlink()
    config.save(config.parse(), tmp_path)


def test_rows_are_on_the_disk_before_their_checkpoint(tmp_path, monkeypatch):
    flushed = []
    monkeypatch.setattr(metrics, "flush", lambda path: flushed.append((path.name, os.path.getsize(path) > 9)))
    with MetricsWriter(tmp_path, 0, 3, ()) as writer:
        writer.write(1, {"loss": 1.0})
        writer.unlogged.add(2, {"loss": 0.5})
        unlogged = {"sums": {"loss": 1.0}, "weight": 2, "consecutive_skips": 0}
        assert writer.keep() == {"rows": 1, "unlogged": unlogged}
    assert flushed == [("metrics.jsonl", True), (tmp_path.name, True)]
