"""SIGTERM: finish the step, save, and end with an exit status that says `start me again`."""

import signal
from typing import Self

import jax
from jax.experimental import multihost_utils

# sysexits.h: temporary failure, the same command will go on.
EXIT_STATUS = 75


class Preemption:
    """Notices SIGTERM while in a `with`; all processes of a run agree on the step after which they stop."""

    def __init__(self):
        self._received = False

    def reached(self, step: int) -> bool:
        """Whether to save and stop after this step. To be asked after every step, by all processes."""
        if jax.process_count() > 1:
            # jax's coordination service has its own handler for SIGTERM and picks a step that none has passed.
            return multihost_utils.reached_preemption_sync_point(step)
        return self._received

    def __enter__(self) -> Self:
        if jax.process_count() == 1:
            self._previous = signal.signal(signal.SIGTERM, self._note)
        return self

    def __exit__(self, *_) -> None:
        if jax.process_count() == 1:
            signal.signal(signal.SIGTERM, self._previous)

    def _note(self, *_) -> None:
        self._received = True
