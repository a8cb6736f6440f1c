"""Position strategies against arrays of the reference, google-research/meliad (commit cc1aef5)."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from ways import V, W, check_token_by_token

from meliad_like.layers.rotary import LinearScaling, RotaryTable, YarnScaling
from meliad_like.mixers.positions import T5, Alibi, Fourier, Network, Orthogonal, OrthogonalBias, Rotary
from meliad_like.models.decoder import DecoderConfig
from meliad_like.models.model import Model

ARRAYS = np.load(Path(__file__).parent / "golden" / "positions.npz")
# Our config, and the names of parameters: ours and the reference's.
STRATEGIES = {
    "fourier": (Fourier(), {"amplitudes": "rotation_matrix"}),
    "alibi": (Alibi(learned_slope=True, bound="learned"), {"slope": "scale", "bound": "bound"}),
    "alibi_per_head": (Alibi(learned_slope=True, bound="by_head"), {"slope": "scale", "bound": "bound"}),
    "alibi_fixed": (Alibi(learned_slope=True, bound="fixed"), {"slope": "scale"}),
    "nn": (Network(), {"hidden_scale": "dense_1_kernel", "hidden_bias": "bias", "output": "dense_2_kernel"}),
    "orthogonal": (Orthogonal(), {"coefficients": "orthogonal_basis_coeffs"}),
}


def bias_of(name):
    """The bias of distances as a function of the reference's parameters, and these."""
    config, names = STRATEGIES[name]
    graph, fresh = nnx.split(config.build(16, 2, rngs=nnx.Rngs(0)), nnx.Param)
    within = f"{name}/params/" + ("_wrapped_module/" if "alibi" in name else "")
    params = {theirs: ARRAYS[within + theirs] for theirs in names.values()}
    assert {n: x.shape for n, x in nnx.to_pure_dict(fresh)["by_distance"].items()} == {
        ours: params[theirs].shape for ours, theirs in names.items()
    }

    def bias(params, distance):
        state = jax.tree.map(lambda x: x, fresh)
        nnx.replace_by_pure_dict(state, {"by_distance": {ours: params[theirs] for ours, theirs in names.items()}})
        return nnx.merge(graph, state).by_distance(distance)

    return bias, params


@pytest.mark.parametrize("name", STRATEGIES)
def test_biases_and_their_gradients_are_the_references(name):
    bias, params = bias_of(name)
    within = "_wrapped_module/" if "alibi" in name else ""
    for tile in ("tile", "melodi", "decode", "far"):
        # Also those of the places that a mask hides, whose distances are not positive.
        distance = -ARRAYS[f"{tile}/relative_position"].reshape(-1)
        theirs = ARRAYS[f"{name}/{tile}/bias"].reshape(2, -1)
        # The reference computes waves from places in float32, with an error that grows with them.
        tolerance = 1e-4 if (name, tile) == ("fourier", "far") else 1e-5
        np.testing.assert_allclose(bias(params, distance), theirs, atol=tolerance, rtol=1e-5)
        if tile == "far":
            continue
        cotangent = ARRAYS[f"{name}/{tile}/cotangent"].reshape(2, -1)
        gradient = jax.grad(lambda p, d=distance, c=cotangent: jnp.sum(bias(p, d) * c))(params)
        for key, ours in gradient.items():
            expected = ARRAYS[f"{name}/{tile}/grad_params/{within}{key}"]
            np.testing.assert_allclose(ours, expected, rtol=1e-4, atol=1e-4 * np.abs(expected).max(), err_msg=key)


def test_the_change_of_basis_is_the_references():
    module = OrthogonalBias(2, rngs=nnx.Rngs(0))
    np.testing.assert_allclose(module.basis_change(), ARRAYS["orthogonal/basis_change"], rtol=1e-5, atol=1e-5)


def test_rotary_with_the_unit_of_the_reference():
    rotary = Rotary(unit="pi").build(16, 2, rngs=nnx.Rngs(0))
    for tile in ("tile", "melodi", "decode"):
        *_, offset = ARRAYS[f"{tile}/queries_keys_offset"]
        for what, first in (("keys", -offset), ("queries", 0)):
            x = np.swapaxes(ARRAYS[f"rotary/{tile}/{what}"], 1, 2)
            rotated = rotary.placed(x, first + np.arange(x.shape[2]))
            np.testing.assert_allclose(np.swapaxes(rotated, 1, 2), ARRAYS[f"rotary/{tile}/rotated_{what}"], atol=1e-5)


def test_turns_of_far_places_are_exact():
    """The errors of wavelengths that are rounded to float32 would grow with the place."""
    places = np.array([0, 1, 8191])
    turns = RotaryTable(12, 10_000.0, LinearScaling(factor=4.0)).of(places)
    angle = places[:, None] * 10_000.0 ** (-np.arange(6) / 6) / 4
    np.testing.assert_allclose(turns, [np.cos(angle), np.sin(angle)], atol=1e-7)


def test_a_limit_of_yarn_may_lie_beyond_the_last_pair():
    """The pairs 2.3 and 3.8, of which the authors' code makes 2 and 4, turn 32 times and once in 40,000 tokens."""
    scaling = YarnScaling(factor=4.0, original_positions=40_000)
    np.testing.assert_allclose(scaling.share_kept(8, 10_000.0), [1, 1, 1, 0.5])


def test_alibi_as_published():
    module = Alibi().build(4, 2, rngs=nnx.Rngs(0))
    np.testing.assert_allclose(module.bias(2, 3), [[-(2**-4), -(2**-3), -3 * 2**-4], [-(2**-8), -(2**-7), -3 * 2**-8]])


@pytest.mark.parametrize("position", [Fourier(), Alibi(), Network(), Orthogonal(), Rotary(unit="pi")], ids=str)
def test_token_by_token_equals_segments(position):
    sizes = {"num_layers": 1, "model_width": 8, "num_heads": 2, "head_size": 4, "feedforward_width": 8}
    model = Model(DecoderConfig(**sizes, window_length=W, position=position), V)
    check_token_by_token(model, model.init(jax.random.key(0)))


def test_large_biases_are_rounded_alike():
    sizes = {"num_layers": 1, "model_width": 8, "num_heads": 2, "head_size": 4, "feedforward_width": 8}
    model = Model(DecoderConfig(**sizes, window_length=W, position=T5()), V)
    params = model.init(jax.random.key(0))
    heads = params["layers"][0]["mixers"]["sliding_window"]["heads"]
    heads["position"] = jax.tree.map(lambda x: x + 1e6, heads["position"])
    check_token_by_token(model, params)
