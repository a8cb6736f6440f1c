"""Fresh parameters against the reference's own: names, shapes and distributions."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from decoders import with_mixer

from meliad_like.conversion.meliad import to_meliad
from meliad_like.families.melodi import MelodiConfig
from meliad_like.mixers.dense_memory import DenseMemory
from meliad_like.mixers.positions import Alibi, Fourier, Network, Orthogonal
from meliad_like.mixers.recurrent_states import RecurrentStates, StateReader
from meliad_like.models.decoder import DecoderConfig
from meliad_like.models.model import Model
from meliad_like.studies.gates import gate_values

GOLDEN = Path(__file__).parent / "golden"
REFERENCE = json.loads((GOLDEN / "i_init_statistics.json").read_text())
NEWER = json.loads((GOLDEN / "melodi_init_statistics.json").read_text())
SIZES = {"model_width": 256, "num_heads": 4, "head_size": 64, "feedforward_width": 1024}


def num_layers_and_recurrent(statistics):
    layers = {name.split("/")[0] for name in statistics if name.startswith("transformer")}
    recurrent = {name.split("/")[0] for name in statistics if "recurrent_initial_state" in name}
    return len(layers), tuple(int(name.removeprefix("transformer")) for name in recurrent)


@pytest.mark.parametrize("name", REFERENCE)
def test_fresh_parameters_are_the_references(name):
    num_parameters = REFERENCE[name]["__total__"]
    reference = {key: value for key, value in REFERENCE[name].items() if not key.startswith("__")}
    num_layers, recurrent = num_layers_and_recurrent(reference)
    gates = {} if name == "slide" else dict(zip(("gate", "cell"), name.split("_")))
    config = DecoderConfig(
        num_layers=num_layers,
        **SIZES,
    )
    if recurrent:
        config = with_mixer(config, RecurrentStates(num_states=64, **gates), recurrent)
    model = Model(config, 512)
    assert model.num_parameters == num_parameters
    ours = to_meliad(model.init(jax.random.key(0)))
    assert {key: list(value.shape) for key, value in ours.items()} == {k: v["shape"] for k, v in reference.items()}
    assert_alike(ours, reference)


def assert_alike(ours, reference):
    """Checks that the distributions of parameters are those of the reference's, by the same names."""
    for key, theirs in reference.items():
        values = ours[key].astype(np.float64)
        if theirs["std"] == 0:
            assert (values == theirs["mean"]).all(), key
            continue
        # Both are samples, so the difference of two means has a variance of 2 std^2 / n. The standard deviation of a
        # sample's std is std / sqrt(2 n) for a normal distribution, and less for a truncated one.
        n, std = values.size, theirs["std"]
        assert abs(values.mean() - theirs["mean"]) < 5 * std * np.sqrt(2 / n), key
        assert abs(values.std() - std) < 5 * std * np.sqrt(1 / n), key
        truncated = n > 10_000 and theirs["max"] < 2.5 * std
        if truncated:
            # Cut off at two standard deviations of the normal distribution, that is at 2.27 of what is left of it.
            assert 2.2 * std < values.max() < 2.3 * std, key
            assert 2.2 * std < -values.min() < 2.3 * std, key
            assert values.max() < 1.01 * theirs["max"], key
        elif n > 10_000:
            assert values.max() > 3 * std, key


@pytest.mark.parametrize("cell", ["skip", "single", "dual"])
@pytest.mark.parametrize("gate", ["fixed", "lstm"])
def test_gates_begin_with_the_time_constants(gate, cell):
    recurrence = RecurrentStates(num_states=8, gate=gate, cell=cell, time_constants=(2.0, 1000.0))
    model = Model(with_mixer(DecoderConfig(num_layers=1, **SIZES), recurrence, (0,)), 64)
    states = model.bind(model.init(jax.random.key(0))).layers[0].mixers["recurrent_states"].cell
    times = np.geomspace(2, 1000, SIZES["model_width"])
    hidden = {"attention_gate": 2 * SIZES["num_heads"] * SIZES["head_size"], "feedforward_gate": 1024}
    read = {name: jnp.zeros((1, 1, width)) for name, width in hidden.items() if hasattr(states, name)}
    for name, inputs in read.items():
        kept, taken = gate_values(getattr(states, name), inputs)
        np.testing.assert_allclose(kept[0, 0], np.exp(-1 / times), rtol=1e-5)
        np.testing.assert_allclose(taken, 1 - kept, atol=1e-6)


def test_attention_of_states_begins_with_its_scale():
    recurrence = RecurrentStates(num_states=8, attention_scale=4.0)
    config = with_mixer(DecoderConfig(num_layers=2, **SIZES), recurrence, (0,))
    model = Model(with_mixer(config, StateReader(attention_scale=4.0)), 64)
    parameters = to_meliad(model.init(jax.random.key(0)))
    scales = {path: value for path, value in parameters.items() if "attention_scale" in path}
    of_states = {path for path in scales if "recurrent" in path or path.endswith("attention_scale2")}
    assert len(of_states) == 4  # Of states to states and to tokens, and of the tokens of each layer to states.
    assert {path for path, scale in scales.items() if (scale == 4).all()} == of_states


def test_attention_of_a_dense_memory_begins_with_its_scale():
    model = Model(with_mixer(DecoderConfig(num_layers=1, **SIZES), DenseMemory(attention_scale=4.0)), 64)
    heads = model.init(jax.random.key(0))["layers"][0]["mixers"]["dense_memory"]["heads"]
    assert (heads["attention_scale"] == 4).all()


MELODI = {"long_layers": (1,), "num_summaries": 32, "short_length": 32, "long_length": 16, "long_slots": 64}
SIDE = {"pattern": ("sliding_window+feedforward", ((1,), "dense_memory+feedforward")), "doubled_inputs": (1,)}
NEWER_MODELS = {
    "melodi": MELODI,
    "dense_kv": {**SIDE, "num_layers": 3},
    "alibi": {**MELODI, "position": Alibi(learned_slope=True, bound="learned")},
    "fourier": {**MELODI, "position": Fourier()},
    "nn": {**MELODI, "position": Network()},
    "orthogonal": {**MELODI, "position": Orthogonal()},
}


@pytest.mark.parametrize("name", NEWER_MODELS)
def test_fresh_parameters_of_the_newer_stack_are_the_references(name):
    changes = {"num_layers": 2, "window_length": 128, "feedforward_bias": True} | NEWER_MODELS[name]
    config = (DecoderConfig if name == "dense_kv" else MelodiConfig)(**SIZES, **changes)
    reference = {key.removeprefix(f"{name}/"): value for key, value in NEWER.items() if key.startswith(f"{name}/")}
    ours = to_meliad(Model(config, 1000).init(jax.random.key(0)), config)
    if name in ("melodi", "dense_kv"):
        assert {key: list(value.shape) for key, value in ours.items()} == {k: v["shape"] for k, v in reference.items()}
    # Our last layer has no mixing for a layer above.
    idle = "layer_stack/melodi_layers_1/melodi_layer/token_mixing_summary/"
    assert_alike(ours, {key: value for key, value in reference.items() if not key.startswith(idle)})
