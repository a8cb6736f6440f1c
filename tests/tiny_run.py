"""A tiny training run on synthetic documents."""

import dataclasses
import functools
import json
import os
import subprocess
import weakref
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import forked
import jax
import numpy as np
from jax.sharding import Mesh

from meliad_like import config
from meliad_like.config import RunConfig
from meliad_like.config.run import TrainingConfig
from meliad_like.data.preparation import prepare
from meliad_like.mesh import MeshConfig, make_mesh
from meliad_like.run import setup, training
from meliad_like.run.setup import StageSetup
from meliad_like.training import program
from meliad_like.training.checkpoints import Checkpoints
from meliad_like.training.program import TrainingProgram, make_program

ROOT = Path(__file__).parent.parent
FILES = ["size/tiny.gin", "block_recurrent/fixed_skip.gin"]
# Most of a small training is compilation. What one test has compiled, another loads that trains the same run.
ONE_LAYER = ["DecoderConfig.num_layers = 1", "RECURRENT_LAYERS = (-1,)"]


def read_metadata(folder):
    """The metadata of the newest checkpoint in `folder` that is not damaged."""
    with Checkpoints(folder, read_only=True) as checkpoints:
        return checkpoints.read_metadata()


def make_bindings(folder: Path) -> list[str]:
    """Makes a token store below `folder`, and returns the `--gin_param`s of a run on it: 8 lanes of 4 blocks."""
    generator = np.random.default_rng(0)
    for split, num_documents in (("train", 20), ("validation", 2)):
        (folder / "documents" / split).mkdir(parents=True)
        for i in range(num_documents):
            words = generator.choice(["a", "rose", "is", "when", "bees", "do", "not"], size=generator.integers(2, 300))
            (folder / "documents" / split / f"{i}.txt").write_text(" ".join(words))
    bindings = [
        "RunConfig.source = 'text'",
        f"FolderSourceConfig.folder = '{folder / 'documents'}'",
        f"ReaderConfig.store = '{folder / 'store'}'",
        *ONE_LAYER,
        # 264 tokens: divides by every mesh of the tests.
        "VocabularyConfig.size_multiple = 8",
        "ReaderConfig.tokens_per_step = 512",
        # Second moments in factors, as those of a large model.
        "Adafactor.factored_size = 16",
        "ScheduleConfig.warmup_steps = 5",
        "TrainingConfig.log_every = 1",
    ]
    run = parse(bindings)
    prepare(run.source, run.vocabulary, run.data.store, num_workers=1)
    return bindings


def parse(bindings: list[str], *more: str, files: tuple[str, ...] = ()) -> RunConfig:
    return config.parse([*FILES, *files], [*bindings, *more])


def command(bindings: list[str], *arguments: str) -> list[str]:
    """The words of the training command after `python`; `arguments` are further flags."""
    flags = [f"--gin_file={name}" for name in FILES] + [f"--gin_param={binding}" for binding in bindings]
    return ["-m", "meliad_like.train", *flags, *arguments]


def environment(num_devices: int) -> dict[str, str]:
    """The environment of a subprocess with a number of fake devices."""
    flags = f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count={num_devices}"
    return {**os.environ, "XLA_FLAGS": flags, "PYTHONPATH": str(Path(__file__).parent)}


def run_command(words: list[str], num_devices: int = 8) -> subprocess.CompletedProcess:
    return forked.run(*words, environment=environment(num_devices))


# The real command, which does something when it has logged a step.
ON_STEP = """
import os, pathlib, runpy, signal, time
from meliad_like.run import setup
from meliad_like.training.metrics import MetricsWriter
from tiny_run import mesh_of_the_first_devices

setup.make_mesh = mesh_of_the_first_devices
write = MetricsWriter.write

def write_and_act(self, step, metrics, kind="train"):
    write(self, step, metrics, kind)
    if step == {step}:
        {deed}

MetricsWriter.write = write_and_act
runpy.run_module("meliad_like.train", run_name="__main__")
"""


def run_and_act(bindings: list[str], workdir: Path, step: int, deed: str) -> subprocess.CompletedProcess:
    """Runs the training command in a process that executes the Python statement `deed` after it has logged a step."""
    _, _, *flags = command(bindings, f"--workdir={workdir}")
    return run_command(["-c", ON_STEP.format(step=step, deed=deed), *flags])


@functools.lru_cache(maxsize=16)
def kept_program(run: RunConfig, vocabulary_size: int, mesh: Mesh, _make_train_step: Callable) -> TrainingProgram:
    return make_program(run, vocabulary_size, mesh)


def _program(run: RunConfig, vocabulary_size: int, mesh: Mesh) -> TrainingProgram:
    """The program of the first run that differs in nothing that a program is made from."""
    names = ["seed", "gradient_accumulation", "loss_slice", "nonfinite"]
    names += ["num_steps"] if run.schedule.num_independent(run.training.num_steps) < run.training.num_steps else []
    training = TrainingConfig(**{name: getattr(run.training, name) for name in names})
    same = {name: getattr(RunConfig(), name) for name in ("source", "vocabulary", "mesh", "trackers")}
    run = dataclasses.replace(run, **same, training=training, data=dataclasses.replace(run.data, store=""))
    return kept_program(run, vocabulary_size, mesh, program.make_train_step)


def _kept_step(program: TrainingProgram, options: Mapping[str, Any] | None = None) -> jax.stages.Compiled:
    if options:
        return _compile_step(program, options)
    if program.train_step not in _kept_steps:
        _kept_steps[program.train_step] = _compile_step(program)
    return _kept_steps[program.train_step]


# Most tests train the same run again, whose step then need not be traced and compiled again.
setup.make_program = _program
_compile_step, TrainingProgram.compile_step = TrainingProgram.compile_step, _kept_step
_kept_steps: weakref.WeakKeyDictionary[Any, jax.stages.Compiled] = weakref.WeakKeyDictionary()


def mesh_of_the_first_devices(mesh: MeshConfig) -> Mesh:
    """A mesh of only the first devices, because eight fake devices are slow; with `data=-1`, of all."""
    number = mesh.data * mesh.fsdp * mesh.tensor * mesh.sequence
    return make_mesh(mesh, jax.devices()[:number] if number > 0 else None)


def train(run: RunConfig, workdir: str | Path, *arguments: Any, **others: Any) -> int:
    """Trains on the first devices, as many as the mesh of the config has."""
    return training.train(run, workdir, *arguments, **others, mesh=mesh_of_the_first_devices(run.mesh))


def set_up(run: RunConfig, stage: int = -1) -> StageSetup:
    """Sets a stage up on the first devices, as many as the mesh of the config has; default: the last one."""
    return setup.set_up(run, mesh_of_the_first_devices(run.mesh))[stage]


def read_metrics(workdir: Path, kind: str = "train") -> Iterator[dict]:
    for line in (workdir / "metrics.jsonl").read_text().splitlines():
        metrics = json.loads(line)
        if metrics["kind"] == kind:
            yield metrics


def assert_same_bits(actual, expected) -> None:
    for (path, a), b in zip(jax.tree.leaves_with_path(actual), jax.tree.leaves(expected), strict=True):
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes(), jax.tree_util.keystr(path)
