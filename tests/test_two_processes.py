"""Two real processes that train together are one run: the same losses and parameters, one working folder."""

import re
import shutil
import signal
import socket
import time

import forked
import jax
import numpy as np
import pytest
import tiny_run
from tiny_run import command, parse, read_metrics

from meliad_like import config
from meliad_like.run.setup import set_up
from meliad_like.run.training import train
from meliad_like.training.checkpoints import Checkpoints

NUM_STEPS = 3


@pytest.fixture(scope="module")
def bindings(tmp_path_factory):
    """Every axis of the mesh is larger than a process' part of it could be, but for `data`."""
    return [
        *tiny_run.make_bindings(tmp_path_factory.mktemp("documents")),
        f"TrainingConfig.num_steps = {NUM_STEPS}",
        "TrainingConfig.checkpoint_every = 1",
        "TrainingConfig.checkpoints_kept = 1000",
        "MeshConfig.fsdp = 2",
        "MeshConfig.tensor = 2",
    ]


@pytest.fixture(scope="module")
def one(bindings, tmp_path_factory):
    """Working folder of the same run in one process."""
    workdir = tmp_path_factory.mktemp("one")
    assert train(parse(bindings), workdir) == 0
    return workdir


def start_two(arguments):
    """The command in two processes with four fake devices each."""
    with socket.create_server(("localhost", 0)) as server:
        port = server.getsockname()[1]
    place = [f"--coordinator_address=localhost:{port}", "--num_processes=2"]
    environment = tiny_run.environment(num_devices=4)
    return [forked.Process([*arguments, *place, f"--process_id={process}"], environment) for process in range(2)]


def finish(processes):
    """Exit statuses and outputs."""
    results = [process.finish() for process in processes]
    return [result.returncode for result in results], [(result.stdout, result.stderr) for result in results]


def assert_steps_of_one_process(bindings, workdir, first, last):
    """Checks each step of a run against that of one process from the same state; rounding grows from step to step."""
    (setup,) = set_up(parse(bindings))
    step, state = setup.program.compile_step(), setup.program.initialise()
    losses = {metrics["step"]: metrics["loss"] for metrics in read_metrics(workdir)}
    assert list(losses) == list(range(1, last + 1))
    with Checkpoints(workdir / "checkpoints", read_only=True) as checkpoints:
        for i in range(first, last):
            if i > 0:
                state = checkpoints.restore(setup.program.abstract_state, i)[0]
            expected, metrics = step(state, setup.reader.batch(i, range(8)))
            state = checkpoints.restore(setup.program.abstract_state, i + 1)[0]
            np.testing.assert_allclose(losses[i + 1], metrics.loss, rtol=1e-5)
            jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), state, expected)


@pytest.mark.thorough
def test_two_processes_equal_one(bindings, tmp_path):
    last = f"every = {NUM_STEPS}"
    extras = [f"TrainingConfig.evaluate_{last}", f"TrainingConfig.sample_{last}", "TrainingConfig.sample_tokens = 4"]
    statuses, results = finish(start_two(command([*bindings, *extras], f"--workdir={tmp_path}")))
    assert statuses == [0, 0], results
    assert_steps_of_one_process(bindings, tmp_path, 0, NUM_STEPS)
    outputs = [output for output, _ in results]
    assert f"step {NUM_STEPS}/{NUM_STEPS}" in outputs[0]
    # Gloo greets each process, in pieces where several threads do so at once.
    assert "step" not in outputs[1] and "parameters" not in outputs[1]
    assert len([*read_metrics(tmp_path, "validation")]) == 1
    assert (tmp_path / "samples" / f"step_{NUM_STEPS}.txt").exists()


@pytest.mark.exhaustive
def test_ctrl_c_to_one_stops_both_after_the_same_step(bindings, one, tmp_path):
    """It becomes SIGTERM, of which jax notifies the other processes."""
    # What one process saved, two go on with.
    shutil.copytree(one / "checkpoints" / "2", tmp_path / "checkpoints" / "2")
    metrics = tmp_path / "metrics.jsonl"
    metrics.write_text("".join((one / "metrics.jsonl").read_text().splitlines(keepends=True)[:2]))
    processes = start_two(command([*bindings, "TrainingConfig.num_steps = 10000"], f"--workdir={tmp_path}"))
    deadline = time.monotonic() + 100
    while metrics.read_text().count("\n") < 5 and time.monotonic() < deadline:
        time.sleep(0.05)
    processes[1].send_signal(signal.SIGINT)
    statuses, results = finish(processes)
    assert statuses == [75, 75], results
    assert "from step 2 to 10,000" in results[0][0]
    (step,) = re.findall(r"SIGTERM: saved step (\d+) in", results[0][0])

    # What two processes saved, one goes on with.
    num_steps = int(step) + 1
    assert train(parse(bindings, f"TrainingConfig.num_steps = {num_steps}"), tmp_path) == 0
    assert_steps_of_one_process(bindings, tmp_path, 2, num_steps)


@pytest.mark.exhaustive
def test_a_mistake_ends_both_at_once(bindings, tmp_path):
    config.save(parse(bindings), tmp_path)
    (tmp_path / "checkpoints" / "2").mkdir(parents=True)
    other = command([*bindings, "RecurrentStates.gate = 'lstm'"], f"--workdir={tmp_path}")
    statuses, results = finish(start_two(other))
    assert statuses == [2, 2], results
    changed = "RecurrentStates.gate is 'fixed' there, 'lstm' here"
    for _, errors in results:
        assert f"error: {tmp_path} belongs to another config: {changed}" in errors
