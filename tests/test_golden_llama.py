"""Llama against arrays of Hugging Face's transformers: tiny random models (`make_golden_llama.py`)."""

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
import ways
from decoders import mixer_of
from make_golden_llama import CONFIGS, FROM, LENGTH, PATH, WHOLE, outputs, tensors, tokens
from pretrained_models import read, read_published
from pretrained_models import tensors as tensors_of

import meliad_like
from meliad_like.conversion.published.folder import described, write_published
from meliad_like.errors import UserError
from meliad_like.layers.losses import token_losses
from meliad_like.mixers.dot_product_attention import DotProductAttention
from meliad_like.models.decoder import DecoderConfig
from meliad_like.models.model import Model

TOKENS = tokens()


@functools.cache
def golden(kind):
    with np.load(PATH) as file:
        return {name.removeprefix(f"{kind}/"): file[name] for name in file if name.startswith(f"{kind}/")}


@pytest.fixture
def folder(kind, tmp_path):
    """A model's folder."""
    safetensors.numpy.save_file(tensors(kind), tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS[kind]))
    return tmp_path


@pytest.fixture
def opened(kind, folder):
    """A model and its parameters, read from a folder, and the golden arrays."""
    pretrained = read_published(folder)
    # More tokens than in pretraining.
    config = dataclasses.replace(pretrained.config, window_length=LENGTH) if kind == "dynamic" else pretrained.config
    return Model(config, pretrained.vocabulary_size), pretrained.params, golden(kind)


@pytest.mark.parametrize("kind", CONFIGS)
def test_logits_and_every_hidden_state(opened, kind):
    model, params, arrays = opened
    hidden_states, normed, logits = read(model, params, TOKENS, 0)
    np.testing.assert_allclose(logits, arrays["logits"], rtol=1e-5, atol=1e-5)
    if kind in WHOLE:
        np.testing.assert_allclose(normed, arrays["normed"], rtol=1e-5, atol=1e-5)
        for i, hidden in enumerate(hidden_states):
            np.testing.assert_allclose(hidden, arrays[f"hidden{i}"], rtol=1e-5, atol=1e-5, err_msg=f"layer {i}")


@pytest.mark.parametrize("kind", WHOLE)
def test_loss_and_gradients(opened):
    model, params, arrays = opened

    def loss(params):
        module = model.bind(params)
        hidden_states = module.read_window(TOKENS[:, :-1])
        return jnp.mean(token_losses(module, module.final_norm(hidden_states[-1]), TOKENS[:, 1:], 16).nats)

    value, gradient = jax.jit(jax.value_and_grad(loss))(params)
    np.testing.assert_allclose(value, arrays["loss"], rtol=1e-5)
    ours = tensors_of(model.config, gradient)
    theirs = {name.removeprefix("gradient/"): arrays[name] for name in arrays if name.startswith("gradient/")}
    assert len(theirs) in (0, len(ours))
    for name, expected in theirs.items():
        np.testing.assert_allclose(ours[name], expected, rtol=1e-5, atol=1e-5, err_msg=name)


@pytest.mark.parametrize("kind", [kind for kind in CONFIGS if kind != "dynamic"])
def test_a_token_at_a_time_and_greedy_text(opened):
    model, params, arrays = opened

    @jax.jit
    def step(params, token, carry):
        return model.bind(params).decode_step(token, carry)

    carry = ways.begin(model, params, 2, decoding=True)
    for i, token in enumerate(TOKENS.T):
        logits, carry = step(params, token, carry)
        if i >= FROM:
            np.testing.assert_allclose(logits, arrays["cached"][:, i - FROM], rtol=1e-5, atol=1e-5)

    expected, carry = arrays["greedy"][0], ways.begin(model, params, 2, decoding=True)
    for i in range(len(expected) - 1):
        logits, carry = step(params, np.repeat(np.int32(expected[i]), 2), carry)
        if i >= FROM - 1:
            assert np.argmax(logits[0]) == expected[i + 1]


def load(folder):
    parameters = "RunConfig.model = 'decoder'", "DecoderConfig.window_length = 4", "ReaderConfig.segment_length = 8"
    return meliad_like.load(folder, gin_params=parameters)


@pytest.mark.parametrize("kind", [kind for kind in CONFIGS if kind != "dynamic"])
def test_as_a_decoder_at_once_in_segments_and_a_token_at_a_time(kind, folder, tmp_path):
    lm, arrays = load(folder), golden(kind)
    model, params, start = lm.model, lm.params, ways.starts(2, 4)
    assert isinstance(model.config, DecoderConfig)
    whole, _ = ways.read(model, params, TOKENS, ways.begin(model, params, 2), start)
    np.testing.assert_allclose(whole, arrays["logits"], rtol=1e-5, atol=1e-5)
    # A segment of half the tokens, and then token by token.
    first, carry = ways.read(model, params, TOKENS[:, :8], ways.begin(model, params, 2), start[:, :2])
    rest, _ = ways.decode(model, params, TOKENS[:, 8:], model.bind(params).begin_decoding(carry))
    np.testing.assert_allclose(np.concatenate([first, rest], axis=1), arrays["logits"], rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(rest[:, FROM - 8 :], arrays["cached"], rtol=1e-5, atol=1e-5)
    (tmp_path / "back").mkdir()
    write_published(lm.opened, tmp_path / "back")
    back = safetensors.numpy.load_file(tmp_path / "back" / "model.safetensors")
    jax.tree.map(np.testing.assert_array_equal, back, tensors(kind))


@pytest.mark.parametrize("kind", ["dynamic"])
def test_a_scaling_by_a_texts_length_is_for_windows_alone(folder):
    with pytest.raises(UserError, match="rotary_scaling='dynamic' depends on a text's length, and spans don't"):
        load(folder)


@pytest.mark.parametrize(
    "changes, span",
    [
        ({"sliding_window": 5}, 5),
        ({"sliding_window": None}, 32),
        ({}, 4096),
        ({"sliding_window": None, "max_position_embeddings": 131_072}, 8192),
    ],
)
def test_spans_of_mistral(changes, span):
    saved = {name: value for name, value in CONFIGS["mistral"].items() if name != "sliding_window"}
    decoder = described(saved | changes, "config.json", decoder=True).config
    assert mixer_of(decoder, DotProductAttention).span == span


@pytest.mark.parametrize("kind", CONFIGS)
def test_the_arrays_are_those_of_transformers(kind):
    """Where transformers is installed."""
    pytest.importorskip("transformers")
    pytest.importorskip("torch")
    expected = golden(kind)
    assert json.loads(str(expected.pop("config"))) == CONFIGS[kind]
    found = outputs(kind)
    assert found.keys() == expected.keys()
    for name in found:
        np.testing.assert_allclose(found[name], expected[name], atol=1e-6, err_msg=name)
