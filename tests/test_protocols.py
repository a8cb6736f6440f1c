"""Three protocols that predict the same tokens: their scores, contexts and costs."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fake_split import FakeSplit

from meliad_like.errors import UserError
from meliad_like.families.pretrained.config import PretrainedConfig
from meliad_like.families.shortformer import ShortformerConfig
from meliad_like.mesh import MeshConfig, make_mesh
from meliad_like.models.decoder import DecoderConfig
from meliad_like.models.model import Model
from meliad_like.studies.protocols import evaluate, sliding_windows

W, V = 4, 40
PIA = ShortformerConfig(
    num_layers=2, model_width=16, num_heads=2, head_size=8, feedforward_width=16, window_length=W, cache_length=W,
    cutoffs=(10,),
)  # fmt: skip
CONFIGS = {
    "shortformer": PIA,
    "baseline": dataclasses.replace(PIA, position="input", cache_length=0),
    "slide": DecoderConfig(
        num_layers=1, model_width=16, num_heads=2, head_size=8, feedforward_width=16, window_length=W
    ),
    "overlapping": PretrainedConfig(
        num_layers=1,
        model_width=16,
        num_heads=2,
        num_key_value_heads=2,
        head_size=8,
        feedforward_width=16,
        max_positions=W,
        window_length=W,
        overlap=1,
    ),
}
LENGTHS = (11, 2, 19)


class Split(FakeSplit):
    def tokens(self, document, start, stop):
        return super().tokens(document, start, stop) * 7 % (V - 1)


@pytest.fixture(scope="module")
def mesh():
    return make_mesh(MeshConfig(), jax.devices()[:2])


def run(name, protocol, mesh, concatenated=True, segment_length=W, **arguments):
    model = Model(CONFIGS[name], V)
    params = jax.device_put(model.init(jax.random.key(0)), jax.NamedSharding(mesh, jax.P()))
    split = Split(LENGTHS)
    split = split.concatenated(V - 1) if concatenated else split
    return model, evaluate(model, params, split, protocol, segment_length=segment_length, mesh=mesh, **arguments)


@functools.cache
def reader(name):
    """A function: one sequence, read with an empty carry -> log probabilities."""
    model = Model(CONFIGS[name], V)
    params = model.init(jax.random.key(0))

    @jax.jit
    def read(tokens):
        module = model.bind(params)
        hidden, _ = module(tokens, module.init_carry(1), jnp.zeros((1, tokens.shape[1] // W), bool))
        return jax.nn.log_softmax(module.logits(hidden))[0]

    return read


def reference(name, windows):
    """The nats of the last targets of windows of the stream, each read separately with an empty carry."""
    stream, total = Split(LENGTHS).concatenated(V - 1).tokens(0, 0, sum(LENGTHS) + 1), 0.0
    for first, last, repeated in windows:
        length = -(-(last - first) // W) * W
        tokens = np.pad(stream[first:last], (0, length - (last - first)))[None]
        log_probabilities = np.asarray(reader(name)(tokens))
        total -= sum(float(log_probabilities[i, stream[first + i + 1]]) for i in range(repeated, last - first))
    return total


@pytest.mark.parametrize("concatenated", [True, False])
@pytest.mark.parametrize("name", ["shortformer", "slide"])
def test_token_by_token_equals_segments(name, concatenated, mesh):
    _, segments = run(name, "segments", mesh, concatenated)
    _, tokens = run(name, "token_by_token", mesh, concatenated)
    assert tokens.num_tokens == segments.num_tokens == sum(LENGTHS) - (0 if concatenated else 3)
    assert tokens.nats / tokens.num_tokens == pytest.approx(segments.nats / segments.num_tokens, abs=1e-5)
    assert (tokens.min_visible, tokens.mean_visible, tokens.max_visible) == (
        segments.min_visible, segments.mean_visible, segments.max_visible,
    )  # fmt: skip


@pytest.mark.thorough
def test_segments_of_the_baseline_are_read_alone(mesh):
    model, score = run("baseline", "segments", mesh)
    assert score.nats == pytest.approx(reference("baseline", [(i, min(i + 4, 32), 0) for i in range(0, 32, 4)]), 1e-5)
    assert (score.min_visible, score.mean_visible, score.max_visible) == (1, 2.5, 4)
    assert score.flops == 32 * model.flops.forward


@pytest.mark.parametrize(
    ("stride", "num_windows"),
    [(1, 3), (3, 1), *(pytest.param(*pair, marks=pytest.mark.exhaustive) for pair in ((1, 1), (3, 3)))],
)
def test_sliding_windows(stride, num_windows, mesh):
    model, score = run("baseline", "sliding", mesh, stride=stride, num_windows=num_windows)
    first = 4 - 4 % stride
    # The last stride, which is not full, is read with as much before it as the others.
    later = [(end - 4, min(end, 32), 4 - stride) for end in range(first + stride, 32 + stride, stride)]
    windows = [(0, first, 0), *later]
    assert score.num_tokens == 32
    assert score.nats == pytest.approx(reference("baseline", windows), 1e-5)
    assert score.flops == len(windows) * 4 * model.flops.forward
    # Of later windows, a target sees all but the stride's end.
    assert (score.min_visible, score.max_visible) == (1, 4)
    if stride == 1:
        assert score.mean_visible == (1 + 2 + 3 + 29 * 4) / 32


def test_a_cache_is_seen_as_the_paper_counts(mesh):
    """From L' + 1 to L' + L tokens, but in the first segment, which has none before it."""
    _, score = run("shortformer", "segments", mesh)
    assert score.min_visible == 1 and score.max_visible == 8
    assert score.mean_visible == ((1 + 2 + 3 + 4) + 7 * (5 + 6 + 7 + 8)) / 32
    assert score.perplexity == pytest.approx(math.exp(score.nats / 32)) == pytest.approx(2**score.bits_per_token)


@pytest.mark.thorough
def test_a_window_of_two_blocks_fills_the_cache(mesh):
    _, score = run("shortformer", "sliding", mesh, segment_length=8, stride=2)
    windows = [(0, 8, 0), *((end - 8, end, 6) for end in range(10, 33, 2))]
    assert score.nats == pytest.approx(reference("shortformer", windows), 1e-5)


def test_windows_of_documents():
    windows = list(sliding_windows(np.array([3, 1, 9]), 5, 2))
    assert windows == [(0, 0, 2, 0), (2, 0, 4, 0), (2, 1, 5, 3), (2, 3, 5, 3)]


def test_windows_that_repeat_tokens_are_read_by_writing_alone(mesh):
    model, score = run("overlapping", "token_by_token", mesh)
    # The first window, nine with three new tokens, and the first of another.
    assert (score.min_visible, score.max_visible) == (1, 4)
    assert score.mean_visible == ((1 + 2 + 3 + 4) + 9 * (2 + 3 + 4) + 2) / 32
    assert score.flops == pytest.approx(32 * model.flops.forward * 4 / 3)
    for arguments in ({"protocol": "segments"}, {"protocol": "sliding", "stride": 3}):
        with pytest.raises(UserError, match="windows that repeat overlap=1 tokens: evaluate without a protocol, or"):
            run("overlapping", mesh=mesh, **arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"protocol": "segments", "segment_length": 6}, "segment_length=6 must be a multiple of window_length=4"),
        ({"protocol": "segments", "stride": 2}, "protocol=segments with stride=2: only sliding windows have one"),
        ({"protocol": "sliding"}, "protocol=sliding with stride=None: only sliding"),
        ({"protocol": "sliding", "stride": 5}, "stride=5: only sliding windows have one, of 1 to 4 tokens"),
    ],
)
def test_what_does_not_fit_is_named(arguments, message, mesh):
    with pytest.raises(UserError, match=message):
        run("baseline", mesh=mesh, **arguments)
