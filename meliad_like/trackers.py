"""Trackers of a run's metrics in addition to its `metrics.jsonl`: TensorBoard, Weights & Biases."""

import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from meliad_like.errors import UserError
from meliad_like.registry import Registry, resumable

TRACKERS = Registry("tracker")


class TrackedRun(NamedTuple):
    """The properties of a run that a tracker needs."""

    folder: Path
    """A local folder for files; where the working folder is in an object store, it is copied there."""
    name: str
    """The name of the working folder."""
    identity: Callable[[], str]
    """A function that returns a random name, the same when the run resumes; a file in the working folder holds it."""
    start_step: int
    """Steps done before; metrics of later ones, from an earlier attempt, are repeated."""
    settings: Mapping[str, Any]
    """The run's config, by the names with which gin binds it."""


class Tracker:
    """Receives the metrics of a run while it is trained, in process 0 alone."""

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Adds finite metrics of a step, with names such as `train/loss`; steps never decrease."""
        raise NotImplementedError

    def flush(self) -> None:
        """Writes everything into the run's folder that is to be copied to an object store."""

    def close(self, failed: bool) -> None:
        """Ends the run's entry; `failed` is whether the run ends with an error."""
        raise NotImplementedError


@dataclass(frozen=True)
class TrackerConfig:
    """The fields of all trackers; a run may resume with others."""

    def open(self, run: TrackedRun) -> Tracker:
        """Begins the run's entry, or resumes it.

        Raises a UserError if the tracker isn't installed or can't be reached.
        """
        raise NotImplementedError


@TRACKERS.register("tensorboard")
class TensorBoard(TrackerConfig):
    """Event files in the working folder."""

    def open(self, run: TrackedRun) -> Tracker:
        return _EventFile(run)


class _EventFile(Tracker):
    def __init__(self, run: TrackedRun):
        # Classes made when they are imported.
        from tensorboardX.proto import event_pb2, summary_pb2  # type: ignore
        from tensorboardX.record_writer import RecordWriter

        self._event, self._summary = event_pb2.Event, summary_pb2.Summary  # type: ignore
        # The thread of a `SummaryWriter` would print tracebacks when the disk is full.
        self._file = RecordWriter(str(run.folder / f"events.out.tfevents.{time.time():.0f}.{socket.gethostname()}"))
        self.flush = self._file.flush
        self._write(0, file_version="brain.Event:2")
        # Makes TensorBoard drop events of an earlier attempt from this step on.
        start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)  # type: ignore
        self._write(run.start_step + 1, session_log=start)

    def _write(self, step: int, **content: Any) -> None:
        self._file.write(self._event(step=step, wall_time=time.time(), **content).SerializeToString())

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        values = [self._summary.Value(tag=tag, simple_value=value) for tag, value in metrics.items()]
        self._write(step, summary=self._summary(value=values))

    def close(self, failed: bool) -> None:
        self._file.close()


@TRACKERS.register("wandb")
class WandbTracker(TrackerConfig):
    """Weights & Biases; with the environment variable `WANDB_MODE=offline`, files in the working folder instead."""

    project: str = resumable("meliad_like")
    """The project; the run has the name of its working folder."""

    def open(self, run: TrackedRun) -> Tracker:
        try:
            import wandb  # type: ignore  # optional
        except ImportError as error:
            raise UserError(f'the tracker wandb is not installed ({error}): pip install "meliad_like[wandb]"') from None
        names = {"project": self.project, "name": run.name, "id": run.identity()}
        try:
            return _WandbRun(wandb.init(**names, resume="allow", dir=run.folder, config=dict(run.settings)))
        except wandb.Error as error:
            advice = "run `wandb login`, or set WANDB_MODE=offline and `wandb sync` later"
            raise UserError(f"Weights & Biases: {error}; {advice}") from None


class _WandbRun(Tracker):
    def __init__(self, run: Any):
        self._run = run

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log(dict(metrics), step=step)

    def close(self, failed: bool) -> None:
        self._run.finish(exit_code=int(failed))
