"""launch/slurm.sbatch, gke_xpk.sh and the Dockerfile, with fakes of Slurm's programs, xpk, kubectl and docker."""

import ast
import re
import shlex
import subprocess
from pathlib import Path

import pytest
from checkouts import ROOT, make_checkout

# What no shell on the way may change.
TRAINING = ["--gin_file=size/tiny.gin", """--gin_param=A.b = 'it's "$HOME" `x` \\ *'""", "--workdir=gs://b/a  run"]
TRAINED = ["-m", "meliad_like.train", "--distributed", *TRAINING]
GKE = ["--name=run-1", "--cluster=c", "--zone=us-east5-a", "--type=v5litepod-16", "--image=r-docker.pkg.dev/p/r/m:1"]

# Logs its name and arguments; NAME_STATUS is what it ends with, and NAME_DOES what it does before.
FAKE_PROGRAM = """#!/usr/bin/env bash
name="$(basename "$0")"
printf '%q ' "$name" "$@" >>"$LOG"
echo >>"$LOG"
does="${name}_does" status="${name}_status"
eval "${!does:-}"
exit "${!status:-0}"
"""


class Machine:
    """A checkout, and a PATH that begins with fake programs."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.checkout = make_checkout(folder, extra="gpu")
        # Where the scripts wrongly think that something must be installed, the test fails instead of fetching it.
        self.environment = {
            "PATH": f"{folder / 'programs'}:/usr/bin:/bin",
            "LOG": str(folder / "log"),
            "PIP_NO_INDEX": "1",
        }
        (folder / "programs").mkdir()
        for name in ("srun", "scontrol", "xpk", "kubectl", "docker"):
            (folder / "programs" / name).write_text(FAKE_PROGRAM)
            (folder / "programs" / name).chmod(0o755)

    def run(self, script: Path | str, *arguments: str, **environment: str) -> subprocess.CompletedProcess:
        return subprocess.run(
            ["bash", self.checkout / "launch" / script, *arguments],
            env=self.environment | environment,
            cwd="/",
            capture_output=True,
            text=True,
            timeout=300,
        )

    def run_job(self, *arguments: str, **environment: str) -> subprocess.CompletedProcess:
        """The batch script as Slurm runs it: a copy, in another folder."""
        copy = self.folder / "slurm_script"
        copy.write_text((ROOT / "launch" / "slurm.sbatch").read_text())
        job = {"SLURM_JOB_ID": "17", "SLURM_SUBMIT_DIR": str(self.checkout), "SLURM_CPUS_PER_TASK": "6"}
        return self.run(copy, *arguments, **(job | environment))

    def calls(self) -> list[list[str]]:
        log = self.folder / "log"
        return [shlex.split(line) for line in log.read_text().splitlines()] if log.exists() else []


@pytest.fixture
def machine(tmp_path):
    return Machine(tmp_path)


def commands(output: str) -> list[list[str]]:
    return [shlex.split(line) for line in output.splitlines() if not line.startswith("== ")]


def assert_trains(call: list[str]) -> None:
    """Checks that a call of srun starts the training, with its flags as they were given."""
    assert call[0] == "srun" and call[call.index("python") :] == ["python", *TRAINED]


def test_slurm_dry_run(machine):
    result = machine.run("slurm.sbatch", "--dry_run", *TRAINING)
    assert result.returncode == 0, result.stderr
    srun, requeue = commands(result.stdout)
    assert_trains(srun)
    assert requeue == ["scontrol", "requeue", "JOB"]
    assert not machine.calls() and not (machine.checkout / "runs").exists()


def test_slurm_puts_a_saved_run_back_into_the_queue(machine):
    assert machine.run_job(*TRAINING, srun_status="75").returncode == 75
    srun, requeue = machine.calls()
    assert_trains(srun)
    assert requeue == ["scontrol", "requeue", "17"]
    assert (machine.checkout / "runs" / "slurm" / "17").is_dir()


@pytest.mark.parametrize(
    "outcome",
    [{"srun_status": "0"}, {"srun_status": "2"}, {"srun_status": "75", "srun_does": 'kill -TERM "$PPID"'}],
)
def test_slurm_ends_with_the_training_after_a_failure_and_after_scancel(machine, outcome):
    assert machine.run_job(*TRAINING, **outcome).returncode == int(outcome["srun_status"])
    (call,) = machine.calls()
    assert_trains(call)


def test_slurm_asks_for_sigterm_in_all_processes_and_as_many_of_them_as_gpus():
    lines = (ROOT / "launch" / "slurm.sbatch").read_text().splitlines()
    first_command = next(i for i, line in enumerate(lines) if line and line[0] != "#")
    options = dict(
        line.removeprefix("#SBATCH --").partition("=")[::2] for line in lines[:first_command] if "#SBATCH " in line
    )
    assert options["gpus-per-node"] == options["ntasks-per-node"]
    # With B: it would be for the batch script alone.
    assert re.fullmatch(r"TERM@\d+", options["signal"]) and "requeue" in options


def test_gke_dry_run(machine):
    result = machine.run("gke_xpk.sh", *GKE, "--build", "--create_flags=--priority=high", "--dry_run", "--", *TRAINING)
    assert result.returncode == 0, result.stderr
    build, push, create, delete, wait, logs = commands(result.stdout)
    programs = [["docker", "build"], ["docker", "push"], ["xpk", "workload"], ["xpk", "workload"], ["xpk", "workload"]]
    assert [call[:2] for call in (build, push, create, delete, wait, logs)] == [*programs, ["kubectl", "logs"]]
    (command,) = [word.removeprefix("--command=") for word in create if word.startswith("--command=")]
    assert shlex.split(command) == ["exec", "python", *TRAINED] and "--priority=high" in create
    # A saved run, and the processes that lost another, start again.
    assert "--restart-on-exit-codes=1,75" in create
    assert not machine.calls() and not (machine.checkout / "runs").exists()


@pytest.mark.parametrize("status", [0, 125])
def test_gke_waits_and_fetches_the_logs(machine, status):
    wait = f'[[ "$2" != list ]] || exit {status}'
    result = machine.run("gke_xpk.sh", *GKE, "--", *TRAINING, xpk_does=wait, kubectl_does="echo '[pod/a] step 1'")
    assert result.returncode == status, result.stderr
    assert [call[:2] for call in machine.calls()] == [["xpk", "workload"], ["xpk", "workload"], ["kubectl", "logs"]]
    assert (machine.checkout / "runs" / "gke" / "run-1.log").read_text() == "[pod/a] step 1\n"


def test_gke_stops_where_the_workload_cannot_be_made(machine):
    assert machine.run("gke_xpk.sh", *GKE, "--", *TRAINING, xpk_status="3").returncode == 3
    assert len(machine.calls()) == 1


@pytest.mark.parametrize(
    ("script", "arguments", "message"),
    [
        ("slurm.sbatch", [], "what to train is missing: --gin_file=FILE --workdir=FOLDER"),
        ("slurm.sbatch", TRAINING, "this is not a Slurm job; submit it with sbatch"),
        ("gke_xpk.sh", GKE[:3], "--type=VALUE is missing"),
        ("gke_xpk.sh", [*GKE, "--name=Run", "--", "--a"], "--name=Run must be at most 40 lower-case letters"),
        ("gke_xpk.sh", [*GKE, "--", "--a=b\nc"], "xpk takes no line breaks in the training's flags; use a gin file"),
        ("gke_xpk.sh", [*GKE, "--", "--a"], "xpk is not installed; pip install xpk"),
    ],
)
def test_mistakes_are_one_line(script, arguments, message, tmp_path):
    for program in ("bash", "dirname"):
        (tmp_path / program).symlink_to(f"/usr/bin/{program}")
    command = ["bash", ROOT / "launch" / script, *arguments]
    result = subprocess.run(command, env={"PATH": str(tmp_path)}, capture_output=True, text=True)
    assert result.returncode == 2
    assert result.stderr.startswith(f"error: {message}") and result.stderr.count("\n") == 1


def test_slurm_outside_of_the_checkout_is_one_line(machine):
    result = machine.run_job(*TRAINING, SLURM_SUBMIT_DIR="/nowhere")
    assert (result.returncode, result.stderr) == (2, "error: /nowhere is not the checkout's root; run sbatch there\n")


DRY_RUN = ("tpu_pod.sh", "gke_xpk.sh", "two_processes.sh", "slurm.sbatch")


@pytest.mark.parametrize("script", [*DRY_RUN, "quickstart.sh", "test.sh", "test_newest.sh"])
def test_help_is_the_first_comment_from_anywhere(script):
    command = ["bash", Path(script), "--help"]
    result = subprocess.run(command, cwd=ROOT / "launch", capture_output=True, text=True, check=True)
    assert ("--dry_run" in result.stdout) == (script in DRY_RUN) and result.stdout.count("\n") >= 2
    assert not re.search(r"^#|SBATCH|set -e", result.stdout, re.MULTILINE)


def dockerfile() -> list[list[str]]:
    lines = (ROOT / "launch" / "Dockerfile").read_text().splitlines()
    return [line.split() for line in lines if line and line[0] != "#"]


def test_dockerfile_copies_what_there_is_and_what_is_not_ignored():
    copied = [name for words in dockerfile() if words[0] == "COPY" for name in words[1:-1]]
    allowed = re.findall(r"^!(.+)$", (ROOT / "launch" / "Dockerfile.dockerignore").read_text(), re.MULTILINE)
    for name in copied:
        assert (ROOT / name).exists() and name.split("/")[0] in allowed
    assert set(allowed) == {name.split("/")[0] for name in copied}
    # What tpu_pod.sh packs is the same, and the scripts.
    (packed,) = re.findall(r"^code=\((.+)\)$", (ROOT / "launch" / "tpu_slice.sh").read_text(), re.MULTILINE)
    assert set(packed.split()) == {*allowed, "launch"}


def test_extras_that_launch_names_exist():
    calls = [node for node in ast.walk(ast.parse((ROOT / "setup.py").read_text())) if isinstance(node, ast.keyword)]
    (extras,) = [ast.literal_eval(call.value) for call in calls if call.arg == "extras_require"]
    text = "".join(path.read_text() for path in ROOT.glob("launch/*") if path.is_file())
    named = set(re.findall(r"(?:ACCELERATOR=|EXTRA=|EXTRA:-|set_up_environment )([a-z]\w*)", text))
    assert {"base", "tpu", "gpu", "gpu_cuda12"} <= named <= set(extras)
    hints = "".join(path.read_text() for path in (*ROOT.glob("meliad_like/**/*.py"), *ROOT.glob("docs/*.md")))
    assert {"tpu", "gpu", "harness"} <= set(re.findall(r"meliad_like\[(\w+)\]", hints)) <= set(extras)
