"""Whole runs: the files that they write, and that stopping and resuming changes nothing."""

import itertools
import json
import shutil
import signal
import time
from concurrent.futures import ThreadPoolExecutor

import jax
import numpy as np
import pytest
import tiny_run
from tensorboardX.proto.event_pb2 import Event
from tiny_run import assert_same_bits, command, parse, read_metrics, run_and_act, run_command, set_up, train

from meliad_like import config
from meliad_like.errors import UserError
from meliad_like.run.setup import starting_state
from meliad_like.training.checkpoints import Checkpoints
from meliad_like.training.metrics import MetricsWriter

NUM_STEPS = 40
EXTRAS = ("TrainingConfig.evaluate_every = 20", "TrainingConfig.sample_every = 40", "TrainingConfig.sample_tokens = 8")


@pytest.fixture(scope="module")
def bindings(tmp_path_factory):
    """The bindings of a run whose lanes and parameters are sharded over two devices."""
    return [
        *tiny_run.make_bindings(tmp_path_factory.mktemp("documents")),
        f"TrainingConfig.num_steps = {NUM_STEPS}",
        "TrainingConfig.checkpoint_every = 10",
        "MeshConfig.data = 1",
        "MeshConfig.fsdp = 2",
    ]


@pytest.fixture(scope="module")
def setup(bindings):
    return set_up(parse(bindings))


@pytest.fixture(scope="module")
def straight(bindings, tmp_path_factory):
    """The working folder of an uninterrupted run."""
    workdir = tmp_path_factory.mktemp("straight")
    assert train(parse(bindings, *EXTRAS), workdir) == 0
    return workdir


@pytest.fixture(scope="module")
def stopped(bindings, tmp_path_factory):
    """The working folder of a run of 17 steps, in a thread: Python lets the main thread alone handle signals."""
    workdir = tmp_path_factory.mktemp("stopped")
    run = parse(bindings, "TrainingConfig.num_steps = 17", "TrainingConfig.log_every = 5")
    with ThreadPoolExecutor() as pool:
        assert pool.submit(train, run, workdir).result() == 0
    return workdir


def read_state(setup, workdir, step):
    with Checkpoints(workdir / "checkpoints", read_only=True) as checkpoints:
        return checkpoints.restore(setup.program.abstract_state, step)[0]


def test_killed_then_terminated_and_nothing_is_lost(bindings, setup, straight, tmp_path):
    saved = f"pathlib.Path({str(tmp_path)!r}, 'checkpoints', '10')"
    kill = f"while not {saved}.exists(): time.sleep(0.01)\n        os.kill(os.getpid(), signal.SIGKILL)"
    killed = run_and_act(bindings, tmp_path, 17, kill)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert [m["step"] for m in read_metrics(tmp_path)][-1] == 17
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 18, "ki')

    # When a step is logged, the loop is one step further.
    terminated = run_and_act(bindings, tmp_path, 24, "os.kill(os.getpid(), signal.SIGTERM)")
    assert terminated.returncode == 75, terminated.stderr
    assert "step 11/40" in terminated.stdout and "step 10/40" not in terminated.stdout
    folder = tmp_path / "checkpoints"
    assert f"SIGTERM: saved step 25 in {folder}; the same command resumes it" in terminated.stdout
    assert (folder / "25" / "manifest.json").exists()

    assert train(parse(bindings), tmp_path) == 0
    assert_same_bits(read_state(setup, tmp_path, NUM_STEPS), read_state(setup, straight, NUM_STEPS))
    figures = [[(m["step"], m["loss"], m["gradient_norm"]) for m in read_metrics(run)] for run in (tmp_path, straight)]
    assert figures[0] == figures[1]
    assert [step for step, *_ in figures[0]] == [*range(1, NUM_STEPS + 1)]


@pytest.mark.exhaustive
def test_tokens_that_are_cut_short_under_a_run(bindings, setup, straight, tmp_path):
    store, run = tmp_path / "store", tmp_path / "run"
    shutil.copytree(setup.store.folder, store)
    tokens = store / "train" / "tokens.bin"
    whole = tokens.read_bytes()
    here = [*bindings, f"ReaderConfig.store = '{store}'"]
    died = run_and_act(here, run, 12, f"os.truncate({str(tokens)!r}, 2)")
    # A page of a memory-mapped file that is no longer there: no program can go on.
    assert died.returncode == -signal.SIGBUS and "Bus error" in died.stderr
    again = run_command(command(here, f"--workdir={run}"))
    assert again.returncode == 2 and f"{tokens} has 2 bytes and should have {len(whole)}" in again.stderr
    tokens.write_bytes(whole)
    assert train(parse(here), run) == 0
    assert_same_bits(read_state(setup, run, NUM_STEPS), read_state(setup, straight, NUM_STEPS))


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_clock_that_jumps_changes_nothing(bindings, straight, tmp_path, monkeypatch):
    """Like that of a machine which was months ahead, until the network set it."""
    now, calls = time.time, itertools.count()
    monkeypatch.setattr(time, "time", lambda: now() + (1e7 if next(calls) < 100 else 0))
    assert train(parse(bindings, "TrainingConfig.num_steps = 12"), tmp_path) == 0
    assert next(calls) > 100
    losses = [[m["loss"] for m in read_metrics(run)][:12] for run in (tmp_path, straight)]
    assert losses[0] == losses[1] and len(losses[0]) == 12
    assert all(m["tokens_per_second"] > 0 for m in read_metrics(tmp_path))


def test_ctrl_c_saves_and_ends_as_sigterm_does(bindings, tmp_path):
    stopped = run_and_act(bindings, tmp_path, 3, "signal.raise_signal(signal.SIGINT)")
    assert stopped.returncode == 75, stopped.stderr
    assert f"SIGINT: saved step 4 in {tmp_path / 'checkpoints'}; the same command resumes it" in stopped.stdout
    assert "Traceback" not in stopped.stderr and "press it again to stop at once" in stopped.stderr

    twice = "signal.raise_signal(signal.SIGINT); signal.raise_signal(signal.SIGINT)"
    ended = run_and_act(bindings, tmp_path, 6, twice)
    assert ended.returncode == -signal.SIGINT and "Traceback" not in ended.stderr
    assert [int(path.name) for path in (tmp_path / "checkpoints").glob("[0-9]*")] == [4]


def test_ctrl_c_before_the_first_step_is_one_line(bindings, tmp_path):
    # Interrupted while jax prepares the training, the interpreter crashes in its clean-up.
    crash = "import atexit, os, signal; from meliad_like.command_line import Command; atexit.register(os.abort); "
    ended = run_command(["-c", crash + "Command(None).run(lambda: signal.raise_signal(signal.SIGINT))"])
    assert ended.returncode == 130 and ended.stderr == "interrupted\n"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.thorough
def test_a_signal_at_a_step_that_has_a_checkpoint_anyway(bindings, tmp_path, monkeypatch, capsys, number):
    write, handler = MetricsWriter.write, signal.signal(signal.SIGINT, signal.default_int_handler)

    def write_and_signal(self, step, metrics, kind="train"):
        write(self, step, metrics, kind)
        if step == 1:
            signal.raise_signal(number)

    monkeypatch.setattr(MetricsWriter, "write", write_and_signal)
    assert train(parse(bindings, "TrainingConfig.checkpoint_every = 2"), tmp_path) == 75
    assert f"{number.name}: saved step 2 in" in capsys.readouterr().out
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    assert signal.signal(signal.SIGINT, handler) is signal.default_int_handler


def test_sigterm_at_a_step_with_an_evaluation_saves_first(bindings, tmp_path, monkeypatch):
    write, saved = MetricsWriter.write, []

    def write_and_signal(self, step, metrics, kind="train"):
        write(self, step, metrics, kind)
        if step == 1:
            signal.raise_signal(signal.SIGTERM)

    def evaluation_hook(*_):
        return lambda step, state: saved.append((tmp_path / "checkpoints" / str(step) / "manifest.json").exists())

    monkeypatch.setattr(MetricsWriter, "write", write_and_signal)
    monkeypatch.setattr("meliad_like.run.training.evaluation_hook", evaluation_hook)
    assert train(parse(bindings, "TrainingConfig.evaluate_every = 2"), tmp_path) == 75
    assert saved == [True]


def test_a_finished_run_resumes_when_it_is_given_more_steps(bindings, setup, straight, stopped, tmp_path):
    shutil.copytree(stopped, tmp_path, dirs_exist_ok=True)
    assert train(parse(bindings), tmp_path) == 0
    assert_same_bits(read_state(setup, tmp_path, NUM_STEPS), read_state(setup, straight, NUM_STEPS))


@pytest.mark.thorough
def test_a_run_with_an_average_resumes_and_begins_with_other_parameters(bindings, straight, tmp_path):
    changes = "OptimizerConfig.average_decay = 0.9", "TrainingConfig.z_loss = 1e-3"
    run = parse(bindings, *changes, "TrainingConfig.num_steps = 12")
    assert train(run, tmp_path / "whole") == 0
    for steps in (7, 12):
        assert train(parse(bindings, *changes, f"TrainingConfig.num_steps = {steps}"), tmp_path / "parts") == 0
    averaging = set_up(run)
    states = [read_state(averaging, tmp_path / name, 12) for name in ("whole", "parts")]
    assert_same_bits(*states)
    with Checkpoints(tmp_path / "fresh") as checkpoints:
        state = starting_state(averaging, checkpoints, str(straight))
    assert_same_bits(state.optimizer_state.trained, state.params)


@pytest.mark.thorough
def test_going_on_with_another_mesh(bindings, setup, stopped, tmp_path):
    run = parse(bindings, "MeshConfig.data = 2", "MeshConfig.tensor = 2")
    other = set_up(run)
    restored = read_state(other, stopped, 17)
    assert restored.params["embedding"].addressable_shards[0].data.shape == (132, 16)
    assert_same_bits(restored, read_state(setup, stopped, 17))

    # One step, because the programs of two meshes round differently, and the difference grows with every step.
    states = []
    for each in (setup, other):
        step, state = each.program.compile_step(), read_state(each, stopped, 17)
        state, _ = step(state, each.reader.batch(17, range(8)))
        states.append(jax.tree.map(np.asarray, state))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-4), *states)

    # All further steps are the same program's.
    for i in range(18, NUM_STEPS):
        state, _ = step(state, other.reader.batch(i, range(8)))
    shutil.copytree(stopped, tmp_path, dirs_exist_ok=True)
    assert train(run, tmp_path) == 0
    assert_same_bits(read_state(setup, tmp_path, NUM_STEPS), state)


@pytest.mark.exhaustive
def test_going_on_with_scanned_layers_and_back(bindings, tmp_path):
    bindings = [*bindings, "DecoderConfig.num_layers = 3", "TrainingConfig.checkpoint_every = 1"]
    for steps, scanned in ((2, False), (3, True), (4, False)):
        changes = f"TrainingConfig.num_steps = {steps}", f"DecoderConfig.scan_layers = {scanned}"
        assert train(parse(bindings, *changes), tmp_path) == 0
    setup = set_up(parse(bindings, "TrainingConfig.num_steps = 4"))
    step = setup.program.compile_step()
    # One step from the same state: the program with the loop rounds differently, and the difference would grow.
    expected, _ = step(read_state(setup, tmp_path, 2), setup.reader.batch(2, range(8)))
    scanned = read_state(setup, tmp_path, 3)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-4), scanned, expected)
    expected, _ = step(scanned, setup.reader.batch(3, range(8)))
    assert_same_bits(read_state(setup, tmp_path, 4), expected)


def test_checkpoints_written_beside_the_steps_hold_the_states_of_their_steps(bindings, setup, tmp_path):
    """The next steps take over the buffers while a checkpoint is being written."""
    every_step = ("TrainingConfig.num_steps = 6", "TrainingConfig.checkpoint_every = 1")
    assert train(parse(bindings, *every_step, "TrainingConfig.checkpoints_kept = 6"), tmp_path) == 0
    step, state = setup.program.compile_step(), setup.program.initialise()
    for i in range(6):
        state, _ = step(state, setup.reader.batch(i, range(8)))
        assert_same_bits(read_state(setup, tmp_path, i + 1), jax.tree.map(np.asarray, state))


def test_a_finished_run_says_so_and_changes_nothing(bindings, straight, capsys):
    before = (straight / "metrics.jsonl").read_bytes()
    assert train(parse(bindings, *EXTRAS), straight) == 0
    assert f"{straight} is at step 40 of 40: nothing left to do; raise num_steps" in capsys.readouterr().out
    assert (straight / "metrics.jsonl").read_bytes() == before


def test_what_a_run_leaves_behind(bindings, straight):
    run = parse(bindings, *EXTRAS)
    assert config.parse([str(straight / "config.gin")]) == run
    assert config.from_json((straight / "config.json").read_text()) == run
    assert (straight / "checkpoints" / "vocabulary" / "vocabulary.json").exists()
    (events,) = (path.read_bytes() for path in straight.iterdir() if path.name.startswith("events.out.tfevents"))
    logged = []
    while events:
        # The length of a record, its checksum, the record, its checksum.
        end = 12 + int.from_bytes(events[:8], "little")
        logged.append(Event.FromString(events[12:end]))
        events = events[end + 4 :]
    losses = [(event.step, v.simple_value) for event in logged for v in event.summary.value if v.tag == "train/loss"]
    assert losses == [(m["step"], np.float32(m["loss"])) for m in read_metrics(straight)]


def test_metrics(bindings, setup, straight, stopped):
    steps = [*read_metrics(straight)]
    last = steps[-1]
    assert last["loss"] < 0.7 * steps[0]["loss"]
    # Of bytes: every target is one, and the end of a document stands for the first, which is none.
    assert last["bits_per_byte"] == pytest.approx(last["loss"] / np.log(2)) == last["bits_per_token"]
    assert 0.1 < last["accuracy"] < 1
    assert last["learning_rate"] == pytest.approx(0.1)
    assert steps[2]["learning_rate"] == pytest.approx(0.1 * 2 / 5)
    for name in ("update_norm", "tokens_per_second", "model_flops_per_second", "share_of_peak", "memory_bytes"):
        assert last[name] > 0, name
    assert last["data_wait_seconds"] >= 0
    batch = setup.reader.batch(NUM_STEPS - 1, range(8))
    assert last["num_tokens"] == batch.loss_mask.sum()

    averages = [*read_metrics(stopped)]
    assert [m["step"] for m in averages] == [5, 10, 15, 17]
    weights = [m["num_tokens"] for m in steps[5:10]]
    assert averages[1]["loss"] == pytest.approx(np.average([m["loss"] for m in steps[5:10]], weights=weights))
    assert averages[1]["num_tokens"] == sum(weights)


def test_evaluation_on_the_way(straight):
    rows = [*read_metrics(straight, "validation")]
    assert [m["step"] for m in rows] == [20, 40]
    assert rows[1]["bits_per_byte"] < 5 and rows[1]["perplexity"] == pytest.approx(2 ** rows[1]["bits_per_token"])


def test_evaluation_of_long_documents_reads_a_beginning(bindings, setup, tmp_path, capsys):
    limit = int(setup.store.split("validation").lengths.min()) - 1
    evaluations = ("TrainingConfig.evaluate_every = 1", f"TrainingConfig.evaluate_max_tokens = {limit}")
    assert train(parse(bindings, "TrainingConfig.num_steps = 1", *evaluations), tmp_path) == 0
    assert f"on validation: the first {limit} bytes of 0\n" in capsys.readouterr().out
    (row,) = read_metrics(tmp_path, "validation")
    assert row["perplexity"] > 1


def test_samples_on_the_way(straight, setup):
    (sample,) = (straight / "samples").iterdir()
    prompt, _, continuation = sample.read_text().partition("\n--- continued by step 40: ---\n")
    split = setup.store.split("validation")
    assert setup.store.vocabulary.decode(split.tokens(0, 0, 64)) == prompt
    assert continuation.strip()


def test_fine_tuning_starts_with_the_parameters_alone(bindings, setup, straight, tmp_path):
    with Checkpoints(tmp_path) as checkpoints:
        state = starting_state(setup, checkpoints, str(straight))
        assert_same_bits(state.params, read_state(setup, straight, NUM_STEPS).params)
        fresh = setup.program.initialise()
        assert_same_bits(state._replace(params=None), fresh._replace(params=None))

        changes = (
            "DecoderConfig.remat = 'layers'",
            "DecoderConfig.scan_layers = True",
            "DecoderConfig.dropout_rate = 0.5",
            "DecoderConfig.attention_kernel = 'tpu'",
        )
        sparing = set_up(parse(bindings, *changes))
        assert_same_bits(starting_state(sparing, checkpoints, str(straight)).params, state.params)

        other = set_up(parse(bindings, "RecurrentStates.gate = 'lstm'"))
        with pytest.raises(
            UserError,
            match="load_dir=.* belongs to another config: .*RecurrentStates.gate is 'fixed' there",
        ):
            starting_state(other, checkpoints, str(straight))


def test_metrics_are_json_that_any_program_reads(straight):
    def refuse(constant):
        raise ValueError(constant)

    for line in (straight / "metrics.jsonl").read_text().splitlines():
        json.loads(line, parse_constant=refuse)
