"""How the states of a model change while it reads, and the values of its gates."""

from collections import defaultdict, deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from meliad_like.mechanisms.base import Watched
from meliad_like.models.model import Model

LAGS = (1, 2, 4, 8, 16, 32, 64)
"""Blocks between the states that are compared."""


@dataclass(frozen=True)
class Trace:
    """One layer's states over the whole blocks of one document."""

    shape: tuple[int, int]
    """The number of states and of their channels."""
    change: Float[np.ndarray, " blocks"]
    """The norm of the change of all states in a block, divided by their norm before it."""
    from_initial: Float[np.ndarray, " blocks"]
    """The mean cosine of a state with its initial value."""
    similarity: Float[np.ndarray, "lags blocks"]
    """The mean cosine of a state with its value LAGS blocks before; NaN where the document has no such block."""


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
    """Reads documents block by block; compiled once."""

    def __init__(self, model: Model):
        """`model`: a decoder; its mechanisms decide which states can be watched (`Mechanism.watch`)."""
        self._window = model.config.window_length
        self._init_carry = jax.jit(lambda params: model.bind(params).init_carry(1))
        self._step = jax.jit(lambda params, carry, tokens: _step(model, params, carry, tokens))

    def read(self, params: Any, tokens: Int[np.ndarray, " tokens"], gates: Gates) -> dict[str, Trace]:
        """The traces of a document, by layer and mechanism. The values of gates are added to `gates`."""
        collected: dict[str, _Collector] = defaultdict(_Collector)
        for block in self._blocks(params, tokens):
            for name, watched in block.items():
                for gate, values in watched.gates.items():
                    gates.add(f"{name} {gate}", values[:, 0])
                collected[name].add(watched.before[0], watched.after[0])
        return {name: one.trace() for name, one in collected.items()}

    def _blocks(self, params: Any, tokens: np.ndarray) -> Iterator[dict[str, Watched]]:
        carry, previous = self._init_carry(params), None
        for start in range(0, len(tokens) - self._window + 1, self._window):
            carry, watched = self._step(params, carry, tokens[None, start : start + self._window])
            # Fetched one block late, while the device reads the next block.
            if previous is not None:
                yield jax.device_get(previous)
            previous = watched
        if previous is not None:
            yield jax.device_get(previous)


def _step(model: Model, params: Any, carry: Any, tokens: Int[Array, "1 w"]) -> tuple[Any, dict[str, Watched]]:
    module = model.bind(params)
    _, after = module(tokens, carry, carry.position[:, None] == 0)
    watched = module.watch(carry, after)
    return after, jax.tree.map(lambda x: x.astype(jnp.float32), watched)


class _Collector:
    """Compares the states of a layer with earlier ones."""

    def __init__(self):
        self._rows: list[tuple[float, float, list[float]]] = []
        self._past: deque[np.ndarray] = deque(maxlen=max(LAGS))
        self._initial = np.zeros((0, 0))

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
        shape = self._initial.shape
        return Trace((shape[0], shape[1]), np.array(change), np.array(from_initial), np.array(similarity).T)


def _unit(states: np.ndarray) -> np.ndarray:
    return states / np.maximum(np.linalg.norm(states, axis=1, keepdims=True), 1e-30)


def _cosine(a: np.ndarray, b: np.ndarray) -> float:
    return float((a * b).sum(axis=1).mean())
