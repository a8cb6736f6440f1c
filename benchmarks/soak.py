r"""Kills a training repeatedly, and compares its final state with that of an undisturbed run, bit for bit.

    python benchmarks/soak.py                  # 20 times kill -9, one process
    python benchmarks/soak.py --processes=2    # one of two processes that train together
    python benchmarks/soak.py --gin_file=mixer/gated_delta_rule.gin

A tiny model, in two stages, on the standard library's source, with a checkpoint every few steps: it is killed
while the program starts, compiles, steps or writes a checkpoint. The same command then resumes, as a user's would.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
from absl import app, flags

from meliad_like import config
from meliad_like.data.preparation import prepare
from meliad_like.data.token_store import STORE_NAME
from meliad_like.run.opening import open_checkpoint

FILES = ("size/tiny.gin", "task/standard_library.gin")

FOLDER = flags.DEFINE_string("folder", "runs/soak", "Of the documents, the runs and their logs; a new one each time.")
KILLS = flags.DEFINE_integer("kills", 20, "How often.", lower_bound=1)
PROCESSES = flags.DEFINE_integer("processes", 1, "Of the training; one of them is killed.", lower_bound=1)
NUM_STEPS = flags.DEFINE_integer("num_steps", 4000, "Of the whole run.", lower_bound=4)
SEED = flags.DEFINE_integer("seed", 0, "Decides the moments, and who is killed.")
PATIENCE = flags.DEFINE_float("patience", 150.0, "Seconds in which the others must notice, and end.")
GIN_FILE = flags.DEFINE_multi_string("gin_file", ["block_recurrent/fixed_skip.gin"], "What is trained, at size tiny.")
GIN_PARAM = flags.DEFINE_multi_string("gin_param", [], "Bindings of the training.")


def bindings(folder: Path) -> list[str]:
    return [
        f"ReaderConfig.store = '{folder / 'store'}'",
        f"TrainingConfig.num_steps = {NUM_STEPS.value}",
        "TrainingConfig.log_every = 1",
        "TrainingConfig.checkpoint_every = 10",
        f"StagesConfig.num_steps = ({NUM_STEPS.value // 2},)",
        "StagesConfig.segment_length = (32,)",
        *GIN_PARAM.value,
    ]


def start(folder: Path, name: str) -> list[subprocess.Popen]:
    """Starts or resumes the training; every process appends to a log of its own."""
    with socket.create_server(("localhost", 0)) as server:
        port = server.getsockname()[1]
    command = [sys.executable, "-m", "meliad_like.train", f"--workdir={folder / name}"]
    command += [f"--gin_file={file}" for file in (*FILES, *GIN_FILE.value)]
    command += [f"--gin_param={text}" for text in bindings(folder)]
    started = []
    for process in range(PROCESSES.value):
        place = [f"--coordinator_address=localhost:{port}", f"--num_processes={PROCESSES.value}"]
        place = [*place, f"--process_id={process}", "--join_seconds=60"] if PROCESSES.value > 1 else []
        with (folder / f"{name}-{process}.log").open("a") as log:
            environment = {**os.environ, "JAX_COMPILATION_CACHE_DIR": str((folder / "compiled").absolute())}
            started.append(subprocess.Popen([*command, *place], stdout=log, stderr=log, env=environment))
    return started


def steps_done(workdir: Path) -> int:
    metrics = workdir / "metrics.jsonl"
    return metrics.read_text().count('"kind": "train"') if metrics.exists() else 0


def end_of(processes: list[subprocess.Popen], patience: float) -> float:
    """Seconds until all have ended.

    Raises:
      SystemExit: one of them has not, after `patience` seconds.
    """
    began = time.monotonic()
    for process in processes:
        try:
            process.wait(timeout=max(0.1, patience - (time.monotonic() - began)))
        except subprocess.TimeoutExpired:
            for each in processes:
                each.kill()
            raise SystemExit(f"error: process {processes.index(process)} still ran after {patience:.0f} s") from None
    return time.monotonic() - began


def finish(folder: Path, name: str) -> tuple[float, float]:
    """Lets the training end; returns the seconds until the first new step is logged, and the seconds after it."""
    before, began, processes = steps_done(folder / name), time.monotonic(), start(folder, name)
    while steps_done(folder / name) == before and processes[0].poll() is None:
        time.sleep(0.05)
    first = time.monotonic() - began
    rest = end_of(processes, patience=36_000)
    if any(process.returncode for process in processes):
        raise SystemExit(f"error: {name} ended with {[p.returncode for p in processes]}, see {folder}/{name}-*.log")
    return first, rest


def kill_once(folder: Path, startup: float, chance: np.random.Generator) -> None:
    """Starts, kills one process at a random moment, and waits for the others.

    Args:
      startup: seconds until the first step: a quarter of the kills come before.

    Raises:
      SystemExit: the training was done before.
    """
    workdir, victim = folder / "killed", chance.integers(PROCESSES.value)
    before, began, processes = steps_done(workdir), time.monotonic(), start(folder, "killed")
    if chance.random() < 0.25:
        moment = began + chance.uniform(0, startup)
        # The machine may have become faster since.
        while time.monotonic() < moment and steps_done(workdir) <= before:
            time.sleep(0.01)
    else:
        # Together the tries get about two thirds of the way.
        target = before + chance.integers(int(2 * NUM_STEPS.value / (1.5 * KILLS.value)))
        while steps_done(workdir) < target and processes[victim].poll() is None:
            time.sleep(0.01)
        time.sleep(chance.uniform(0, 0.2))
    if processes[victim].poll() is not None:
        raise SystemExit(f"error: it ended before it was killed; see {folder}/killed-{victim}.log")
    processes[victim].send_signal(signal.SIGKILL)
    seconds = time.monotonic() - began
    noticed = end_of(processes, PATIENCE.value)
    others = f", the others ended {noticed:.1f} s later" if PROCESSES.value > 1 else ""
    print(f"killed process {victim} after {seconds:.1f} s at {steps_done(workdir)} steps{others}", flush=True)


def losses(workdir: Path) -> list[tuple[int, float]]:
    lines = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    return [(line["step"], line["loss"]) for line in lines if line["kind"] == "train"]


def main(_) -> None:
    folder = Path(FOLDER.value)
    if folder.exists():
        raise SystemExit(f"error: {folder} is there already: choose another --folder")
    folder.mkdir(parents=True)
    run = config.parse([*FILES, *GIN_FILE.value], bindings(folder))
    if not (Path(run.data.store) / STORE_NAME).exists():
        prepare(run.source, run.vocabulary, run.data.store)
    finish(folder, "undisturbed")
    # What is compiled now comes from the cache, as it will in every try.
    startup, stepping = finish(folder, "again")
    print(f"undisturbed: {startup:.1f} s until the first step, then {stepping:.1f} s", flush=True)
    chance, kills = np.random.default_rng(SEED.value), KILLS.value
    for _ in range(kills):
        kill_once(folder, startup, chance)
    finish(folder, "killed")
    states = [open_checkpoint(folder / name) for name in ("undisturbed", "killed")]
    same = jax.tree.map(lambda x, y: np.asarray(x).tobytes() == np.asarray(y).tobytes(), *(s.params for s in states))
    assert states[0].step == states[1].step == NUM_STEPS.value
    if not all(jax.tree.leaves(same)) or losses(folder / "undisturbed") != losses(folder / "killed"):
        raise SystemExit(f"error: after {kills} kills parameters or losses differ")
    print(f"{kills} of {kills} kills survived: parameters of step {NUM_STEPS.value} and all losses are the same bits")


if __name__ == "__main__":
    app.run(main)
