"""Parity with google-research/meliad (commit cc1aef5): arrays computed by its own code, in float32 on a CPU."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from decoders import with_mixer
from golden_arrays import assert_gradients, below, compared_segments, train_eight_steps

from meliad_like.conversion.meliad import from_meliad, to_meliad
from meliad_like.data.batch import Batch
from meliad_like.layers.attention import attend, unit
from meliad_like.layers.basic import RMSNorm
from meliad_like.mixers.base import LayerContext
from meliad_like.mixers.positions import T5Bias, t5_bucket
from meliad_like.mixers.recurrent_states import RecurrentStates
from meliad_like.mixers.sliding_window import TokenCache
from meliad_like.models.decoder import DecoderConfig
from meliad_like.models.model import Model
from meliad_like.optimization.schedules import CosineSchedule, make_schedule

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
    "mask_empty_cache": False,
}


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
    distance = (np.arange(W)[:, None] - np.arange(W) - 1) % W + 1
    np.testing.assert_allclose(bias_by_distance(distance.reshape(-1)).reshape(2, W, W), folded, atol=1e-6)


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

    def attended(*bias_and_mask):
        return jnp.swapaxes(attend(*(jnp.swapaxes(y, 1, 2) for y in (query, key, value)), *bias_and_mask), 1, 2)

    np.testing.assert_allclose(attended(bias, arrays["mask"]), arrays["out"], atol=1e-5)
    np.testing.assert_allclose(attended(), arrays["out_no_mask"], atol=1e-5)
    np.testing.assert_array_equal(attended(bias, np.zeros_like(arrays["mask"])), arrays["out_all_masked"])


def test_rms_norm():
    arrays = np.load(GOLDEN / "b_attention_function.npz")
    norm = type("Norm", (), {"scale": jnp.asarray(arrays["layernorm_scale"]), "epsilon": 1e-6})
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
    key, value = (jnp.swapaxes(poisoned.get(f"previous_{name}_train", zeros), 1, 2) for name in ("keys", "values"))
    carry = {"sliding_window": TokenCache(key, value, np.full(2, W))}

    def run(params, xs, carry, start):
        return model.bind({**whole, **params}).layers[0](xs, LayerContext(jnp.where(start, 0, W), {}), carry)

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
        cache = carry["sliding_window"]
        np.testing.assert_allclose(jnp.swapaxes(cache.key, 1, 2), seg["next_previous_keys"], atol=1e-5)
        np.testing.assert_allclose(jnp.swapaxes(cache.value, 1, 2), seg["next_previous_values"], atol=1e-5)
        if "grad_xs" in seg:
            np.testing.assert_allclose(grad_xs, seg["grad_xs"], rtol=1e-4, atol=1e-4)
            ours = {name.removeprefix("transformer0/"): value for name, value in to_meliad(grad_params).items()}
            assert_gradients(ours, below(seg, "grad_params/"))


def language_model(name):
    arrays = np.load(GOLDEN / f"{name}.npz")
    config = DecoderConfig(**SMALL)
    if name == "d_lm_fixed_skip":
        config = with_mixer(config, RecurrentStates(num_states=16), (1,))
    model = Model(config, V)
    params = from_meliad(below(arrays, "params/"), model.abstract_params)
    return arrays, model, params


def segment_batch(arrays, segment):
    """The reference's shift inside the segment: the token after the last one is not predicted."""
    seg = below(arrays, f"seg{segment}/")
    start = np.zeros((2, N // W), bool)
    start[:, 0] = arrays["start_of_sequence"][segment]
    return Batch(arrays["tokens"][segment], seg["target_tokens"], seg["loss_mask"], start, None, None), seg


@pytest.mark.parametrize("name", ["d_lm_slide", "d_lm_fixed_skip"])
def test_language_model_over_segments(name):
    arrays, model, params = language_model(name)
    segments = (segment_batch(arrays, segment) for segment in range(3))
    for seg, gradient, carry in compared_segments(model, params, segments, N // 2):
        assert_gradients(to_meliad(gradient), below(seg, "grad_params/"))
        for layer, layer_carry in enumerate(carry.layers):
            theirs = below(seg, f"next_state/transformer{layer}/")
            recurrent = layer_carry.get("recurrent_states")
            assert (recurrent is None) == ("recurrent_state_train" not in theirs)
            cache = layer_carry["sliding_window"] if recurrent is None else recurrent.window
            np.testing.assert_allclose(jnp.swapaxes(cache.key, 1, 2), theirs["previous_keys_train"], atol=1e-5)
            np.testing.assert_allclose(jnp.swapaxes(cache.value, 1, 2), theirs["previous_values_train"], atol=1e-5)
            if recurrent is not None:
                np.testing.assert_allclose(recurrent.states, theirs["recurrent_state_train"], atol=1e-5)


@pytest.mark.parametrize("name", ["d_lm_slide", "d_lm_fixed_skip"])
def test_eight_training_steps(name):
    arrays, model, params = language_model(name)
    schedule = make_schedule(CosineSchedule(warmup_steps=4), 20)
    for step in range(8):
        np.testing.assert_allclose(schedule(step), arrays["train/learning_rates"][step], rtol=1e-5)
    trained = train_eight_steps(arrays, model, params, [segment_batch(arrays, segment)[0] for segment in range(3)])
    theirs = below(arrays, "train/final_params/")
    ours = to_meliad(trained)
    assert set(ours) == set(theirs)
    for parameter, value in theirs.items():
        np.testing.assert_allclose(ours[parameter], value, atol=1e-5, err_msg=parameter)
