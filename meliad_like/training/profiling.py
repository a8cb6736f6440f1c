"""`--profile_steps`: a trace of devices and host in some steps of a run, which xprof and Perfetto display."""

import re
import sys
import tempfile
from typing import Any, Self

import jax
from etils import epath

from meliad_like.errors import UserError
from meliad_like.remote import copy_folder

FOLDER = "profile"


def parse_steps(text: str) -> tuple[int, int]:
    """Parses `FIRST:LAST` into the first and the last step.

    Raises:
      UserError: the text has another form.
    """
    match = re.fullmatch(r"(\d+):(\d+)", text)
    if match is None or not 1 <= int(match[1]) <= int(match[2]):
        raise UserError(f"--profile_steps={text} must be FIRST:LAST, such as 10:15, with 1 <= FIRST <= LAST")
    return int(match[1]), int(match[2])


class Profiler:
    """Traces the requested steps in process 0. Use it in a `with` statement."""

    def __init__(self, workdir: epath.PathLike, steps: tuple[int, int] | None):
        """
        Args:
          workdir: working folder of the run; traces are written to its folder `profile`.
          steps: the first and the last step; None: no trace.
        """
        self._first, self._last = (sys.maxsize, 0) if steps is None or jax.process_index() else steps
        self.folder = epath.Path(workdir) / FOLDER
        self._local: tempfile.TemporaryDirectory | None = None

    def before(self, step: int, state: Any) -> None:
        """Call it before a step is dispatched, with the state from which the step starts."""
        if self._local is None and self._first <= step <= self._last:
            # Wait for earlier steps, which must not be in the trace.
            jax.block_until_ready(state)
            self._local = tempfile.TemporaryDirectory()
            jax.profiler.start_trace(self._local.name)

    def after(self, step: int, metrics: Any) -> bool:
        """Call it after a step is dispatched. Returns whether the trace was completed and written with this step."""
        if self._local is None or step < self._last:
            return False
        jax.block_until_ready(metrics)
        self._stop()
        return True

    def _stop(self) -> None:
        assert self._local is not None
        jax.profiler.stop_trace()
        copy_folder(epath.Path(self._local.name), self.folder)
        self._local.cleanup()
        self._local, self._first = None, sys.maxsize

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_) -> None:
        if self._local is not None:
            self._stop()
