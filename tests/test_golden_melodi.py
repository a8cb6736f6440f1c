"""Parity with the newer code of google-research/meliad (commit cc1aef5): MELODI, the dense memory, positions."""

import functools
from pathlib import Path

import numpy as np
import pytest
from golden_arrays import assert_gradients, below, compared_segments, train_eight_steps

from meliad_like.conversion.meliad import from_meliad, to_meliad
from meliad_like.data.batch import Batch
from meliad_like.families.melodi import MelodiConfig
from meliad_like.families.melodi.decoder import MelodiCarry
from meliad_like.mixers.dense_memory import DenseMemory
from meliad_like.models.decoder import DecoderConfig
from meliad_like.models.model import Model

GOLDEN = Path(__file__).parent / "golden"
W, V = 16, 40
# A document's start shows the reference's unmasked zeros.
SIZES = {
    "num_layers": 3,
    "model_width": 24,
    "num_heads": 2,
    "head_size": 16,
    "feedforward_width": 56,
    "window_length": W,
    "feedforward_bias": True,
    "mask_empty_cache": False,
}
CONFIGS = {
    "melodi_lm": MelodiConfig(**SIZES, long_layers=(1,), num_summaries=6, short_length=6, long_length=4, long_slots=40),
    "dense_kv_lm": DecoderConfig(
        **SIZES,
        pattern=("sliding_window+feedforward", ((1,), "dense_memory+feedforward")),
        mixers=(DenseMemory(num_slots=64, horizon="segment"),),
        doubled_inputs=(1,),
    ),
}
of_each_model = pytest.mark.parametrize("name", CONFIGS)


@functools.cache
def language_model(name):
    arrays, model = dict(np.load(GOLDEN / f"{name}.npz")), Model(CONFIGS[name], V)
    return arrays, model, from_meliad(below(arrays, "params/"), model.abstract_params, CONFIGS[name])


def segment_batch(arrays, segment):
    """The reference's shift inside the segment: the token after the last one is not predicted."""
    seg = below(arrays, f"seg{segment}/")
    start = np.zeros((2, arrays["tokens"].shape[2] // W), bool)
    start[:, 0] = arrays["start_of_sequence"][segment]
    return Batch(arrays["tokens"][segment], seg["target_tokens"], seg["loss_mask"], start, None, None), seg


def without_idle(theirs):
    """The reference's parameters without those of its last layer that nothing reads."""
    return {name: x for name, x in theirs.items() if "melodi_layers_2/melodi_layer/token_mixing_summary" not in name}


def in_order(ring, number):
    """The vectors of a ring by age, the oldest first, with zeros in front, after `number` vectors were written."""
    m = ring.shape[0]
    vectors = np.arange(number - m, number)
    return np.where((vectors >= 0)[:, None], ring.reshape(m, -1)[vectors % m], 0)


def states_of(carry):
    """Our memories as the reference keeps them, by its names."""
    states = {}
    for i, layer in enumerate(carry.layers):
        if isinstance(layer, MelodiCarry):
            states[f"melodi_layers_{i}/short_memory/previous_mems_train"] = layer.short
            if layer.long is not None:
                rings = [in_order(np.asarray(x), 4 * p // W) for x, p in zip(layer.long, carry.position)]
                states[f"melodi_layers_{i}/long_memory/previous_mems_train"] = np.stack(rings)
    return states


@of_each_model
def test_language_model_over_segments(name):
    arrays, model, params = language_model(name)
    segments = (segment_batch(arrays, segment) for segment in range(3))
    for seg, gradient, carry in compared_segments(model, params, segments, W):
        theirs = below(seg, "grad_params/")
        assert not any(x.any() for key, x in theirs.items() if key not in without_idle(theirs))
        assert_gradients(without_idle(to_meliad(gradient, model.config)), without_idle(theirs))
        for key, ours in states_of(carry).items():
            np.testing.assert_allclose(ours, seg[f"next_state/{key}"], atol=1e-5, err_msg=key)


@of_each_model
@pytest.mark.thorough
def test_eight_training_steps(name):
    arrays, model, params = language_model(name)
    trained = train_eight_steps(arrays, model, params, [segment_batch(arrays, segment)[0] for segment in range(3)])
    ours, theirs = to_meliad(trained, model.config), below(arrays, "train/final_params/")
    assert set(ours) == set(theirs)
    for parameter, value in without_idle(theirs).items():
        np.testing.assert_allclose(ours[parameter], value, atol=1e-5, err_msg=parameter)
