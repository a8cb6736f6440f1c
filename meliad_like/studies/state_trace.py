"""How the states of a model change while it reads, and the values of its gates."""

from collections import defaultdict, deque
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd
from jaxtyping import Array, Float, Int

from meliad_like.mechanisms.base import Watched
from meliad_like.models.model import Model

LAGS = (1, 2, 4, 8, 16, 32, 64)
"""Blocks between the states that are compared."""


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
    """Reads documents block by block; compiled once. Mechanisms decide what can be watched (`Mechanism.watch`)."""

    def __init__(self, model: Model, params: Any):
        self._window, self._params = model.config.window_length, jax.device_put(params, jax.devices()[0])
        self._init_carry = jax.jit(lambda params: model.bind(params).init_carry(1))
        self._step = jax.jit(lambda params, carry, tokens: _step(model, params, carry, tokens))
        self.gates = Gates()
        """Of all documents that were read."""
        self.shapes: dict[str, tuple[int, int]] = {}
        """The number of states and of their channels, by layer and mechanism."""

    def read(self, tokens: Int[np.ndarray, " tokens"]) -> dict[str, pd.DataFrame]:
        """The states over the whole blocks of a document, by layer and mechanism.

        Each table has a line for each block: the norm of the `change` of all states, divided by their norm before it;
        the mean cosine of a state with its initial value (`from_initial`), and with its value some blocks before, by
        the number of blocks (LAGS), which is NaN where there is no such block.
        """
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
                row = {"change": float(np.linalg.norm(after - before) / np.linalg.norm(before))}
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
    watched = module.watch(carry, after)
    return after, jax.tree.map(lambda x: x.astype(jnp.float32), watched)


def _unit(states: np.ndarray) -> np.ndarray:
    return states / np.maximum(np.linalg.norm(states, axis=1, keepdims=True), 1e-30)


def _cosine(a: np.ndarray, b: np.ndarray) -> float:
    return float((a * b).sum(axis=1).mean())
