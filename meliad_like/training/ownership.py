"""Ensures one training per working folder: a second one is refused, or takes over where files can't be locked."""

import errno
import os
import socket
from contextlib import ExitStack
from datetime import UTC, datetime
from pathlib import Path
from typing import Self

import jax
import numpy as np
from etils import epath
from jax.experimental import multihost_utils

from meliad_like.errors import UserError, refusals
from meliad_like.remote import is_remote, one_line
from meliad_like.resumable import locked

LOCK_NAME = ".lock"
# Errors of file systems without locks.
NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)


class Ownership:
    """Reserves the working folder for this training in a `with` statement, which all processes of a run must use.

    On a local disk the operating system locks a file, and releases it when the process ends in any way. An object store
    has no locks: each training writes its name there, and ends before its next checkpoint if it finds another name.
    """

    def __init__(self, workdir: epath.PathLike):
        self._workdir = epath.Path(workdir)
        self._path = self._workdir / LOCK_NAME
        # Precise enough to distinguish two trainings of one process.
        since = datetime.now(UTC).isoformat(timespec="microseconds")
        self._name = f"process {os.getpid()} on {socket.gethostname()}, since {since}"
        self._locked = ExitStack()
        self._is_locked = False

    def __enter__(self) -> Self:
        """
        Raises:
          UserError: another training has the folder, or it can't be written to.
        """
        problem = None
        if jax.process_index() == 0:
            try:
                problem = self._take()
            except refusals() as error:
                problem = f"{self._workdir} can't be written to: {one_line(error)}"
        _refuse(problem)
        return self

    def check(self) -> None:
        """Checks that the folder is still this training's. Call it before a checkpoint is saved.

        Raises:
          UserError: another training has taken the folder, or the file with the name can't be read.
        """
        problem = None
        if jax.process_index() == 0 and not self._is_locked:
            try:
                found = self._path.read_text() if self._path.exists() else f"{LOCK_NAME} has been deleted"
                if found != self._name:
                    problem = (
                        f"another training has taken {self._workdir}: {found}; this one ends, and saves nothing more"
                    )
            except refusals() as error:
                problem = f"{self._path} can't be read: {one_line(error)}; the same command resumes"
        _refuse(problem)

    def __exit__(self, *_) -> None:
        self._locked.close()

    def _take(self) -> str | None:
        """Takes the folder; returns the reason if that fails."""
        self._workdir.mkdir(parents=True, exist_ok=True)
        if not is_remote(self._workdir):
            try:
                self._locked.enter_context(locked(Path(self._path), busy="another training has it"))
                self._is_locked = True
            except UserError:
                return (
                    f"another training is writing to {self._workdir}: {self._path.read_text()}; "
                    "end that one, or choose another --workdir"
                )
            except OSError as error:
                # The file system is then treated like an object store.
                if error.errno not in NO_LOCKS:
                    raise
        self._path.write_text(self._name)
        return None


def agreed(problem: str | None, elsewhere: str) -> str | None:
    """The problem that process 0 has, if any; the other processes learn only that it has one, and get `elsewhere`."""
    met = problem is not None
    if jax.process_count() > 1:
        met = bool(multihost_utils.broadcast_one_to_all(np.asarray(met)))
    return (problem or elsewhere) if met else None


def _refuse(problem: str | None) -> None:
    """Ends all processes if process 0 has a problem; otherwise the others would wait for it."""
    if found := agreed(problem, "process 0 can't continue, and its output says why"):
        raise UserError(found)
