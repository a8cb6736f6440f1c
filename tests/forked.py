"""Commands and programs in processes of their own, which are forked from one that has imported jax and the package.

A process that begins afresh needs seconds for these imports, and the commands of most tests compute for less. The
commands of the launch scripts' tests begin afresh.
"""

import atexit
import contextlib
import gc
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import larger_rounding

from meliad_like.training import hardware

# Measuring the peak rate of a machine takes longer than the tests' trainings.
hardware.MEASURED_SIZE = 256

ROOT = Path(__file__).resolve().parent.parent

_forks = multiprocessing.get_context("forkserver")
_forks.set_forkserver_preload(
    [
        "matplotlib.pyplot",
        "tensorboardX",
        "meliad_like.conversion.pretrained",
        "meliad_like.experiments.experiment",
        "meliad_like.history.commands",
        "meliad_like.run.training",
    ]
)


class Process:
    """A process that executes `python WORDS`, where WORDS begins with -m or -c, with its output in files. By default it
    has one fake device: compiling for eight takes longer."""

    def __init__(self, words: Sequence[str], environment: dict[str, str] | None = None, cwd: Path = ROOT):
        self.words = words
        self._files = [tempfile.NamedTemporaryFile() for _ in range(2)]  # noqa: SIM115
        if environment is None:
            one = f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count=1"
            environment = {**os.environ, "XLA_FLAGS": one}
        arguments = words, dict(environment), str(cwd)
        self._process = _forks.Process(target=_execute, args=(*arguments, *(file.name for file in self._files)))
        self._process.start()

    def send_signal(self, number: int) -> None:
        os.kill(self._process.pid, number)

    def finish(self, timeout: float = 300) -> subprocess.CompletedProcess:
        """Waits for the end, and returns the exit status and the outputs as text."""
        self._process.join(timeout)
        with contextlib.ExitStack() as stack:
            outputs = [stack.enter_context(file).read().decode() for file in self._files]
        if self._process.exitcode is None:
            self._process.kill()
            raise subprocess.TimeoutExpired(self.words, timeout, *outputs)
        return subprocess.CompletedProcess(self.words, self._process.exitcode, *outputs)


def run(*words: str, environment: dict[str, str] | None = None, timeout: float = 300) -> subprocess.CompletedProcess:
    """Executes `python WORDS`, as `subprocess.run` does with captured text."""
    return Process(words, environment).finish(timeout)


def _execute(words: Sequence[str], environment: dict[str, str], cwd: str, *outputs: str) -> None:
    larger_rounding.install()
    # As tests/conftest.py.
    gc.freeze()
    gc.set_threshold(200_000)
    for number, name in enumerate(outputs, start=1):
        os.dup2(os.open(name, os.O_WRONLY), number)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(cwd)
    # Also where the tests run in the background, which ignores Ctrl-C, and hands that down.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    kind, what, *arguments = words
    sys.argv = [kind, *arguments]
    try:
        if kind == "-m":
            runpy.run_module(what, run_name="__main__", alter_sys=True)
        else:
            exec(compile(what, "<string>", "exec"), {"__name__": "__main__"})
    finally:
        # A process of multiprocessing ends without them, such as jax' farewell to other processes.
        atexit._run_exitfuncs()
