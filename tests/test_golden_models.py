"""Parity with google-research/meliad (commit cc1aef5): arrays computed by its own code, in float32 on a CPU."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meliad_like.conversion.meliad import from_meliad, to_meliad
from meliad_like.layers.attention import attend, ring_distance, unit
from meliad_like.layers.basic import RMSNorm
from meliad_like.layers.positions import T5Bias, t5_bucket
from meliad_like.models.decoder import DecoderCarry
from meliad_like.models.decoder_config import DecoderConfig
from meliad_like.models.decoder_layer import LayerCarry
from meliad_like.models.model import Model
from meliad_like.training.loss import token_losses

GOLDEN = Path(__file__).parent / "golden"
W, N, V = 16, 64, 40
# A document's start shows the reference's unmasked zeros.
SMALL = {
    "num_layers": 3,
    "model_width": 32,
    "num_heads": 2,
    "head_size": 16,
    "feedforward_width": 64,
    "window_length": W,
    "num_states": 16,
    "mask_empty_cache": False,
}


def below(arrays, prefix):
    return {name.removeprefix(prefix): arrays[name] for name in arrays if name.startswith(prefix)}


def assert_gradients(ours, theirs):
    assert set(ours) == set(theirs)
    for name in theirs:
        scale = np.abs(theirs[name]).max()
        np.testing.assert_allclose(ours[name], theirs[name], rtol=1e-4, atol=1e-4 * scale, err_msg=name)


def test_t5_buckets_and_bias():
    arrays = np.load(GOLDEN / "a_t5_relative_position.npz")
    np.testing.assert_array_equal(t5_bucket(-arrays["rel_distance"]), arrays["bucket_causal_32_128"])

    def bias_by_distance(distance):
        return T5Bias.__call__(type("Table", (), {"table": jnp.asarray(arrays["table"])}), distance)

    dense = bias_by_distance(-arrays["rel_pos_16q_32k"].reshape(-1)).reshape(1, 2, W, 2 * W)
    np.testing.assert_allclose(dense, arrays["bias_16q_32k"], atol=1e-6)
    # The ring square is that tile, folded.
    own = arrays["causal_mask_16q_32k_w16"][:, W:]
    folded = np.where(own, arrays["bias_16q_32k"][0, ..., W:], arrays["bias_16q_32k"][0, ..., :W])
    np.testing.assert_allclose(bias_by_distance(ring_distance(W).reshape(-1)).reshape(2, W, W), folded, atol=1e-6)


def test_the_window_is_the_references_mask():
    mask = np.load(GOLDEN / "a_t5_relative_position.npz")["causal_mask_16q_32k_w16"]
    own = np.tri(W, k=-1, dtype=bool)
    np.testing.assert_array_equal(mask, np.concatenate([~own, own], axis=1))
    assert (mask.sum(axis=1) == W).all()


def test_attention_function():
    arrays = np.load(GOLDEN / "b_attention_function.npz")
    np.testing.assert_allclose(unit(arrays["keys"]), arrays["normalized_keys"], atol=1e-6)
    np.testing.assert_allclose(unit(arrays["queries"]), arrays["normalized_queries"], atol=1e-6)
    # The scale multiplies the bias as well.
    scale = arrays["scale"][:, None]
    query, key, value = arrays["normalized_queries"] * scale, arrays["normalized_keys"], arrays["values"]
    bias = arrays["bias"] * scale[:, :, None]
    np.testing.assert_allclose(attend(query, key, value, bias, arrays["mask"]), arrays["out"], atol=1e-5)
    np.testing.assert_allclose(attend(query, key, value), arrays["out_no_mask"], atol=1e-5)
    nothing = np.zeros_like(arrays["mask"])
    np.testing.assert_array_equal(attend(query, key, value, bias, nothing), arrays["out_all_masked"])


def test_rms_norm():
    arrays = np.load(GOLDEN / "b_attention_function.npz")
    norm = type("Norm", (), {"scale": jnp.asarray(arrays["layernorm_scale"]), "epsilon": RMSNorm.epsilon})
    np.testing.assert_allclose(RMSNorm.__call__(norm, arrays["layernorm_x"]), arrays["layernorm_out"], atol=1e-6)


@pytest.mark.parametrize("name", ["b_sliding_window_layer", "b_transformer_xl_layer"])
def test_layer_over_segments(name):
    arrays = np.load(GOLDEN / f"{name}.npz")
    model = Model(DecoderConfig(**{**SMALL, "num_layers": 1}), V)
    whole = model.init(jax.random.key(0))
    theirs = {f"transformer0/{name}": value for name, value in below(arrays, "params/").items()}
    params = from_meliad(theirs, {"layers": model.abstract_params["layers"]})
    # The first segment's start flags must hide whatever the cache holds.
    zeros = np.zeros((2, W, 2, 16), np.float32)
    poisoned = below(arrays, "state0/")
    carry = LayerCarry(poisoned.get("previous_keys_train", zeros), poisoned.get("previous_values_train", zeros))

    def run(params, xs, carry, start):
        return model.bind({**whole, **params}).layers[0](xs, carry, start, jnp.ones(2, bool))

    @jax.jit
    def run_and_differentiate(params, xs, carry, start, cotangent):
        outputs, transpose, carry = jax.vjp(lambda p, x: run(p, x, carry, start), params, xs, has_aux=True)
        return outputs, carry, *transpose(cotangent)

    for segment in range(3):
        seg = below(arrays, f"seg{segment}/")
        start = jnp.zeros((2, seg["xs"].shape[1] // W), bool).at[:, 0].set(seg["start_of_sequence"])
        cotangent = seg.get("cotangent", np.zeros_like(seg["xs"]))
        ys, carry, grad_params, grad_xs = run_and_differentiate(params, seg["xs"], carry, start, cotangent)
        np.testing.assert_allclose(ys, seg["ys"], atol=1e-5)
        np.testing.assert_allclose(carry.key, seg["next_previous_keys"], atol=1e-5)
        np.testing.assert_allclose(carry.value, seg["next_previous_values"], atol=1e-5)
        if "grad_xs" in seg:
            np.testing.assert_allclose(grad_xs, seg["grad_xs"], rtol=1e-4, atol=1e-4)
            ours = {name.removeprefix("transformer0/"): value for name, value in to_meliad(grad_params).items()}
            assert_gradients(ours, below(seg, "grad_params/"))


@pytest.mark.parametrize("name", ["d_lm_slide", "d_lm_fixed_skip"])
def test_language_model_over_segments(name):
    arrays = np.load(GOLDEN / f"{name}.npz")
    print([(n, arrays[n].shape) for n in arrays if "next_state" in n or "train/" in n])
    recurrent = (1,) if name == "d_lm_fixed_skip" else ()
    model = Model(DecoderConfig(**SMALL, recurrent_layers=recurrent), V)
    params = from_meliad(below(arrays, "params/"), model.abstract_params)
    carry = model.bind(params).init_carry(2)
    for segment in range(3):
        seg = below(arrays, f"seg{segment}/")
        tokens = arrays["tokens"][segment]
        start = jnp.zeros((2, N // W), bool).at[:, 0].set(arrays["start_of_sequence"][segment])

        def loss(params, tokens=tokens, start=start, seg=seg, carry=carry):
            module = model.bind(params)
            hidden, carry = module(tokens, carry, start)
            losses = token_losses(module, hidden, seg["target_tokens"], N)
            return jnp.sum(losses.nats * seg["loss_mask"]), (module.logits(hidden), losses.nats, carry)

        (value, (logits, nats, carry)), gradients = jax.value_and_grad(loss, has_aux=True)(params)
        np.testing.assert_allclose(logits, seg["logits"], atol=1e-5)
        mask = seg["loss_mask"]
        np.testing.assert_allclose(np.where(mask, nats, 0), np.where(mask, seg["token_losses"], 0), atol=1e-5)
        np.testing.assert_allclose(value, seg["training_loss"], rtol=1e-5)
        assert_gradients(to_meliad(gradients), below(seg, "grad_params/"))
