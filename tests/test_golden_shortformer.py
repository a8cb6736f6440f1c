"""Parity with ofirpress/shortformer (commit edc411f): arrays computed by its own code, in float32 on a CPU."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from golden_shortformer import CONFIG, GOLDEN, THEIRS

from meliad_like.conversion.fairseq import from_fairseq, place
from meliad_like.errors import UserError
from meliad_like.layers.losses import token_losses
from meliad_like.layers.positions import sinusoids
from meliad_like.models.model import Model

MODEL = Model(CONFIG, 60)
FORWARD = np.load(GOLDEN / "pia_cache_forward.npz")
SEGMENTS = range(4)


@pytest.fixture(scope="module")
def params():
    return jax.tree.map(jnp.asarray, from_fairseq(THEIRS, MODEL.abstract_params))


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
    for path, ours in jax.tree.leaves_with_path(results[s][4]):
        name = place(jax.tree_util.keystr(path, simple=True, separator="/")).name
        theirs = FORWARD[f"seg{s}_grad/decoder.{name}"]
        theirs = theirs if ours.shape == theirs.shape and "embeddings" in name and ".0.weight" in name else theirs.T
        # A bias of the keys moves all scores of a query alike: its gradient is 0, and theirs and ours are rounding.
        atol = max(1e-4 * np.abs(theirs).max(), 1e-6)
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=atol, err_msg=name)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda arrays: arrays.pop("decoder.layers.1.fc1.bias"), "has no tensor layers.1.fc1.bias"),
        (
            lambda arrays: arrays.update({"decoder.layers.2.fc1.bias": np.zeros(2)}),
            "layers.2.fc1.bias that .* has no place for",
        ),
        (
            lambda arrays: arrays.update({"decoder.adaptive_softmax.tail.0.0.weight": np.zeros((32, 8))}),
            "tail.0.0.weight differs from decoder.embed_tokens.embeddings.1.1.weight: only tied softmaxes",
        ),
        (lambda arrays: arrays.update({"decoder.layers.0.fc1.bias": np.zeros(3)}), r"fc1.bias has shape \(3,\)"),
    ],
)
def test_a_checkpoint_of_another_model_is_an_error(change, message):
    arrays = dict(THEIRS)
    change(arrays)
    with pytest.raises(UserError, match=message):
        from_fairseq(arrays, MODEL.abstract_params)
