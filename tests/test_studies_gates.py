"""The reported gates and states are those of the model."""

from itertools import pairwise

import jax
import numpy as np
import pandas as pd
import pytest
from study_runs import WINDOW, Page, assert_safe, make, one_device, runs

from meliad_like.mixers.recurrent_states import LstmGate, RecurrentStates
from meliad_like.studies import gates
from meliad_like.studies.gates import Tracer
from meliad_like.studies.readings import open_studied

__all__ = ["one_device", "runs"]  # fixtures
BLOCKS = 3
TOKENS = np.random.default_rng(0).integers(0, 256, BLOCKS * WINDOW + 3).astype(np.int32)


def test_time_constants_by_hand():
    # After one time constant, 1/e is left: 0.5^t = 1/e at t = 1/log(2).
    np.testing.assert_allclose(gates.time_constants(np.array([0.5, 0.9, np.exp(-0.01)])), [1.442695, 9.491222, 100])


@pytest.fixture(scope="module")
def fixed(runs):
    """A model with fixed gates, its tracer, which has read TOKENS, and their trace."""
    studied = open_studied(runs("fixed_skip"))
    tracer = Tracer(studied.opened.model, studied.opened.params)
    return studied, tracer, tracer.read(TOKENS)


def test_fixed_gates_are_sigmoids_of_their_biases(fixed):
    studied, tracer, _ = fixed
    [layer] = recurrent_layers(studied)
    states = studied.opened.params["layers"][layer]["mixers"]["recurrent_states"]
    kept = jax.nn.sigmoid(states["cell"]["attention_gate"]["bias"])
    assert not tracer.varying
    [(name, values)] = tracer.gates().items()
    assert name == f"layer {layer} recurrent_states attention_gate"
    np.testing.assert_allclose(values, np.stack([kept, 1 - kept]), rtol=1e-5)


def test_gates_of_several_layers_are_averaged_by_themselves(fixed):
    studied, *_ = fixed
    tracer = Tracer(studied.opened.model, studied.opened.params)
    for block in range(4):
        tracer.add("layer 1 gate", np.full((2, 3, 5), 0.25))
        tracer.add("layer 2 gate", np.full((2, 1, 5), block / 4))
    np.testing.assert_array_equal(tracer.gates()["layer 1 gate"], np.full((2, 5), 0.25))
    np.testing.assert_array_equal(tracer.gates()["layer 2 gate"], np.full((2, 5), 0.375))
    assert list(tracer.varying) == ["layer 2 gate"]


def recurrent_layers(studied):
    return studied.run.model.layers_with(RecurrentStates)


def states_after(studied, layer, blocks):
    """The states of a layer after a number of blocks were read in one pass."""
    model = studied.opened.model

    @jax.jit
    def read(params):
        module = model.bind(params)
        carry = module.init_carry(1)
        if blocks:
            _, carry = module(TOKENS[None, : blocks * WINDOW], carry, np.arange(blocks)[None] == 0)
        return carry.layers[layer]["recurrent_states"].states[0]

    return np.asarray(read(studied.opened.params))


def test_a_trace_compares_the_states_after_each_block(fixed):
    studied, _, traces = fixed
    [layer] = recurrent_layers(studied)
    trace = traces[f"layer {layer} recurrent_states"]
    states = [states_after(studied, layer, blocks) for blocks in range(BLOCKS + 1)]
    change = [np.linalg.norm(b - a) / np.linalg.norm(a) for a, b in pairwise(states)]
    np.testing.assert_allclose(trace["change"], change, rtol=1e-4)

    def cosine(a, b):
        return np.mean(np.sum(a * b, axis=1) / np.linalg.norm(a, axis=1) / np.linalg.norm(b, axis=1))

    np.testing.assert_allclose(trace["from_initial"], [cosine(states[0], s) for s in states[1:]], rtol=1e-4)
    two_back = [np.nan, *(cosine(a, b) for a, b in zip(states, states[2:]))]
    np.testing.assert_allclose(trace[2], two_back, rtol=1e-4)
    assert trace[8].isna().all()


def test_measured_gates_are_those_that_the_model_uses(runs, monkeypatch):
    studied = open_studied(runs("lstm_dual"))
    tracer = Tracer(studied.opened.model, studied.opened.params)
    tracer.read(TOKENS)
    used = []

    def gates_that_tell(self, hidden, original=LstmGate.gates):
        found = original(self, hidden)
        jax.debug.callback(lambda *values: used.append(np.stack(values)), *found, ordered=True)
        return found

    monkeypatch.setattr(LstmGate, "gates", gates_that_tell)
    states_after(studied, *recurrent_layers(studied), BLOCKS)
    jax.effects_barrier()
    # In each block the gate after the attention, then the one after the network.
    assert len(used) == 2 * BLOCKS
    for name, values in zip(("attention_gate", "feedforward_gate"), (used[::2], used[1::2]), strict=True):
        [found] = [mean for key, mean in tracer.gates().items() if key.endswith(name)]
        np.testing.assert_allclose(found, np.mean(values, axis=(0, 2)), rtol=1e-4)


@pytest.mark.parametrize("row", ["fixed_skip", "lstm_dual"])
def test_page(runs, tmp_path, row):
    make(gates, runs(row), tmp_path)
    assert_safe(tmp_path)
    page = Page(tmp_path)
    assert "16 by 32" in page.text and "States after every 16 tokens" in page.text
    assert ("Measured gates" in page.text) == (row == "lstm_dual")
    quantiles = pd.read_csv(tmp_path / "time_constants.csv").set_index("quantile")
    channels = pd.read_csv(tmp_path / "gates.csv")
    for gate, rows in channels.groupby("gate"):
        expected = gates.time_constants(rows["kept"].to_numpy())
        np.testing.assert_allclose(rows["time constant"], expected)
        assert quantiles.loc["50%", gate] == pytest.approx(np.median(expected))
    states = pd.read_csv(tmp_path / "states.csv")
    assert {"document", "states", "block", "change", "from_initial", "1"} <= set(states)
