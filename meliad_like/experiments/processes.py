"""Processes that train or measure times, several at the same time."""

import os
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from meliad_like.training.processes import EXIT_STATUS


def environment(folder: Path, side_by_side: bool) -> dict[str, str]:
    """The environment variables of a process that trains or measures times, perhaps with others at the same time.

    The processes share a cache of compiled programs in the table's folder.
    """
    # As in launch/environment.sh.
    variables = {
        "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
        "JAX_COMPILATION_CACHE_DIR": str(folder.absolute() / "compiled"),
        **os.environ,
    }
    if side_by_side:
        # Two runs at the same time with one thread each are faster than one after the other with two threads. On a
        # GPU, the first process would otherwise take all memory.
        variables["XLA_FLAGS"] = f"{variables.get('XLA_FLAGS', '')} --xla_cpu_multi_thread_eigen=false"
        variables.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    return variables


def run_processes(
    commands: Mapping[str, tuple[Sequence[str], Path]],
    max_processes: int,
    variables: Mapping[str, str],
    on_end: Callable[[str, int], Any],
) -> int:
    """Runs commands in parallel, waits for all of them, and returns 0, or `EXIT_STATUS` after a signal.

    SIGTERM and Ctrl-C are passed on, so that every process saves and ends, and no further one is started.

    Args:
      commands: by name, each with the file that its output is appended to.
      max_processes: the most that run at the same time.
      variables: the environment.
      on_end: called with the name and exit status of each command that ended.
    """
    running: set[subprocess.Popen] = set()
    stopping = False

    def stop(*_) -> None:
        nonlocal stopping
        stopping = True
        for process in list(running):
            process.terminate()

    def run(name: str) -> None:
        if stopping:
            return
        command, log_path = commands[name]
        log_path.parent.mkdir(parents=True, exist_ok=True)
        with log_path.open("a") as log:
            # In a session of its own, so that Ctrl-C reaches it as SIGTERM.
            process = subprocess.Popen(
                command, stdout=log, stderr=subprocess.STDOUT, env=variables, start_new_session=True
            )
        running.add(process)
        if stopping:
            process.terminate()
        status = process.wait()
        running.discard(process)
        if not stopping:
            on_end(name, status)

    previous = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        with ThreadPoolExecutor(max_processes) as pool:
            list(pool.map(run, commands))
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
    return EXIT_STATUS if stopping else 0
