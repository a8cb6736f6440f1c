"""Mistakes and accidents: a one-line error that names the cause, no loss of data, and a way to resume."""

import errno
import os
import re
import shutil
import threading
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
import tiny_run
from tiny_run import assert_same_bits, command, parse, read_metrics, run_command, set_up, train

from meliad_like.data.preparation import prepare
from meliad_like.errors import UserError
from meliad_like.run.opening import open_checkpoint, open_store
from meliad_like.run.step_log import MEASURED
from meliad_like.training.checkpoints import Checkpoints
from meliad_like.training.metrics import MetricsWriter
from meliad_like.training.processes import Ownership
from meliad_like.training.step import make_train_step

BAD_STEP, BAD_LANE = 4, 3


@pytest.fixture(scope="module")
def bindings(tmp_path_factory):
    return [
        *tiny_run.make_bindings(tmp_path_factory.mktemp("documents")),
        "TrainingConfig.num_steps = 6",
        "TrainingConfig.checkpoint_every = 3",
        "MeshConfig.data = 1",
    ]


@pytest.fixture
def poisoned_step(monkeypatch):
    """The step function with NaN in the carry of one lane in step 4."""

    def make(*arguments, **options):
        step = make_train_step(*arguments, **options)

        def poisoned(state, batch):
            factor = jnp.where(state.step == BAD_STEP - 1, jnp.full(8, 1.0).at[BAD_LANE].set(jnp.nan), 1.0)
            batch = batch._replace(start=batch.start & (state.step != BAD_STEP - 1))

            def poison(x):
                return jnp.maximum(x, 16) if x.ndim == 1 else x * factor.reshape(-1, *[1] * (x.ndim - 1))

            state, metrics = step(state._replace(carry=jax.tree.map(poison, state.carry)), batch)
            return state, metrics

        return poisoned

    monkeypatch.setattr("meliad_like.training.program.make_train_step", make)


def saved_steps(workdir):
    with Checkpoints(workdir / "checkpoints", read_only=True) as checkpoints:
        return checkpoints.steps()


@pytest.mark.parametrize("checkpoint_every", [3, 2])
def test_a_loss_that_is_not_a_number_stops_and_skipping_continues(
    bindings, poisoned_step, tmp_path, checkpoint_every, capsys
):
    """Also where the good state has been saved already."""
    often = f"TrainingConfig.checkpoint_every = {checkpoint_every}"
    reader = set_up(parse(bindings)).reader
    document = reader.batch(BAD_STEP - 1, [BAD_LANE]).document[0, 0]
    with pytest.raises(UserError) as error:
        train(parse(bindings, often), tmp_path)
    message = str(error.value)
    assert message.startswith("step 4 is not finite: the loss of 1 of 8 lanes, first of lane 3 in document ")
    names = re.search("in document (.*); the state after step 3 is saved", message)[1].split(", ")
    assert set_up(parse(bindings)).store.split("train").names[document] in names
    assert "--gin_file=option/skip_nonfinite.gin" in message and "\n" not in message
    assert message.endswith(f"a smaller learning rate: --load_dir={tmp_path} --workdir=NEW")
    assert saved_steps(tmp_path)[-1] == 3
    assert [m["loss"] is None for m in read_metrics(tmp_path)] == [False, False, False, True]

    if checkpoint_every == 2:
        return
    assert train(parse(bindings, often, files=("option/skip_nonfinite.gin",)), tmp_path) == 0
    figures = [*read_metrics(tmp_path)]
    assert [(m["step"], m["num_skipped"], m["loss"] is None) for m in figures] == [
        (1, 0, False), (2, 0, False), (3, 0, False), (4, 1, True), (5, 1, False), (6, 1, False),
    ]  # fmt: skip
    assert figures[5]["parameter_norm"] != figures[4]["parameter_norm"] != figures[3]["parameter_norm"]
    assert "1 skipped" in capsys.readouterr().out


@pytest.mark.filterwarnings("ignore:overflow encountered in cast")
@pytest.mark.thorough
def test_parameters_that_are_not_finite_end_the_run(bindings, tmp_path, monkeypatch):
    # A CPU refuses such an update.
    monkeypatch.setattr("meliad_like.layers.backend.platform", lambda: "tpu")
    run = parse(bindings, "Adafactor.base_rate = 1e39")
    with pytest.raises(UserError, match="the parameters after step 1 are not finite, although"):
        train(run, tmp_path)
    assert not saved_steps(tmp_path)


@pytest.mark.thorough
def test_a_run_that_skips_every_step_ends(bindings, tmp_path, monkeypatch):
    """Here with a limit of two, and as the run has only two steps."""

    def make(*arguments, **options):
        step = make_train_step(*arguments, **options)
        return lambda state, batch: step(state._replace(carry=jax.tree.map(spoil, state.carry)), batch)

    def spoil(x):
        return jnp.full_like(x, jnp.nan) if jnp.issubdtype(x.dtype, jnp.floating) else x + 16

    monkeypatch.setattr("meliad_like.training.program.make_train_step", make)
    for binding in ("TrainingConfig.max_consecutive_skips = 2", "TrainingConfig.num_steps = 2"):
        message = r"^2 steps in a row were skipped, the last one step \d: .*--load_dir=.* --workdir=NEW, or raise "
        with pytest.raises(UserError, match=message):
            train(parse(bindings, binding, files=("option/skip_nonfinite.gin",)), tmp_path / binding[15:20])


def test_a_run_without_checkpoints_in_between_saves_its_last_step(bindings, tmp_path):
    never = ("TrainingConfig.checkpoint_every = 0", "TrainingConfig.num_steps = 2")
    assert train(parse(bindings, *never), tmp_path) == 0
    assert saved_steps(tmp_path) == [2]


def test_a_stop_between_two_logs_changes_no_row(bindings, tmp_path, monkeypatch):
    """Nor does a run that stops at a step that is not finite and then skips it."""

    def rows(workdir):
        return [{name: row[name] for name in row if name not in MEASURED} for row in read_metrics(workdir)]

    changes = ("TrainingConfig.log_every = 5", "TrainingConfig.num_steps = 6", "TrainingConfig.checkpoint_every = 0")
    assert train(parse(bindings, *changes), tmp_path / "a") == 0
    for stop in (3, 6):
        with monkeypatch.context() as patch:
            patch.setattr("meliad_like.training.processes.Preemption.reached", lambda _, step, stop=stop: step == stop)
            assert train(parse(bindings, *changes), tmp_path / "b") == 75
    assert rows(tmp_path / "a") == rows(tmp_path / "b") and len(rows(tmp_path / "a")) == 2


@pytest.mark.thorough
def test_a_skipped_step_is_no_part_of_the_averages(bindings, poisoned_step, tmp_path):
    run = parse(bindings, "TrainingConfig.log_every = 6", files=("option/skip_nonfinite.gin",))
    assert train(run, tmp_path) == 0
    (row,) = read_metrics(tmp_path)
    reader = set_up(run).reader
    targets = [int(reader.batch(step, range(8)).loss_mask.sum()) for step in range(6)]
    assert row["num_tokens"] == sum(targets) - targets[BAD_STEP - 1]
    assert 0 < row["loss"] < 10 and row["num_skipped"] == 1
    # The schedule counts the steps that were taken.
    assert row["learning_rate"] == pytest.approx(0.1 * 4 / 5)


def test_a_checkpoint_cut_short(bindings, tmp_path, caplog):
    assert train(parse(bindings), tmp_path / "a") == 0
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    last = tmp_path / "b" / "checkpoints" / "6"
    largest = max((path for path in (last / "params").rglob("*") if path.is_file()), key=lambda p: p.stat().st_size)
    largest.write_bytes(largest.read_bytes()[:-7])
    assert train(parse(bindings), tmp_path / "b") == 0
    assert f"checkpoint {last} is damaged" in caplog.text and f"{last} is moved aside, to damaged-6" in caplog.text
    a, b = ([(m["step"], m["loss"]) for m in read_metrics(tmp_path / name)] for name in "ab")
    assert a == b
    assert saved_steps(tmp_path / "b") == [3, 6]
    assert (tmp_path / "b" / "checkpoints" / "damaged-6").is_dir()


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ("DecoderConfig.window_length = 48", "segment_length=64 must be a multiple of window_length=48"),
        ("ReaderConfig.store = '/nowhere/store'", "there is no token store at /nowhere/store: make it with python -m"),
        ("ReaderConfig.store = ''", "no token store is named: add documents (--gin_file=task/"),
        ("VocabularyConfig.size_multiple = 16", "was made by other vocabulary settings"),
        ("SourceConfig.empty = 'skip'", "was made by other source settings"),
        (
            "MeshConfig.tensor = 3",
            "parameter layers/0/feedforward/network/hidden/kernel does not divide by mesh axis tensor=3",
        ),
        ("TrainingConfig.gradient_accumulation = 3", "gradient_accumulation=3 must divide the 8 lanes"),
    ],
)
def test_a_mistake_is_found_before_anything_is_written(bindings, changed, message, tmp_path):
    with pytest.raises(UserError, match=re.escape(message)):
        train(parse(bindings, changed), tmp_path / "workdir")
    assert not (tmp_path / "workdir").exists()


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (("TrainingConfig.evaluate_every = 5", "TrainingConfig.evaluate_split = 'test'"), "'test' has no documents"),
        (("TrainingConfig.evaluate_every = 5", "TrainingConfig.evaluate_max_tokens = 1"), "max_tokens=1 is less than"),
        (("TrainingConfig.sample_every = 5", "TrainingConfig.evaluate_split = 'test'"), "'test' has no documents"),
        (
            ("TrainingConfig.sample_every = 5", "DecoderConfig.clear_states = True"),
            "depends on where segments end",
        ),
    ],
)
def test_what_would_stop_the_first_evaluation_is_found_before_the_first_step(bindings, changed, message, tmp_path):
    with pytest.raises(UserError, match=re.escape(message)):
        train(parse(bindings, *changed), tmp_path / "workdir")
    assert not (tmp_path / "workdir").exists()


def test_a_working_folder_of_another_run(bindings, tmp_path):
    assert train(parse(bindings, "TrainingConfig.num_steps = 1"), tmp_path) == 0
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    changed = "RecurrentStates.num_states is 16 there, 8 here"
    message = f"{tmp_path} belongs to another config: {changed}; choose another"
    with pytest.raises(UserError, match=re.escape(message)):
        train(parse(bindings, "NUM_STATES = 8"), tmp_path)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before

    # The same settings, but a document has been added since.
    run = parse(bindings)
    added = Path(run.source.folder) / "train" / "new.txt"
    added.write_text("one more")
    prepare(run.source, run.vocabulary, tmp_path / "store", num_workers=1)
    with pytest.raises(UserError, match=r"checkpoints belongs to another config: store_fingerprint is '\w+' there"):
        train(parse(bindings, f"ReaderConfig.store = '{tmp_path / 'store'}'"), tmp_path)
    added.unlink()
    # The store of the first run was made from another one.
    changed = added.with_name("0.txt")
    text = changed.read_text()
    changed.write_text("another")
    with pytest.raises(UserError, match="was made from the documents in .*documents, which have changed since"):
        train(run, tmp_path)
    changed.write_text(text)


@pytest.mark.thorough
def test_a_run_goes_on_with_the_version_of_its_store(tmp_path, capsys):
    """Bit for bit, when documents were added after it began; another run reads all of them."""
    bindings = [
        *tiny_run.make_bindings(tmp_path / "documents"),
        "MeshConfig.data = 1",
        "RunConfig.schedule = 'constant'",
        "TrainingConfig.evaluate_every = 4",
    ]
    half, whole = (parse(bindings, f"TrainingConfig.num_steps = {steps}") for steps in (2, 4))
    train(whole, tmp_path / "straight")
    train(half, tmp_path / "resumed")
    for split in "train", "validation":
        (Path(whole.source.folder) / split / "new.txt").write_text("added later " * 99)
    # The store is as it was.
    with pytest.raises(UserError, match="2 files are newer than the token store .*: add them with python -m"):
        train(half, tmp_path / "new")
    old = prepare(whole.source, whole.vocabulary, whole.data.store, num_workers=1)
    assert old.version == 2 and len(old.split("train")) == 21
    capsys.readouterr()
    train(whole, tmp_path / "resumed")
    assert "version 1 of the token store" in capsys.readouterr().out
    train(half, tmp_path / "new")
    assert "of the token store" not in capsys.readouterr().out
    rows = {name: list(read_metrics(tmp_path / name)) for name in ("straight", "resumed", "new")}
    losses = {name: [row["loss"] for row in rows[name]] for name in rows}
    assert losses["resumed"] == losses["straight"] != losses["new"] and len(losses["straight"]) == 4
    evaluated = [list(read_metrics(tmp_path / name, "validation")) for name in ("straight", "resumed")]
    assert evaluated[0][-1]["bits_per_token"] == evaluated[1][-1]["bits_per_token"]  # after the last step
    states, stores = [], []
    for name in ("straight", "resumed", "new"):
        with Checkpoints(tmp_path / name / "checkpoints", read_only=True) as checkpoints:
            stores.append(checkpoints.read_metadata()["store_fingerprint"])
            states.append(checkpoints.restore(set_up(whole).program.abstract_state)[0])
    assert_same_bits(*states[:2])
    assert stores[0] == stores[1] == old.infos[0].fingerprint and stores[2] == old.fingerprint
    # An evaluation reads the documents of the training, unless it names a store.
    opened = open_checkpoint(tmp_path / "resumed")
    read = [open_store(opened, tmp_path / "resumed", store, prepare=False) for store in (None, whole.data.store)]
    assert [store.version for store in read] == [1, 2]
    (Path(whole.source.folder) / "train" / "newer.txt").write_text("added even later")
    assert open_store(opened, tmp_path / "resumed", whole.data.store, prepare=True).version == 3


def test_what_has_no_effect_is_said(bindings, tmp_path, capsys):
    def output(num_steps, **arguments):
        assert train(parse(bindings, f"TrainingConfig.num_steps = {num_steps}"), tmp_path, **arguments) == 0
        return capsys.readouterr().out

    first = output(1)
    # 512 tokens with padding, of 11,721 targets.
    assert "\nreads 8 of 20 documents, 4.3% of the tokens\n" in first
    assert re.search(r"step 1/1  0:00:00 left  .* bits/byte  .* tokens/s  0.0 epochs", first)
    assert re.search(r"warning: the learning rate grows for \d+ steps \(warmup_steps\), and the run has 1\n", first)
    assert f"\ndone: 1 steps; checkpoints and metrics are in {tmp_path}\n" in first, repr(first)
    assert "warning: --load_dir=none is not read, because" in output(2, load_dir="none")
    before = (tmp_path / "config.json").read_bytes()
    assert "is at step 2 of 1: nothing left to do" in output(1)
    assert (tmp_path / "config.json").read_bytes() == before


@pytest.mark.thorough
def test_a_start_that_failed_leaves_the_folder_to_the_next(bindings, tmp_path):
    with pytest.raises(UserError, match="there is no checkpoint folder"):
        train(parse(bindings), tmp_path / "run", load_dir=str(tmp_path / "none"))
    assert train(parse(bindings, "NUM_STATES = 8", "TrainingConfig.num_steps = 1"), tmp_path / "run") == 0


def test_tokens_that_change_under_a_run(bindings, tmp_path, monkeypatch):
    store = tmp_path / "store"
    run = parse(bindings, f"ReaderConfig.store = '{store}'")
    shutil.copytree(parse(bindings).data.store, store)
    write = MetricsWriter.write

    def write_and_change(self, step, metrics, kind="train"):
        write(self, step, metrics, kind)
        if step == 4:
            with (store / "train" / "tokens.bin").open("r+b") as file:
                file.write(b"a\0b\0")

    monkeypatch.setattr(MetricsWriter, "write", write_and_change)
    with pytest.raises(
        UserError, match=f"{store}/train/tokens.bin was changed while it was read: prepare {store} again"
    ):
        train(run, tmp_path / "run")
    # Steps that may have read them are in no checkpoint.
    assert saved_steps(tmp_path / "run") == [3]


def test_a_checkpoint_that_fails_beside_the_steps_is_noticed_before_the_next(bindings, tmp_path, monkeypatch):
    def no_space(folder):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    write = MetricsWriter.write

    def write_and_wait(self, step, metrics, kind="train"):
        write(self, step, metrics, kind)
        if step == 4:
            for thread in threading.enumerate():
                if "save_finalize" in thread.name:
                    # Its own `join` would raise what it met.
                    threading.Thread.join(thread, 30)

    monkeypatch.setattr("meliad_like.training.checkpoints.write_manifest", no_space)
    monkeypatch.setattr(MetricsWriter, "write", write_and_wait)
    with pytest.raises(UserError, match=r"the disk is full: checkpoint .*/3 could not be written"):
        train(parse(bindings), tmp_path)
    assert [m["step"] for m in read_metrics(tmp_path)][-1] == 4


def test_two_trainings_in_one_folder(bindings, tmp_path):
    with Ownership(tmp_path), pytest.raises(UserError, match=f"another training is writing to {tmp_path}: process "):
        train(parse(bindings), tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [".lock"]


@pytest.mark.parametrize(
    ("flag", "message"),
    [
        ("--gin_file=size/tiny1.gin", "no gin file or row 'size/tiny1.gin' (nearest: size/tiny.gin)"),
        ("--gin_param=TrainingConfig.steps = 3", "TrainingConfig has no parameter steps (nearest: "),
        ("--gin_param=DecoderConfig.window_length = 48", "segment_length=64 must be a multiple of window_length=48"),
        ("--gin_param=MeshConfig.data = 3", "mesh data=3 fsdp=1 tensor=1 sequence=1 does not fit 8 device(s)"),
        ("--process_id=0", "num_processes=None and process_id=0 must be given together"),
        ("--work_dir=x", "Unknown command line flag 'work_dir'. Did you mean: workdir ?"),
    ],
)
def test_the_command_says_so_in_one_line(bindings, flag, message, tmp_path):
    result = run_command(command(bindings, f"--workdir={tmp_path / 'workdir'}", flag))
    assert result.returncode == 2
    assert result.stderr.startswith("error: ") and result.stderr.count("\n") == 1
    assert message in result.stderr
    assert not (tmp_path / "workdir").exists()
