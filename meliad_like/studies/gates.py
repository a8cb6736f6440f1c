"""A study of the gates of a model: what they have learned, and how the states change along a document.

A gate keeps the share g of each channel of a state in each block, so that the share g^t of an update is left after t
blocks: its time constant is -1/log(g) blocks, its half-life log(2) times that. A fixed gate has one g for each channel;
an lstm gate depends on what is read, and its g is averaged over the documents.
"""

from collections import defaultdict, deque
from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd
from einops import rearrange
from jaxtyping import Array, Float, Int
from rich.console import Console
from rich.progress import track

from meliad_like.errors import UserError
from meliad_like.layers.attention import KeysAndValues
from meliad_like.layers.lanes import choose_lanes
from meliad_like.mixers.base import MIXERS
from meliad_like.mixers.recurrent_states import Gate, StateRecurrence, StatesCarry
from meliad_like.models.config import ModelConfig
from meliad_like.models.decoder import DecoderConfig
from meliad_like.models.model import Model
from meliad_like.studies.page import Chart, Numbers, Study
from meliad_like.studies.readings import StudyRequest, choose, open_studied

LAGS = (1, 2, 4, 8, 16, 32, 64)
"""Blocks between the states that are compared."""
QUANTILES = (0.0, 0.1, 0.5, 0.9, 1.0)
SHOWN = {1: "1 block before", 8: "8 blocks before", 64: "64 blocks before", "from_initial": "the initial ones"}
MOST_POINTS = 300

Trace = dict[str, pd.DataFrame]
"""The states over the whole blocks of a document, by layer and mixer.

Each table has a line for each block: the norm of the `change` of all states, divided by their norm before it; the mean
cosine of a state with its initial value (`from_initial`), and with its value some blocks before, by the number of
blocks (LAGS), which is NaN where there is no such block.
"""


class Watched(NamedTuple):
    """The states of a mixer before and after a block, by vector; a matrix is one vector for each of its rows."""

    before: Float[Array, "b r d"]
    after: Float[Array, "b r d"]
    gates: dict[str, Float[Array, "2 b r d"]]
    """The share of each channel that a gate kept, and the share of the update that it added, by gate."""


def watch(model: Model, module: Any, before: Any, after: Any) -> dict[str, Watched]:
    """The states of a block, by names such as `layer 3 recurrent_states`; {} if the model has none. `before` and
    `after` are the carries before and after a segment of one block, by `module`, the model with its parameters."""
    watched, start = {}, before.position == 0
    for i, (layer, *carries) in enumerate(zip(module.layers, before.layers, after.layers, strict=True)):
        fresh = layer.init_carry(len(start), module.dtype)
        for name, states in _states(model.config, i).items():
            memories = [carry[name] if isinstance(carry, dict) else carry for carry in (fresh, *carries)]
            # Where a document begins, nothing of the one before is left.
            begun, new = choose_lanes(start, *memories[:2]), memories[2]
            gates = _gates(layer.mixers[name], begun, new) if isinstance(begun, StatesCarry) else {}
            watched[f"layer {i} {name}"] = Watched(_vectors(begun, states), _vectors(new, states), gates)
    return watched


def _states(config: ModelConfig, index: int) -> dict[str, tuple[str, ...]]:
    """The names of the states in each memory of a layer that has some, by the memory's name."""
    states = {config.traits.memory: config.traits.states}
    if isinstance(config, DecoderConfig):
        states = {MIXERS.name_of(mixer): mixer.traits(config.shape).states for mixer in config.shape.layers[index]}
    return {name: names for name, names in states.items() if name and names}


def _vectors(carry: Any, states: tuple[str, ...]) -> Float[Array, "b r d"]:
    return jnp.concatenate([rearrange(getattr(carry, name), "b ... d -> b (...) d") for name in states], axis=1)


def _gates(mixer: StateRecurrence, before: StatesCarry, after: StatesCarry) -> dict[str, Float[Array, "2 b r d"]]:
    """The gates of recurrent states, whose input is computed again from the windows before and after the block."""
    begun = mixer.begin_decoding(before)
    block = KeysAndValues(after.window.key, after.window.value)
    _, read = mixer.cell.update(begun.states, mixer.cell.attend(begun.heads, begun.previous, block))
    return {name: gate_values(getattr(mixer.cell, name), hidden) for name, hidden in read.items()}


def gate_values(gate: Gate, hidden: Float[Array, "b r f"]) -> Float[Array, "2 b r d"]:
    """The share of each channel that a gate keeps, and the share of the update that it takes in."""
    keep, take = gate.gates(hidden)
    return jnp.stack([jnp.broadcast_to(x, (*hidden.shape[:-1], keep.shape[-1])) for x in (keep, take)])


class Tracer:
    """Reads documents block by block; compiled once. Mixers say what their states are (`Traits.states`)."""

    def __init__(self, model: Model, params: Any):
        self._window, self._params = model.config.window_length, jax.device_put(params, jax.devices()[0])
        self._init_carry = jax.jit(lambda params: model.bind(params).init_carry(1))
        self._step = jax.jit(partial(_step, model))
        self.shapes: dict[str, tuple[int, int]] = {}
        """The number of states and of their channels, by layer and mixer."""
        self.varying: dict[str, None] = {}
        """The names of gates that depend on the tokens."""
        self._gates: dict[str, list[np.ndarray]] = defaultdict(list)
        self._first: dict[str, np.ndarray] = {}

    def read(self, tokens: Int[np.ndarray, " tokens"]) -> Trace:
        """The states of a document, whose gates are counted in `gates`."""
        rows: dict[str, list[dict[Any, float]]] = defaultdict(list)
        past: dict[str, deque[np.ndarray]] = {}
        initial: dict[str, np.ndarray] = {}
        carry = self._init_carry(self._params)
        for start in range(0, len(tokens) - self._window + 1, self._window):
            carry, block = self._step(self._params, carry, tokens[None, start : start + self._window])
            for name, watched in jax.device_get(block).items():
                for gate, values in watched.gates.items():
                    self.add(f"{name} {gate}", values[:, 0])
                before, after = watched.before[0], watched.after[0]
                self.shapes[name] = before.shape
                first, unit = initial.setdefault(name, _unit(before)), _unit(after)
                states = past.setdefault(name, deque([first], maxlen=max(LAGS)))
                # Undefined for states of zeros, with which a document can begin.
                size = float(np.linalg.norm(before)) or np.nan
                row = {"change": float(np.linalg.norm(after - before)) / size, "from_initial": _cosine(unit, first)}
                rows[name].append(row | {lag: _cosine(unit, states[-lag]) for lag in LAGS if lag <= len(states)})
                states.append(unit)
        return {name: pd.DataFrame(lines, columns=["change", "from_initial", *LAGS]) for name, lines in rows.items()}

    def add(self, gate: str, values: Float[np.ndarray, "2 r d"]) -> None:
        """Counts the shares that a gate keeps and takes in, in one block."""
        self._gates[gate].append(values.mean(axis=1, dtype=np.float64))
        if (values != self._first.setdefault(gate, values[:, :1])).any():
            self.varying[gate] = None

    def gates(self) -> dict[str, Float[np.ndarray, "2 d"]]:
        """The mean shares, over blocks and states, by names such as `layer 3 recurrent_states attention_gate`."""
        return {gate: np.mean(blocks, axis=0) for gate, blocks in self._gates.items()}


def _step(model: Model, params: Any, carry: Any, tokens: Int[Array, "1 w"]) -> tuple[Any, dict[str, Watched]]:
    module = model.bind(params)
    _, next_carry = module(tokens, carry, carry.position[:, None] == 0)
    return next_carry, jax.tree.map(lambda x: x.astype(jnp.float32), watch(model, module, carry, next_carry))


def _unit(states: np.ndarray) -> np.ndarray:
    return states / np.maximum(np.linalg.norm(states, axis=1, keepdims=True), 1e-30)


def _cosine(a: np.ndarray, b: np.ndarray) -> float:
    """The mean cosine of vectors of unit length; NaN where some are zeros, with which a document can begin."""
    return float((a * b).sum(axis=1).mean()) if a.any(axis=1).all() and b.any(axis=1).all() else np.nan


def time_constants(shares: Float[np.ndarray, " d"]) -> Float[np.ndarray, " d"]:
    """Blocks until 1/e of an update is left, if each block keeps one of these shares."""
    return -1 / np.log(shares)


def run(request: StudyRequest) -> Study:
    """The gates and states of a model. UserError if it has no states."""
    studied = open_studied(request.checkpoint, request.gin_param, request.step)
    window = studied.run.model.window_length
    selection = choose([studied], request)
    if selection.documents.lengths.max() < window:
        raise UserError(f"gates: no document has a whole block of {window} tokens")
    tracer, names = Tracer(studied.opened.model, studied.opened.params), selection.documents.names
    numbers = track(range(len(names)), studied.label, console=Console(stderr=True), transient=True)
    traces = [tracer.read(selection.whole(document)) for document in numbers]
    if not tracer.shapes:
        raise UserError(f"gates: the model of {request.checkpoint} has no states that pass from block to block")
    gates = tracer.gates()
    constants = {gate: time_constants(shares) for gate, (shares, _) in gates.items()}
    parts: list[Numbers | Chart] = []
    if gates:
        note = (
            f"A block is {window} tokens. g is the share of a state that a block leaves; the time constant is "
            "-1/log(g) blocks, and after 0.69 of it half is left. Of gates that depend on what is read, g is the "
            "forget gate, averaged over states and blocks."
        )
        title, forms = "Time constants of the channels", dict.fromkeys(constants, ",.3g")
        parts.append(Numbers("time_constants", f"{title}, blocks", _quantiles(constants), forms, note))
        axes = "time constant, blocks", "channels"
        parts += [
            Chart(f"histogram_{i}", f"{title}: {gate}", _histogram(blocks), *axes, steps=True, log_x=True)
            for i, (gate, blocks) in enumerate(constants.items())
        ]
        channels = pd.concat(
            pd.DataFrame({"gate": gate, "kept": kept, "added": added, "time constant": constants[gate]})
            for gate, (kept, added) in gates.items()
        )
        parts.append(Numbers("gates", "All channels", channels, shown=False))
    if tracer.varying:
        shares = {
            f"{gate}, {kind}": gates[gate][i] for gate in tracer.varying for i, kind in enumerate(("kept", "added"))
        }
        note = "The shares of the states that are kept, and of the updates that are added."
        forms = dict.fromkeys(shares, ".3f")
        parts.append(Numbers("measured", "Measured gates, by channel", _quantiles(shares), forms, note))
    lags = {name: pd.concat([trace[name] for trace in traces if name in trace])[[*LAGS]] for name in tracer.shapes}
    similarity = pd.DataFrame({name: each.mean() for name, each in lags.items()}).dropna(how="all")
    note = "Of a state vector with itself, this number of blocks before; over all documents, blocks and states."
    x, y = "blocks between", "mean cosine"
    parts.append(Chart("similarity", "Similarity of the states over time", similarity, x, y, note, log_x=True))
    note = (
        "With the same states some blocks before, and with the initial states. In long documents a point is the mean "
        "of several blocks."
    )
    states = []
    for i, (document, by_layer) in enumerate(zip(names, traces, strict=True)):
        for j, (layer, trace) in enumerate(by_layer.items()):
            states.append(trace.assign(document=document, states=layer, block=np.arange(len(trace))))
            title, averaged = f"{document}, {layer}", _averaged(trace, window)
            change, similar = f"Change of the states in a block: {title}", f"Similarity of the states: {title}"
            parts += [
                Chart(f"change_{i}_{j}", change, averaged[["change"]], "token", "norm of the change / norm"),
                Chart(f"similarity_{i}_{j}", similar, averaged[[*SHOWN.values()]], "token", y, note),
            ]
    parts.append(Numbers("states", "The states by block", pd.concat(states), shown=False))
    shapes = [f"{name} (states by channels: {number} by {width})" for name, (number, width) in tracer.shapes.items()]
    return Study(
        title=f"Gates and states of {studied.label}",
        lead=[f"States after every {window} tokens: {', '.join(shapes)}. Layers count from 0."],
        parts=parts,
        selection=selection,
        details=[studied.details()],
        remarks="Whole blocks only; each document begins with the initial states.",
    )


def _quantiles(by_gate: Mapping[str, np.ndarray]) -> pd.DataFrame:
    """The quantiles over channels, with a column for each gate."""
    columns = {name: np.quantile(values, QUANTILES) for name, values in by_gate.items()}
    return pd.DataFrame({"quantile": [f"{share:.0%}" for share in QUANTILES]} | columns)


def _histogram(blocks: np.ndarray) -> pd.DataFrame:
    """The number of channels by time constant, from each place to the next."""
    low, high = np.log10(blocks.min()), np.log10(blocks.max())
    edges = np.logspace(low - 0.02, high + 0.02, min(40, max(8, blocks.size // 4)) + 1)
    return pd.DataFrame({"channels": [*np.histogram(blocks, edges)[0], np.nan]}, edges)


def _averaged(states: pd.DataFrame, window: int) -> pd.DataFrame:
    """A line for each of at most MOST_POINTS places, by their first tokens; NaN where not all blocks have a value."""
    blocks = -(-len(states) // MOST_POINTS)
    means = states.groupby(np.arange(len(states)) // blocks).mean(skipna=False)
    return means.set_axis(means.index * blocks * window).rename(columns=SHOWN)
