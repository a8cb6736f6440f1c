"""SIGTERM and Ctrl-C: finish the step, save, and exit with the status of a temporary failure."""

import os
import signal
import sys
import threading
from typing import Self

import jax
from jax.experimental import multihost_utils

# sysexits.h: a temporary failure; the same command resumes the run.
EXIT_STATUS = 75


class Preemption:
    """Handles SIGTERM and SIGINT in a `with` statement; all processes of a run stop after the same step.

    A second SIGINT ends the process at once. Outside of the main thread, where Python allows no signal handlers,
    SIGTERM is handled only if there are several processes.
    """

    def __init__(self):
        self.signal_name = "SIGTERM"
        """The signal that was received, for a message."""
        self._received = False
        self._previous = {}

    def reached(self, step: int) -> bool:
        """Whether to save and stop after this step. All processes must call it after every step."""
        if jax.process_count() > 1:
            # jax's coordination service handles SIGTERM and chooses a step that no process has passed.
            return multihost_utils.reached_preemption_sync_point(step)
        return self._received

    def __enter__(self) -> Self:
        if threading.current_thread() is not threading.main_thread():
            return self
        if jax.process_count() == 1:
            self._previous[signal.SIGTERM] = signal.signal(signal.SIGTERM, self._note)
        # Programs that a shell starts in the background ignore SIGINT.
        if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
            self._previous[signal.SIGINT] = signal.signal(signal.SIGINT, self._interrupt)
        return self

    def __exit__(self, *_) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _note(self, number: int, _) -> None:
        self._received, self.signal_name = True, signal.Signals(number).name

    def _interrupt(self, number: int, frame) -> None:
        # Python's own handler waits until a jax computation returns. But an interactive session must not be ended.
        signal.signal(number, self._previous[number] if hasattr(sys, "ps1") else signal.SIG_DFL)
        if jax.process_count() == 1:
            self._note(number, frame)
        else:
            os.kill(os.getpid(), signal.SIGTERM)
        # The signal may have interrupted a `print`, so `print` must not be used here.
        os.write(2, b"\nCtrl-C: stopping after this step; press it again to stop at once\n")
