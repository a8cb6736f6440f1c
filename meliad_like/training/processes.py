"""The processes of a run: they connect, reserve the working folder, agree on errors, and end together on a signal.

If a process does not start, or dies, jax's time-outs end the others.
"""

import errno
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable
from contextlib import ExitStack
from datetime import UTC, datetime
from pathlib import Path
from typing import Self

import jax
import numpy as np
from etils import epath
from jax.experimental import multihost_utils

from meliad_like.errors import UserError, one_line, refusals
from meliad_like.remote import is_remote
from meliad_like.resumable import locked

HEARTBEAT_SECONDS = 30
"""The time without a heartbeat of a process after which jax ends all others and names it in the log of process 0."""
SHUTDOWN_SECONDS = 60
"""The time that a process waits for the others before it exits, also after an error."""
LOCK_NAME = ".lock"
NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)
"""Errors of file systems without locks."""
EXIT_STATUS = 75
"""The status of a temporary failure in sysexits.h: the same command resumes the run."""


def initialize_distributed(
    coordinator_address: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    timeout_seconds: int = 300,
) -> None:
    """Connects this process to the others of the run; must be called before any use of jax's devices.

    Without arguments, jax detects the cluster (a TPU pod, SLURM, GKE or MPI). With all three arguments, the processes
    connect to `coordinator_address` ("host:port", where process 0 listens). jax ends the process if not all processes
    connect within `timeout_seconds`.
    """
    place = (coordinator_address, num_processes, process_id)
    if None in place and place != (None, None, None):
        raise UserError(
            f"coordinator_address={coordinator_address}, num_processes={num_processes} and process_id={process_id} "
            "must be given together, or not at all on a cluster that jax detects"
        )
    if coordinator_address is not None:
        port = coordinator_address.rpartition(":")[2]
        if not port.isdigit():
            raise UserError(f"coordinator_address={coordinator_address} must be host:port")
        if process_id == 0:
            _check_port(int(port))
        print(
            f"process {process_id} of {num_processes}: waiting up to {timeout_seconds} s for all processes at "
            f"{coordinator_address}",
            file=sys.stderr,
            flush=True,
        )
    # Used only by processes on CPUs; accelerators have their own collectives.
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    try:
        jax.distributed.initialize(
            *place,
            initialization_timeout=timeout_seconds,
            heartbeat_timeout_seconds=HEARTBEAT_SECONDS,
            shutdown_timeout_seconds=SHUTDOWN_SECONDS,
        )
    except ValueError as error:
        raise UserError(f"this machine is not part of a cluster that jax detects: {one_line(error)}") from None
    if jax.process_count() > 1 and jax.default_backend() == "cpu":
        # A process would load programs that another has compiled, whose collectives may come in another order.
        jax.config.update("jax_enable_compilation_cache", False)


def _check_port(port: int) -> None:
    # jax 0.10 crashes if it can't listen at the port.
    try:
        socket.create_server(("", port)).close()
    except OSError as error:
        raise UserError(
            f"process 0 can't listen at port {port} ({error.strerror}): choose another coordinator_address"
        ) from None


class Ownership(ExitStack):
    """Reserves the working folder for this training in a `with` statement, which all processes of a run must use.

    On a local disk the operating system locks a file, and releases it when the process ends in any way. An object store
    has no locks: each training writes its name there, and ends before its next checkpoint if it finds another name.
    """

    def __init__(self, workdir: epath.PathLike):
        super().__init__()
        self._workdir = epath.Path(workdir)
        self._path = self._workdir / LOCK_NAME
        # Precise enough to distinguish two trainings of one process.
        since = datetime.now(UTC).isoformat(timespec="microseconds")
        self._name = f"process {os.getpid()} on {socket.gethostname()}, since {since}"
        self._is_locked = False

    def __enter__(self) -> Self:
        """Raises a UserError if another training has the folder, or it can't be written to."""
        on_process_0(self._take, f"{self._workdir} can't be written to")
        return self

    def check(self) -> None:
        """Raises a UserError if another training has taken the folder. Call it before a checkpoint is saved."""
        on_process_0(self._compare, f"the same command resumes: {self._path} can't be read")

    def _take(self) -> None:
        self._workdir.mkdir(parents=True, exist_ok=True)
        if not is_remote(self._workdir):
            owner = self._owner() or "it has just begun"
            busy = f"another training is writing to {self._workdir}: {owner}; end that one, or choose another --workdir"
            try:
                self.enter_context(locked(Path(self._path), busy))
                self._is_locked = True
            except OSError as error:
                # The file system is then treated like an object store.
                if error.errno not in NO_LOCKS:
                    raise
        self._path.write_text(self._name)

    def _owner(self) -> str:
        # A damaged name must not keep a run from starting.
        return self._path.read_bytes().decode(errors="replace") if self._path.exists() else ""

    def _compare(self) -> None:
        if self._is_locked:
            return
        owner = self._owner() or f"{LOCK_NAME} has been deleted"
        if owner != self._name:
            raise UserError(
                f"another training has taken {self._workdir}: {owner}; this one ends, and saves nothing more"
            )


def on_process_0(work: Callable[[], None], refused: str) -> None:
    """Calls `work` on process 0. If it raises a UserError, all processes do; otherwise the others would wait for it.

    If a disk or bucket refuses it, the message begins with `refused`.
    """
    problem = None
    if jax.process_index() == 0:
        try:
            work()
        except UserError as error:
            problem = str(error)
        except refusals() as error:
            problem = f"{refused}: {one_line(error)}"
    if message := agreed(problem, "process 0 can't continue, and its output says why"):
        raise UserError(message)


def agreed(problem: str | None, elsewhere: str) -> str | None:
    """Broadcasts whether process 0 has a problem.

    Returns:
      In process 0 the problem, in all others the message `elsewhere`; None in all of them if there is no problem.
    """
    has_problem = multihost_utils.broadcast_one_to_all(np.asarray(problem is not None))
    return (problem or elsewhere) if has_problem else None


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
