r"""Disturbs small trainings, resumes them, and compares what they leave with an undisturbed run, bit for bit.

    python benchmarks/soak.py                  # 20 runs, with each fault in turn
    python benchmarks/soak.py --processes=2    # of two processes that train together
    python benchmarks/soak.py --faults=kill --gin_file=mixer/gated_delta_rule.gin

A tiny model, in two stages, on the standard library's source. At a random moment, while the program starts, compiles,
steps or writes a checkpoint,

- `kill` kills a process;
- `terminate` sends SIGTERM to one, as does
- `bad_sector`, after which a file of the newest checkpoint can't be read (this needs a C compiler);
- `power_cut` copies the image of the disk that the run writes to; the run resumes on the copy (this needs root).

The same command then trains to the end, as a user's would. The last checkpoint and `metrics.jsonl` must be those of the
undisturbed run, but for the times in them.
"""

import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from signal import SIGKILL, SIGTERM
from typing import Any

import jax
import numpy as np
from absl import app, flags, logging

from meliad_like import config
from meliad_like.data.preparation import prepare
from meliad_like.run.setup import set_up
from meliad_like.run.step_log import MEASURED
from meliad_like.training.checkpoints import Checkpoints

FILES = ("size/tiny.gin", "task/standard_library.gin")
FAULTS = ("kill", "terminate", "power_cut", "bad_sector")
CHECKPOINT_EVERY = 10
BAD_SECTOR = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
static int is_bad(int file) {
  char link[64], path[4096] = "";
  snprintf(link, sizeof link, "/proc/self/fd/%d", file);
  return readlink(link, path, sizeof path - 1) > 0 && strstr(path, getenv("BAD_FILE")) && (errno = EIO);
}
ssize_t read(int file, void *to, size_t size) {
  return is_bad(file) ? -1 : ((ssize_t (*)(int, void *, size_t))dlsym(RTLD_NEXT, "read"))(file, to, size);
}
ssize_t pread64(int file, void *to, size_t size, off_t at) {
  return is_bad(file) ? -1 : ((ssize_t (*)(int, void *, size_t, off_t))dlsym(RTLD_NEXT, "pread64"))(file, to, size, at);
}
"""

FOLDER = flags.DEFINE_string("folder", "runs/soak", "Of the documents, the runs and their logs; a new one each time.")
TRIALS = flags.DEFINE_integer("trials", 20, "The number of runs.", lower_bound=1)
FAULT_NAMES = flags.DEFINE_list("faults", list(FAULTS), "Which faults, in turn.")
PROCESSES = flags.DEFINE_integer("processes", 1, "Of each training.", lower_bound=1)
NUM_STEPS = flags.DEFINE_integer("num_steps", 120, "Of each run.", lower_bound=8 * CHECKPOINT_EVERY)
SEED = flags.DEFINE_integer("seed", 0, "Decides the moments, and which process or file is hit.")
PATIENCE = flags.DEFINE_float("patience", 150.0, "Seconds in which all processes must end after a fault.")
GIN_FILE = flags.DEFINE_multi_string("gin_file", ["block_recurrent/fixed_skip.gin"], "What is trained, at size tiny.")
GIN_PARAM = flags.DEFINE_multi_string("gin_param", [], "Bindings of the training.")


def bindings(folder: Path) -> list[str]:
    return [
        f"ReaderConfig.store = '{folder / 'store'}'",
        f"TrainingConfig.num_steps = {NUM_STEPS.value}",
        # Many stops come between two logs, and between two checkpoints.
        "TrainingConfig.log_every = 7",
        f"TrainingConfig.checkpoint_every = {CHECKPOINT_EVERY}",
        f"StagesConfig.num_steps = ({NUM_STEPS.value // 2},)",
        "StagesConfig.segment_length = (32,)",
        *GIN_PARAM.value,
    ]


def start(folder: Path, workdir: Path, **environment: str) -> list[subprocess.Popen]:
    """Starts or resumes a training; every process appends to a log of its own."""
    with socket.create_server(("localhost", 0)) as server:
        port = server.getsockname()[1]
    command = [sys.executable, "-m", "meliad_like.train", f"--workdir={workdir}"]
    command += [f"--gin_file={file}" for file in (*FILES, *GIN_FILE.value)]
    command += [f"--gin_param={text}" for text in bindings(folder)]
    processes = []
    for process in range(PROCESSES.value):
        place = [f"--coordinator_address=localhost:{port}", f"--num_processes={PROCESSES.value}"]
        place = [*place, f"--process_id={process}", "--join_seconds=60"] if PROCESSES.value > 1 else []
        with (folder / f"{workdir.name}-{process}.log").open("a") as log:
            variables = {**os.environ, "JAX_COMPILATION_CACHE_DIR": str(folder / "compiled"), **environment}
            processes.append(subprocess.Popen([*command, *place], stdout=log, stderr=log, env=variables))
    return processes


def wait(processes: list[subprocess.Popen], patience: float) -> list[int]:
    """Waits until all have ended, and returns their statuses. Stops all if one has not after `patience` seconds."""
    deadline = time.monotonic() + patience
    try:
        return [process.wait(timeout=max(0.1, deadline - time.monotonic())) for process in processes]
    except subprocess.TimeoutExpired:
        for process in processes:
            process.kill()
        raise SystemExit(f"error: a process still ran after {patience:.0f} s") from None


def rows(workdir: Path) -> list[dict[str, Any]]:
    """The complete rows of `metrics.jsonl`, without times."""
    path = workdir / "metrics.jsonl"
    lines = path.read_text().split("\n")[:-1] if path.exists() else []
    return [{name: value for name, value in json.loads(line).items() if name not in MEASURED} for line in lines]


def train_to_the_end(folder: Path, workdir: Path, **environment: str) -> float:
    """Returns the seconds until the first row is there."""
    began, processes = time.monotonic(), start(folder, workdir, **environment)
    while not rows(workdir) and processes[0].poll() is None:
        time.sleep(0.05)
    seconds = time.monotonic() - began
    if any(statuses := wait(processes, patience=36_000)):
        raise SystemExit(f"error: {workdir.name} ended with {statuses}, see {folder}/{workdir.name}-*.log")
    return seconds


def result(run: config.RunConfig, workdir: Path) -> tuple[dict[str, bytes], list[dict[str, Any]]]:
    """The arrays of the last checkpoint, and the rows."""
    with Checkpoints(workdir / "checkpoints", read_only=True) as checkpoints:
        state, _ = checkpoints.restore(set_up(run)[-1].program.abstract_state, NUM_STEPS.value)
    arrays = {jax.tree_util.keystr(path): np.asarray(leaf).tobytes() for path, leaf in jax.tree.leaves_with_path(state)}
    return arrays, rows(workdir)


@contextmanager
def mounted(image: Path) -> Iterator[Path]:
    """The folder of a disk in an image file. A disk that was not unmounted is repaired by its journal."""
    place = image.with_suffix("")
    place.mkdir()
    subprocess.run(["mount", "-o", "loop", image, place], check=True)
    try:
        yield place
    finally:
        subprocess.run(["umount", place], check=True)


def disturb(fault: str, folder: Path, workdir: Path, startup: float, chance: np.random.Generator) -> dict[str, str]:
    """Starts a run and lets a fault end it; returns the environment in which it is to be resumed.

    Args:
      startup: seconds until the first row of a run that has to compile. About a fifth of the faults come before it.
    """
    first = 3 * CHECKPOINT_EVERY if fault == "bad_sector" else -NUM_STEPS.value // 5
    step, victim = chance.integers(first, int(0.8 * NUM_STEPS.value)), chance.integers(PROCESSES.value)
    processes = start(folder, workdir)
    time.sleep(chance.uniform(0, startup / 2) if step < 0 else 0)
    while step > 0 and processes[victim].poll() is None and not any(row["step"] >= step for row in rows(workdir)):
        time.sleep(0.01)
    time.sleep(chance.uniform(0, 0.2))
    if processes[victim].poll() is not None:
        raise SystemExit(f"error: it ended before the fault; see {folder}/{workdir.name}-{victim}.log")
    if fault == "power_cut":
        shutil.copyfile(folder / "disk.img", folder / "copy.img")
    hit = processes if fault == "power_cut" else [processes[victim]]
    for process in hit:
        process.send_signal(SIGKILL if fault in ("kill", "power_cut") else SIGTERM)
    wait(processes, PATIENCE.value)
    last = rows(workdir)[-1]["step"] if rows(workdir) else 0
    print(f"{workdir.name}: {fault} of process {victim} after a log of step {last}", flush=True)
    if fault != "bad_sector":
        return {}
    newest = max((path for path in (workdir / "checkpoints").glob("[0-9]*")), key=lambda path: int(path.name))
    file = chance.choice(sorted(map(str, filter(Path.is_file, newest.rglob("*")))))
    print(f"{workdir.name}: {file} can't be read", flush=True)
    return {"LD_PRELOAD": str(folder / "bad_sector.so"), "BAD_FILE": file}


def main(_) -> None:
    logging.set_verbosity(logging.WARNING)
    folder = Path(FOLDER.value).absolute()
    if folder.exists():
        raise SystemExit(f"error: {folder} is there already: choose another --folder")
    folder.mkdir(parents=True)
    command = ["cc", "-shared", "-fPIC", "-x", "c", "-", "-o", folder / "bad_sector.so", "-ldl"]
    if "bad_sector" in FAULT_NAMES.value:
        subprocess.run(command, input=BAD_SECTOR, text=True, check=True)
    run = config.parse([*FILES, *GIN_FILE.value], bindings(folder))
    prepare(run.source, run.vocabulary, run.data.store)
    startup = train_to_the_end(folder, folder / "undisturbed")
    expected = result(run, folder / "undisturbed")
    chance = np.random.default_rng(SEED.value)
    for trial in range(TRIALS.value):
        fault = FAULT_NAMES.value[trial % len(FAULT_NAMES.value)]
        name = f"trial_{trial}"
        with ExitStack() as disks:
            place = folder
            if fault == "power_cut":
                (folder / "disk.img").write_bytes(b"")
                os.truncate(folder / "disk.img", 100 << 20)
                subprocess.run(["mkfs.ext4", "-q", folder / "disk.img"], check=True)
                with mounted(folder / "disk.img") as disk:
                    environment = disturb(fault, folder, disk / name, startup, chance)
                place = disks.enter_context(mounted(folder / "copy.img"))
            else:
                environment = disturb(fault, folder, place / name, startup, chance)
            train_to_the_end(folder, place / name, **environment)
            for what, actual, undisturbed in zip(("arrays", "metrics"), result(run, place / name), expected):
                if actual != undisturbed:
                    raise SystemExit(f"error: {name}: {what} differ after {fault}")
        shutil.rmtree(folder / "disk", ignore_errors=True)
        shutil.rmtree(folder / "copy", ignore_errors=True)
    print(f"{TRIALS.value} of {TRIALS.value} runs left the checkpoint and the metrics of the undisturbed one")


if __name__ == "__main__":
    app.run(main)
