"""launch/two_processes.sh for real: two processes that train, are stopped, and die."""

import contextlib
import os
import re
import shlex
import signal
import subprocess
import time
from pathlib import Path

import pytest
import tiny_run
from checkouts import BASH, ROOT, make_checkout

SCRIPT = "launch/two_processes.sh"
# Seconds after which a run hangs; on a machine that is busy otherwise, seconds become minutes.
LIMIT = 600
# No recurrence and one layer: most of a run is compilation, in both processes.
FILES = ["size/tiny.gin", "block_recurrent/slide_12l.gin"]
MORE = ["TrainingConfig.checkpoint_every = 2"]


@pytest.fixture(scope="module")
def bindings(tmp_path_factory):
    made = tiny_run.make_bindings(tmp_path_factory.mktemp("documents"))
    return [binding for binding in made if not binding.startswith("RECURRENT_LAYERS")]


@pytest.fixture
def start(bindings, tmp_path):
    """Starts the script, with a run's flags and more bindings, in a session of its own as a terminal would."""
    checkout = make_checkout(tmp_path)
    scripts = []

    def start(*more: str, workdir: Path = tmp_path / "a run") -> subprocess.Popen:
        flags = [f"--gin_file={name}" for name in FILES]
        flags += [f"--gin_param={binding}" for binding in [*bindings, *MORE, *more]]
        script = subprocess.Popen(
            [*BASH, checkout / SCRIPT, *flags, f"--workdir={workdir}"],
            env=tiny_run.environment(num_devices=1),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd="/",
            start_new_session=True,
        )
        scripts.append(script)
        return script

    yield start
    for script in scripts:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(script.pid, signal.SIGKILL)


def wait_for_steps(workdir, number):
    metrics, deadline = workdir / "metrics.jsonl", time.monotonic() + LIMIT
    while not (metrics.exists() and metrics.read_text().count("\n") >= number):
        assert time.monotonic() < deadline, (workdir / "logs" / "process_0.log").read_text()
        time.sleep(0.05)


def process(workdir, number):
    """The id of one of the two Python processes."""
    for folder in os.listdir("/proc"):
        if folder.isdigit():
            words = []
            with contextlib.suppress(OSError):
                words = Path("/proc", folder, "cmdline").read_text().split("\0")
            if f"--process_id={number}" in words and f"--workdir={workdir}" in words:
                return int(folder)
    raise AssertionError(f"no process {number}")


@pytest.mark.thorough
@pytest.mark.parametrize("name", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.exhaustive)])
def test_a_signal_to_the_script_saves_both(start, tmp_path, name):
    script = start("TrainingConfig.num_steps = 10000")
    wait_for_steps(tmp_path / "a run", 2)
    # Ctrl-C goes to all programs of the terminal, SIGTERM to one.
    os.killpg(script.pid, name) if name == signal.SIGINT else script.send_signal(name)
    output, _ = script.communicate(timeout=LIMIT)
    assert script.returncode == 75, output
    logs = tmp_path / "a run" / "logs"
    assert "[0] SIGTERM: saved step" in output
    assert output.splitlines()[-1] == f"== Ended with status 75 and 75; the logs are in {logs}"
    assert re.search(r"^\[0\] step 2/10000  ", output, re.MULTILINE)
    assert "step 2/" in (logs / "process_0.log").read_text() and "step 2/" not in (logs / "process_1.log").read_text()
    # The lines that the other scripts read in the logs of a resumed run.
    command = 'source "$1/launch/running.sh"; start_step "$2"'
    step = subprocess.check_output(["bash", "-c", command, "x", str(ROOT), str(logs / "process_0.log")], text=True)
    assert step == "0\n"


@pytest.mark.thorough
def test_when_one_is_killed_the_other_ends(start, tmp_path):
    """Both runs side by side, because jax waits half a minute for the process that is not the coordinator."""
    workdirs = [tmp_path / f"run {number}" for number in range(2)]
    scripts = [start("TrainingConfig.num_steps = 10000", workdir=workdir) for workdir in workdirs]
    for number, workdir in enumerate(workdirs):
        wait_for_steps(workdir, 2)
        os.kill(process(workdir, number), signal.SIGKILL)
    killed = time.monotonic()
    for number, (script, workdir) in enumerate(zip(scripts, workdirs, strict=True)):
        output, _ = script.communicate(timeout=LIMIT)
        assert time.monotonic() - killed < 55
        assert script.returncode == 137, output
        statuses = re.search(r"== Ended with status (\w+) and (\w+);", output).groups()
        assert statuses[number] == "137" and statuses[1 - number] not in ("0", "killed"), output
        assert "another task died" in (workdir / "logs" / f"process_{1 - number}.log").read_text()


def test_a_mistake_is_one_line_of_each(start):
    script = start("DecoderConfig.num_layers = 0")
    output, _ = script.communicate(timeout=LIMIT)
    assert script.returncode == 2
    assert output.count("error: ") == 2 and "Traceback" not in output


# A training whose two processes do what P0 and P1 say.
FAKE_TRAINING = """#!/usr/bin/env bash
[[ "$*" == *meliad_like.train* ]] || exit 0
[[ "$*" == *process_id=0* ]] && eval "$P0" || eval "$P1"
"""


@pytest.mark.parametrize(
    ("first", "second", "status", "end"),
    [
        ("exit 0", "exit 0", 0, "0 and 0"),
        ("exit 75", "sleep 2; exit 75", 75, "75 and 75"),
        ("sleep 0.5; exit 1", "exit 3", 3, "1 and 3"),
        ("exit 4", "sleep 100", 4, "4 and killed"),
        ("sleep 100", "kill -9 $$", 137, "killed and 137"),
    ],
)
def test_the_worse_status_counts_and_nobody_is_waited_for(tmp_path, first, second, status, end):
    script = make_checkout(tmp_path, FAKE_TRAINING) / SCRIPT
    grace = "1" if "sleep 100" in (first, second) else "60"
    environment = {"PATH": "/usr/bin:/bin", "P0": first, "P1": second, "GRACE": grace}
    command = ["bash", script, f"--workdir={tmp_path / 'a run'}"]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert result.returncode == status
    assert result.stdout.splitlines()[-1].startswith(f"== Ended with status {end};")


def test_dry_run_prints_both_commands(tmp_path):
    arguments = [
        "--gin_file=size/tiny.gin",
        "--gin_param=FolderSourceConfig.folder = 'it''s \"here\"'",
        f"--workdir={tmp_path}/x",
    ]
    command = ["bash", ROOT / SCRIPT, "--dry_run", *arguments]
    output = subprocess.run(command, cwd="/", capture_output=True, text=True, check=True).stdout.splitlines()
    words = [shlex.split(line) for line in output]
    assert [line[2:8] for line in words] == [["python", "-m", "meliad_like.train", *arguments]] * 2
    assert [line[-1] for line in words] == ["--process_id=0", "--process_id=1"]
    assert words[0][-3].startswith("--coordinator_address=localhost:") and words[0][-3] == words[1][-3]
    assert not (tmp_path / "x").exists()


def test_without_a_working_folder_nothing_starts():
    result = subprocess.run(["bash", ROOT / SCRIPT, "--gin_file=a"], capture_output=True, text=True)
    assert result.returncode == 2
    assert result.stderr == "error: --workdir=FOLDER is missing: where the run and its logs shall lie\n"
