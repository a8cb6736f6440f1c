"""The requirements for every memory mechanism: equal results of all ways of reading, and support in every command."""

import dataclasses
import functools
import shutil
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_run
from tiny_run import assert_same_bits, read_metrics, set_up, train
from ways import (
    W,
    assert_same,
    begin,
    check_documents,
    check_lanes,
    check_parts,
    check_segments,
    check_token_by_token,
    decode,
    read,
    starts,
    tokens_of,
)

from meliad_like import config
from meliad_like.data.batch import Batch
from meliad_like.errors import UserError
from meliad_like.experiments.tables import SUBJECTS, TABLES
from meliad_like.experiments.tables.block_recurrent import SCALES
from meliad_like.experiments.tables.table import configure
from meliad_like.mechanisms.base import MECHANISMS, MechanismConfig
from meliad_like.mechanisms.dense_memory import DenseMemory
from meliad_like.mechanisms.external_memory import ExternalMemory
from meliad_like.mechanisms.gated_delta_rule import GatedDeltaRule
from meliad_like.mechanisms.melodi import Melodi
from meliad_like.mechanisms.recurrent_states import RecurrentStates
from meliad_like.mechanisms.sliding_window import SlidingWindow
from meliad_like.mesh import MeshConfig, carry_shardings, lane_sharding, make_mesh, parameter_shardings
from meliad_like.models.decoder import DecoderConfig
from meliad_like.models.model import Model
from meliad_like.training.checkpoints import Checkpoints

B, C, V = 8, 8, 64


class Example(NamedTuple):
    """A mechanism for the tests, and the shipped file that has it."""

    config: MechanismConfig
    file: str
    parameters: int
    """The number of parameters of the shipped file's model, with a vocabulary of 32,000."""
    window: bool = True
    """Whether the layers also have a sliding window."""


EXAMPLES = {
    "sliding_window": Example(SlidingWindow(), "block_recurrent/slide_12l.gin", 183_791_712),
    "recurrent_states": Example(
        RecurrentStates(layers=(1,), num_states=8), "block_recurrent/fixed_skip.gin", 193_230_968
    ),
    "external_memory": Example(
        ExternalMemory(layers=(1,), num_slots=4 * W, num_neighbors=3), "block_recurrent/memorizing_64k.gin", 183_791_464
    ),
    "gated_delta_rule": Example(GatedDeltaRule(layers=(1,)), "mechanism/gated_delta_rule.gin", 189_063_408),
    # The reference has 38,976 more, with which its last layer mixes summaries that nothing reads.
    "melodi": Example(
        Melodi(long_layers=(1,), num_summaries=2, short_length=2, long_length=3, long_slots=7),
        "melodi/base.gin",
        184_873_600 - 38_976,
        window=False,
    ),
    "dense_memory": Example(DenseMemory(layers=(1,), num_slots=3 * W - 1), "melodi/dense_4k.gin", 196_443_240),
}
SIZES = {"num_layers": 2, "model_width": 16, "num_heads": 8, "head_size": 2, "feedforward_width": 16}
of_each_mechanism = pytest.mark.parametrize("name", EXAMPLES)


def decoder(name, **sizes):
    """A decoder with the mechanism, beside a sliding window or alone."""
    example, config = EXAMPLES[name], DecoderConfig(**sizes).with_mechanism(EXAMPLES[name].config)
    return config if example.window else config.without_mechanism(SlidingWindow)


@functools.cache
def model_of(name):
    return Model(decoder(name, **SIZES, window_length=W), V)


@functools.cache
def make(name):
    """Makes a model, and parameters without ones, zeros or values too small for the tests to notice."""
    model, generator = model_of(name), np.random.default_rng(0)

    def perturb(x):
        return jnp.asarray(x + 0.3 * generator.normal(size=x.shape) * (x.ndim == 1), jnp.float32)

    return model, jax.tree.map(perturb, model.init(jax.random.key(0)))


def test_every_mechanism_is_here():
    assert set(EXAMPLES) == set(MECHANISMS)


@of_each_mechanism
def test_token_by_token_equals_segments(name):
    check_token_by_token(*make(name))


@of_each_mechanism
def test_lanes_decode_independently(name):
    check_lanes(*make(name))


@of_each_mechanism
def test_a_book_in_segments_is_the_book(name):
    check_segments(*make(name))


@of_each_mechanism
def test_documents_know_nothing_of_each_other(name):
    check_documents(*make(name))


@pytest.mark.exhaustive
@of_each_mechanism
def test_memories_can_be_exchanged(name):
    check_parts(*make(name))


@of_each_mechanism
def test_an_empty_part_is_a_cleared_one(name):
    """The memory alone is exchanged: the window remains, as with `MechanismConfig.cleared`."""
    model, params = make(name)
    _, carry = read(model, params, tokens_of(2, 8), begin(model, params, 2), starts(2, 8))
    assert set(model.config.parts(carry)) - {"window"} == {name} - {"sliding_window"}
    if (cleared := model.config.cleared()) is None:
        return
    empty = {name: model.config.parts(begin(model, params, 2))[name]}
    tokens = tokens_of(2, 4, seed=1)
    logits, _ = read(model, params, tokens, model.config.with_parts(carry, empty), starts(2, 4))
    expected, _ = read(Model(cleared, V), params, tokens, carry, starts(2, 4))
    assert_same(logits, expected)
    kept, _ = read(model, params, tokens, carry, starts(2, 4))
    assert abs(kept - logits).max() > 1e-3


@of_each_mechanism
def test_nothing_depends_on_the_future(name):
    model, params = make(name)
    tokens = np.arange(6 * W)[None]

    @jax.jit
    def jacobian(embedding):
        def project(embedding):
            module = model.bind(params | {"embedding": embedding})
            hidden, _ = module(tokens, module.init_carry(1), jnp.zeros((1, 6), bool))
            return hidden[0] @ jnp.linspace(-1, 1, hidden.shape[-1])

        return jnp.abs(jax.jacrev(project)(embedding)).sum(axis=-1)

    strength = np.asarray(jacobian(params["embedding"]))[:, : 6 * W]
    assert (np.triu(strength, 1) == 0).all() and (np.diag(strength) > 0).all()


def losses_and_gradient(model, params, carry, batch):
    def loss(params):
        losses, new_carry = model.bind(params).losses(batch.inputs, batch.targets, carry, batch.start, slice_length=W)
        return jnp.sum(losses.nats**2), new_carry

    return jax.value_and_grad(loss, has_aux=True)(params)


@of_each_mechanism
@pytest.mark.parametrize("shape", [(2, 2, 2, 1), (1, 1, 1, 8)])
def test_sharded_equals_unsharded(name, shape):
    model, params = make(name)
    if shape[3] > 1 and model.config.waits_for:
        with pytest.raises(UserError, match="MeshConfig.sequence=8 must be 1"):
            model.config.check_sequence(C * W, shape[3])
        return
    tokens = tokens_of(B, C + 1)[:, : C * W + 1]
    batch = Batch(tokens[:, :-1], tokens[:, 1:], np.ones((B, C * W), bool), starts(B, C, (0, 3)), None, None)
    carry, step = begin(model, params, B), jax.jit(functools.partial(losses_and_gradient, model))
    expected = step(params, carry, batch)
    mesh = make_mesh(MeshConfig(*shape))
    where = parameter_shardings(mesh, model.axes, params), carry_shardings(mesh, B, model.carry_axes(carry))
    with jax.set_mesh(mesh):
        placed = [jax.device_put(x, s) for x, s in zip((params, carry, batch), (*where, lane_sharding(mesh, B)))]
        found = step(*placed)
    for ours, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-4 * np.abs(theirs).max())


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Runs four training steps on tiny documents, an evaluation and a sample after the last step."""
    bindings = tiny_run.make_bindings(tmp_path_factory.mktemp("documents"))
    every = ("checkpoint_every = 2", "evaluate_every = 4", "sample_every = 4", "sample_tokens = 6", "num_steps = 4")
    return tiny_run.parse(bindings, *(f"TrainingConfig.{binding}" for binding in every), "MeshConfig.data = 1")


@of_each_mechanism
def test_it_trains_resumes_is_evaluated_and_writes(name, run, tmp_path):
    data = dataclasses.replace(run.data, segment_length=2 * W, tokens_per_step=8 * W)
    run = dataclasses.replace(run, model=model_of(name).config, data=data)
    assert train(run, tmp_path / "straight") == 0
    # As a kill would have left it.
    shutil.copytree(tmp_path / "straight", tmp_path / "resumed")
    for folder in ("checkpoints/4", "samples"):
        shutil.rmtree(tmp_path / "resumed" / folder)
    assert train(run, tmp_path / "resumed") == 0
    states, setup = [], set_up(run)
    for folder in ("straight", "resumed"):
        with Checkpoints(tmp_path / folder / "checkpoints", read_only=True) as checkpoints:
            states.append(checkpoints.restore(setup.abstract_state, 4)[0])
        *_, evaluation = read_metrics(tmp_path / folder, "validation")
        assert np.isfinite(evaluation["bits_per_byte"])
        assert list((tmp_path / folder / "samples").iterdir())
    assert_same_bits(*states)


@of_each_mechanism
def test_a_token_costs_the_same_wherever_it_stands(name):
    model, params = make(name)
    carry = begin(model, params, 2, decoding=True)
    shapes = jax.tree.map(lambda x: (x.shape, x.dtype), carry)
    for _ in range(3):
        _, carry = decode(model, params, tokens_of(2, 5), carry)
        assert jax.tree.map(lambda x: (x.shape, x.dtype), carry) == shapes


# Of the search of a memory, XLA counts one turn of its loop; test_flops.py has that count by hand.
@pytest.mark.parametrize("name", [name for name in EXAMPLES if name != "external_memory"])
def test_operations_are_those_that_xla_counts(name):
    sizes = {"num_layers": 2, "model_width": 256, "num_heads": 2, "head_size": 96, "feedforward_width": 384}
    model = Model(decoder(name, **sizes, window_length=64), 200)

    def forward(params, tokens):
        module = model.bind(params)
        # One block: XLA counts the body of a loop once.
        hidden, carry = module(tokens, module.init_carry(2), jnp.zeros((2, 1), bool))
        return module.logits(hidden), carry

    tokens = jax.ShapeDtypeStruct((2, 64), np.int32)
    counted = jax.jit(forward).lower(model.abstract_params, tokens).compile().cost_analysis()["flops"]
    assert 0.9 < counted / (tokens.size * model.forward_flops_per_token) < 1.1


@of_each_mechanism
def test_it_says_how_its_sizes_shrink(name):
    mechanism = EXAMPLES[name].config
    numbers = [field for field in dataclasses.fields(mechanism) if type(getattr(mechanism, field.name)) is int]
    assert all("scales_as" in field.metadata for field in [*numbers, *dataclasses.fields(MechanismConfig)])


@of_each_mechanism
def test_its_file_is_a_row_of_a_table_at_every_scale(name):
    example = EXAMPLES[name]
    assert Model(config.parse([example.file]).model, 32_000).num_parameters == example.parameters
    tables = (TABLES["table1"], SUBJECTS["melodi"])
    [row] = [row for table in tables for row in table.rows if row.files[0] == example.file]
    tiny = configure(row, SCALES["tiny"]).model
    assert type(example.config) in map(type, tiny.mechanisms)
    assert Model(tiny, 256).num_parameters < example.parameters / 100


@of_each_mechanism
def test_a_study_can_watch_what_passes_from_block_to_block(name):
    model, params = make(name)

    @jax.jit
    def watch(params, carry, tokens):
        module = model.bind(params)
        _, after = module(tokens, carry, carry.position[:, None] == 0)
        return module.watch(carry, after), after

    carry = begin(model, params, 2)
    for block in np.split(tokens_of(2, 3), 3, axis=1):
        watched, carry = watch(params, carry, block)
    for states in watched.values():
        assert states.before.shape == states.after.shape and (states.before != states.after).any()
        assert all(values.shape == (2, *states.after.shape) for values in states.gates.values())
    assert bool(watched) == (model.config.cleared() is not None)
