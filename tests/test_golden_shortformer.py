"""Parity with ofirpress/shortformer (commit edc411f): arrays computed by its own code, in float32 on a CPU."""

import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meliad_like.families.shortformer import ShortformerConfig, sinusoids
from meliad_like.layers.losses import token_losses
from meliad_like.models.model import Model
from meliad_like.training.checkpoints import named_arrays

GOLDEN = Path(__file__).parent / "golden"
CONFIG = ShortformerConfig(
    num_layers=2,
    model_width=32,
    num_heads=4,
    head_size=8,
    feedforward_width=64,
    window_length=8,
    cache_length=8,
    cutoffs=(20, 40),
)
MODULES = {
    "attention_norm": "self_attn_layer_norm",
    "query": "self_attn.q_proj",
    "key": "self_attn.k_proj",
    "value": "self_attn.v_proj",
    "output": "self_attn.out_proj",
    "feedforward_norm": "final_layer_norm",
    "feedforward_hidden": "fc1",
    "feedforward_output": "fc2",
}
MODEL = Model(CONFIG, 60)
FORWARD = np.load(GOLDEN / "pia_cache_forward.npz")
SEGMENTS = range(4)


def their_name(path):
    """The name in fairseq of our parameter, and whether its array is [out, in] and ours [in, out]."""
    if match := re.fullmatch(r"vocabulary/bands/(\d+)/(embedding|projection)", path):
        return f"embed_tokens.embeddings.{match[1]}.{int(match[2] == 'projection')}.weight", match[2] == "projection"
    if path == "vocabulary/clusters/kernel":
        return "adaptive_softmax.head.class_proj.weight", True
    match = re.fullmatch(r"layers/(\d+)/(\w+)/(\w+)", path)
    name = f"layers.{match[1]}.{MODULES[match[2]]}.{'bias' if match[3] == 'bias' else 'weight'}"
    return name, match[3] == "kernel"


def by_our_paths(arrays, prefix):
    """Fairseq's arrays in the tree of our parameters, each with our axes."""

    def read(path):
        name, transposed = their_name(path)
        array = arrays[f"{prefix}decoder.{name}"]
        return array.T if transposed else array

    template = MODEL.abstract_params
    return jax.tree.unflatten(jax.tree.structure(template), [read(path) for path in named_arrays(template)])


@pytest.fixture(scope="module")
def params():
    return jax.tree.map(jnp.asarray, by_our_paths(np.load(GOLDEN / "pia_params.npz"), "param/"))


@pytest.fixture(scope="module")
def results(params):
    """Of each segment: hidden vectors, log-probabilities, losses, carry and gradient."""

    @jax.jit
    def read(params, tokens, targets, carry):
        def loss(params):
            module = MODEL.bind(params)
            hidden, new_carry = module(tokens, carry, np.zeros((2, 1), bool))
            losses = token_losses(module, hidden, targets, 4)
            return jnp.sum(losses.nats), (hidden, module.logits(hidden), losses, new_carry)

        gradient, aux = jax.grad(loss, has_aux=True)(params)
        return *aux, gradient

    carry, results = MODEL.bind(params).init_carry(2), []
    for s in SEGMENTS:
        tokens, targets = (FORWARD[f"seg{s}_{name}"].astype(np.int32) for name in ("tokens", "targets"))
        results.append(read(params, tokens, targets, carry))
        carry = results[-1][3]
    return results


def test_positions():
    np.testing.assert_allclose(sinusoids(32, 32), FORWARD["positions"], atol=1e-5)


@pytest.mark.parametrize("s", SEGMENTS)
def test_outputs_of_a_segment(results, s):
    hidden, log_probabilities, losses, _, _ = results[s]
    np.testing.assert_allclose(hidden, FORWARD[f"seg{s}_features"], atol=1e-5)
    np.testing.assert_allclose(log_probabilities, FORWARD[f"seg{s}_logprobs"], atol=1e-5)
    np.testing.assert_allclose(losses.nats, FORWARD[f"seg{s}_token_nll"], atol=1e-5)
    np.testing.assert_allclose(losses.nats.sum(), FORWARD[f"seg{s}_loss_sum"], rtol=1e-6)
    expected = FORWARD[f"seg{s}_logprobs"].argmax(axis=-1) == FORWARD[f"seg{s}_targets"]
    np.testing.assert_array_equal(losses.correct, expected)


@pytest.mark.parametrize("s", SEGMENTS)
def test_what_is_cached_after_a_segment(results, s):
    for i, layer in enumerate(results[s][3].layers):
        np.testing.assert_allclose(layer.cache, FORWARD[f"seg{s}_cache_layer{i}"], atol=1e-5)


@pytest.mark.parametrize("s", SEGMENTS)
def test_gradients_of_a_segment(results, s):
    expected = named_arrays(by_our_paths(FORWARD, f"seg{s}_grad/"))
    for name, ours in named_arrays(results[s][4]).items():
        theirs = expected[name]
        # A bias of the keys moves all scores of a query alike: its gradient is 0, and theirs and ours are rounding.
        atol = max(1e-4 * np.abs(theirs).max(), 1e-6)
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=atol, err_msg=name)
