"""Processes that train or measure times, several at the same time."""

import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from meliad_like.training.processes import EXIT_STATUS


def environment(side_by_side: bool) -> dict[str, str]:
    """The environment variables of a process that trains or measures times, perhaps with others at the same time."""
    # As in launch/environment.sh.
    variables = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1", **os.environ}
    if side_by_side:
        # Two runs at the same time with one thread each are faster than one after the other with two threads. On a
        # GPU, the first process would otherwise take all memory.
        variables["XLA_FLAGS"] = f"{variables.get('XLA_FLAGS', '')} --xla_cpu_multi_thread_eigen=false"
        variables.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    return variables


def run_processes(commands: Mapping[str, tuple[Sequence[str], Path]], max_processes: int) -> tuple[int, list[str]]:
    """Runs commands by name, each with the file that its output is appended to, and waits for all of them.

    At most `max_processes` run at the same time, in their `environment`. SIGTERM and Ctrl-C are passed on, so that
    every process saves and ends, and no further one is started.

    Returns:
      0, or `EXIT_STATUS` after a signal; and the commands that failed, with their files.
    """
    running: set[subprocess.Popen] = set()
    ended, failed = [], []
    stopping, began, variables = False, time.perf_counter(), environment(max_processes > 1)

    def stop(*_) -> None:
        nonlocal stopping
        stopping = True
        for process in list(running):
            process.terminate()

    def run(name: str) -> None:
        if stopping:
            return
        command, path = commands[name]
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a") as log:
            # In a session of its own, so that Ctrl-C reaches it as SIGTERM.
            process = subprocess.Popen(command, stdout=log, stderr=log, env=variables, start_new_session=True)
        running.add(process)
        if stopping:
            process.terminate()
        status = process.wait()
        running.discard(process)
        if not stopping:
            ended.append(name)
            if status:
                failed.append(f"{name} (see {path})")
            how, seconds = "failed" if status else "finished", time.perf_counter() - began
            print(f"{how} {name}, {len(ended)} of {len(commands)} after {seconds:,.0f} s", flush=True)

    previous = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        with ThreadPoolExecutor(max_processes) as pool:
            list(pool.map(run, commands))
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
    return EXIT_STATUS if stopping else 0, failed
