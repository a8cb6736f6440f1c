"""`--profile_steps`: a trace of devices and host in some steps of a run, which xprof and Perfetto display."""

import re
import sys
from contextlib import ExitStack
from typing import Any, Self

import jax
from etils import epath

from meliad_like.errors import UserError
from meliad_like.remote import written_locally

FOLDER = "profile"


def parse_steps(text: str) -> tuple[int, int]:
    """Parses `FIRST:LAST` into the first and the last step. Raises a UserError if the text has another form."""
    match = re.fullmatch(r"(\d+):(\d+)", text)
    if match is None or not 1 <= int(match[1]) <= int(match[2]):
        raise UserError(f"--profile_steps={text} must be FIRST:LAST, such as 10:15, with 1 <= FIRST <= LAST")
    return int(match[1]), int(match[2])


class Profiler:
    """Traces the requested steps in process 0. Use it in a `with` statement."""

    def __init__(self, workdir: epath.PathLike, steps: tuple[int, int] | None):
        """Traces from the first to the last of `steps` (None: nothing), into the folder `profile` of the run's."""
        self._first, self._last = (sys.maxsize, 0) if steps is None or jax.process_index() else steps
        self.folder = epath.Path(workdir) / FOLDER
        self._tracing = ExitStack()
        self._is_tracing = False

    def before(self, step: int, state: Any) -> None:
        """Call it before a step is dispatched, with the state from which the step starts."""
        if not self._is_tracing and self._first <= step <= self._last:
            # Wait for earlier steps, which must not be in the trace.
            jax.block_until_ready(state)
            local = self._tracing.enter_context(written_locally(self.folder))
            self._tracing.enter_context(jax.profiler.trace(local))
            self._is_tracing = True

    def after(self, step: int, metrics: Any) -> bool:
        """Call it after a step is dispatched. Returns whether the trace was completed and written with this step."""
        if not self._is_tracing or step < self._last:
            return False
        jax.block_until_ready(metrics)
        self._tracing.close()
        self._is_tracing, self._first = False, sys.maxsize
        return True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_) -> None:
        self._tracing.close()
