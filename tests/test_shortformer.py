"""The Shortformer and its ablations: equal results of all ways of computing them, and dependencies on inputs."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from ways import (
    V,
    W,
    assert_same,
    begin,
    check_documents,
    check_lanes,
    check_parts,
    check_segments,
    check_token_by_token,
    read,
    starts,
    tokens_of,
)

from meliad_like.errors import UserError
from meliad_like.families.shortformer import ShortformerConfig, sinusoids
from meliad_like.models.model import Model

PIA = ShortformerConfig(
    num_layers=2,
    model_width=16,
    num_heads=2,
    head_size=8,
    feedforward_width=24,
    window_length=W,
    cache_length=W,
    cutoffs=(10, 30),
    band_factor=2,
)
CONFIGS = {
    "shortformer": PIA,
    "longer cache": dataclasses.replace(PIA, cache_length=2 * W + 2),
    "shorter cache": dataclasses.replace(PIA, cache_length=W - 1),
    "infused, no cache": dataclasses.replace(PIA, cache_length=0),
    "cache, not infused": dataclasses.replace(PIA, position="input"),
    "baseline": dataclasses.replace(PIA, position="input", cache_length=0, cutoffs=()),
}


@functools.cache
def make(name):
    model = Model(CONFIGS[name], V)
    generator = np.random.default_rng(0)
    params = jax.tree.map(
        lambda x: x + jnp.asarray(0.2 * generator.normal(size=x.shape), jnp.float32) if x.ndim == 1 else 0.8 * x,
        model.init(jax.random.key(0)),
    )
    return model, params


def dense(config, params, tokens):
    """The last block's log-probabilities, computed for one lane in numpy, with the blocks before it."""
    p = jax.tree.map(np.asarray, params)
    table = sinusoids(config.cache_length + W, config.model_width)
    h, scale = config.num_heads, config.head_size**-0.5
    edges = (0, *config.cutoffs, V)

    def norm(x, weights):
        x = x - x.mean(-1, keepdims=True)
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-5) * weights["scale"] + weights["bias"]

    def linear(x, weights):
        return x @ weights["kernel"] + weights["bias"]

    def log_softmax(x):
        x = x - x.max(-1, keepdims=True)
        return x - np.log(np.exp(x).sum(-1, keepdims=True))

    caches = [np.zeros((0, config.model_width))] * config.num_layers
    for block in tokens.reshape(-1, W):
        x = np.zeros((W, config.model_width))
        for t, token in enumerate(block):
            band = max(i for i, first in enumerate(edges[:-1]) if token >= first)
            weights = p["vocabulary"]["bands"][band]
            vector = weights["embedding"][token - edges[band]]
            x[t] = vector @ weights["projection"] if "projection" in weights else vector
        x = x * config.model_width**0.5 + (table[:W] if config.position == "input" else 0)
        for i in range(config.num_layers):
            layer = p["layers"][i]
            inputs = norm(x, layer["attention_norm"])
            seen = np.concatenate([caches[i], inputs])
            c = len(caches[i])
            place = table[: c + W] if config.position == "infused" else np.zeros((c + W, 1))
            heads = (linear(inputs + place[c:], layer["query"]) * scale, linear(seen + place, layer["key"]))
            query, key, value = (np.split(y, h, axis=-1) for y in (*heads, linear(seen, layer["value"])))
            visible = np.arange(c + W) <= c + np.arange(W)[:, None]
            mixed = [np.exp(log_softmax(np.where(visible, query[j] @ key[j].T, -np.inf))) @ value[j] for j in range(h)]
            x = x + linear(np.concatenate(mixed, axis=-1), layer["output"])
            hidden = np.maximum(linear(norm(x, layer["feedforward_norm"]), layer["feedforward_hidden"]), 0)
            x = x + linear(hidden, layer["feedforward_output"])
            caches[i] = seen[len(seen) - min(config.cache_length, len(seen)) :]
    bands = p["vocabulary"]["bands"]
    if len(bands) == 1:
        return log_softmax(x @ bands[0]["embedding"].T)
    head = log_softmax(np.concatenate([x @ bands[0]["embedding"].T, x @ p["vocabulary"]["clusters"]["kernel"]], -1))
    rest = [
        head[:, [edges[1] + i - 1]] + log_softmax(x @ bands[i]["projection"].T @ bands[i]["embedding"].T)
        for i in range(1, len(bands))
    ]
    return np.concatenate([head[:, : edges[1]], *rest], axis=-1)


@pytest.mark.parametrize("name", CONFIGS)
def test_equals_the_dense_model(name):
    model, params = make(name)
    tokens = tokens_of(2, 4)
    logits, carry = read(model, params, tokens, begin(model, params, 2), starts(2, 4))
    assert carry.position.tolist() == [4 * W, 4 * W]
    np.testing.assert_allclose(np.exp(logits).sum(axis=-1), 1, rtol=1e-5)
    for lane in range(2):
        np.testing.assert_allclose(logits[lane, -W:], dense(CONFIGS[name], params, tokens[lane]), atol=2e-5)


@pytest.mark.parametrize("name", CONFIGS)
def test_token_by_token_equals_blocks(name):
    check_token_by_token(*make(name))


def test_lanes_decode_independently():
    check_lanes(*make("longer cache"))


@pytest.mark.parametrize("name", ["longer cache", "baseline"])
def test_a_book_in_segments_is_the_book(name):
    check_segments(*make(name))


def test_caches_can_be_exchanged():
    check_parts(*make("longer cache"))


@pytest.mark.parametrize("name", ["shortformer", "longer cache"])
def test_documents_that_begin_within_a_segment_are_separate(name):
    check_documents(*make(name))


@pytest.mark.parametrize("name", ["shortformer", "infused, no cache", "longer cache"])
def test_what_depends_on_what(name):
    """Changing a token changes what is seen of it, through as many caches as there are layers."""
    model, params = make(name)
    blocks, changed = 8, 2 * W + 1
    tokens = tokens_of(1, blocks)
    other = tokens.copy()
    other[0, changed] = (other[0, changed] + 1) % V
    ours, theirs = (read(model, params, t, begin(model, params, 1), starts(1, blocks))[0][0] for t in (tokens, other))
    differs = np.abs(ours - theirs).max(axis=-1) > 0
    reached = {"shortformer": 5 * W, "infused, no cache": 3 * W, "longer cache": blocks * W}[name]
    np.testing.assert_array_equal(differs, (np.arange(blocks * W) >= changed) & (np.arange(blocks * W) < reached))


def test_no_gradient_from_the_block_before():
    model, params = make("shortformer")
    tokens = tokens_of(1, 2)

    def gradient(tokens, carry, start):
        def loss(params):
            module = model.bind(params)
            hidden, _ = module(tokens, carry, start)
            return jnp.sum(module.logits(hidden)[:, -W:, 0])

        return jax.jit(jax.grad(loss))(params)

    _, carry = read(model, params, tokens[:, :W], begin(model, params, 1), starts(1, 1))
    both = gradient(tokens, begin(model, params, 1), starts(1, 2))
    assert_same(both, gradient(tokens[:, W:], carry, starts(1, 1)))


@pytest.mark.thorough
def test_dropout_is_drawn_by_key_and_everywhere_or_nowhere():
    model, params = make("shortformer")
    tokens, carry = tokens_of(1, 2), begin(model, params, 1)
    rates = ("dropout_rate", "attention_dropout_rate", "activation_dropout_rate")

    def hidden(config, key):
        return Model(config, V).bind(params)(tokens, carry, starts(1, 2), key)[0]

    none = dataclasses.replace(PIA, **dict.fromkeys(rates, 0.0))
    expected = hidden(PIA, None)
    np.testing.assert_allclose(hidden(none, jax.random.key(0)), expected, atol=1e-5)
    for rate in rates:
        one = dataclasses.replace(none, **{rate: 0.5})
        dropped = hidden(one, jax.random.key(0))
        np.testing.assert_allclose(dropped, hidden(one, jax.random.key(0)), atol=1e-5)
        for other in (expected, hidden(one, jax.random.key(1))):
            assert np.abs(dropped - other).max() > 1e-2, rate


def test_rematerialisation_and_bfloat16():
    model, params = make("shortformer")
    tokens, carry = tokens_of(1, 2), begin(model, params, 1)
    exact = read(model, params, tokens, carry, starts(1, 2))[0]
    for remat in ("dots", "layers"):
        other = Model(dataclasses.replace(PIA, remat=remat), V)
        assert_same(read(other, params, tokens, carry, starts(1, 2))[0], exact)
    half = Model(dataclasses.replace(PIA, activation_dtype="bfloat16"), V)
    logits, new_carry = read(half, params, tokens, begin(half, params, 1), starts(1, 2))
    assert logits.dtype == jnp.float32 and new_carry.layers[0].cache.dtype == jnp.bfloat16
    assert np.abs(logits - exact).max() < 0.05 * np.abs(exact).max()


def test_operations_of_a_token():
    """Keys and values of the cache are projected again with every block."""
    config = ShortformerConfig(
        num_layers=1, model_width=100, num_heads=1, head_size=100, feedforward_width=7, window_length=8, cache_length=8,
        cutoffs=()
    )  # fmt: skip
    layer = 2 * 100 * 100 * 6 + 4 * 16 * 100 + 4 * 100 * 7
    assert config.flops(30).forward == layer + 2 * 100 * 30


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"position": "learned"}, "position='learned' is not one of infused, input"),
        ({"cache_length": -1}, "cache_length=-1 must not be negative"),
        ({"softmax_dropout_rate": 1.0}, "softmax_dropout_rate=1.0 must be at least 0 and below 1"),
        ({"cutoffs": (5, 5)}, r"cutoffs=\(5, 5\) must be positive and ascend"),
        ({"model_width": 15}, "model_width=15 must be even"),
        ({"band_factor": 8}, "model_width=16 leaves nothing for the last of 3 bands"),
        ({"num_heads": 0}, "num_heads=0 must be at least 1"),
    ],
)
def test_a_mistake_in_the_config_is_named(fields, message):
    with pytest.raises(UserError, match=message):
        dataclasses.replace(PIA, **fields)


def test_cutoffs_must_be_in_the_vocabulary():
    with pytest.raises(UserError, match=r"cutoffs=\(10, 30\) must be below the vocabulary's size of 30; \(\) for one"):
        Model(PIA, 30).abstract_params  # noqa: B018


def test_segments_are_whole_blocks():
    model, params = make("shortformer")
    with pytest.raises(ValueError, match="6 tokens with 1 start flags are not whole blocks of window_length=4"):
        read(model, params, np.zeros((1, 6), np.int32), begin(model, params, 1), starts(1, 1))
