"""The requirements for every mixer: equal results of all reading modes, and support in every command."""

import dataclasses
import functools
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_run
from decoders import with_mixer
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

from meliad_like.data.batch import Batch
from meliad_like.errors import UserError
from meliad_like.experiments.tables import SUBJECTS, TABLES
from meliad_like.experiments.tables.block_recurrent import SCALES
from meliad_like.experiments.tables.table import configure
from meliad_like.families.melodi import MelodiConfig
from meliad_like.mesh import MeshConfig, carry_shardings, lane_sharding, make_mesh, parameter_shardings
from meliad_like.mixers.base import MIXERS, MixerConfig
from meliad_like.mixers.dense_memory import DenseMemory
from meliad_like.mixers.dot_product_attention import DotProductAttention, LocalAttention
from meliad_like.mixers.external_memory import ExternalMemory
from meliad_like.mixers.gated_delta_rule import GatedDeltaRule
from meliad_like.mixers.kimi_delta_attention import KimiDeltaAttention
from meliad_like.mixers.lightning_attention import LightningAttention
from meliad_like.mixers.mamba2 import Mamba2
from meliad_like.mixers.recurrent_states import RecurrentStates, StateReader
from meliad_like.mixers.retention import Retention
from meliad_like.mixers.rg_lru import RGLRU
from meliad_like.mixers.sliding_window import SlidingWindow
from meliad_like.models.decoder import DecoderConfig
from meliad_like.models.model import Model
from meliad_like.registry import configs_in
from meliad_like.studies import gates
from meliad_like.studies.interventions import cleared, exchange, part_names
from meliad_like.training.checkpoints import Checkpoints

B, C, V = 8, 8, 64


class Example(NamedTuple):
    """A mixer, or MELODI, for the tests, and the shipped file that has it."""

    config: Any
    file: str
    needs: tuple[MixerConfig, ...] = ()
    """The other mixers of the decoder."""
    sizes: dict[str, int] = {}  # noqa: RUF012
    """The sizes of the decoder that differ from `SIZES`."""


# In heads of two channels the norm of a read that is almost zero makes rounding large.
FEWER_HEADS = {"num_heads": 4, "head_size": 4}


EXAMPLES = {
    "sliding_window": Example(SlidingWindow(), "block_recurrent/slide_12l.gin"),
    "recurrent_states": Example(RecurrentStates(num_states=8, gate="lstm"), "block_recurrent/lstm_skip.gin"),
    "state_reader": Example(
        StateReader(),
        "block_recurrent/feedback_fixed_skip.gin",
        (RecurrentStates(num_states=8),),
    ),
    "external_memory": Example(ExternalMemory(num_slots=4 * W, num_neighbors=3), "block_recurrent/memorizing_64k.gin"),
    "gated_delta_rule": Example(GatedDeltaRule(), "mixer/gated_delta_rule.gin", sizes=FEWER_HEADS),
    "rg_lru": Example(RGLRU(), "mixer/rg_lru.gin"),
    "kimi_delta_attention": Example(KimiDeltaAttention(), "mixer/kimi_delta_attention.gin", sizes=FEWER_HEADS),
    "mamba2": Example(Mamba2(head_size=4, state_size=4, num_groups=2), "mixer/mamba2.gin"),
    "retention": Example(Retention(), "mixer/retention.gin", sizes=FEWER_HEADS),
    "lightning_attention": Example(LightningAttention(), "mixer/lightning.gin"),
    # A span that ends inside a block, and a shorter one in another layer.
    "dot_product_attention": Example(
        DotProductAttention(span=2 * W - 1, num_key_heads=2, norm="head", gate=True, rotary_share=0.5),
        "mixer/qwen3_5.gin",
        (LocalAttention(span=W - 1, rotary_base=10.0),),
        sizes=FEWER_HEADS,
    ),
    "local_attention": Example(LocalAttention(span=W + 1), "mixer/local_attention.gin", sizes=FEWER_HEADS),
    "melodi": Example(
        MelodiConfig(long_layers=(-1,), num_summaries=2, short_length=2, long_length=3, long_slots=7),
        "melodi/base.gin",
        sizes=FEWER_HEADS,
    ),
    "dense_memory": Example(DenseMemory(num_slots=3 * W - 1), "melodi/dense_4k.gin"),
}
SIZES = {"num_layers": 2, "model_width": 16, "num_heads": 8, "head_size": 2, "feedforward_width": 16}
ATTENTION = "sliding_window", "state_reader", "external_memory", "dense_memory", "dot_product_attention"
WITHOUT_STATES = {*ATTENTION, "local_attention"}
"""The mixers that remember tokens alone, or nothing. The carries of all others have states (`Traits.states`)."""
# They are others with other constants: retention (test_retention.py), and attention to a longer span.
SAME = ("lightning_attention", "local_attention")
# What a program does around a mixer is the same for all that are a MatrixRecurrence: one with corrections, and one with
# several groups, are in all tests.
SIMILAR = (*SAME, "kimi_delta_attention", "retention")


def of_each_but(*names):
    """A test of all mixers whose cases of these names are exhaustive."""
    cases = [pytest.param(name, marks=[pytest.mark.exhaustive] * (name in names)) for name in EXAMPLES]
    return pytest.mark.parametrize("name", cases)


of_each_mixer, of_each_carry = of_each_but(*SAME), of_each_but(*SIMILAR)


def decoder(name, alone=False, **sizes):
    """A decoder with the mixer in all layers and alone, or in its second layer in addition to the window. Then the
    first has the mixers that it needs, or the mixer alone, or, if the mixer is itself attention to the window, that."""
    config, needs = EXAMPLES[name].config, EXAMPLES[name].needs
    if isinstance(config, MelodiConfig):
        return dataclasses.replace(config, **sizes)
    window, needed = DecoderConfig(**sizes), [((0,), f"{MIXERS.name_of(mixer)}+feedforward") for mixer in needs]
    entry = f"{MIXERS.name_of(config)}+feedforward"
    if alone:
        return dataclasses.replace(window, pattern=(entry, *needed), mixers=(*needs, config))
    if not config.has_window and not needs:
        pattern = *window.pattern, ((0,), entry), ((1,), f"sliding_window+{entry}")
        return dataclasses.replace(window, pattern=pattern, mixers=(config,))
    return with_mixer(dataclasses.replace(window, pattern=(*window.pattern, *needed), mixers=needs), config, (1,))


@functools.cache
def model_of(name, alone=False):
    return Model(decoder(name, alone, **SIZES | EXAMPLES[name].sizes, window_length=W), V)


@functools.cache
def make(name, alone=False):
    """Makes a model, and parameters without ones, zeros or values too small for the tests to notice."""
    model, generator = model_of(name, alone), np.random.default_rng(0)

    def perturb(x):
        return jnp.asarray(x + 0.3 * generator.normal(size=x.shape) * (x.ndim == 1), jnp.float32)

    return model, jax.tree.map(perturb, model.init(jax.random.key(0)))


def test_every_mixer_is_here():
    assert set(EXAMPLES) == {*MIXERS, "melodi"}


@of_each_mixer
def test_decoding_equals_segments(name):
    check_token_by_token(*make(name))


def test_a_decoder_without_a_window():
    model, params = make("gated_delta_rule", alone=True)
    check_token_by_token(model, params)
    check_documents(model, params)


@of_each_carry
def test_lanes_decode_independently(name):
    check_lanes(*make(name))


@of_each_carry
def test_a_book_in_segments_is_the_book(name):
    check_segments(*make(name))


@of_each_mixer
def test_documents_know_nothing_of_each_other(name):
    check_documents(*make(name))


@of_each_carry
def test_memories_can_be_exchanged(name):
    check_parts(*make(name))


@of_each_carry
def test_an_empty_part_is_a_cleared_one(name):
    """The memory alone is exchanged: the window remains, as with `clear_states`."""
    model, params = make(name)
    _, carry = read(model, params, tokens_of(2, 4), begin(model, params, 2), starts(2, 4))
    memories = {name, *map(MIXERS.name_of, EXAMPLES[name].needs)} - {"sliding_window", "state_reader"}
    assert set(part_names(model.config, carry)) - {"window"} == memories
    clearing = cleared(model.config)
    assert (clearing is None) == ({name, *map(MIXERS.name_of, EXAMPLES[name].needs)} <= WITHOUT_STATES)
    if clearing is None:
        return
    empty = exchange(model.config, carry, begin(model, params, 2), sorted(memories))
    tokens = tokens_of(2, 4, seed=1)
    logits, _ = read(model, params, tokens, empty, starts(2, 4))
    expected, _ = read(Model(clearing, V), params, tokens, carry, starts(2, 4))
    assert_same(logits, expected)
    kept, _ = read(model, params, tokens, carry, starts(2, 4))
    assert abs(kept - logits).max() > 1e-3


@of_each_mixer
def test_nothing_depends_on_the_future(name):
    model, params = make(name)
    tokens, start = tokens_of(2, 4), starts(2, 4)
    _, carry = read(model, params, tokens_of(2, 4, seed=1), begin(model, params, 2), start)
    logits, _ = read(model, params, tokens, carry, start)
    for i in range(4 * W):
        other = tokens.copy()
        other[:, i] = (other[:, i] + 1) % V
        changed = (read(model, params, other, carry, start)[0] != logits).any(axis=-1)
        assert not changed[:, :i].any() and changed[:, i].all()


@functools.partial(jax.jit, static_argnums=0)
def losses_and_gradient(model, params, carry, batch):
    """The gradient of the squared losses, the losses and the carry after them."""

    def loss(params):
        losses, new_carry = model.bind(params).losses(batch.inputs, batch.targets, carry, batch.start, slice_length=W)
        return jnp.sum(losses.nats**2), (losses.nats, new_carry)

    return jax.grad(loss, has_aux=True)(params)


@functools.cache
def segment_and_gradient(name):
    """The carry after a segment, and the next segment, within which documents begin; its gradient on one device."""
    model, params = make(name, alone=True)
    carry = begin(model, params, B)
    for seed, *at in (1,), (0, (0, 3), (1, 0)):
        tokens = tokens_of(B, C + 1, seed)[:, : C * W + 1]
        batch = Batch(tokens[:, :-1], tokens[:, 1:], np.ones((B, C * W), bool), starts(B, C, *at), None, None)
        before, results = carry, losses_and_gradient(model, params, carry, batch)
        _, (_, carry) = results
    return (before, batch), results


@of_each_mixer
def test_every_parameter_gets_a_gradient(name):
    _, (gradient, _) = segment_and_gradient(name)
    for path, leaf in jax.tree.leaves_with_path(gradient):
        assert (np.abs(leaf) > 0).any(), jax.tree_util.keystr(path, simple=True, separator="/")


# Layers in a loop pass on what others publish, and all else as these do.
@of_each_but(*SIMILAR, "rg_lru", "mamba2", "dot_product_attention", "dense_memory")
def test_what_is_computed_again_or_in_a_loop_of_layers_is_the_same(name):
    model, params = make(name, alone=True)
    segment, expected = segment_and_gradient(name)
    other = Model(dataclasses.replace(model.config, remat="dots", scan_layers=True), V)
    results = losses_and_gradient(other, params, *segment)
    for ours, theirs in zip(jax.tree.leaves(results), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5 * np.abs(theirs).max())


# Layers whose rounding is compared with released code elsewhere are left out.
@of_each_but(*SIMILAR, "gated_delta_rule", "mamba2", "rg_lru", "dense_memory")
def test_in_bfloat16(name):
    """Losses are those of float32 but for rounding, all gradients are finite, and dtypes stay those of the carry."""
    model, params = make(name, alone=True)
    rounded = Model(dataclasses.replace(model.config, activation_dtype="bfloat16"), V)
    (carry, batch), (_, (expected, _)) = segment_and_gradient(name)
    carry = jax.tree.map(lambda x, begun: x.astype(begun.dtype), carry, begin(rounded, params, B))
    gradient, (losses, after) = losses_and_gradient(rounded, params, carry, batch)
    assert jax.tree.map(lambda x: x.dtype, after) == jax.tree.map(lambda x: x.dtype, carry)
    # A search among rounded keys finds other neighbours.
    most = 0.2 if name == "external_memory" else 0.02
    assert np.abs(losses - expected).max() < most * np.ptp(expected)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(gradient))


# Programs for meshes that cut the heads and the sequence at once take four times as long to compile.
@of_each_carry
@pytest.mark.parametrize("shape", [(2, 2, 2, 1), (1, 1, 1, 8)])
def test_sharded_equals_unsharded(name, shape):
    model, params = make(name, alone=True)
    if shape[3] > 1 and model.config.traits.sequential_because:
        with pytest.raises(UserError, match="MeshConfig.sequence=8 must be 1"):
            model.config.check_sequence(C * W, shape[3])
        return
    (carry, batch), expected = segment_and_gradient(name)
    mesh = make_mesh(MeshConfig(*shape))
    where = parameter_shardings(mesh, model.axes, params), carry_shardings(mesh, B, carry)
    with jax.set_mesh(mesh):
        placed = [jax.device_put(x, s) for x, s in zip((params, carry, batch), (*where, lane_sharding(mesh, B)))]
        results = losses_and_gradient(model, *placed)
    for ours, theirs in zip(jax.tree.leaves(results), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-4 * np.abs(theirs).max())


def test_a_device_holds_the_heads_of_its_share():
    """With `tensor=4` the window's cache and memories by head are cut in four, also while decoding."""
    mesh = make_mesh(MeshConfig(data=2, tensor=4))
    for name in ("sliding_window", "recurrent_states", "external_memory", "dense_memory", "gated_delta_rule", "mamba2"):
        model = model_of(name, alone=True)
        for decoding in (False, True):
            carry = model.abstract_carry(2, decoding=decoding)
            shardings = carry_shardings(mesh, 2, carry)
            for leaf, sharding in zip(jax.tree.leaves(carry), jax.tree.leaves(shardings), strict=True):
                share = 8 if leaf.ndim == 4 else 2
                assert np.prod(sharding.shard_shape(leaf.shape)) == leaf.size / share


@pytest.mark.parametrize("tensor, share", [(2, 2), (4, 1)])
def test_a_device_holds_few_heads_of_keys_of_its_share_or_all(tensor, share):
    """Two heads of keys for four of queries."""
    mesh, model = make_mesh(MeshConfig(tensor=tensor)), model_of("dot_product_attention", alone=True)
    carry = model.abstract_carry(8)
    shardings = carry_shardings(mesh, 8, carry)
    cache, sharding = (tree.layers[1]["dot_product_attention"].key for tree in (carry, shardings))
    assert cache.shape[1] // sharding.shard_shape(cache.shape)[1] == share


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Runs four training steps on tiny documents, an evaluation and a sample after the last step."""
    bindings = tiny_run.make_bindings(tmp_path_factory.mktemp("documents"))
    every = ("checkpoint_every = 2", "evaluate_every = 4", "sample_every = 4", "sample_tokens = 6", "num_steps = 4")
    return tiny_run.parse(bindings, *(f"TrainingConfig.{binding}" for binding in every), "MeshConfig.data = 1")


# test_training_loop.py trains windows and recurrent states, without a memory that a search reads, and none of another
# family. To training and its commands, the carries of others are trees of arrays like theirs.
@of_each_but(*EXAMPLES.keys() - {"external_memory", "melodi"})
@pytest.mark.thorough
def test_it_trains_resumes_is_evaluated_and_writes(name, run, tmp_path):
    data = dataclasses.replace(run.data, segment_length=2 * W, tokens_per_step=8 * W)
    # As few layers as possible: programs of training are large.
    model = dataclasses.replace(model_of(name, alone=True).config, num_layers=1 + len(EXAMPLES[name].needs))
    run = dataclasses.replace(run, model=model, data=data)
    assert train(run, tmp_path / "straight") == 0
    # As a kill would have left it.
    shutil.copytree(tmp_path / "straight", tmp_path / "resumed")
    for folder in ("checkpoints/4", "samples"):
        shutil.rmtree(tmp_path / "resumed" / folder)
    assert train(run, tmp_path / "resumed") == 0
    states, setup = [], set_up(run)
    for folder in ("straight", "resumed"):
        with Checkpoints(tmp_path / folder / "checkpoints", read_only=True) as checkpoints:
            states.append(checkpoints.restore(setup.program.abstract_state, 4)[0])
        *_, evaluation = read_metrics(tmp_path / folder, "validation")
        assert np.isfinite(evaluation["bits_per_byte"])
        assert list((tmp_path / folder / "samples").iterdir())
    assert_same_bits(*states)


@of_each_mixer
def test_a_token_costs_the_same_wherever_it_stands(name):
    model, params = make(name)
    carry = begin(model, params, 2, decoding=True)
    shapes = jax.tree.map(lambda x: (x.shape, x.dtype), carry)
    for _ in range(3):
        _, carry = decode(model, params, tokens_of(2, 4), carry)
        assert jax.tree.map(lambda x: (x.shape, x.dtype), carry) == shapes


# Of the search of a memory, XLA counts one turn of its loop; test_flops.py has that count by hand.
@pytest.mark.parametrize("name", [name for name in EXAMPLES if name != "external_memory"])
def test_operations_are_those_that_xla_counts(name):
    sizes = {"num_layers": 2, "model_width": 512, "num_heads": 2, "head_size": 128, "feedforward_width": 512}
    model = Model(decoder(name, **sizes, window_length=64), 200)

    def forward(params, tokens):
        module = model.bind(params)
        # One block: XLA counts the body of a loop once.
        hidden, carry = module(tokens, module.init_carry(2), jnp.zeros((2, 1), bool))
        return module.logits(hidden), carry

    tokens = jax.ShapeDtypeStruct((2, 64), np.int32)
    counted = jax.jit(forward).lower(model.abstract_params, tokens).cost_analysis()["flops"]
    assert 0.95 < counted / (tokens.size * model.flops.forward) < 1.05


def test_a_mistake_in_a_mixer_names_it(monkeypatch):
    with pytest.raises(NotImplementedError, match="MixerConfig has no method flops"):
        MixerConfig().flops(DecoderConfig().shape)
    monkeypatch.setattr(SlidingWindow, "width", lambda self, shape: 3)
    model = Model(DecoderConfig(**SIZES, window_length=W, norm_epsilon=1e-3), V)

    def forward(params):
        module = model.bind(params)
        return module(tokens_of(1, 1), module.init_carry(1), starts(1, 1))

    with pytest.raises(ValueError, match="the mixer sliding_window returns 16 channels, and its width is 3"):
        jax.eval_shape(forward, model.abstract_params)


@of_each_mixer
def test_it_says_how_its_sizes_shrink(name):
    config = EXAMPLES[name].config
    numbers = [field for field in dataclasses.fields(config) if type(getattr(config, field.name)) is int]
    assert all("scales_as" in field.metadata for field in numbers)


@of_each_mixer
def test_its_file_is_a_row_of_a_table_at_every_scale(name):
    example = EXAMPLES[name]
    tables = (TABLES["table1"], SUBJECTS["melodi"])
    [row] = [row for table in tables for row in table.rows if row.name == Path(example.file).stem]
    tiny = configure(row, SCALES["tiny"]).model
    assert type(example.config) in map(type, configs_in(tiny))
    whole = configure(row, SCALES["paper"]).model
    assert Model(tiny, 256).num_parameters < Model(whole, 32_000).num_parameters / 100


@of_each_carry
def test_a_study_can_watch_what_passes_from_block_to_block(name):
    model, params = make(name)
    carry = begin(model, params, 2)
    for block in np.split(tokens_of(2, 3), 3, axis=1):
        _, after = read(model, params, block, carry, starts(2, 1))
        watched, carry = gates.watch(model, model.bind(params), carry, after), after
    for one in watched.values():
        assert one.before.shape == one.after.shape and (one.before != one.after).any()
        assert all(values.shape == (2, *one.after.shape) for values in one.gates.values())
    assert bool(watched) == (cleared(model.config) is not None)
