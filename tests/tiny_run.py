"""A tiny training run on synthetic documents."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import jax
import numpy as np
from checkouts import INTERRUPTIBLE
from jax.sharding import Mesh

from meliad_like import config
from meliad_like.config import RunConfig
from meliad_like.data.preparation import prepare
from meliad_like.mesh import MeshConfig, make_mesh
from meliad_like.training.checkpoints import Checkpoints

ROOT = Path(__file__).parent.parent
FILES = ["size/tiny.gin", "block_recurrent/fixed_skip.gin"]


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
        "DecoderConfig.num_layers = 2",
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
    """The training command line; `arguments` are further flags."""
    flags = [f"--gin_file={name}" for name in FILES] + [f"--gin_param={binding}" for binding in bindings]
    return [sys.executable, "-m", "meliad_like.train", *flags, *arguments]


def environment(num_devices: int) -> dict[str, str]:
    """The environment of a subprocess with a number of fake devices."""
    flags = f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count={num_devices}"
    return {**os.environ, "XLA_FLAGS": flags, "PYTHONPATH": str(Path(__file__).parent)}


def run_command(command: list[str], num_devices: int = 8) -> subprocess.CompletedProcess:
    return subprocess.run(command, cwd=ROOT, env=environment(num_devices), capture_output=True, text=True, timeout=120)


# The real command, which does something when it has logged a step.
ON_STEP = """
import os, pathlib, signal, time
from meliad_like import command_line, train
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
command_line.run(train.main)
"""


def run_and_act(bindings: list[str], workdir: Path, step: int, deed: str) -> subprocess.CompletedProcess:
    """Runs the training command in a process that executes the Python statement `deed` after it has logged a step."""
    flags = command(bindings, f"--workdir={workdir}")[3:]
    program = ON_STEP.format(step=step, deed=deed)
    return run_command([*INTERRUPTIBLE, sys.executable, "-c", program, *flags])


def mesh_of_the_first_devices(mesh: MeshConfig) -> Mesh:
    """A replacement for `make_mesh` that uses only the first devices, because eight fake devices are slow."""
    return make_mesh(mesh, jax.devices()[: mesh.data * mesh.fsdp * mesh.tensor * mesh.sequence])


def read_metrics(workdir: Path, kind: str = "train") -> Iterator[dict]:
    for line in (workdir / "metrics.jsonl").read_text().splitlines():
        metrics = json.loads(line)
        if metrics["kind"] == kind:
            yield metrics


def assert_same_bits(actual, expected) -> None:
    for (path, a), b in zip(jax.tree.leaves_with_path(actual), jax.tree.leaves(expected), strict=True):
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes(), jax.tree_util.keystr(path)
