"""The whole quick start at a small size, also in a folder that an earlier quick start has left."""

import subprocess
from pathlib import Path

import matplotlib.image
import pytest
from checkouts import make_checkout
from tiny_run import environment

# The smallest run that goes all the way: bytes of three short documents instead of the standard library.
TINY = {
    "DecoderConfig.num_layers": 1,
    "RECURRENT_LAYERS": (-1,),
    "DecoderConfig.model_width": 32,
    "DecoderConfig.num_heads": 2,
    "DecoderConfig.head_size": 16,
    "DecoderConfig.feedforward_width": 32,
    "DecoderConfig.window_length": 16,
    "NUM_STATES": 8,
    "ReaderConfig.segment_length": 32,
    "ReaderConfig.tokens_per_step": 64,
    "ReaderConfig.store": "'stores/tiny'",
    "RunConfig.source": "'text'",
    "FolderSourceConfig.folder": "'documents'",
    "RunConfig.vocabulary": "'bytes'",
    "TrainingConfig.num_steps": 6,
    "TrainingConfig.evaluate_every": 3,
    "TrainingConfig.log_every": 2,
}

# Stands in for the programs: logs what it is asked for, makes the run's folder, and fails on demand.
FAKE_PYTHON = """#!/usr/bin/env bash
[[ "$*" != *meliad_like* ]] || echo "$2 $(ls runs/quickstart 2>/dev/null | tr '\\n' ' ')" >>log
[[ "$*" != *meliad_like.train* ]] || mkdir -p runs/quickstart/checkpoints
[[ -z "${FAILING:-}" || "$*" != *"$FAILING"* ]]
"""


def quick_start(checkout: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess:
    command = ["bash", checkout / "launch" / "quickstart.sh", *arguments]
    environment = {"PATH": "/usr/bin:/bin"} | environment
    return subprocess.run(command, cwd="/", env=environment, capture_output=True, text=True)


@pytest.mark.thorough
def test_from_documents_to_table_picture_and_sample(tmp_path):
    checkout = make_checkout(tmp_path)
    for split, name in (("train", "one"), ("validation", "two"), ("test", "logging")):
        path = checkout / "documents" / split / f"{name}.txt"
        path.parent.mkdir(parents=True)
        path.write_text(f"a line of {name}\n" * 40)
    compiling = {name: value for name, value in environment(num_devices=1).items() if name.startswith(("JAX_", "XLA_"))}
    result = quick_start(checkout, *(f"--gin_param={name}={value}" for name, value in TINY.items()), **compiling)
    assert result.returncode == 0, result.stderr
    for text in (
        "step 6/6",
        "bits/byte",
        "tokens/s",
        "0:00 left",
        "step 3: ",
        "untrained",
        "step 6 ",
        "gzip -9",
        "xz -9",
        "drew runs/quickstart/bits_per_byte.png",
        "a line of logging\n",
        "Done in ",
    ):
        assert text in result.stdout, text
    # Nothing of jax' search for accelerators.
    assert "backend" not in result.stderr and "Traceback" not in result.stderr
    assert matplotlib.image.imread(checkout / "runs/quickstart/bits_per_byte.png").ndim == 3


@pytest.mark.parametrize("failing", ["", "train", "generate"])
def test_a_finished_run_is_made_again_and_an_interrupted_one_resumes(tmp_path, failing):
    checkout = make_checkout(tmp_path, FAKE_PYTHON)
    first = quick_start(checkout, FAILING=f"meliad_like.{failing}" if failing else "")
    assert first.returncode == bool(failing)
    (checkout / "log").unlink()
    second = quick_start(checkout)
    assert second.returncode == 0, second.stderr
    assert ("Resuming" if failing else "Keeping") in second.stdout
    assert not (checkout / "runs" / "quickstart.before").exists()
    steps = [line.split() for line in (checkout / "log").read_text().splitlines()]
    assert [step[0].removeprefix("meliad_like.") for step in steps] == [
        "prepare",
        "train",
        "evaluate",
        "plot",
        "generate",
    ]
    assert (steps[1][1:] == ["checkpoints"]) == bool(failing)


@pytest.mark.parametrize("failing", ["prepare", "train"])
def test_a_finished_run_is_kept_until_the_next_one_is_trained(tmp_path, failing):
    checkout = make_checkout(tmp_path, FAKE_PYTHON)
    assert quick_start(checkout).returncode == 0
    # A misspelt parameter fails where the documents are prepared, an impossible one where the training starts.
    assert quick_start(checkout, "--gin_param=mistake", FAILING=f"meliad_like.{failing}").returncode == 1
    assert (checkout / "runs" / "quickstart" / "finished").exists()
    assert not (checkout / "runs" / "quickstart.before").exists()


def test_help_runs_nothing(tmp_path):
    checkout = make_checkout(tmp_path, FAKE_PYTHON)
    result = quick_start(checkout, "--help")
    assert result.returncode == 0 and result.stdout.startswith("Trains a model that writes Python")
    assert "--gin_param" in result.stdout and not (checkout / "log").exists()
