"""The cost of a step: linear in the segment length, independent of the position, with one compilation."""

import logging

import jax
import jax.numpy as jnp
import pytest
import tiny_run
import ways
from tiny_run import ONE_LAYER, parse, train

from meliad_like import config
from meliad_like.data.batch import empty_batch
from meliad_like.models.model import Model
from meliad_like.optimization.optimizers import make_optimizer
from meliad_like.optimization.schedules import make_schedule
from meliad_like.training.metrics import MetricsWriter
from meliad_like.training.step import init_state, make_train_step

VOCABULARY_SIZE = 264


def compile_step(row: str, layers: list[str], segment_length: int, loss_slice: int) -> jax.stages.Compiled:
    """The training step of one lane, from shapes alone."""
    run = config.parse(
        ["size/tiny.gin", f"block_recurrent/{row}.gin", "option/no_dropout.gin"],
        [
            f"ReaderConfig.segment_length = {segment_length}",
            f"ReaderConfig.tokens_per_step = {segment_length}",
            f"TrainingConfig.loss_slice = {loss_slice}",
            *layers,
        ],
    )
    model = Model(run.model, VOCABULARY_SIZE)
    schedule = make_schedule(run.schedule, run.training.num_steps)
    optimizer = make_optimizer(run.optimizer, schedule, model.kinds)
    state = jax.eval_shape(lambda key: init_state(model, optimizer, 1, key), jax.random.key(0))
    step = jax.jit(make_train_step(model, optimizer, run.training), donate_argnums=0)
    return step.lower(state, empty_batch(1, segment_length, run.model.window_length)).compile()


@pytest.mark.thorough
def test_memory_is_linear_in_the_segment():
    steps = [compile_step("fixed_skip", ONE_LAYER, n, loss_slice=256) for n in (4096, 16384)]
    memory = [step.memory_analysis().temp_size_in_bytes for step in steps]
    assert memory[0] * 4 == pytest.approx(memory[1], rel=0.05)


def test_operations_are_linear_in_the_segment():
    # XLA counts the body of a loop once: a model without recurrence, and a loss in one slice, have none.
    steps = [compile_step("slide_12l", ["DecoderConfig.num_layers = 1"], n, loss_slice=n) for n in (4096, 16384)]
    operations = [step.cost_analysis()["flops"] for step in steps]
    assert operations[1] / operations[0] == pytest.approx(4, rel=0.02)


def test_decoding_costs_the_same_at_every_position():
    """One program serves all positions, and nothing in it repeats as often as the data says."""
    run = config.parse(tiny_run.FILES, ONE_LAYER)
    model = Model(run.model, VOCABULARY_SIZE)
    step = jax.jit(lambda params, token, carry: model.bind(params).decode_step(token, carry))
    params = jax.jit(model.init)(jax.random.key(0))
    token, carry = jnp.zeros(2, jnp.int32), jax.jit(lambda p: ways.begin(model, p, 2, decoding=True))(params)
    assert "while" not in step.lower(params, token, carry).as_text()
    for position in (0, 1_000, 100_000):
        _, after = step(params, token, carry._replace(position=jnp.full(2, position, jnp.int32)))
        assert [x.shape for x in jax.tree.leaves(after)] == [x.shape for x in jax.tree.leaves(carry)]
    assert step._cache_size() == 1


def test_a_run_compiles_its_step_once_and_later_nothing(tmp_path, monkeypatch, caplog):
    bindings = [*tiny_run.make_bindings(tmp_path), "TrainingConfig.num_steps = 10", "MeshConfig.data = 1"]
    messages = {}
    write = MetricsWriter.write

    def write_and_count(self, step, metrics, kind="train"):
        write(self, step, metrics, kind)
        messages[step] = [r.getMessage() for r in caplog.records if r.getMessage().startswith("Compiling")]

    monkeypatch.setattr(MetricsWriter, "write", write_and_count)
    tiny_run.kept_program.cache_clear()
    with jax.log_compiles(), caplog.at_level(logging.WARNING):
        assert train(parse(bindings), tmp_path / "workdir") == 0
    assert len([message for message in messages[10] if "train_step" in message]) == 1
    assert messages[10] == messages[2]
