"""launch/tpu_pod.sh and tpu_worker.sh, on a cloud of folders (fake_gcloud.sh) with a training that ends as planned."""

import os
import shlex
import signal
import subprocess
import time
from pathlib import Path

import pytest
from checkouts import BASH, ROOT, make_checkout

SLICE = ["--name=pod", "--zone=us-central2-b", "--type=v4-16", "--poll=0.1"]
# What a shell, ssh and another shell must not change.
TRAINING = ["--gin_file=size/tiny.gin", """--gin_param=A.b = 'it's "$HOME" `x` \\ *'""", "--workdir=gs://b/a  run"]


class Cloud:
    """The fake gcloud's folder, and the script in a checkout next to it."""

    def __init__(self, folder: Path):
        self.folder = folder / "cloud"
        self.checkout = make_checkout(folder)
        self.environment = {"PATH": f"{folder / 'programs'}:/usr/bin:/bin", "CLOUD": str(self.folder)}
        self.folder.mkdir()
        (folder / "programs").mkdir()
        for program, text in {"gcloud": "fake_gcloud.sh", "python3.11": "fake_worker_python.sh"}.items():
            (folder / "programs" / program).write_text((ROOT / "tests" / text).read_text())
            (folder / "programs" / program).chmod(0o755)
        self.plan("exit 0")
        (self.folder / "step").write_text("0\n")

    def plan(self, *outcomes: str) -> None:
        (self.folder / "plan").write_text("".join(f"{outcome}\n" for outcome in outcomes))

    def refuse(self, *patterns: str) -> None:
        """The next requests that look like these, in this order, fail."""
        (self.folder / "refused").write_text("".join(f"{pattern}\n" for pattern in patterns))

    def start(self, *flags: str, training=TRAINING, **environment: str) -> subprocess.Popen:
        return subprocess.Popen(
            [*BASH, self.checkout / "launch" / "tpu_pod.sh", *SLICE, *flags, "--", *training],
            env=self.environment | environment,
            cwd="/",
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def run(self, *flags: str, **environment: str) -> tuple[int, str, str]:
        """Exit status, output and errors of the script."""
        script = self.start(*flags, **environment)
        output, errors = script.communicate(timeout=300)
        return script.returncode, output, errors

    def calls(self, *words: str) -> list[list[str]]:
        """What gcloud was asked for, as far as it begins with these words."""
        log = self.folder / "log"
        calls = [shlex.split(line)[2:] for line in log.read_text().splitlines()] if log.exists() else []
        return [call for call in calls if call[: len(words)] == list(words)]

    def trained(self, worker: int) -> list[list[str]]:
        return [shlex.split(line) for line in (self.folder / f"trained_{worker}").read_text().splitlines()]

    def logs(self, attempt: int) -> Path:
        return self.checkout / "runs" / "pods" / "pod" / f"attempt_{attempt}"


@pytest.fixture
def cloud(tmp_path):
    return Cloud(tmp_path)


def test_dry_run_prints_commands_that_a_shell_reads_back(cloud):
    before = "cp -r 'the store' ."
    status, output, _ = cloud.run("--spot", f"--before={before}", "--create_flags=--network=n --tags=a,b", "--dry_run")
    commands = [shlex.split(line) for line in output.splitlines() if not line.startswith("== ")]
    assert status == 0 and not cloud.calls() and not (cloud.checkout / "runs").exists()
    create, _, _, copy, _, train = commands
    assert create[3:6] == ["queued-resources", "create", "pod"] and {"--spot", "--network=n", "--tags=a,b"} < {*create}
    assert copy[3:5] == ["tpu-vm", "scp"] and train[3:6] == ["tpu-vm", "ssh", "pod"]
    (command,) = [word.removeprefix("--command=") for word in train if word.startswith("--command=")]
    words = shlex.split(command)
    assert words[words.index("train") + 2 :] == [before, *TRAINING]


def test_trains_on_all_workers_gathers_logs_and_deletes_the_slice(cloud):
    status, output, errors = cloud.run("--before=touch 'is here'")
    assert status == 0, output + errors
    for worker in (0, 1):
        assert cloud.trained(worker) == [["-m", "meliad_like.train", "--distributed", *TRAINING]]
        assert (cloud.folder / f"installed_{worker}").read_text() == ".[tpu]\n"
        assert "from step 0 to 3,000" in (cloud.logs(1) / f"worker_{worker}.log").read_text()
    assert "34,410 parameters" in output and output.splitlines()[-1] == "== Done; the logs are in runs/pods/pod"
    assert len(cloud.calls("queued-resources", "create")) == len(cloud.calls("queued-resources", "delete")) == 1


def test_takes_the_slice_of_that_name_and_keeps_it(cloud):
    assert cloud.run("--keep")[0] == 0
    assert cloud.run("--keep")[0] == 0
    assert len(cloud.calls("queued-resources", "create")) == 1 and not cloud.calls("queued-resources", "delete")
    assert (cloud.logs(2) / "worker_1.log").exists()
    assert (cloud.folder / "installed_0").read_text() == ".[tpu]\n"


def test_waits_for_a_slice(cloud):
    status, output, _ = cloud.run(STATES="CREATING\\nWAITING_FOR_RESOURCES\\nWAITING_FOR_RESOURCES\\nACTIVE")
    states = [line for line in output.splitlines() if line.startswith("== Slice")]
    assert states == [f"== Slice pod: {state}" for state in ("none", "CREATING", "WAITING_FOR_RESOURCES", "READY")]
    assert status == 0 and len(cloud.calls("queued-resources", "create")) == 1


def test_a_request_that_fails_is_not_repeated(cloud):
    status, _, errors = cloud.run(STATES="CREATING\\nFAILED")
    assert status == 2 and len(cloud.calls("queued-resources", "create")) == 1
    describe = "gcloud compute tpus queued-resources describe pod --zone=us-central2-b"
    assert errors == f"error: there is no such slice to be had; {describe} says why\n"


def test_a_request_that_somebody_deletes_is_not_waited_for(cloud):
    script = cloud.start(STATES="CREATING\\nWAITING_FOR_RESOURCES")
    while not (cloud.folder / "request").exists() or "CREATING" in (cloud.folder / "request").read_text():
        time.sleep(0.1)
    (cloud.folder / "request").unlink()
    _, errors = script.communicate(timeout=300)
    assert script.returncode == 2 and len(cloud.calls("queued-resources", "create")) == 1
    assert errors == "error: nothing is known of the slice pod any more; the same command asks for it again\n"


def test_a_preempted_slice_is_made_again_and_the_training_resumes(cloud):
    cloud.plan("preempt 100", "preempt 200", "exit 0")
    status, output, _ = cloud.run("--max_restarts=1")
    assert status == 0, output
    assert len(cloud.calls("queued-resources", "create")) == len(cloud.calls("queued-resources", "delete")) == 3
    assert len(cloud.trained(0)) == 3 and cloud.trained(1) == cloud.trained(0)
    assert "from step 200 to" in (cloud.logs(3) / "worker_0.log").read_text()


def test_gives_up_after_restarts_that_saved_nothing(cloud):
    cloud.plan("preempt 7", *["preempt 7"] * 5)
    status, output, errors = cloud.run("--max_restarts=2")
    assert status == 2 and len(cloud.trained(0)) == 4
    assert errors == "error: 2 restarts in a row saved nothing; the logs are in runs/pods/pod\n"
    assert output.splitlines()[-1].startswith("gcloud compute tpus queued-resources delete pod --force")


def test_requests_that_the_cloud_refuses_are_made_again(cloud):
    cloud.plan("preempt 100", "exit 0")
    cloud.refuse("queued-resources create*", "queued-resources create*", "queued-resources delete*")
    status, output, _ = cloud.run()
    assert status == 0, output
    assert len(cloud.calls("queued-resources", "create")) == 4 and len(cloud.calls("queued-resources", "delete")) == 3


def test_a_cloud_that_does_not_say_how_many_workers_there_are(cloud):
    cloud.refuse("tpu-vm describe*networkEndpoints*")
    status, output, _ = cloud.run()
    assert status == 0 and "== Exit statuses of the workers: 255\n" in output
    assert len(cloud.trained(0)) == 1 and (cloud.logs(2) / "worker_1.log").exists()


def test_a_cloud_that_does_not_say_that_the_slice_is_there(cloud):
    """It can't be made then."""
    assert cloud.run("--keep")[0] == 0
    cloud.refuse("queued-resources describe*")
    assert cloud.run("--keep")[0] == 0
    assert len(cloud.calls("queued-resources", "create")) == len(cloud.trained(0)) == 2


def test_runs_within_a_second_all_train(cloud):
    clock = cloud.folder.parent / "programs" / "date"
    clock.write_text("#!/bin/sh\necho 1700000000\n")
    clock.chmod(0o755)
    assert cloud.run("--keep")[0] == cloud.run("--keep")[0] == 0
    assert len(cloud.trained(0)) == 2


def test_gives_up_after_requests_that_were_all_refused(cloud):
    cloud.refuse(*["queued-resources create*"] * 5)
    status, _, errors = cloud.run()
    assert status == 2 and len(cloud.calls("queued-resources", "create")) == 5
    assert errors.endswith("error: gcloud refused five times in a row; its output is above\n")


def test_after_sigterm_the_same_slice_resumes(cloud):
    cloud.plan("exit 75", "exit 0")
    assert cloud.run()[0] == 0
    assert len(cloud.calls("queued-resources", "create")) == 1 and len(cloud.trained(1)) == 2


def test_a_failure_ends_it_and_the_slice_stays(cloud):
    cloud.plan("exit 3", "exit 0")
    status, output, _ = cloud.run()
    assert status == 3 and len(cloud.trained(0)) == 1 and not cloud.calls("queued-resources", "delete")
    lines = output.splitlines()
    assert "== The training failed; the logs in runs/pods/pod/attempt_1 say why" in lines
    assert lines[-1] == "gcloud compute tpus queued-resources delete pod --force --zone=us-central2-b --quiet"


@pytest.mark.parametrize("name", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_saves_and_keeps_the_slice(cloud, name):
    cloud.plan("wait")
    script = cloud.start()
    while not all((cloud.folder / f"waiting_{worker}").exists() for worker in (0, 1)):
        assert script.poll() is None
        time.sleep(0.1)
    os.killpg(script.pid, name) if name == signal.SIGINT else script.send_signal(name)
    output, _ = script.communicate(timeout=300)
    assert script.returncode == 75, output
    assert not cloud.calls("queued-resources", "delete")
    assert output.splitlines()[-2].startswith("== While it exists, the slice pod costs")
    for worker in (0, 1):
        assert (cloud.folder / f"worker_{worker}/meliad_like/runs/worker/status").read_text() == "75\n"


def test_a_broken_connection_is_taken_up_again(cloud):
    cloud.plan("wait")
    folder = cloud.folder / "worker_0"
    (folder / ".venv" / "bin").mkdir(parents=True)
    (folder / ".venv" / "bin" / "python").symlink_to(cloud.checkout.parent / "programs" / "python3.11")
    (folder / "launch").symlink_to(ROOT / "launch")
    command = ["bash", folder / "launch" / "tpu_worker.sh"]
    environment = cloud.environment | {"WORKER": "0"}
    start = {"env": environment, "stdout": subprocess.PIPE, "text": True, "start_new_session": True}
    first = subprocess.Popen([*command, "train", "1", "", *TRAINING], **start)
    while not (cloud.folder / "waiting_0").exists():
        time.sleep(0.1)
    os.killpg(first.pid, signal.SIGKILL)
    second = subprocess.Popen([*command, "train", "1", "", *TRAINING], **start)
    assert "34,410 parameters" in second.stdout.readline()
    subprocess.run([*command, "stop"], env=environment, check=True)
    output, _ = second.communicate(timeout=300)
    assert second.returncode == 75 and output.endswith("saved\n")
    assert len(cloud.trained(0)) == 1


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--name=p", "--zone=z", "--", "--a"], "--type=VALUE is missing"),
        (["--workdir=x"], "unexpected argument --workdir=x; --help shows"),
        ([*SLICE], "what to train is missing"),
        ([*SLICE, "--type=v9-1", "--", "--a"], "--type=v9-1 is not one of v2 to v6e"),
        ([*SLICE, "--", "--a"], "gcloud is not installed"),
    ],
)
def test_mistakes_are_one_line(flags, message, tmp_path):
    for program in ("bash", "dirname"):
        (tmp_path / program).symlink_to(f"/usr/bin/{program}")
    command = ["bash", ROOT / "launch" / "tpu_pod.sh", *flags]
    result = subprocess.run(command, env={"PATH": str(tmp_path)}, capture_output=True, text=True)
    assert result.returncode == 2
    assert result.stderr.startswith(f"error: {message}") and result.stderr.count("\n") == 1
