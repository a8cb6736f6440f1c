"""What the gates of a model have learned, and how its states change along a document.

A gate keeps the share g of each channel of a state in each block, so that the share g^t of an update is left after t
blocks: its time constant is -1/log(g) blocks, its half-life log(2) times that. A fixed gate has one g for each channel;
an lstm gate depends on what is read, and its g is averaged over the documents.
"""

from collections import defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd
from jaxtyping import Array, Float, Int
from rich.console import Console
from rich.progress import track

from meliad_like.errors import UserError
from meliad_like.models.model import Model
from meliad_like.studies.page import Chart, Series, write_page
from meliad_like.studies.readings import StudyRequest, choose, open_subject
from meliad_like.studies.states import Watched, watch
from meliad_like.tables import Table

LAGS = (1, 2, 4, 8, 16, 32, 64)
"""Blocks between the states that are compared."""
QUANTILES = {"lowest": 0.0, "10%": 0.1, "median": 0.5, "90%": 0.9, "highest": 1.0}
SHOWN_LAGS = (1, 8, 64)
MOST_POINTS = 300

Trace = dict[str, pd.DataFrame]
"""The states over the whole blocks of a document, by layer and mixer.

Each table has a line for each block: the norm of the `change` of all states, divided by their norm before it; the mean
cosine of a state with its initial value (`from_initial`), and with its value some blocks before, by the number of
blocks (LAGS), which is NaN where there is no such block.
"""
Shares = Mapping[str, np.ndarray]
"""The share of every channel, by the name of its gate."""


class Gates:
    """Mean values of gates over blocks and states, by `layer 3 recurrent_states attention_gate` and the like."""

    def __init__(self):
        self._values: dict[str, tuple[int, np.ndarray, np.ndarray]] = {}
        self.varying: set[str] = set()
        """The names of gates that depend on what is read."""

    def add(self, name: str, values: Float[np.ndarray, "2 r d"]) -> None:
        """Adds the shares that were kept and taken in, in one block."""
        blocks, total, first = self._values.get(name, (0, np.zeros(()), values[:, :1]))
        self._values[name] = blocks + 1, total + values.mean(axis=1, dtype=np.float64), first
        if (values != first).any():
            self.varying.add(name)

    def means(self) -> dict[str, Float[np.ndarray, "2 d"]]:
        """The mean shares that every channel keeps and takes in."""
        return {name: total / blocks for name, (blocks, total, _) in self._values.items()}


class Tracer:
    """Reads documents block by block; compiled once. Mixers say what their states are (`Traits.states`)."""

    def __init__(self, model: Model, params: Any):
        self._window, self._params = model.config.window_length, jax.device_put(params, jax.devices()[0])
        self._init_carry = jax.jit(lambda params: model.bind(params).init_carry(1))
        self._step = jax.jit(lambda params, carry, tokens: _step(model, params, carry, tokens))
        self.gates = Gates()
        """The summary of all documents that were read."""
        self.shapes: dict[str, tuple[int, int]] = {}
        """The number of states and of their channels, by layer and mixer."""

    def read(self, tokens: Int[np.ndarray, " tokens"]) -> Trace:
        """The states of a document, whose gates are added to `gates`."""
        rows: dict[str, list[dict[Any, float]]] = defaultdict(list)
        initial: dict[str, np.ndarray] = {}
        past: dict[str, deque[np.ndarray]] = {}
        for block in self._blocks(tokens):
            for name, watched in block.items():
                for gate, values in watched.gates.items():
                    self.gates.add(f"{name} {gate}", values[:, 0])
                before, after = watched.before[0], watched.after[0]
                self.shapes[name] = before.shape
                first, unit = initial.setdefault(name, _unit(before)), _unit(after)
                states = past.setdefault(name, deque([first], maxlen=max(LAGS)))
                # Undefined for states of zeros, with which a document can begin.
                size = float(np.linalg.norm(before)) or np.nan
                row = {"change": float(np.linalg.norm(after - before)) / size}
                row |= {"from_initial": _cosine(unit, first)}
                rows[name].append(row | {lag: _cosine(unit, states[-lag]) for lag in LAGS if lag <= len(states)})
                states.append(unit)
        return {name: pd.DataFrame(lines, columns=["change", "from_initial", *LAGS]) for name, lines in rows.items()}

    def _blocks(self, tokens: np.ndarray) -> Iterator[dict[str, Watched]]:
        carry, previous = self._init_carry(self._params), None
        for start in range(0, len(tokens) - self._window + 1, self._window):
            carry, watched = self._step(self._params, carry, tokens[None, start : start + self._window])
            # Fetched one block late, while the device reads the next block.
            if previous is not None:
                yield jax.device_get(previous)
            previous = watched
        if previous is not None:
            yield jax.device_get(previous)


def _step(model: Model, params: Any, carry: Any, tokens: Int[Array, "1 w"]) -> tuple[Any, dict[str, Watched]]:
    module = model.bind(params)
    _, after = module(tokens, carry, carry.position[:, None] == 0)
    watched = watch(model, module, carry, after)
    return after, jax.tree.map(lambda x: x.astype(jnp.float32), watched)


def _unit(states: np.ndarray) -> np.ndarray:
    return states / np.maximum(np.linalg.norm(states, axis=1, keepdims=True), 1e-30)


def _cosine(a: np.ndarray, b: np.ndarray) -> float:
    return float((a * b).sum(axis=1).mean())


def time_constants(kept: Float[np.ndarray, " d"]) -> Float[np.ndarray, " d"]:
    """Blocks until 1/e of an update is left, if each block keeps the share `kept`."""
    return -1 / np.log(kept)


def run(request: StudyRequest) -> None:
    """Writes the page of a model's gates, or raises UserError if it has no states."""
    subject = open_subject(request.checkpoint, request.gin_param, request.step)
    window = subject.run.model.window_length
    chosen = choose([subject], request)
    lengths = chosen.documents.lengths
    if lengths.max() < window:
        raise UserError(f"gates: no document has a whole block of {window} tokens")
    tracer = Tracer(subject.opened.model, subject.opened.params)
    progress = track(range(len(lengths)), subject.label, console=Console(stderr=True), transient=True)
    traces = [tracer.read(chosen.whole(document)) for document in progress]
    if not tracer.shapes:
        raise UserError(f"gates: the model of {request.checkpoint} has no states that pass from block to block")
    means = tracer.gates.means()
    kept = {name: forget for name, (forget, _) in means.items()}
    measured = {name: values for name, values in means.items() if name in tracer.gates.varying}
    constants = {name: time_constants(share) for name, share in kept.items()}
    np.savez_compressed(request.output / "gates.npz", **_arrays(kept, measured, traces))
    shares = [*QUANTILES.values()]
    saved = {"model": subject.details(), "documents": list(chosen.documents.names), "quantiles": shares}
    quantiles = {name: np.quantile(blocks, shares).tolist() for name, blocks in constants.items()}
    chosen.write_summary(request.output, saved | {"time_constants_blocks": quantiles})
    by_channel = {
        f"{name}, {kind}": values
        for name, both in measured.items()
        for kind, values in zip(("forget", "input"), both, strict=True)
    }
    write_page(
        request.output / "index.html",
        "gates.html",
        title=f"Gates and states of {subject.label}",
        window=window,
        shapes=tracer.shapes,
        chosen=chosen,
        constants=_quantiles("time constants, blocks", constants, ",.3g", "mean g", kept),
        measured=_quantiles("measured gates, by channel", by_channel, ".3f", "mean", by_channel),
        histograms=[_histogram(name, blocks, window) for name, blocks in constants.items()],
        lags=_lags(list(tracer.shapes), traces),
        parts=[[chart for name in trace for chart in _state_charts(name, trace[name], window)] for trace in traces],
        details=subject.details(),
    )


def _quantiles(title: str, gates: Shares, form: str, mean: str, averaged: Shares) -> Table:
    """A table with a column for each gate, which is narrow enough for a phone: its mean and its quantiles."""
    rows = [(mean, *(f"{values.mean():.3f}" for values in averaged.values()))] if gates else []
    rows += [(name, *(f"{np.quantile(v, share):{form}}" for v in gates.values())) for name, share in QUANTILES.items()]
    return Table("", (title, *map(_title, gates)), rows if gates else [])


def _histogram(name: str, blocks: np.ndarray, window: int) -> Chart:
    low, high, median = np.log10(blocks.min()), np.log10(blocks.max()), np.median(blocks)
    edges = np.logspace(low - 0.02, high + 0.02, min(40, max(8, blocks.size // 4)) + 1)
    return Chart(
        title=f"Time constants of the channels: {_title(name)}",
        x_label="time constant, blocks",
        y_label="channels",
        series=[Series("channels", edges, np.histogram(blocks, edges)[0], "bars")],
        caption=f"The median is {median:,.3g} blocks, {median * window:,.0f} tokens; its half-life is "
        f"{np.log(2) * median:,.3g} blocks.",
        log_x=True,
    )


def _lags(layers: list[str], traces: list[Trace]) -> Chart:
    by_lag = []
    for i, layer in enumerate(layers):
        means = pd.concat([trace[layer] for trace in traces if layer in trace])[list(LAGS)].mean().dropna()
        by_lag.append(Series(_title(layer), means.index, means, colour=str(i % 5 + 1)))
    return Chart(
        title="Similarity of the states over time",
        x_label="blocks between",
        y_label="mean cosine",
        series=by_lag,
        caption="Of a state vector with itself, this number of blocks before; over all documents, blocks and states.",
        log_x=True,
    )


def _state_charts(layer: str, trace: pd.DataFrame, window: int) -> list[Chart]:
    blocks = -(-len(trace) // MOST_POINTS)
    # A point has no mean unless all of its blocks have a value.
    means = trace.groupby(np.arange(len(trace)) // blocks).mean(skipna=False)
    x = means.index * blocks * window
    similar = [
        Series(f"{lag} block{'s' if lag > 1 else ''} before", x, means[lag], colour=str(i + 1))
        for i, lag in enumerate(SHOWN_LAGS)
    ]
    averaged = f"Each point is the mean of {blocks} blocks." if blocks > 1 else ""
    return [
        Chart(
            title=f"Change of the states in a block: {_title(layer)}",
            x_label="token",
            y_label="norm of the change / norm",
            series=[Series("", x, means["change"])],
            caption=averaged,
        ),
        Chart(
            title=f"Similarity of the states: {_title(layer)}",
            x_label="token",
            y_label="mean cosine",
            series=[*similar, Series("the initial ones", x, means["from_initial"], colour="muted")],
            caption=f"With the same states some blocks before, and with the initial states. {averaged}",
        ),
    ]


def _title(name: str) -> str:
    return name.replace("_", " ")


def _arrays(kept: Shares, measured: Shares, traces: Sequence[Trace]) -> dict[str, Any]:
    """The contents of `gates.npz`."""
    arrays: dict[str, Any] = {f"{name} kept": share for name, share in kept.items()}
    arrays |= {f"{name} forget and input": values for name, values in measured.items()}
    for index, trace in enumerate(traces):
        for layer, states in trace.items():
            arrays |= {f"document {index} {layer} {_title(name)}": states[name] for name in ("change", "from_initial")}
            arrays[f"document {index} {layer} similarity"] = states[list(LAGS)].to_numpy().T
    return arrays | {"lags": np.array(LAGS)}
