"""What a run shows of its metrics: `metrics.jsonl`, its trackers, such as TensorBoard, and the progress line."""

import functools
import json
import math
import os
import time
import uuid
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Self

import jax
from etils import epath
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from meliad_like.errors import UserError, refusals
from meliad_like.remote import copy_folder, is_remote, one_line, size_of, write_whole
from meliad_like.resumable import check_fields, read_json_lines
from meliad_like.trackers import TensorBoard, TrackedRun, TrackerConfig

FILE_NAME = "metrics.jsonl"
IDENTITY_NAME = "tracked_as"
UPLOAD_SECONDS = 30.0


class MetricsWriter:
    """Writes the metrics of a run on process 0, and does nothing on the others. Use it in a `with` statement."""

    def __init__(
        self,
        workdir: epath.PathLike,
        start_step: int,
        num_steps: int,
        trackers: Sequence[TrackerConfig] = (TensorBoard(),),
        settings: Mapping[str, Any] | None = None,
    ):
        """Rows of steps after `start_step`, from an earlier attempt, are dropped: these steps are repeated.

        Args:
          trackers: what else receives the metrics.
          settings: the run's config for the trackers, by the names with which gin binds it.
        """
        self._active = jax.process_index() == 0
        if not self._active:
            return
        self._start_step, self._num_steps, self._began, self._line = start_step, num_steps, time.perf_counter(), ""
        self._workdir, self._closing, self._uploaded = epath.Path(workdir), ExitStack(), time.monotonic()
        # Object stores can't append to a file: for them, files are written locally and copied from time to time.
        self._remote = is_remote(workdir)
        local = Path(self._closing.enter_context(TemporaryDirectory()) if self._remote else workdir)
        self._local = epath.Path(local)
        path = self._workdir / FILE_NAME
        rows = zip(read_json_lines(path)[0], read_rows(path))
        earlier = "".join(line for line, row in rows if row["step"] <= start_step)
        if self._remote or len(earlier.encode()) < size_of(path):
            write_whole(local / FILE_NAME, earlier)
        self._file = (local / FILE_NAME).open("a")
        name = os.path.basename(os.path.abspath(workdir))
        run = TrackedRun(local, name, functools.cache(self._identity), start_step, settings or {})
        self._trackers, self._open_trackers, self._failed = [], ExitStack(), False
        for config in trackers:
            self._trackers.append(tracker := config.open(run))
            self._open_trackers.callback(lambda tracker=tracker: tracker.close(self._failed))
        self.console = Console()
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
        for tracker in self._trackers:
            tracker.write(step, {f"{kind}/{name}": value for name, value in finite.items()})
        if time.monotonic() - self._uploaded > UPLOAD_SECONDS:
            self._flush()
            self.upload("this is tried again")

    def _identity(self) -> str:
        """A random name, or that of the attempt which this one resumes."""
        known = self._workdir / IDENTITY_NAME
        identity = known.read_text() if self._start_step and known.exists() else uuid.uuid4().hex[:12]
        (self._local / IDENTITY_NAME).write_text(identity)
        return identity

    def _flush(self) -> None:
        for tracker in self._trackers:
            tracker.flush()

    def upload(self, otherwise: str | None = None) -> None:
        """Copies the files to an object store. It is called before a save, so that no earlier metrics are lost.

        If the object store refuses the copy, this is a UserError, or a warning if `otherwise` says what happens next.
        """
        try:
            if self._active and self._remote:
                self._flush()
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
        self._line = f"step {step}/{self._num_steps}  {figures}  {_duration(seconds)} left{warnings}"
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
        return self

    def __exit__(self, kind, *_) -> None:
        if not self._active:
            return
        self._failed = kind is not None
        with self._closing, self._file:
            # Closed before the last upload, which takes the end of their files along.
            self._open_trackers.close()
            self._trackers.clear()
            self._progress.stop()
            if self.console.is_terminal and self._line:
                self.say(self._line)
            # After another error, a failure here must not hide it.
            self.upload(None if kind is None else "what was logged since the last copy is lost")


def read_rows(path: epath.Path) -> list[dict[str, Any]]:
    """The rows of a metrics file, one for each complete line. A line that is not a row is an error with its number."""
    rows = read_json_lines(path)[1]
    for number, row in enumerate(rows, 1):
        check_fields(row, {"step": int, "kind": str}, f"{path}:{number}")
    return rows


def _duration(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"
