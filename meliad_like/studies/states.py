"""The states of a decoder and the gates that change them, read from its carries before and after a block."""

import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from einops import rearrange
from jaxtyping import Array, Float

from meliad_like.layers.attention import KeysAndValues
from meliad_like.layers.lanes import choose_lanes
from meliad_like.mixers.base import MIXERS
from meliad_like.mixers.recurrent_states import Gate, StateRecurrence, StatesCarry
from meliad_like.models.config import ModelConfig
from meliad_like.models.decoder import DecoderConfig
from meliad_like.models.model import Model


def memory_of(model: Model) -> list[jax.ShapeDtypeStruct]:
    """The shapes of the floating-point arrays that a model carries from segment to segment for one text."""
    leaves = jax.tree.leaves(model.abstract_carry(1))
    return [leaf for leaf in leaves if jnp.issubdtype(leaf.dtype, jnp.floating)]


class Watched(NamedTuple):
    """The states of a mixer while it reads a block."""

    before: Float[Array, "b r d"]
    """The states before the block, by vector; a matrix is one vector for each of its rows."""
    after: Float[Array, "b r d"]
    """The states after the block."""
    gates: dict[str, Float[Array, "2 b r d"]]
    """The share of each channel that a gate kept, and the share of the update that it added, by gate."""


def watch(model: Model, module: Any, before: Any, after: Any) -> dict[str, Watched]:
    """The states of a block, by names such as `layer 3 recurrent_states`; {} if the model has none.

    Args:
        model, module: the model, bound to its parameters.
        before, after: the carries before and after a segment of one block.
    """
    watched = {}
    start = before.position == 0
    for i, (layer, old, new) in enumerate(zip(module.layers, before.layers, after.layers, strict=True)):
        fresh = layer.init_carry(len(start), module.dtype)
        for name, (states, memory) in _memories(model.config, i).items():
            # Where a document begins, nothing of the one before is left.
            begun = choose_lanes(start, memory(fresh), memory(old))
            gates = _gates(layer.mixers[name], begun, memory(new)) if isinstance(begun, StatesCarry) else {}
            watched[f"layer {i} {name}"] = Watched(_vectors(begun, states), _vectors(memory(new), states), gates)
    return watched


def _memories(config: ModelConfig, index: int) -> dict[str, tuple[tuple[str, ...], Callable[[Any], Any]]]:
    """The memories of a layer that have states, by name: the names of these, and the memory in a layer's carry."""
    if not isinstance(config, DecoderConfig):
        traits = config.traits
        return {traits.memory: (traits.states, lambda carry: carry)} if traits.memory and traits.states else {}
    mixers = {MIXERS.name_of(mixer): mixer.traits(config.shape).states for mixer in config.shape.layers[index]}
    return {name: (states, operator.itemgetter(name)) for name, states in mixers.items() if states}


def _vectors(carry: Any, states: tuple[str, ...]) -> Float[Array, "b r d"]:
    vectors = [rearrange(getattr(carry, name), "b ... d -> b (...) d") for name in states]
    return jnp.concatenate(vectors, axis=1)


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
