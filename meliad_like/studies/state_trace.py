"""How a model's states change while it reads, and what its gates do meanwhile."""

from collections import defaultdict, deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from meliad_like.layers.recurrence import LstmGate
from meliad_like.models.decoder_layer import DecoderLayer, LayerCarry
from meliad_like.models.model import Model

LAGS = (1, 2, 4, 8, 16, 32, 64)
"""Blocks between the states that are compared."""
GATES = ("attention_gate", "feedforward_gate")
"""Where a cell may have a gate."""


@dataclass(frozen=True)
class Trace:
    """One layer's states over the whole blocks of one document."""

    change: Float[np.ndarray, " blocks"]
    """Norm of the change of all states in a block, over their norm before it."""
    from_initial: Float[np.ndarray, " blocks"]
    """Mean cosine of a state with the initial one of the same number."""
    similarity: Float[np.ndarray, "lags blocks"]
    """Mean cosine of a state with the same state LAGS blocks before; NaN where the document has no such block."""


class _Read(NamedTuple):
    """What a step tells, by layer."""

    before: dict[int, Float[Array, "r d"]]
    after: dict[int, Float[Array, "r d"]]
    gates: dict[str, Float[Array, "2 d"]]
    """Mean forget and input gate of every channel over the states; of lstm gates alone."""


class GateMeans:
    """Mean values of lstm gates over blocks, by `layer 3 attention_gate` and the like."""

    def __init__(self):
        self._sums: dict[str, np.ndarray] = defaultdict(lambda: np.zeros(()))
        self._blocks = 0

    def add(self, gates: dict[str, np.ndarray]) -> None:
        self._blocks += 1
        for name, values in gates.items():
            self._sums[name] = self._sums[name] + values

    def means(self) -> dict[str, Float[np.ndarray, "2 d"]]:
        return {name: total / self._blocks for name, total in self._sums.items()}


class Tracer:
    """Reads documents block by block; compiled once."""

    def __init__(self, model: Model):
        """`model`: a decoder with recurrent layers."""
        self.layers = sorted(model.config.recurrent_indices)  # type: ignore[attr-defined]
        self._window = model.config.window_length
        self._init_carry = jax.jit(lambda params: model.bind(params).init_carry(1))
        self._step = jax.jit(lambda params, carry, tokens: _step(model, self.layers, params, carry, tokens))

    def read(self, params: Any, tokens: Int[np.ndarray, " tokens"], gate_means: GateMeans) -> dict[int, Trace]:
        """The traces of a document, by layer; what lstm gates do is added to `gate_means`."""
        collected = {layer: _Collector() for layer in self.layers}
        for read in self._blocks(params, tokens):
            gate_means.add(read.gates)
            for layer in self.layers:
                collected[layer].add(read.before[layer], read.after[layer])
        return {layer: one.trace() for layer, one in collected.items()}

    def _blocks(self, params: Any, tokens: np.ndarray) -> Iterator[_Read]:
        carry, previous = self._init_carry(params), None
        for start in range(0, len(tokens) - self._window + 1, self._window):
            carry, read = self._step(params, carry, tokens[None, start : start + self._window])
            # Fetched one block late, so that the device has the next one already.
            if previous is not None:
                yield jax.device_get(previous)
            previous = read
        if previous is not None:
            yield jax.device_get(previous)


def _step(model: Model, layers: list[int], params: Any, carry: Any, tokens: Int[Array, "1 w"]) -> tuple[Any, _Read]:
    module = model.bind(params)
    start = carry.position[:, None] == 0
    _, after = module(tokens, carry, start)
    read = _Read({}, {}, {})
    for i in layers:
        layer, old, new = module.layers[i], carry.layers[i], after.layers[i]
        states, _ = layer.begin_states(old.states, start[:, 0], layer.cell.kernels(old.states.dtype))
        read.before[i], read.after[i] = (x[0].astype(jnp.float32) for x in (states, new.states))
        if model.config.gate == "lstm":  # type: ignore[attr-defined]
            layer = model.bind(params).layers[i]
            for name, values in gate_values(layer, old, new, carry.position).items():
                read.gates[f"layer {i} {name}"] = values.astype(jnp.float32).mean(axis=(1, 2))
    return after, read


class _Recorder:
    """In the place of an lstm gate: does what it does, and keeps the gates."""

    def __init__(self, gate: LstmGate):
        self._gate = gate
        self.values: Any = None

    def __call__(self, state: Array, hidden: Array, update: Array) -> Array:
        self.values = jnp.stack(self._gate.gates(hidden))
        return self._gate(state, hidden, update)


def gate_values(
    layer: DecoderLayer, old: LayerCarry, new: LayerCarry, position: Int[Array, " b"]
) -> dict[str, Float[Array, "2 b r d"]]:
    """The forget and the input gates with which a recurrent layer has read a block.

    Args:
      layer: of a module of its own, because its gates are replaced.
      old, new: what it remembered before and after the block.
      position: of the block's first token in its document.
    """
    config, cell = layer.config, layer.cell
    recorders = {name: _Recorder(getattr(cell, name)) for name in GATES if hasattr(cell, name)}
    for name, recorder in recorders.items():
        setattr(cell, name, recorder)
    states, heads = layer.begin_states(old.states, position == 0, cell.kernels(old.states.dtype))
    key, value = (jnp.concatenate([getattr(carry, x) for carry in (old, new)], axis=2) for x in ("key", "value"))
    previous = ((position > 0) | (not config.mask_empty_cache))[:, None]
    valid = (jnp.arange(2 * config.window_length) >= config.window_length) | previous
    cell.update(states, heads, key, value, valid)
    return {name: recorder.values for name, recorder in recorders.items()}


class _Collector:
    """Compares the states of a layer with earlier ones."""

    def __init__(self):
        self._rows: list[tuple[float, float, list[float]]] = []
        self._past: deque[np.ndarray] = deque(maxlen=max(LAGS))
        self._initial = np.zeros(())

    def add(self, before: np.ndarray, after: np.ndarray) -> None:
        if not self._rows:
            self._initial = _unit(before)
            self._past.append(self._initial)
        unit = _unit(after)
        change = float(np.linalg.norm(after - before) / np.linalg.norm(before))
        past = [self._past[-lag] if lag <= len(self._past) else None for lag in LAGS]
        similarity = [float("nan") if x is None else _cosine(unit, x) for x in past]
        self._rows.append((change, _cosine(unit, self._initial), similarity))
        self._past.append(unit)

    def trace(self) -> Trace:
        change, from_initial, similarity = zip(*self._rows) if self._rows else ((), (), np.zeros((0, len(LAGS))))
        return Trace(np.array(change), np.array(from_initial), np.array(similarity).T)


def _unit(states: np.ndarray) -> np.ndarray:
    return states / np.maximum(np.linalg.norm(states, axis=1, keepdims=True), 1e-30)


def _cosine(a: np.ndarray, b: np.ndarray) -> float:
    return float((a * b).sum(axis=1).mean())
