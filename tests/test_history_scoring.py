"""Equation 2: the score of a span, computed one at a time and in batches."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meliad_like.errors import UserError
from meliad_like.families.pretrained.config import PretrainedConfig
from meliad_like.history.gains import Candidates, SpanGains, TargetLosses
from meliad_like.history.settings import HistoryConfig
from meliad_like.history.spans import Layout, Window, candidates, strides
from meliad_like.mesh import MeshConfig, make_mesh
from meliad_like.models.decoder import DecoderConfig
from meliad_like.models.model import Model

CONFIG = HistoryConfig(window_length=20, history_length=8, span_length=4, stride=4, separator="")
PRETRAINED = PretrainedConfig(
    num_layers=1,
    model_width=8,
    num_heads=2,
    num_key_value_heads=2,
    head_size=4,
    feedforward_width=8,
    max_positions=32,
    window_length=8,
    overlap=3,
)
MODEL = Model(PRETRAINED, 50)
DOCUMENT = np.random.default_rng(0).integers(0, 50, size=63).astype(np.int32)


@pytest.fixture(scope="module")
def params():
    # Larger than a fresh model's, so that what it reads makes a difference; with still larger ones, rounding does too.
    return jax.tree.map(lambda x: 4 * x, MODEL.init(jax.random.key(0)))


@pytest.fixture(scope="module")
def mesh():
    return make_mesh(MeshConfig(data=1), jax.devices()[:1])


@functools.partial(jax.jit, static_argnums=0)
def log_probabilities(model, params, tokens):
    module = model.bind(params)
    hidden, _ = module(tokens[None], module.init_carry(1), jnp.ones((1, 1), bool))
    return jax.nn.log_softmax(module.logits(hidden)[0], axis=-1)


def losses_of(model, params, tokens):
    """The loss of each token after the first, from the model as in training, on the whole sequence at once."""
    model = Model(dataclasses.replace(model.config, window_length=len(tokens), overlap=0), model.vocabulary_size)
    of_all = np.asarray(log_probabilities(model, params, np.asarray(tokens)), np.float64)
    return -of_all[np.arange(len(tokens) - 1), tokens[1:]]


def expected_gain(params, stride, end, baseline):
    # What a window of 20 that was to have four targets keeps behind the places of spans.
    start = stride.first + 4 - 12
    recent = DOCUMENT[start : stride.end]
    without = recent if baseline == "bare" else DOCUMENT[start - 4 : stride.end]
    sides = [losses_of(MODEL, params, tokens) for tokens in (without, [*DOCUMENT[end - 4 : end], *recent])]
    return sides[0][-stride.num_targets :].sum() - sides[1][-stride.num_targets :].sum()


def reader(params, mesh, batch_size):
    return functools.partial(TargetLosses, MODEL, params, mesh, batch_size=batch_size)


def make_gains(params, mesh, batch_size, **changes):
    return SpanGains(reader(params, mesh, batch_size), Layout(dataclasses.replace(CONFIG, **changes), None))


def requests(*numbers):
    every = list(strides(len(DOCUMENT), CONFIG))
    return [Candidates(DOCUMENT, every[i], candidates(every[i], CONFIG)) for i in numbers]


@pytest.mark.parametrize("baseline", ["bare", "contiguous"])
def test_many_at_once_are_what_they_are_one_at_a_time(params, mesh, baseline):
    # The last stride has three targets; batches of 8 end within requests.
    asked = requests(11, 5, 15)
    together = list(make_gains(params, mesh, 8, baseline=baseline)(asked))
    one = make_gains(params, mesh, 1, baseline=baseline)
    alone = [np.concatenate(list(one(r._replace(ends=r.ends[i : i + 1]) for i in range(len(r.ends))))) for r in asked]
    assert [len(gains) for gains in together] == [len(request.ends) for request in asked] == [16, 4, 24]
    for a, b in zip(together, alone):
        np.testing.assert_allclose(a, b, atol=1e-5)
    for request, gains in zip(asked, together):
        expected = [expected_gain(params, request.stride, end, baseline) for end in request.ends[:2]]
        np.testing.assert_allclose(gains[:2], expected, atol=1e-5)
    assert np.std(together[0]) > 0.1


def test_the_separator_is_read(params, mesh):
    gains = [
        next(SpanGains(reader(params, mesh, 4), Layout(CONFIG, separator))(requests(6))) for separator in (None, 7)
    ]
    assert (np.abs(gains[0] - gains[1]) > 1e-4).all()


def test_recent_text_that_is_all_targets(params, mesh):
    # Nothing precedes the first target in the bare baseline: 3 of 4 are compared.
    config = HistoryConfig(window_length=12, history_length=8, span_length=4, stride=4, separator="")
    stride = list(strides(40, config))[8]
    ends = candidates(stride, config)
    (gains,) = SpanGains(reader(params, mesh, 8), Layout(config, None))([Candidates(DOCUMENT, stride, ends)])
    recent = DOCUMENT[32:36]
    expected = losses_of(MODEL, params, recent).sum() - losses_of(MODEL, params, [*DOCUMENT[4:8], *recent])[-3:].sum()
    np.testing.assert_allclose(gains[ends.tolist().index(8)], expected, atol=1e-5)


def test_operations_are_counted(params, mesh):
    gains = make_gains(params, mesh, 8)
    list(gains(requests(5, 6)))
    layer = 4 * 2 * 8 * 8 + 2 * 2 * 16 * 8 + 2 * 2 * 8 * 8
    # Two baselines, 4 and 6 spans; 16 tokens each, of which 4 have logits.
    assert gains.flops == (2 + 4 + 6) * (16 * layer + 4 * 2 * 8 * 50)


@pytest.mark.thorough
def test_any_family_reads_separate_sequences(mesh):
    config = DecoderConfig(
        num_layers=1, model_width=8, num_heads=2, head_size=4, feedforward_width=8, window_length=8, dropout_rate=0.0
    )
    model = Model(config, 50)
    params = model.init(jax.random.key(0))
    read = TargetLosses(model, params, mesh, length=20, max_targets=19, batch_size=2)
    module = model.bind(params)
    tokens = np.zeros(24, np.int32)
    tokens[:20] = DOCUMENT[:20]
    hidden, _ = module(jnp.asarray(tokens)[None], module.init_carry(1), jnp.asarray([[True, False, False]]))
    expected = -np.asarray(jax.nn.log_softmax(module.logits(hidden)[0]))[np.arange(19), tokens[1:20]]
    sequences = [Window(DOCUMENT[:20], 19), Window(DOCUMENT[:11], 3), Window(DOCUMENT[:1], 0)]
    found = list(read(sequences))
    np.testing.assert_allclose(found[0], expected, atol=1e-5)
    np.testing.assert_allclose(found[1], expected[7:10], atol=1e-5)
    assert found[2].shape == (0,)


def test_a_window_that_the_model_cannot_read_is_an_error(params, mesh):
    with pytest.raises(UserError, match="window_length=40 is more than the max_positions=32 of the model"):
        TargetLosses(MODEL, params, mesh, length=40, max_targets=4, batch_size=1)
