"""The outputs of a run's metrics: `metrics.jsonl`, its trackers, such as TensorBoard, and the progress line."""

import functools
import json
import math
import os
import sys
import time
import uuid
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Self

import jax
from absl import logging
from etils import epath
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from meliad_like.errors import UserError, one_line, refusals
from meliad_like.remote import copy_folder, flush, is_remote, size_of, write_whole
from meliad_like.resumable import check_fields, parse_json
from meliad_like.trackers import TensorBoard, TrackedRun, TrackerConfig

FILE_NAME = "metrics.jsonl"
IDENTITY_NAME = "tracked_as"
UPLOAD_SECONDS = 30.0


@dataclass
class Unlogged:
    """The sums over the steps since the last log; checkpoints carry them to the next row of a resumed run."""

    sums: dict[str, float] = field(default_factory=dict)
    weight: int = 0
    consecutive_skips: int = 0
    """The number of steps, up to the last one, that were not finite; a log leaves it as it is."""

    def add(self, weight: int, figures: Mapping[str, Any]) -> None:
        """Adds the figures of a step, such as averages over `weight` targets."""
        for name, value in figures.items():
            self.sums[name] = self.sums.get(name, 0.0) + float(value) * weight
        self.weight += weight

    def take(self) -> tuple[dict[str, float], int]:
        """The averages of the steps, none without weight, and the weight. New sums begin."""
        averages = {name: total / self.weight for name, total in self.sums.items() if self.weight}
        weight, self.sums, self.weight = self.weight, {}, 0
        return averages, weight


class MetricsWriter:
    """Writes the metrics of a run on process 0, and does nothing on the others. Use it in a `with` statement."""

    def __init__(
        self,
        workdir: epath.PathLike,
        start_step: int,
        num_steps: int,
        trackers: Sequence[TrackerConfig] = (TensorBoard(),),
        settings: Mapping[str, Any] | None = None,
        logged: Mapping[str, Any] | None = None,
    ):
        """Rows of steps after `start_step`, from an earlier attempt, are dropped: these steps are repeated.

        Args:
          trackers: what else receives the metrics.
          settings: the run's config for the trackers, by the names with which gin binds it.
          logged: what `keep` returned for the checkpoint of `start_step`. Where the file is damaged or has fewer rows,
            a line says so, and the readable rows stay.
        """
        self._active = jax.process_index() == 0
        self.num_rows = 0
        """The number of rows in the file, in process 0."""
        logged = logged or {"rows": 0, "unlogged": {}}
        self.unlogged = Unlogged(**logged["unlogged"])
        """The steps since the last row, in every process."""
        if not self._active:
            return
        self._start_step, self._num_steps, self._began, self._line = start_step, num_steps, time.perf_counter(), ""
        self._workdir, self._closing, self._uploaded = epath.Path(workdir), ExitStack(), time.monotonic()
        # Object stores can't append to a file: for them, files are written locally and copied from time to time.
        self._remote = is_remote(workdir)
        self._stream: Any = None
        local = Path(self._closing.enter_context(TemporaryDirectory()) if self._remote else workdir)
        self._local = epath.Path(local)
        path = self._workdir / FILE_NAME
        self.console = Console()
        rows, problem = _readable_rows(path)
        earlier = [line for line, row in rows if row["step"] <= start_step]
        self.num_rows = len(earlier)
        if problem or self.num_rows < logged["rows"]:
            more = f"{self.num_rows} of {max(logged['rows'], self.num_rows)} rows until step {start_step} are kept"
            self.say(f"warning: {path} is damaged ({problem or 'rows are missing'}): {more}")
        if self._remote or problem or sum(map(len, earlier)) < size_of(path):
            write_whole(local / FILE_NAME, b"".join(earlier))
        self._file = (local / FILE_NAME).open("a")
        name = os.path.basename(os.path.abspath(workdir))
        run = TrackedRun(local, name, functools.cache(self._identity), start_step, settings or {})
        self._trackers = [config.open(run) for config in trackers]
        self._progress = Progress(
            BarColumn(bar_width=20), TextColumn("{task.description}"), console=self.console, transient=True
        )
        self._task = self._progress.add_task(
            "compiled, waiting for the first step", total=num_steps, completed=start_step
        )

    def write(self, step: int, metrics: Mapping[str, float], kind: str = "train") -> None:
        """Adds the metrics of a step: of `train`, or of the evaluated split.

        Infinite numbers and NaN, which JSON doesn't have, are written as null.
        """
        if not self._active:
            return
        finite = {name: value for name, value in metrics.items() if math.isfinite(value)}
        self._file.write(json.dumps({"step": step, "kind": kind, **dict.fromkeys(metrics), **finite}) + "\n")
        self._file.flush()
        self.num_rows += 1
        for tracker in self._trackers:
            tracker.write(step, {f"{kind}/{name}": value for name, value in finite.items()})
        if time.monotonic() - self._uploaded > UPLOAD_SECONDS:
            self.upload("this is tried again")

    def _identity(self) -> str:
        """A random name, or the name of the attempt which this one resumes."""
        known = self._workdir / IDENTITY_NAME
        identity = known.read_text() if self._start_step and known.exists() else uuid.uuid4().hex[:12]
        (self._local / IDENTITY_NAME).write_text(identity)
        return identity

    def keep(self) -> dict[str, Any]:
        """Lets all rows reach the disk or the object store; returns the part of the log that a checkpoint saves."""
        if self._active:
            flush(self._local / FILE_NAME)
            flush(self._local)
        self.upload()
        return {"rows": self.num_rows, "unlogged": asdict(self.unlogged)}

    def upload(self, otherwise: str | None = None) -> None:
        """Lets the trackers write their files, and copies all files to an object store.

        If the object store refuses the copy, this is a UserError, or a warning if `otherwise` says what happens next.
        """
        if not self._active:
            return
        for tracker in self._trackers:
            tracker.flush()
        try:
            if self._remote:
                copy_folder(self._local, self._workdir)
        except refusals() as error:
            refused = f"the metrics can't be copied to {self._workdir}: {one_line(error)}"
            if otherwise is None:
                raise UserError(f"{refused}; the same command resumes from the last checkpoint") from error
            self.say(f"warning: {refused}; {otherwise}")
        finally:
            # These are raised after a minute of retries.
            self._uploaded = time.monotonic()

    def start_clock(self, step: int) -> None:
        """Starts the clock for estimates of the remaining time; it is called after compilation."""
        self._start_step, self._began = step, time.perf_counter()

    def show(self, step: int, figures: str, warnings: str = "") -> None:
        """Shows progress: an updated line on a terminal, otherwise one line per call."""
        if not self._active:
            return
        seconds = (time.perf_counter() - self._began) * (self._num_steps - step) / max(step - self._start_step, 1)
        # A narrow terminal cuts the end off.
        self._line = f"step {step}/{self._num_steps}  {timedelta(seconds=round(seconds))} left  {figures}{warnings}"
        if self.console.is_terminal:
            self._progress.update(self._task, completed=step, description=self._line)
        else:
            print(self._line, flush=True)

    def say(self, text: str) -> None:
        """Prints a message above the progress line."""
        if self._active:
            self.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def __enter__(self) -> Self:
        if self._active and self.console.is_terminal:
            self._progress.start()
            # The progress bar prints what is written to sys.stderr above itself; absl has the stream of before.
            self._stream = logging.get_absl_handler().python_handler.setStream(sys.stderr)
        return self

    def __exit__(self, kind, *_) -> None:
        if not self._active:
            return
        with self._closing, self._file:
            # Closed before the last upload, which takes the end of their files along.
            with ExitStack() as open_trackers:
                for tracker in self._trackers:
                    open_trackers.callback(tracker.close, kind is not None)
            self._trackers.clear()
            if self._stream is not None:
                self._progress.stop()
                logging.get_absl_handler().python_handler.setStream(self._stream)
                if self._line:
                    self.say(self._line)
            # After another error, a failure here must not hide it.
            self.upload(None if kind is None else "what was logged since the last copy is lost")


def read_rows(path: epath.Path) -> list[dict[str, Any]]:
    """The rows of a metrics file, one for each complete line. A line that is not a row is an error with its number."""
    rows, problem = _readable_rows(path)
    if problem:
        raise UserError(f"{path} is damaged: {problem}")
    return [row for _, row in rows]


def _readable_rows(path: epath.Path) -> tuple[list[tuple[bytes, dict[str, Any]]], str | None]:
    """The complete lines of a metrics file that are rows, with these, and the first problem with the others."""
    text, problem, rows = b"", None, []
    try:
        text = path.read_bytes() if path.exists() else b""
    except OSError as error:
        problem = f"cannot read it: {error.strerror}"
    # A killed process has not completed the last line.
    for number, line in enumerate(text.split(b"\n")[:-1], 1):
        try:
            row = parse_json(line, f"line {number}")
            check_fields(row, {"step": int, "kind": str}, f"line {number}")
            rows.append((line + b"\n", row))
        except UserError as error:
            problem = problem or str(error)
    return rows, problem
