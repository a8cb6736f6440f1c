"""The dense memory against attention to all tokens at once."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from decoders import with_mixer
from ways import V, W, starts, tokens_of

from meliad_like import config
from meliad_like.errors import UserError
from meliad_like.mixers import dense_memory
from meliad_like.mixers.dense_memory import DenseMemory
from meliad_like.models.decoder import DecoderConfig
from meliad_like.models.model import Model

SIZES = {"num_layers": 1, "model_width": 8, "num_heads": 2, "head_size": 4, "feedforward_width": 8, "window_length": W}
M = 6


@functools.cache
def make(**changes):
    model = Model(with_mixer(DecoderConfig(**SIZES), DenseMemory(num_slots=M, **changes)), V)
    return model, model.init(jax.random.key(0))


def attend(model, params, tokens, low):
    """The hidden vectors of a document, where token t sees the tokens from low[t] to t - 1, by a dense product."""
    p = params["layers"][0]
    layer = model.bind(params).layers[0]
    x = params["embedding"][tokens]
    key, value, query = (y[0] for y in layer.mixers["dense_memory"].heads.of(layer.norm(x[None])))
    t = np.arange(len(tokens))
    seen = (t[None] >= low[:, None]) & (t[None] < t[:, None])
    weights = jnp.where(seen, jnp.exp(query @ jnp.swapaxes(key, 1, 2)), 0)
    mixed = weights @ value / jnp.maximum(weights.sum(axis=-1, keepdims=True), 1e-9)
    z = x + jnp.swapaxes(mixed, 0, 1).reshape(len(tokens), -1) @ p["output"]["kernel"]
    return model.bind(params).final_norm(layer.feedforward(z, None))


@pytest.mark.thorough
@pytest.mark.parametrize(("piece", "horizon"), [(3, "tokens"), (3, "segment"), (2048, "tokens")])
def test_several_pieces_and_segments_are_attention_to_all_tokens(piece, horizon, monkeypatch):
    monkeypatch.setattr(dense_memory, "PIECE", piece)
    model, params = make(horizon=horizon)
    tokens, t = tokens_of(1, 6)[0], np.arange(6 * W)
    # Two segments of three blocks; the memory, which begins with the first segment's last M tokens, wraps in between.
    first = 3 * W * (t // (3 * W))
    low = t - M if horizon == "tokens" else np.maximum(first - M, 0)

    def ours(params):
        module = model.bind(params)
        hidden, carry = module(tokens[None, : 3 * W], module.init_carry(1), starts(1, 3, (0, 0)))
        return jnp.concatenate([hidden, module(tokens[None, 3 * W :], carry, starts(1, 3))[0]], axis=1)[0]

    def gradient_and_outputs(read):
        def loss(params):
            hidden = read(params)
            # Within a segment, gradients pass through keys and values.
            return jnp.sum(hidden[: 3 * W] * jnp.linspace(-1, 1, 8)), hidden

        return jax.jit(jax.grad(loss, has_aux=True))(params)

    gradient, outputs = gradient_and_outputs(ours)
    expected, expected_outputs = gradient_and_outputs(lambda params: attend(model, params, tokens, low))
    np.testing.assert_allclose(outputs, expected_outputs, atol=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5), gradient, expected)


@pytest.mark.thorough
def test_a_doubled_input_is_added_once_more():
    plain, params = make()
    doubled, tokens = Model(dataclasses.replace(plain.config, doubled_inputs=(-1,)), V), tokens_of(1, 2)

    @functools.partial(jax.jit, static_argnums=0)
    def outputs(model):
        """The inputs and outputs of the layer: for a segment, and for a decoded token."""
        module = model.bind(params)
        carry = module.init_carry(1)
        segment, _ = module.read_segment(tokens, carry, starts(1, 2, (0, 0)), every_layer=True)
        return segment, module.read_tokens(tokens[:, :1], np.ones(1, int), module.begin_decoding(carry))[0]

    for (before, once), (_, twice) in zip(outputs(plain), outputs(doubled), strict=True):
        np.testing.assert_allclose(twice, before + once, rtol=1e-6)


def test_a_horizon_of_segments_is_not_decoded():
    model, _ = make(horizon="segment")
    assert model.config.traits.needs_segments and not make()[0].config.traits.needs_segments


@pytest.mark.parametrize(
    ("binding", "message"),
    [
        ("DenseMemory.num_slots = 0", "DenseMemory.num_slots=0 must be at least 1"),
        ("DenseMemory.horizon = 'all'", "DenseMemory.horizon='all' must be 'tokens' or 'segment'"),
        ("DecoderConfig.doubled_inputs = (13,)", "doubled_inputs=(13,) names a layer that 13 layers lack"),
        (
            "DecoderConfig.pattern = ('dense_memory+sliding_window',)",
            "dense_memory and sliding_window each have the attention to the window",
        ),
    ],
)
def test_mistakes(binding, message):
    with pytest.raises(UserError) as error:
        config.parse(["melodi/dense_4k.gin"], [binding])
    assert message in str(error.value)
