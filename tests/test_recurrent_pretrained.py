"""The recurrence between windows of a pretrained decoder, against loops over windows in numpy."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import ways
from fake_split import FakeSplit
from numpy_pretrained import NumpyGPT2, NumpyLlama, document
from pretrained_models import tensors

from meliad_like.data.readers import LanesReader
from meliad_like.families.pretrained.config import PretrainedConfig
from meliad_like.families.pretrained.recurrence import WindowSummary
from meliad_like.generation.reading import (
    NO_TOKEN,
    GenerationState,
    RequestedResults,
    TextReader,
)
from meliad_like.models.model import Model
from meliad_like.studies.interventions import part_names

V, W = 40, 8
COMMON = {"num_layers": 3, "model_width": 16, "num_heads": 4, "head_size": 4, "feedforward_width": 24}
ARCHITECTURES = {
    "gpt2": {"num_key_value_heads": 4, "activation": "gelu_tanh"},
    "llama": {"num_key_value_heads": 2, "activation": "silu"},
}
SUMMARY = WindowSummary(layers=(1,), width=5, depth=2)
RECURRENT = {"recurrence": (SUMMARY,)}
TOKENS = np.random.default_rng(0).integers(0, V, 60).astype(np.int32)


class Document(FakeSplit):
    def tokens(self, document, start, stop):
        return TOKENS[start:stop]


def make(architecture="gpt2", vocabulary_size=V, **changes):
    fields = {"max_positions": 12, "window_length": W, **COMMON, **ARCHITECTURES[architecture], **changes}
    model = Model(PretrainedConfig(architecture=architecture, **fields), vocabulary_size)
    # Larger than they begin, so that everything counts.
    noise = np.random.default_rng(1)
    params = model.init(jax.random.key(0))
    return model, jax.tree.map(lambda x: x + noise.normal(0, 0.3, x.shape).astype(np.float32), params)


def reader(model, windows=3):
    return LanesReader(
        Document([len(TOKENS)]),
        1,
        windows * W,
        W,
        overlap=model.config.overlap,
        shuffle=False,
        epochs=1,
    )


@functools.partial(jax.jit, static_argnums=0)
def losses_of_segment(model, params, batch, carry):
    losses, carry = model.bind(params).losses(batch.inputs, batch.targets, carry, batch.start, slice_length=4)
    return losses.nats, carry


def losses_by_windows(model, params, windows=3):
    """The losses of the document's tokens, segment by segment."""
    carry, found = model.bind(params).init_carry(1), []
    for step in range(reader(model, windows).num_steps):
        batch = reader(model, windows).batch(step, [0])
        nats, carry = losses_of_segment(model, params, batch, carry)
        found.append(np.asarray(nats)[batch.loss_mask])
    return np.concatenate(found)


def losses_in_numpy(model, params):
    kind = {"gpt2": NumpyGPT2, "llama": NumpyLlama}[model.config.architecture]
    return document(kind(tensors(model.config, params), model.config), params.get("recurrence"), TOKENS)


@pytest.mark.parametrize(
    ("architecture", "changes"),
    [
        ("gpt2", {}),
        ("llama", {"overlap": 3}),
        # The one thing in which the recurrence meets the decoder's own layers: their norms.
        *(
            (architecture, {"pooling": "sum", "insertion_point": "after_norm", "pooled_layers": "final_norm"})
            for architecture in ARCHITECTURES
        ),
        ("gpt2", {"pooling": "max", "layers": (0, -1), "num_inserted": 3, "overlap": 7}),
        ("llama", {"pooling": "attention", "layers": (0, 1, 2), "activation": "tanh", "overlap": 1}),
        ("gpt2", {"depth": 0, "layers": (2,)}),
        ("llama", {"normalise_pooled": True, "insertion_point": "after_norm"}),
    ],
)
def test_the_recurrence_is_a_loop_over_windows(architecture, changes):
    overlap, changes = changes.get("overlap", 0), {name: changes[name] for name in changes if name != "overlap"}
    model, params = make(architecture, recurrence=(dataclasses.replace(SUMMARY, **changes),), overlap=overlap)
    expected = losses_in_numpy(model, params)
    np.testing.assert_allclose(losses_by_windows(model, params), expected, rtol=1e-4, atol=1e-4)
    # It does something: without it, later windows are predicted otherwise.
    without, _ = make(architecture, overlap=model.config.overlap)
    decoder = {name: value for name, value in params.items() if name != "recurrence"}
    plain = losses_by_windows(without, decoder)
    np.testing.assert_allclose(plain[:W], expected[:W], rtol=1e-4, atol=1e-4)
    assert np.abs(plain[W:] - expected[W:]).max() > 0.01


def test_a_scale_of_zero_begins_with_zeros():
    model = Model(make(recurrence=(dataclasses.replace(SUMMARY, scale=0.0),))[0].config, V)
    recurrence = model.bind(model.init(jax.random.key(0))).recurrence
    np.testing.assert_array_equal(recurrence(jnp.ones((2, W, 16))), np.zeros((2, 1, 16)))
    # Only the last layer's: the others have something to learn from.
    assert all(np.abs(layer.kernel[...]).max() > 0 for layer in recurrence.layers[:-1])


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_plain_windows_are_a_loop_as_well(architecture):
    model, params = make(architecture, overlap=3, tied_embedding=False)
    np.testing.assert_allclose(losses_by_windows(model, params), losses_in_numpy(model, params), rtol=1e-4, atol=1e-4)


def test_how_long_segments_are_does_not_matter():
    model, params = make(**RECURRENT, overlap=3)
    whole = losses_by_windows(model, params, windows=4)
    np.testing.assert_allclose(losses_by_windows(model, params, windows=1), whole, atol=1e-5)


def test_summaries_can_be_exchanged():
    model, params = make(vocabulary_size=ways.V, **RECURRENT, window_length=ways.W)
    assert part_names(model.config, ways.begin(model, params, 1)) == ["window_summary"]
    ways.check_parts(model, params)


def test_hidden_vectors_give_the_same_losses():
    model, params = make(**RECURRENT)
    batch = reader(model).batch(0, [0])
    module = model.bind(params)
    hidden, carry = module(batch.inputs, module.init_carry(1), batch.start)
    nats = jax.nn.logsumexp(module.logits(hidden), axis=-1)
    nats -= jnp.take_along_axis(module.logits(hidden), batch.targets[..., None], axis=-1)[..., 0]
    losses, other = losses_of_segment(model, params, batch, module.init_carry(1))
    np.testing.assert_allclose(nats, losses, atol=1e-5)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=1e-5), carry, other)


def test_without_influence_it_is_the_unmodified_model():
    model, params = make(recurrence=(dataclasses.replace(SUMMARY, num_inserted=2),))
    module = model.bind(params)
    tokens = TOKENS[None, :W]
    vectors = 100 * jnp.ones((1, 2, 16))
    read_window = jax.jit(module.read_window)
    absent = read_window(tokens, jnp.zeros(1, jnp.int32), vectors)
    plain = read_window(tokens)
    present = read_window(tokens, jnp.full(1, W), vectors)
    np.testing.assert_allclose(absent[-1], plain[-1], atol=1e-5)
    assert np.abs(present[-1] - plain[-1]).max() > 0.1
    # The layer below the insertion does not know of it.
    np.testing.assert_array_equal(present[1], plain[1])


@pytest.mark.parametrize(
    ("architecture", "changes"),
    [
        ("llama", {}),
        ("gpt2", {"overlap": 3}),
        ("gpt2", {**RECURRENT}),
        ("llama", {"recurrence": (dataclasses.replace(SUMMARY, pooling="max"),), "overlap": 3}),
    ],
)
def test_a_token_at_a_time_is_the_windows(architecture, changes):
    """Two lanes with an offset of three tokens, so that windows end at different steps."""
    model, params = make(architecture, **changes)
    module = model.bind(params)

    @jax.jit
    def read_all(tokens, carry):
        def step(carry, token):
            logits, carry = module.decode_step(token, carry)
            return carry, jax.nn.log_softmax(logits)

        return jax.lax.scan(step, carry, tokens)[1]

    tokens = np.stack([TOKENS[:-1], np.concatenate([TOKENS[:3], TOKENS[:-4]])], axis=1)
    carry = module.begin_decoding(module.init_carry(2))
    log_probabilities = np.asarray(read_all(tokens, carry))
    expected = losses_by_windows(model, params)
    found = -log_probabilities[np.arange(len(TOKENS) - 1), 0, TOKENS[1:]]
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("architecture", "changes"),
    [
        ("llama", {"sliding_window": 5}),
        ("llama", {"overlap": 3}),
        ("gpt2", {"recurrence": (dataclasses.replace(SUMMARY, pooling="max", insertion_point="after_norm"),)}),
    ],
)
def test_tokens_at_once_are_those_one_by_one(architecture, changes, monkeypatch):
    """Two texts in pieces, of which some end inside a window, some with one, and some are empty."""
    model, params = make(architecture, **changes)
    reader = TextReader(model, params, 2 * W)
    pieces = [(3, 1), (2, 0), (5, 7), (1, 4), (0, W), (2 * W, 3)]

    def read():
        nothing = np.zeros(2, int)
        carry = jax.jit(lambda: ways.begin(model, params, 2, decoding=True))()
        state = GenerationState(carry, nothing.astype(np.int32) + NO_TOKEN, nothing, nothing, nothing > 0)
        place, by_piece = np.array([0, 20]), []
        for lengths in pieces:
            texts = [TOKENS[at : at + length] for at, length in zip(place, lengths)]
            results, state = reader.look(state, texts, RequestedResults(True, True, (0, 2)))
            place += lengths
            by_piece.append(results)
        logits, _ = ways.decode_token(model, params, state.token, state.carry)
        return by_piece, logits, state.carry.position

    at_once = read()
    monkeypatch.setattr(reader, "_next", lambda num_read, remaining: (np.minimum(remaining, 1), 1, False))
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-4), at_once, read())


@pytest.mark.parametrize(
    ("read", "remaining", "counts", "size", "are_blocks"),
    [
        # Few tokens do not take a whole window.
        ([0, 0, 0, 0], [7, 101, 0, 17], [0, 101, 0, 17], 128, False),
        ([0, 0], [7, 16], [7, 16], 16, False),
        ([0, 0], [7, 300], [0, 300], 512, False),
        # Blocks that have begun are ended first.
        ([0, 500], [2000, 40], [0, 12], 16, False),
        ([0, 512], [2000, 40], [1024, 0], 1024, True),
        ([0, 0], [600, 512], [512, 512], 512, True),
    ],
)
def test_how_texts_are_cut(read, remaining, counts, size, are_blocks):
    model, params = make("llama", max_positions=512, window_length=512)
    reader = TextReader(model, params, 1024)
    actual = reader._next(np.array(read), np.array(remaining))
    assert (actual[0].tolist(), *actual[1:]) == (counts, size, are_blocks)


def test_how_windows_that_overlap_are_cut():
    model, params = make("llama", max_positions=512, window_length=512, overlap=100)
    cut = lambda *numbers: TextReader(model, params, 512)._next(*map(np.array, numbers))  # noqa: E731
    assert cut([0, 0], [2000, 40])[0].tolist() == [512, 40]
    assert cut([512, 0], [2000, 40])[0].tolist() == [412, 0]
    assert cut([924 + 400, 0], [2000, 0])[0].tolist() == [12, 0]


@pytest.mark.thorough
def test_what_depends_on_what():
    model, params = make(**RECURRENT)
    start = np.array([[True, False, False, True]])

    @jax.jit
    @jax.grad
    def last(embedded, place):
        # Tokens as mixtures of one: the gradient by mixture says whether a token matters.
        bound = model.bind({**params, "embedding": params["embedding"]})
        bound.embedding = type(bound.embedding)(embedded)
        hidden, _ = bound(jnp.arange(4 * W)[None], bound.init_carry(1), start)
        return jnp.sum(hidden[0, place] ** 2)

    embedded = params["embedding"][TOKENS[: 4 * W]]

    def depends(place):
        return np.asarray(jnp.abs(last(embedded, place)).max(axis=1) > 0)

    # A window sees itself, and through the recurrence all of the document's windows before it.
    np.testing.assert_array_equal(depends(2 * W + 4), np.arange(4 * W) <= 2 * W + 4)
    np.testing.assert_array_equal(depends(3 * W + 2), (np.arange(4 * W) >= 3 * W) & (np.arange(4 * W) <= 3 * W + 2))


@pytest.mark.thorough
def test_memory_is_that_of_one_window():
    def temporaries(windows, **changes):
        model, _ = make(**RECURRENT, **changes)
        params = model.abstract_params
        carry = jax.eval_shape(lambda: model.bind(model.init(jax.random.key(0))).init_carry(2))
        tokens = jax.ShapeDtypeStruct((2, windows * W), jnp.int32)
        start = jax.ShapeDtypeStruct((2, windows), bool)

        def loss(params, tokens, carry, start):
            losses, _ = model.bind(params).losses(tokens, tokens, carry, start, slice_length=W)
            return jnp.sum(losses.nats)

        compiled = jax.jit(jax.grad(loss)).lower(params, tokens, carry, start).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    def per_window(**changes):
        return (temporaries(18, **changes) - temporaries(2, **changes)) / 16

    # Sixteen more windows: their tokens, losses and vectors, and nothing of the size of a layer's output.
    assert per_window() < 2 * W * 16 * 4
    # Or what the linear maps put out, in three layers five of width 16 and one of 24, and neither weights of attention
    # nor logits.
    linear_maps = 2 * W * 3 * (5 * 16 + 24) * 4
    assert linear_maps < per_window(remat="dots") < 1.2 * linear_maps


@functools.cache
def gradient(**changes):
    model, params = make(**RECURRENT, **changes)
    batch = reader(model).batch(0, [0])
    carry = model.bind(params).init_carry(1)

    def loss(params):
        losses, _ = model.bind(params).losses(batch.inputs, batch.targets, carry, batch.start, slice_length=W)
        return jnp.sum(losses.nats)

    return jax.jit(jax.grad(loss))(params)


@pytest.mark.thorough
@pytest.mark.parametrize("remat", ["dots", "layers"])
def test_what_is_computed_again_gives_the_same_gradient(remat):
    again, once = gradient(remat=remat), gradient()
    for ours, plain in zip(jax.tree.leaves(again), jax.tree.leaves(once), strict=True):
        # A key's bias shifts all scores of a query alike: its gradient is rounding alone.
        np.testing.assert_allclose(ours, plain, rtol=1e-4, atol=1e-5)


@pytest.mark.thorough
def test_products_of_rounded_numbers():
    exact, rounded = gradient(), gradient(matmul_dtype="bfloat16")
    assert {leaf.dtype.name for leaf in jax.tree.leaves(rounded)} == {"float32"}
    difference = optax.tree.norm(jax.tree.map(jnp.subtract, rounded, exact)) / optax.tree.norm(exact)
    # Eight bits of each factor remain.
    assert 1e-4 < difference < 0.05
