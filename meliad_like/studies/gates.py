"""What the gates of a model have learned, and how its states change along a document.

A gate keeps the share g of each channel of a state in each block, so that the share g^t of an update is left after t
blocks: its time constant is -1/log(g) blocks, its half-life log(2) times that. A fixed gate has one g for each channel;
an lstm gate depends on what is read, and its g is averaged over the documents.
"""

from collections import defaultdict, deque
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd
from jaxtyping import Array, Float, Int

from meliad_like.errors import UserError
from meliad_like.evaluation.report import tracked
from meliad_like.models.model import Model
from meliad_like.studies.page import write_page
from meliad_like.studies.readings import StudyRequest, choose, open_subject
from meliad_like.studies.states import Watched, watch
from meliad_like.tables import Table

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


class Tracer:
    """Reads documents block by block; compiled once. Mixers say what their states are (`Traits.states`)."""

    def __init__(self, model: Model, params: Any):
        self._window, self._params = model.config.window_length, jax.device_put(params, jax.devices()[0])
        self._init_carry = jax.jit(lambda params: model.bind(params).init_carry(1))
        self._step = jax.jit(lambda params, carry, tokens: _step(model, params, carry, tokens))
        self.shapes: dict[str, tuple[int, int]] = {}
        """The number of states and of their channels, by layer and mixer."""
        self.varying: dict[str, None] = {}
        """The names of gates that depend on what is read."""
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
    watched = watch(model, module, carry, next_carry)
    return next_carry, jax.tree.map(lambda x: x.astype(jnp.float32), watched)


def _unit(states: np.ndarray) -> np.ndarray:
    return states / np.maximum(np.linalg.norm(states, axis=1, keepdims=True), 1e-30)


def _cosine(a: np.ndarray, b: np.ndarray) -> float:
    return float((a * b).sum(axis=1).mean())


def time_constants(shares: Float[np.ndarray, " d"]) -> Float[np.ndarray, " d"]:
    """Blocks until 1/e of an update is left, if each block keeps one of these shares."""
    return -1 / np.log(shares)


def run(request: StudyRequest) -> None:
    """Writes the page of a model's gates, `gates.npz` and `summary.json`, or raises UserError if it has no states."""
    subject = open_subject(request.checkpoint, request.gin_param, request.step)
    window = subject.run.model.window_length
    selection = choose([subject], request)
    if selection.documents.lengths.max() < window:
        raise UserError(f"gates: no document has a whole block of {window} tokens")
    tracer, number = Tracer(subject.opened.model, subject.opened.params), len(selection.documents.names)
    traces = [tracer.read(selection.whole(document)) for document in tracked(range(number), subject.label, number)]
    if not tracer.shapes:
        raise UserError(f"gates: the model of {request.checkpoint} has no states that pass from block to block")
    gates = tracer.gates()
    constants = {gate: time_constants(shares) for gate, (shares, _) in gates.items()}
    arrays: dict[str, Any] = {"lags": np.array(LAGS)} | {f"{gate} kept": shares for gate, (shares, _) in gates.items()}
    arrays |= {f"{gate} forget and input": gates[gate] for gate in tracer.varying}
    for index, trace in enumerate(traces):
        for name, states in trace.items():
            arrays[f"document {index} {name} change"] = states["change"]
            arrays[f"document {index} {name} from initial"] = states["from_initial"]
            arrays[f"document {index} {name} similarity"] = states[list(LAGS)].to_numpy().T
    np.savez_compressed(request.output / "gates.npz", **arrays)
    quantiles = {gate: np.quantile(blocks, QUANTILES).tolist() for gate, blocks in constants.items()}
    lags = {name: pd.concat([trace[name] for trace in traces if name in trace])[list(LAGS)] for name in tracer.shapes}
    measured = {
        f"{gate}, {kind}": gates[gate][i] for gate in tracer.varying for i, kind in enumerate(("kept", "added"))
    }
    write_page(
        request.output,
        "gates",
        {"documents": list(selection.documents.names), "quantiles": QUANTILES, "time_constants_blocks": quantiles},
        title=f"Gates and states of {subject.label}",
        selection=selection,
        details=[subject.details()],
        window=window,
        shown=[*SHOWN.values()],
        shapes=tracer.shapes,
        constants=_quantile_table(constants, ",.3g"),
        measured=_quantile_table(measured, ".3f"),
        histograms={gate: _histogram(blocks) for gate, blocks in constants.items()},
        lags=pd.DataFrame({name: states.mean() for name, states in lags.items()}).dropna(how="all"),
        traces=[{name: _averaged(states, window) for name, states in trace.items()} for trace in traces],
    )


def _quantile_table(by_gate: Mapping[str, np.ndarray], form: str) -> Table:
    """A table with a column for each gate, which is narrow enough for a phone."""
    columns = {name: [f"{share:{form}}" for share in np.quantile(v, QUANTILES)] for name, v in by_gate.items()}
    return Table.of(pd.DataFrame({"quantile": [f"{share:.0%}" for share in QUANTILES]} | columns))


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
