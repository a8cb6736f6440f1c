"""One training and its evaluation for each row and seed, in a process and a folder of its own."""

import fcntl
import json
import math
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from meliad_like import config
from meliad_like.config import RunConfig
from meliad_like.data.token_store import TokenStore
from meliad_like.errors import UserError
from meliad_like.evaluation import report
from meliad_like.evaluation.perplexity import Evaluator
from meliad_like.experiments.tables import Row
from meliad_like.models.decoder_config import DecoderConfig
from meliad_like.models.model import Model
from meliad_like.training import preemption
from meliad_like.training.loop import train
from meliad_like.training.mesh import make_mesh
from meliad_like.training.opening import open_checkpoint

RESULT_NAME = "result.json"
LOG_NAME = "log.txt"


@dataclass(frozen=True)
class Job:
    """A row with a seed, and where it leaves what it finds."""

    row: Row
    seed: int
    run: RunConfig
    workdir: Path

    def finished(self, split: str) -> bool:
        """Whether it is trained and evaluated on a split.

        Raises:
          UserError: the folder holds another run.
        """
        config.check_workdir(self.run, self.workdir)
        result = self.result
        return split in result["splits"] and result["num_steps"] >= self.run.training.num_steps

    @property
    def result(self) -> dict[str, Any]:
        """What `train_and_evaluate` has written so far."""
        path = self.workdir / RESULT_NAME
        return json.loads(path.read_text()) if path.exists() else {"splits": {}}


def facts(run: RunConfig, model: Model) -> dict[str, Any]:
    """What is known of a run before its first step."""
    assert isinstance(run.model, DecoderConfig)  # as all rows of the tables
    parameters = model.num_parameters
    return {
        "segment_length": run.data.segment_length,
        "window_length": run.model.window_length,
        "num_states": run.model.num_states if run.model.recurrent_layers else 0,
        "tokens_per_step": run.data.tokens_per_step,
        "num_steps": run.training.num_steps,
        "vocabulary_size": model.vocabulary_size,
        "parameters": parameters,
        "parameters_without_embedding": parameters - model.abstract_params["embedding"].size,
        "training_flops_per_token": model.training_flops_per_token,
    }


def train_and_evaluate(job: Job, split: str) -> int:
    """Trains (or goes on) in this process, evaluates all documents of a split, and adds them to `result.json`.

    Returns:
      The exit status: 0, or `preemption.EXIT_STATUS` after SIGTERM with everything saved.

    Raises:
      UserError: as `train`; or the split has no documents, or another process is at work in this folder.
    """
    job.workdir.mkdir(parents=True, exist_ok=True)
    began = time.perf_counter()
    with _alone_in(job.workdir):
        documents = TokenStore(job.run.data.store).split(split)
        if status := train(job.run, job.workdir):
            return status
        mesh = make_mesh(job.run.mesh)
        opened = open_checkpoint(job.workdir, mesh=mesh)
        evaluator = Evaluator(
            opened.model,
            documents,
            mesh,
            name=split,
            segment_length=job.run.data.segment_length,
            max_lanes=job.run.data.num_lanes,
            loss_slice=job.run.training.loss_slice,
        )
        evaluation = evaluator(opened.params)
        report.write(evaluation, job.workdir / f"{split}.json")
        figures = {name: getattr(evaluation, name) for name in report.FIGURES}
        finite = {name: value if math.isfinite(value) else None for name, value in figures.items()}
        others = job.result["splits"] if opened.step == job.result.get("num_steps") else {}
        result = facts(job.run, opened.model) | {
            "seed": job.seed,
            "device": device_name(),
            "seconds": time.perf_counter() - began,
            "splits": others | {split: finite},
        }
        write_json(job.workdir / RESULT_NAME, result)
    return 0


def device_name() -> str:
    """Of the device that computes here; of a CPU also how many cores there are."""
    device = jax.devices()[0]
    return f"CPU with {os.cpu_count()} cores" if device.platform == "cpu" else device.device_kind


def write_json(path: Path, content: Any) -> None:
    """All of it or nothing, whenever the process ends."""
    incomplete = path.with_name(f"{path.name}.incomplete")
    incomplete.write_text(json.dumps(content, indent=2) + "\n")
    incomplete.rename(path)


@contextmanager
def _alone_in(folder: Path) -> Iterator[None]:
    with (folder / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(f"another process is at work in {folder}: wait for it, or end it") from None
        yield


def environment(folder: Path, side_by_side: bool) -> dict[str, str]:
    """Variables for a process that trains or times.

    Args:
      folder: of the table; what one process compiled, the others load from there.
      side_by_side: whether others do the same on this machine at the same time.
    """
    # As in launch/environment.sh.
    variables = {
        "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
        "JAX_COMPILATION_CACHE_DIR": str(folder.absolute() / "compiled"),
        **os.environ,
    }
    if side_by_side:
        # On a CPU, two runs with a thread each get further than one after the other with two. On a GPU, the first one
        # would take all memory.
        variables["XLA_FLAGS"] = f"{variables.get('XLA_FLAGS', '')} --xla_cpu_multi_thread_eigen=false"
        variables.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    return variables


def run_processes(
    commands: Mapping[str, tuple[Sequence[str], Path]],
    num_side_by_side: int,
    variables: Mapping[str, str],
    said: Callable[[str, int], Any],
) -> int:
    """Runs commands, some side by side, and waits for them all.

    SIGTERM and Ctrl-C are passed on, so that every process saves and ends; no further one is started then.

    Args:
      commands: by name, with the file that each one's output is added to.
      num_side_by_side: at most.
      variables: the environment.
      said: told the name and exit status of each that ended.

    Returns:
      0, or `preemption.EXIT_STATUS` if told to stop.
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
            # A session of its own: Ctrl-C shall reach it as SIGTERM.
            process = subprocess.Popen(
                command, stdout=log, stderr=subprocess.STDOUT, env=variables, start_new_session=True
            )
        running.add(process)
        if stopping:
            process.terminate()
        status = process.wait()
        running.discard(process)
        if not stopping:
            said(name, status)

    previous = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        with ThreadPoolExecutor(num_side_by_side) as pool:
            list(pool.map(run, commands))
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
    return preemption.EXIT_STATUS if stopping else 0
