"""Selectors of ancient history as functions of arrays: the outputs of a head on a decoder's vectors."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meliad_like.errors import UserError
from meliad_like.families.pretrained.config import PretrainedConfig
from meliad_like.families.pretrained.recurrence import WindowSummary
from meliad_like.history.selectors.model import Selector, encoder_config, encoder_params, score
from meliad_like.history.settings import SelectorConfig
from meliad_like.models.model import Model

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


@functools.cache
def made(architecture="gpt2", **changes):
    config = SelectorConfig(head_width=6, dropout_rate=0.5, **changes)
    encoder = encoder_config(config, DECODERS[architecture], 10)
    selector = Selector(config, encoder, VOCABULARY)
    pretrained = jax.jit(Model(DECODERS[architecture], VOCABULARY).init)(jax.random.key(1))
    params = {**jax.jit(selector.init)(jax.random.key(2)), "encoder": encoder_params(encoder, pretrained)}
    # Biases that are not 0.
    return selector, params | {"head": jax.tree.map(lambda x: x + 0.1, params["head"])}


def scores(selector, params, tokens=TOKENS, length=LENGTH, key=None):
    return score(selector, params, jnp.asarray(tokens), jnp.asarray(length), key)


def head_of(params, vectors):
    """The two layers of the head."""
    head = jax.tree.map(np.asarray, params["head"])
    hidden = np.maximum(vectors @ head["hidden"]["kernel"] + head["hidden"]["bias"], 0)
    return (hidden @ head["output"]["kernel"] + head["output"]["bias"])[:, 0]


@functools.partial(jax.jit, static_argnums=(0, 3))
def hidden_of(selector, params, tokens, layer=-1):
    """What the decoder makes of texts, after a layer and the final norm."""
    module = selector.encoder.bind(params["encoder"])
    outputs = module.read_window(tokens)
    return module.final_norm(outputs[layer])


@pytest.mark.parametrize("architecture", ["gpt2", "llama"])
def test_scores_are_those_of_the_text_alone(architecture):
    selector, params = made(architecture)
    last = [np.asarray(hidden_of(selector, params, row[None, :length]))[0, -1] for row, length in zip(TOKENS, LENGTH)]
    np.testing.assert_allclose(scores(selector, params), head_of(params, np.array(last)), rtol=1e-4, atol=1e-5)


def test_what_follows_the_text_changes_nothing():
    selector, params = made()
    other = np.where(np.arange(10) < LENGTH[:, None], TOKENS, 5)
    np.testing.assert_array_equal(scores(selector, params), scores(selector, params, other))


def test_fewer_layers_are_the_first_ones():
    selector, params = made(encoder_layers=1)
    whole, of_all = made()
    hidden = np.asarray(hidden_of(whole, of_all, TOKENS, 1))[np.arange(3), LENGTH - 1]
    np.testing.assert_allclose(scores(selector, params), head_of(params, hidden), rtol=1e-4, atol=1e-6)
    assert selector.flops_per_token(10) == whole.flops_per_token(10) / 2


def test_dropout_hangs_on_its_key():
    selector, params = made()
    first, again, other = (scores(selector, params, key=jax.random.key(seed)) for seed in (0, 0, 1))
    np.testing.assert_array_equal(first, again)
    assert np.abs(first - other).max() > 1e-3 < np.abs(first - scores(selector, params)).max()


def test_what_the_decoder_can_not_do_is_named():
    with pytest.raises(UserError, match="encoder_layers=3 is more than the 2 layers"):
        encoder_config(SelectorConfig(encoder_layers=3), DECODERS["gpt2"], 10)
    with pytest.raises(UserError, match="window_length=17 is more than the max_positions=16 of the model"):
        encoder_config(SelectorConfig(), DECODERS["gpt2"], 17)
