"""MELODI against a plain loop over windows, and what its memories reach."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ways import (
    V,
    W,
    begin,
    check_documents,
    check_token_by_token,
    read,
    starts,
    tokens_of,
)

from meliad_like import config
from meliad_like.errors import UserError
from meliad_like.families.melodi import MelodiConfig
from meliad_like.families.melodi.decoder import toeplitz
from meliad_like.mixers.positions import Rotary
from meliad_like.models.model import Model
from meliad_like.studies import interventions

SIZES = {"num_layers": 3, "model_width": 8, "num_heads": 2, "head_size": 4, "feedforward_width": 12, "window_length": W}
SMALL = MelodiConfig(**SIZES, long_layers=(1,), num_summaries=2, short_length=2, long_length=2, long_slots=6)


@functools.cache
def make(config, **changes):
    """A model, and parameters without zeros, ones or values too small for the tests to notice."""
    model = Model(dataclasses.replace(config, **changes), V)
    generator = np.random.default_rng(0)

    def perturb(x):
        return jnp.asarray(x + 0.3 * generator.normal(size=x.shape), jnp.float32)

    return model, jax.tree.map(perturb, model.init(jax.random.key(0)))


def rms(x, scale):
    return x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + 1e-6) * scale


def heads(x, kernel, unit=True):
    y = (x @ kernel).reshape(len(x), SIZES["num_heads"], SIZES["head_size"]).swapaxes(0, 1)
    return y / np.sqrt(np.sum(y**2, axis=-1, keepdims=True) + 1e-6) if unit else y


def softmax_mix(scores, values):
    """Attention with the reference's additional score, by which a query that sees nothing gets zeros."""
    highest = np.maximum(scores.max(axis=-1, keepdims=True, initial=-1e3), -1e3)
    weights = np.exp(scores - highest)
    return weights @ values / (weights.sum(axis=-1, keepdims=True) + np.exp(-1e3 - highest))


def read_layer(p, melodi, x, short, long):
    """One window of one layer, x [w + u, d]: the output, and the memories after it; those of None are masked."""
    w, u, scale = W, melodi.num_summaries, np.abs(p["heads"]["attention_scale"])[:, None, None]
    kernels = {name: p["heads"][name]["kernel"] for name in ("key", "value", "query")}
    normed = rms(x, p["norm"]["scale"])
    before = np.zeros((0, x.shape[1])) if short is None else rms(short, p["norm"]["scale"])
    seen = np.concatenate([before, normed])
    query, key, value = (
        heads(normed, kernels["query"]),
        heads(seen, kernels["key"]),
        heads(seen, kernels["value"], False),
    )
    distance = np.arange(len(x))[:, None] + len(before) - np.arange(len(seen))
    # Distances below 16 are their own buckets.
    bias = p["heads"]["position"]["by_distance"]["table"][:, np.maximum(distance, 0)]
    scores = np.where(distance > 0, scale * (query @ key.swapaxes(1, 2) + bias), -np.inf)
    mixed = softmax_mix(scores, value)
    if long is not None:
        stored = rms(long, p["norm"]["scale"])
        key, value = heads(stored, kernels["key"]), heads(stored, kernels["value"], False)
        share = 1 / (1 + np.exp(-p["gate"]))[:, None]
        mixed = share * mixed + (1 - share) * softmax_mix(scale * (query @ key.swapaxes(1, 2)), value)
    z = x + mixed.swapaxes(0, 1).reshape(len(x), -1) @ p["output"]["kernel"]
    f = p["feedforward"]["network"]
    hidden = np.maximum(rms(z, p["feedforward"]["norm"]["scale"]) @ f["hidden"]["kernel"] + f["hidden"]["bias"], 0)
    y = z + hidden @ f["output"]["kernel"] + f["output"]["bias"]

    def mix(q):
        rows = [y[:w], y[w:]]
        if "token_norm" in q:
            rows = [rms(a, q[name]["scale"]) for a, name in zip(rows, ("token_norm", "summary_norm"))]
        return q["kernel"].T @ np.concatenate(rows) + q["bias"][:, None]

    new = mix(p["short_mix"]) + (y[w:] if melodi.short_length == u else 0)
    if long is not None:
        long = np.concatenate([long, mix(p["long_mix"])])[-melodi.long_slots :]
    if "summary_mix" in p:
        y = np.concatenate([y[:w], y[w:] + mix(p["summary_mix"])])
    return y, new, long


def read_document(model, params, tokens):
    """The logits of one document, [n, v], by loops over windows and layers in float64; empty memories are masked, or
    zeros without a mask."""
    p, melodi = jax.tree.map(lambda x: np.asarray(x, np.float64), params), model.config
    masked, d, long_layers = melodi.mask_empty_cache, SIZES["model_width"], melodi.long_indices
    number = 0 if masked else melodi.long_slots
    short = [None if masked else np.zeros((melodi.short_length, d))] * 3
    long, outputs = [np.zeros((number, d)) if i in long_layers else None for i in range(3)], []
    for window in np.split(tokens, len(tokens) // W):
        x = np.concatenate([p["embedding"][window], p["summary_embedding"]])
        for i in range(3):
            x, short[i], long[i] = read_layer(p["layers"][i], melodi, x, short[i], long[i])
        outputs.append(rms(x[:W], p["final_norm"]["scale"]) @ p["embedding"].T / np.sqrt(d))
    return np.concatenate(outputs)


# A ring whose length is not a multiple of what a window adds, and that wraps; other lengths of all parts.
TWO_LONG = MelodiConfig(**SIZES, long_layers=(0, 2), num_summaries=3, short_length=2, long_length=3, long_slots=7)


@pytest.mark.parametrize(
    ("melodi", "masked"),
    [
        (SMALL, True),
        (TWO_LONG, False),
        (MelodiConfig(**SIZES, num_summaries=1, short_length=1), False),
        (MelodiConfig(**SIZES, long_layers=(1,), num_summaries=2, short_length=5, long_length=4, long_slots=4), True),
    ],
)
def test_the_loop(melodi, masked):
    model, params = make(melodi, mask_empty_cache=masked)
    tokens = tokens_of(2, 8)
    # Lane 1 begins another document within the first segment.
    first, carry = read(model, params, tokens[:, : 4 * W], begin(model, params, 2), starts(2, 4, (0, 0), (1, 2)))
    second, _ = read(model, params, tokens[:, 4 * W :], carry, starts(2, 4))
    logits = jnp.concatenate([first, second], axis=1)
    for lane, begins in ((0, 0), (1, 2 * W)):
        expected = read_document(model, params, tokens[lane, begins:])
        np.testing.assert_allclose(logits[lane, begins:], expected, atol=2e-5)


def test_toeplitz_lays_values_out_by_distance():
    by_distance = np.arange(1.0, 9)[None] * np.array([[1], [10]])
    square = toeplitz(jnp.asarray(by_distance), 5, 4)
    for i in range(5):
        for j in range(9):
            assert square[1, i, j] == (10 * (i + 4 - j) if j < i + 4 else 0)


@pytest.mark.parametrize("check", [check_token_by_token, check_documents])
def test_all_ways_of_reading_are_equal(check):
    check(*make(TWO_LONG))


@pytest.mark.parametrize(
    "changes",
    [{"position": Rotary()}, pytest.param({"mask_empty_cache": False}, marks=pytest.mark.exhaustive)],
    ids=str,
)
def test_token_by_token_equals_segments_with(changes):
    check_token_by_token(*make(SMALL, **changes))


def reach(model, params):
    """The largest gradient of window 3's hidden vectors for the vectors of window 0's tokens."""
    tokens = np.arange(4 * W)[None]

    def last(table):
        module = model.bind(params | {"embedding": table})
        hidden, _ = module(tokens, module.init_carry(1), starts(1, 4, (0, 0)))
        return jnp.sum(hidden[0, -W:] * jnp.linspace(-1, 1, SIZES["model_width"]))

    return np.abs(jax.jit(jax.grad(last))(params["embedding"]))[:W].max()


@pytest.mark.thorough
def test_each_memory_alone_reaches_three_windows_back():
    # Of another length than the summaries, a short-term memory is what is mixed, and nothing else.
    model, params = make(
        MelodiConfig(**SIZES, long_layers=(1,), num_summaries=2, short_length=3, long_length=2, long_slots=6)
    )

    def without(*mixes):
        def cut(layer):
            return layer | {mix: jax.tree.map(jnp.zeros_like, layer[mix]) for mix in mixes if mix in layer}

        return params | {"layers": {i: cut(layer) for i, layer in params["layers"].items()}}

    assert reach(model, without("long_mix")) > 0
    assert reach(model, without("short_mix")) > 0
    assert reach(model, without("short_mix", "long_mix")) == 0


def test_a_segment_of_cleared_memories_is_a_document():
    model, params = make(SMALL)
    cleared = Model(interventions.cleared(model.config), V)
    tokens = tokens_of(2, 4)
    _, carry = read(cleared, params, tokens, begin(cleared, params, 2), starts(2, 4))
    ours, _ = read(cleared, params, tokens, carry, starts(2, 4))
    expected, _ = read(model, params, tokens, begin(model, params, 2), starts(2, 4))
    np.testing.assert_allclose(ours, expected, atol=1e-5)


@pytest.mark.parametrize(
    ("bindings", "message"),
    [
        (["MelodiConfig.long_layers = (12,)"], "MelodiConfig.long_layers=(12,) names a layer that 12 layers lack"),
        (["MelodiConfig.long_slots = 31"], "long_slots=31 must be at least long_length=32"),
        (["MelodiConfig.num_summaries = 0"], "num_summaries=0 must be at least 1"),
        (["DenseMemory.num_slots = 3"], "nothing reads DenseMemory.num_slots: RunConfig.model is 'melodi'"),
        (["DecoderConfig.doubled_inputs = (3,)"], "nothing reads DecoderConfig.doubled_inputs"),
    ],
)
def test_mistakes(bindings, message):
    with pytest.raises(UserError) as error:
        config.parse(["melodi/base.gin"], bindings)
    assert message in str(error.value)
