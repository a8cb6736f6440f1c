"""Selectors of ancient history as functions of arrays: a decoder's vectors, and the outputs of the heads."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meliad_like.errors import UserError
from meliad_like.history.config import SELECTORS, JointSelectorConfig
from meliad_like.history.selectors.model import Selector, encoder_config, encoder_params
from meliad_like.models.model import Model
from meliad_like.models.pretrained.config import PretrainedConfig
from meliad_like.models.pretrained.recurrence import WindowSummary

VOCABULARY = 19
DECODERS = {
    name: PretrainedConfig(
        architecture=name, num_layers=2, model_width=8, num_heads=2, num_key_value_heads=heads, head_size=4,
        feedforward_width=16, max_positions=16, window_length=16, overlap=3, tied_embedding=tied,
        recurrence=(WindowSummary(),) if tied else (),
    )
    for name, heads, tied in (("gpt2", 2, True), ("llama", 1, False))
}  # fmt: skip
TOKENS = np.random.default_rng(0).integers(0, VOCABULARY, (3, 10))
LENGTH = np.array([10, 7, 1])


def widths(num_tokens):
    return dict.fromkeys(("pair", "span", "context"), num_tokens)


@functools.cache
def made(kind="joint", architecture="gpt2", **changes):
    config = SELECTORS[kind](head_width=6, dropout_rate=0.5, **changes)
    encoder = encoder_config(config, DECODERS[architecture], widths(10))
    selector = Selector(config, encoder, VOCABULARY)
    pretrained = jax.jit(Model(DECODERS[architecture], VOCABULARY).init)(jax.random.key(1))
    return selector, {**jax.jit(selector.init)(jax.random.key(2)), "encoder": encoder_params(encoder, pretrained)}


def encode(selector, params, tokens=TOKENS, length=LENGTH, key=None):
    return jax.jit(selector.encode)(params["encoder"], jnp.asarray(tokens), jnp.asarray(length), key)


@functools.partial(jax.jit, static_argnums=(0, 3))
def hidden_of(selector, params, tokens, layer=-1):
    """What the decoder makes of texts, after a layer and the final norm."""
    module = selector.encoder.bind(params["encoder"])
    outputs = module.read_window(tokens)
    return module.final_norm(outputs[layer])


@pytest.mark.parametrize("kind", ["joint", "light"])
@pytest.mark.parametrize("architecture", ["gpt2", "llama"])
def test_vectors_are_those_of_the_text_alone(kind, architecture):
    selector, params = made(kind, architecture)
    vectors = encode(selector, params)
    assert vectors.shape == (3, selector.vector_width) and selector.vector_width == (8 if kind == "joint" else 16)
    for row, length, vector in zip(TOKENS, LENGTH, vectors):
        hidden = np.asarray(hidden_of(selector, params, row[None, :length]))[0]
        expected = hidden[-1] if kind == "joint" else np.concatenate([hidden.mean(axis=0), hidden[-1]])
        np.testing.assert_allclose(vector, expected, atol=1e-5)


def test_what_follows_the_text_changes_nothing():
    selector, params = made("light")
    other = np.where(np.arange(10) < LENGTH[:, None], TOKENS, 5)
    np.testing.assert_array_equal(encode(selector, params), encode(selector, params, other))


def test_fewer_layers_are_the_first_ones():
    selector, params = made(encoder_layers=1)
    whole, of_all = made()
    hidden = hidden_of(whole, of_all, TOKENS, 1)
    np.testing.assert_allclose(encode(selector, params), hidden[np.arange(3), LENGTH - 1], atol=1e-6)
    assert selector.encoder_flops_per_token(10) == whole.encoder_flops_per_token(10) / 2


def test_the_joint_head_is_two_layers():
    selector, params = made()
    head = jax.tree.map(lambda x: np.asarray(x) + 0.1, params["head"])
    vectors = np.asarray(encode(selector, params))
    hidden = np.maximum(vectors @ head["pair"]["kernel"] + head["pair"]["bias"], 0)
    expected = hidden @ head["pair_output"]["kernel"] + head["pair_output"]["bias"]
    scores = selector.score_vectors(params | {"head": head}, {"pair": jnp.asarray(vectors)})
    np.testing.assert_allclose(scores, expected[:, 0], rtol=1e-5)


def test_the_light_head_is_a_scalar_product_and_what_either_side_says():
    selector, params = made("light")
    chance = np.random.default_rng(3)
    span, context = chance.normal(size=(4, 16)), chance.normal(size=(1, 16))
    params = jax.tree.map(lambda x: chance.normal(size=x.shape), {name: params[name] for name in ("head", "standard")})
    head, standard = params["head"], params["standard"]
    sides = {
        part: (x - standard[part]["mean"]) / standard[part]["deviation"] @ head[part]["kernel"] + head[part]["bias"]
        for part, x in (("span", span), ("context", context))
    }
    expected = (sides["span"] * sides["context"]).sum(axis=1) / np.sqrt(6)
    for part, values in sides.items():
        output = head[f"{part}_output"]
        expected = expected + (np.maximum(values, 0) @ output["kernel"] + output["bias"])[:, 0]
    expected = standard["scores"]["mean"] + standard["scores"]["deviation"] * expected
    vectors = {"span": jnp.asarray(span), "context": jnp.asarray(context)}
    np.testing.assert_allclose(selector.score_vectors(params, vectors), expected, rtol=1e-4, atol=1e-5)


def test_dropout_hangs_on_its_key():
    selector, params = made()
    first, again, other = (encode(selector, params, key=jax.random.key(seed)) for seed in (0, 0, 1))
    np.testing.assert_array_equal(first, again)
    assert np.abs(first - other).max() > 1e-3 < np.abs(first - encode(selector, params)).max()


def test_what_the_decoder_can_not_do_is_named():
    with pytest.raises(UserError, match="encoder_layers=3 is more than the 2 layers"):
        encoder_config(JointSelectorConfig(encoder_layers=3), DECODERS["gpt2"], widths(10))
    with pytest.raises(UserError, match="window_length=17 is more than the max_positions=16 of the model"):
        encoder_config(JointSelectorConfig(), DECODERS["gpt2"], widths(17))
    with pytest.raises(UserError, match="selector='other' is not one of joint, light"):
        SELECTORS["other"]
