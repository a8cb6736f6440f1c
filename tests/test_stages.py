"""Staged training: changes between stages, what is kept, and that a kill changes no result."""

import json
import signal

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_run
from tiny_run import assert_same_bits, parse, read_metrics, run_and_act, set_up, train

from meliad_like import config
from meliad_like.config.run import stages_of
from meliad_like.errors import UserError
from meliad_like.run import step_log
from meliad_like.training.checkpoints import Checkpoints
from meliad_like.training.metrics import MetricsWriter
from meliad_like.training.program import TrainingProgram
from meliad_like.training.step import make_train_step

# Segments of 16, 32 and at last 64 tokens, in windows of 8, 16 and 16: 32, 16 and 8 lanes.
STAGES = (
    "StagesConfig.num_steps = (4, 3)",
    "StagesConfig.segment_length = (16, 32)",
    "StagesConfig.window_length = (8, 16)",
    "TrainingConfig.num_steps = 10",
    "TrainingConfig.checkpoint_every = 1",
    "TrainingConfig.checkpoints_kept = 20",
    "MeshConfig.data = 1",
)
SHORTFORMER = (
    "RunConfig.model = 'shortformer'",
    "ShortformerConfig.num_layers = 1",
    "ShortformerConfig.model_width = 16",
    "ShortformerConfig.num_heads = 2",
    "ShortformerConfig.head_size = 8",
    "ShortformerConfig.feedforward_width = 16",
    "ShortformerConfig.window_length = 32",
    "ShortformerConfig.cache_length = 32",
    "ShortformerConfig.cutoffs = (100, 200)",
    "StagesConfig.num_steps = (3,)",
    "StagesConfig.segment_length = (16,)",
    "StagesConfig.window_length = (16,)",
    "StagesConfig.cache_length = (16,)",
    "ReaderConfig.segment_length = 32",
    "RunConfig.data = 'stream'",
    "RunConfig.optimizer = 'nag'",
    "OptimizerConfig.clip_norm = 0.1",
    "TrainingConfig.num_steps = 6",
    "TrainingConfig.checkpoint_every = 1",
    "TrainingConfig.checkpoints_kept = 20",
    "MeshConfig.data = 1",
)


@pytest.fixture(scope="module")
def bindings(tmp_path_factory):
    made = tiny_run.make_bindings(tmp_path_factory.mktemp("documents"))
    return [binding for binding in made if not binding.startswith("Adafactor.")]


def test_what_all_stages_read_is_said(bindings, monkeypatch):
    """With a warning for each stage in which few lanes stay in their documents for long."""
    run = parse(bindings, *STAGES, "ReaderConfig.tokens_per_step = 128")
    setups = [set_up(run, stage) for stage in range(3)]
    numbers = [stage.stage.last_step - stage.stage.first_step for stage in setups]
    read = {
        int(document)
        for stage, number in zip(setups, numbers, strict=True)
        for step in range(number)
        for document in stage.reader.batch(step, range(stage.reader.num_lanes)).document.ravel()
    }
    (said,) = step_log.reading_report(setups)
    assert said == f"reads {len(read)} of 20 documents, 10.8% of the tokens" and len(read) < 20
    # The stages have 8, 4 and 2 lanes, and documents of about 800 tokens.
    monkeypatch.setattr(step_log, "MANY_STEPS", 10)
    assert step_log.reading_report(setups)[1:] == [
        f"warning: for about {steps} steps in a row each step sees the same {lanes} of 20 documents: "
        f"use more lanes, of shorter segments (ReaderConfig.segment_length={length})"
        for steps, lanes, length in ((51, 8, 16), (25, 4, 32), (13, 2, 64))
    ]
    longer = set_up(parse(bindings, *STAGES, "TrainingConfig.num_steps = 200"))
    assert step_log.reading_report([longer])[0] == "reads 8.3 epochs of 20 documents"


@pytest.fixture(scope="module")
def straight(bindings, tmp_path_factory):
    """The working folder of a run of three stages, and how often a step was compiled."""
    workdir, compiled = tmp_path_factory.mktemp("straight"), []
    with pytest.MonkeyPatch.context() as monkeypatch:
        compile_step = TrainingProgram.compile_step

        def compile_and_count(self):
            compiled.append(self.abstract_batch.inputs.shape)
            return compile_step(self)

        monkeypatch.setattr(TrainingProgram, "compile_step", compile_and_count)
        assert train(parse(bindings, *STAGES), workdir) == 0
    assert compiled == [(32, 16), (16, 32), (8, 64)]
    return workdir


def read_state(run, workdir, step):
    stage = next(stage for stage in stages_of(run) if step <= stage.last_step)
    with Checkpoints(workdir / "checkpoints", read_only=True) as checkpoints:
        return checkpoints.restore(set_up(run, stage.index).program.abstract_state, step)[0]


def train_and_stop(run, workdir, step, monkeypatch):
    """Trains until SIGTERM comes when the metrics of a step are written; returns the exit status."""
    write = MetricsWriter.write

    def write_and_signal(self, at, metrics, kind="train"):
        write(self, at, metrics, kind)
        if at == step:
            signal.raise_signal(signal.SIGTERM)

    with monkeypatch.context() as context:
        context.setattr(MetricsWriter, "write", write_and_signal)
        return train(run, workdir)


def test_lanes_follow_from_the_tokens_of_a_step(bindings):
    stages = stages_of(parse(bindings, *STAGES))
    assert [(stage.first_step, stage.last_step) for stage in stages] == [(0, 4), (4, 7), (7, 10)]
    assert [stage.run.data.num_lanes for stage in stages] == [32, 16, 8]
    assert [stage.run.model.window_length for stage in stages] == [8, 16, 16]
    assert {stage.run.data.tokens_per_step for stage in stages} == {512}


def test_a_run_without_stages_is_one(bindings):
    run = parse(bindings)
    ((index, first, last, same),) = stages_of(run)
    assert (index, first, last, same) == (0, 0, run.training.num_steps, run)


@pytest.mark.thorough
def test_what_a_stage_keeps_and_what_it_resets(bindings, straight):
    run = parse(bindings, *STAGES)
    before, after, last = (read_state(run, straight, step) for step in (4, 5, 10))
    assert [state.carry.layers[0]["recurrent_states"].window.key.shape[:3] for state in (before, after, last)] == [
        (32, 2, 8),
        (16, 2, 16),
        (8, 2, 16),
    ]
    # The state after a switch follows from the one before it, but for the carry.
    setup = set_up(run, 1)
    state = setup.begin_stage(before)
    assert_same_bits(state._replace(carry=None), before._replace(carry=None))
    assert (np.asarray(state.carry.position) == 0).all()
    expected, _ = setup.program.compile_step()(state, setup.reader.batch(0, range(16)))
    assert_same_bits(after, expected)
    assert [m["step"] for m in read_metrics(straight)] == [*range(1, 11)]
    rates = [m["learning_rate"] for m in read_metrics(straight)]
    np.testing.assert_allclose(rates, 0.1 * np.minimum(np.arange(10), 5) / 5, rtol=1e-6)


def test_stages_read_their_documents_in_orders_of_their_own(bindings):
    run = parse(bindings, *STAGES, "StagesConfig.segment_length = (64, 64)", "StagesConfig.window_length = (16, 16)")
    first, second, last = (set_up(run, stage).reader.batch(0, range(8)).inputs for stage in range(3))
    assert (first != second).any() and (second != last).any() and (first != last).any()


# Saved at a stage's last step, and at the first one of the next. When a step is logged, the loop is one step further.
@pytest.mark.parametrize("stop", [pytest.param(3, marks=pytest.mark.exhaustive), 4])
@pytest.mark.thorough
def test_stopped_around_a_switch(bindings, straight, tmp_path, monkeypatch, stop):
    run = parse(bindings, *STAGES)
    assert train_and_stop(run, tmp_path, stop, monkeypatch) == 75
    with Checkpoints(tmp_path / "checkpoints", read_only=True) as checkpoints:
        assert checkpoints.steps()[-1] == stop + 1
    assert train(run, tmp_path) == 0
    assert_same_bits(read_state(run, tmp_path, 10), read_state(run, straight, 10))
    figures = [[(m["step"], m["loss"]) for m in read_metrics(folder)] for folder in (tmp_path, straight)]
    assert figures[0] == figures[1]


def test_killed_around_a_switch(bindings, straight, tmp_path):
    """At the last step of a stage, whose checkpoint may be half written."""
    run = parse(bindings, *STAGES)
    killed = run_and_act([*bindings, *STAGES], tmp_path, 4, "os.kill(os.getpid(), signal.SIGKILL)")
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert train(run, tmp_path) == 0
    assert_same_bits(read_state(run, tmp_path, 10), read_state(run, straight, 10))
    figures = [[(m["step"], m["loss"]) for m in read_metrics(folder)] for folder in (tmp_path, straight)]
    assert figures[0] == figures[1]


@pytest.mark.exhaustive
def test_a_first_step_of_a_stage_that_is_not_finite(bindings, tmp_path, monkeypatch):
    """The saved state is the last step of the stage before, with the lanes of that stage."""

    def make(*arguments, **options):
        step = make_train_step(*arguments, **options)

        def poisoned(state, batch):
            bad = state.step == 4
            carry = jax.tree.map(lambda x: jnp.where(bad, 16 if x.ndim == 1 else jnp.nan, x), state.carry)
            return step(state._replace(carry=carry), batch._replace(start=batch.start & ~bad))

        return poisoned

    monkeypatch.setattr("meliad_like.training.program.make_train_step", make)
    more = (*STAGES, "TrainingConfig.checkpoint_every = 3", "TrainingConfig.num_steps = 8")
    with pytest.raises(UserError, match="step 5 is not finite: .*; the state after step 4 is saved"):
        train(parse(bindings, *more), tmp_path)
    run = parse(bindings, *more, files=("option/skip_nonfinite.gin",))
    assert train(run, tmp_path) == 0
    assert read_state(run, tmp_path, 8).num_skipped == 1


@pytest.mark.thorough
def test_a_shortformer_in_stages(bindings, tmp_path):
    bindings = [binding for binding in bindings if not binding.startswith(("DecoderConfig", "RECURRENT_LAYERS"))]
    run = config.parse([], [*bindings, *SHORTFORMER])
    assert train(run, tmp_path) == 0
    before, last = (read_state(run, tmp_path, step) for step in (3, 6))
    assert before.carry.layers[0].cache.shape == (32, 16, 16)
    assert last.carry.layers[0].cache.shape == (16, 32, 16)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(last.params))


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["StagesConfig.num_steps = (4, 6)"], r"num_steps=\(4, 6\) leaves none of TrainingConfig.num_steps=10"),
        (["StagesConfig.num_steps = (4,)"], r"segment_length=\(16, 32\) and StagesConfig.num_steps=\(4,\) must have a"),
        (["StagesConfig.num_steps = (0, 3)"], r"num_steps=\(0, 3\) must all be at least 1"),
        (["StagesConfig.window_length = (5, 16)"], "stage 1 of 3: segment_length=16 must be a multiple of window_len"),
        (["StagesConfig.segment_length = (16, 48)"], "stage 2 of 3: tokens_per_step=512 must be a multiple of segment"),
        (["StagesConfig.cache_length = (8, 16)"], "StagesConfig.cache_length has no effect: DecoderConfig has no such"),
    ],
)
def test_a_mistake_in_the_stages_is_named(bindings, more, message):
    with pytest.raises(UserError, match=message):
        parse(bindings, *STAGES, *more)


def test_stages_are_saved_and_may_not_change(bindings, tmp_path):
    run = parse(bindings, *STAGES)
    config.save(run, tmp_path)
    assert config.parse([str(tmp_path / "config.gin")]) == run
    assert config.from_json((tmp_path / "config.json").read_text()) == run
    (tmp_path / "checkpoints" / "3").mkdir(parents=True)
    with pytest.raises(UserError, match=r"StagesConfig.num_steps is \[4, 3\] there, \[4, 2\] here"):
        config.save(parse(bindings, *STAGES, "StagesConfig.num_steps = (4, 2)"), tmp_path)
    old = json.loads(config.to_json(parse(bindings)))
    without = {name: value for name, value in old.items() if not name.startswith("StagesConfig.")}
    assert config.from_json(json.dumps(without)) == parse(bindings)
