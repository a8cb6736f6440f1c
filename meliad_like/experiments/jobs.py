"""A training and its evaluation for each row and seed, in a process and a folder of its own."""

import json
import math
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np

from meliad_like import config
from meliad_like.config import RunConfig
from meliad_like.config.stages import stages_of
from meliad_like.data.readers import label
from meliad_like.data.subset import beginnings
from meliad_like.data.token_store import TokenStore
from meliad_like.experiments.evaluations import Trained, by_document, by_protocol
from meliad_like.experiments.tables import Row
from meliad_like.mesh import make_mesh
from meliad_like.models.model import Model
from meliad_like.resumable import locked, write_json
from meliad_like.run.opening import open_checkpoint
from meliad_like.run.training import train
from meliad_like.sizes import sizes_of
from meliad_like.training import preemption
from meliad_like.training.metrics import FILE_NAME as METRICS_NAME

RESULT_NAME = "result.json"
LOG_NAME = "log.txt"


@dataclass(frozen=True)
class Job:
    """A row with a seed, and the folder of its results."""

    row: Row
    seed: int
    run: RunConfig
    """The run that is trained."""
    evaluated: RunConfig
    """The run that is evaluated: the same, but for rows whose training is that of another row."""
    workdir: Path
    by_protocol: bool = False
    """See `Table.by_protocol`."""
    max_tokens: int | None = None
    """The most tokens to evaluate, of the beginnings of documents; None: the whole split."""
    timed_tokens: int = 0
    """See `Scale.timed_tokens`."""
    load_dir: str | None = None
    """Checkpoint folder whose parameters training begins with."""

    def finished(self, split: str) -> bool:
        """Whether it is trained and evaluated on a split.

        Raises:
          UserError: the folder holds another run.
        """
        config.check_workdir(self.run, self.workdir)
        result = self.result
        done = result["splits"].get(split, {"max_tokens": math.nan})
        return done.get("max_tokens") == self.max_tokens and result["num_steps"] >= self.run.training.num_steps

    @property
    def result(self) -> dict[str, Any]:
        """The figures that `train_and_evaluate` has written so far."""
        path = self.workdir / result_name(self.row)
        return json.loads(path.read_text()) if path.exists() else {"splits": {}}


def result_name(row: Row) -> str:
    """The name of the file with a row's figures, in the folder of its run."""
    return f"{row.name}.json" if row.trained_as else RESULT_NAME


def facts(run: RunConfig, vocabulary_size: int) -> dict[str, Any]:
    """Facts about a run that follow from its config."""
    model, num_steps, stages = Model(run.model, vocabulary_size), run.training.num_steps, stages_of(run)
    parameters = model.num_parameters
    own = {"num_states": 0}
    own |= {name: getattr(run.model, name) for name in ("cache_length", "overlap") if hasattr(run.model, name)}
    for mechanism in getattr(run.model, "mechanisms", ()):
        own |= {field.name: getattr(mechanism, field.name) for field in sizes_of(mechanism, "length")}
    embedding = model.abstract_params.get("embedding", model.abstract_params.get("vocabulary"))
    shares = [(stage.last_step - stage.first_step) / num_steps for stage in stages]
    return own | {
        "segment_length": run.data.segment_length,
        "window_length": run.model.window_length,
        "share_of_first_stage": shares[0] if len(stages) > 1 else 0.0,
        "tokens_per_step": run.data.tokens_per_step,
        "num_steps": num_steps,
        "vocabulary_size": vocabulary_size,
        "parameters": parameters,
        "parameters_without_embedding": parameters - sum(leaf.size for leaf in jax.tree.leaves(embedding)),
        "training_flops_per_token": sum(
            share * Model(stage.run.model, vocabulary_size).training_flops_per_token
            for share, stage in zip(shares, stages)
        ),
    }


def train_and_evaluate(job: Job, split: str) -> int:
    """Trains (or resumes) in this process, evaluates documents of a split, and adds the figures to the row's result.

    Returns:
      The exit status: 0, or `preemption.EXIT_STATUS` after SIGTERM with everything saved.

    Raises:
      UserError: as `train`; or the split has no documents, or another process is working in this folder.
    """
    job.workdir.mkdir(parents=True, exist_ok=True)
    began = time.perf_counter()
    with locked(job.workdir / "lock", f"another process is working in {job.workdir}: wait for it, or end it"):
        store = TokenStore(job.run.data.store)
        whole = store.split(split)
        if status := train(job.run, job.workdir, job.load_dir):
            return status
        mesh = make_mesh(job.run.mesh)
        best = job.workdir / "best"
        opened = open_checkpoint(best if job.run.training.keep_best else job.workdir, mesh=mesh)
        vocabulary = opened.vocabulary
        documents = whole if job.max_tokens is None else beginnings(whole, vocabulary, job.max_tokens)
        model = Model(job.evaluated.model, vocabulary.size)
        trained = Trained(job.evaluated, model, opened.params, vocabulary, mesh, store, split, documents)
        if job.by_protocol:
            figures = by_protocol(trained, job.timed_tokens)
        else:
            path = job.workdir / (f"{split}_{job.row.name}.json" if job.row.trained_as else f"{split}.json")
            figures = by_document(trained, path)
        finite = {name: value if math.isfinite(value) else None for name, value in figures.items()}
        num_steps = job.run.training.num_steps
        others = job.result["splits"] if num_steps == job.result.get("num_steps") else {}
        result = facts(job.evaluated, model.vocabulary_size) | {
            "seed": job.seed,
            "device": device_name(),
            "seconds": time.perf_counter() - began,
            "logged_tokens_per_second": _logged_speed(job.workdir),
            "splits": others | {split: finite | {"max_tokens": job.max_tokens}},
        }
        write_json(job.workdir / result_name(job.row), result)
    return 0


def _logged_speed(folder: Path) -> float:
    """Tokens per second of a training step: the median of the logged ones."""
    lines = map(json.loads, (folder / METRICS_NAME).read_text().splitlines())
    kinds = [label("train", leaks) for leaks in (False, True)]
    return float(np.median([line["tokens_per_second"] for line in lines if line["kind"] in kinds]))


def device_name() -> str:
    """The name of this machine's device; for a CPU its number of cores."""
    device = jax.devices()[0]
    return f"CPU with {os.cpu_count()} cores" if device.platform == "cpu" else device.device_kind


def environment(folder: Path, side_by_side: bool) -> dict[str, str]:
    """The environment variables of a process that trains or measures times.

    Args:
      folder: of the table, with the cache of compiled programs that all processes share.
      side_by_side: whether other such processes run on this machine at the same time.
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
    """Runs commands in parallel, and waits for all of them.

    SIGTERM and Ctrl-C are passed on, so that every process saves and ends, and no further one is started.

    Args:
      commands: by name, each with the file that its output is appended to.
      max_processes: the most that run at the same time.
      variables: the environment.
      on_end: called with the name and exit status of each command that ended.

    Returns:
      0, or `preemption.EXIT_STATUS` after a signal.
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
    return preemption.EXIT_STATUS if stopping else 0
