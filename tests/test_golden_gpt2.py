"""GPT-2 against arrays of Hugging Face's transformers: a tiny random model, read from its own folder."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import ways
from pretrained_models import FOLDER, read, read_published, tensors

from meliad_like.layers.losses import token_losses
from meliad_like.models.model import Model
from meliad_like.studies.protocols import sliding_windows


@functools.cache
def opened():
    pretrained = read_published(FOLDER)
    return Model(pretrained.config, pretrained.vocabulary_size), pretrained.params, np.load(FOLDER / "io.npz")


def nats(logits, tokens):
    return -np.take_along_axis(np.asarray(jax.nn.log_softmax(logits))[:, :-1], tokens[:, 1:, None], axis=-1)[..., 0]


def test_logits_and_every_hidden_state():
    model, params, arrays = opened()
    outputs, hidden, logits = read(model, params, arrays["a_input_ids"], 0)
    np.testing.assert_allclose(logits, arrays["a_logits"], atol=1e-5)
    np.testing.assert_allclose(outputs[3], arrays["a_block2_out"], atol=1e-5)
    for i in range(3):
        np.testing.assert_allclose(outputs[i], arrays[f"a_hidden{i}"], atol=1e-5)
    np.testing.assert_allclose(hidden, arrays["a_hidden3"], atol=1e-5)
    np.testing.assert_allclose(nats(logits, arrays["a_input_ids"]), arrays["a_token_nll"], atol=1e-5)


def test_other_lengths_and_positions():
    model, params, arrays = opened()
    for name, first in (("b_logits", 0), ("c_logits", 0), ("b_logits_pos20", 20)):
        logits = read(model, params, arrays[f"{name[0]}_input_ids"], first)[2]
        np.testing.assert_allclose(logits, arrays[name], atol=1e-5)


def test_gradients():
    model, params, arrays = opened()
    tokens = arrays["b_input_ids"]

    def loss(params):
        module = model.bind(params)
        outputs = module.read_window(tokens[:, :-1])
        return jnp.mean(token_losses(module, module.final_norm(outputs[-1]), tokens[:, 1:], 16).nats)

    value, gradient = jax.jit(jax.value_and_grad(loss))(params)
    np.testing.assert_allclose(value, arrays["b_loss_mean"], rtol=1e-5)
    ours = tensors(model.config, gradient)
    theirs = {name.removeprefix("b_grad/"): arrays[name] for name in arrays if name.startswith("b_grad/")}
    assert len(theirs) == 28
    for name, expected in theirs.items():
        scale = np.abs(expected).max()
        np.testing.assert_allclose(ours[name], expected, rtol=1e-4, atol=1e-4 * scale, err_msg=name)


def test_a_token_at_a_time_and_greedy_text():
    model, params, arrays = opened()

    @jax.jit
    def step(params, token, carry):
        return model.bind(params).decode_step(token, carry)

    tokens, carry = arrays["a_input_ids"], ways.begin(model, params, 2, decoding=True)
    for i in range(64):
        logits, carry = step(params, tokens[:, i], carry)
        if i >= 40:
            np.testing.assert_allclose(logits, arrays["a_logits_cached_40on"][:, i - 40], atol=1e-5)

    expected, carry = arrays["greedy_from_b0_5"][0], ways.begin(model, params, 2, decoding=True)
    for i in range(len(expected) - 1):
        logits, carry = step(params, np.repeat(expected[i], 2), carry)
        if i >= 4:
            assert np.argmax(logits[0]) == expected[i + 1]


@pytest.mark.parametrize("stride", [16, 64])
def test_strided_perplexity(stride):
    model, params, arrays = opened()
    stream, total = arrays["stream"], 0.0
    for begin, end, scored, expected in arrays[f"hfstride{stride}_rows"]:
        tokens = np.zeros((1, 64), np.int32)
        length = int(end) - int(begin)
        tokens[:, :length] = stream[:, int(begin) : int(end)]
        of_window = nats(read(model, params, tokens, 0)[2], tokens)[0, : length - 1]
        # The reference's mean over the targets of a window, of which its first token is none.
        summed = of_window[-int(scored) :].mean() * scored
        np.testing.assert_allclose(summed, expected, rtol=1e-5)
        total += summed
    np.testing.assert_allclose(np.exp(total / 200), arrays[f"hfstride{stride}_ppl"], rtol=1e-5)


@pytest.mark.parametrize("stride", [16, 64])
def test_sliding_windows_are_theirs(stride):
    theirs = [tuple(map(int, row[:3])) for row in opened()[2][f"hfstride{stride}_rows"]]
    # Their first windows grow from the beginning of the text, and are one of ours.
    growing = [row for row in theirs if row[0] == 0]
    expected = [(0, growing[-1][1], sum(scored for *_, scored in growing)), *theirs[len(growing) :]]
    rows = sliding_windows(np.array([201]), 64, stride)
    assert [(row.first, row.first + row.length, row.length - row.repeated) for row in rows] == expected
