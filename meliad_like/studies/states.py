"""The states of a decoder and the gates that change them, read from its carries before and after a block."""

from typing import Any, NamedTuple

import jax.numpy as jnp
from einops import rearrange
from jaxtyping import Array, Bool, Float

from meliad_like.mixers.base import MIXERS, Traits
from meliad_like.mixers.recurrent_states import StateRecurrence, StatesCarry
from meliad_like.models.decoder import DecoderConfig
from meliad_like.models.model import Model


class Watched(NamedTuple):
    """The states of a mixer while it reads a block."""

    before: Float[Array, "b r d"]
    """The states before the block, by vector; a matrix is one vector for each of its rows."""
    after: Float[Array, "b r d"]
    """The states after the block."""
    gates: dict[str, Float[Array, "2 b r d"]]
    """By gate: the share of each channel that was kept, and the share of the update that was added."""


def watch(model: Model, module: Any, before: Any, after: Any) -> dict[str, Watched]:
    """The states of a block, by names such as `layer 3 recurrent_states`; {} if the model has none.

    Args:
        model, module: the model, bound to its parameters.
        before, after: the carries before and after a segment of one block.
    """
    watched = {}
    if not isinstance(model.config, DecoderConfig):
        return watched
    start = before.position == 0
    for i, (layer, *carries) in enumerate(zip(module.layers, before.layers, after.layers, strict=True)):
        fresh = layer.init_carry(len(start), module.dtype)
        for name, (old, new) in {name: [carry[name] for carry in carries] for name in fresh}.items():
            if not (states := _traits(model.config, i, name).states):
                continue
            begun = old._replace(
                **{state: _choose(start, getattr(fresh[name], state), getattr(old, state)) for state in states}
            )
            gates = _gates(layer.mixers[name], begun, new, start) if isinstance(old, StatesCarry) else {}
            watched[f"layer {i} {name}"] = Watched(_vectors(begun, states), _vectors(new, states), gates)
    return watched


def _traits(config: DecoderConfig, index: int, name: str) -> Traits:
    configs = {MIXERS.name_of(mixer): mixer for mixer in config.shape.layers[index]}
    return (configs.get(name) or config.kinds[index]).traits(config.shape)


def _choose(start: Bool[Array, " b"], initial: Array, states: Array) -> Array:
    """The initial states in lanes where a document begins."""
    return jnp.where(start.reshape(-1, *[1] * (states.ndim - 1)), initial.astype(states.dtype), states)


def _vectors(carry: Any, states: tuple[str, ...]) -> Float[Array, "b r d"]:
    vectors = (rearrange(getattr(carry, name), "b ... d -> b (...) d") for name in states)
    return jnp.concatenate(list(vectors), axis=1)


def _gates(
    mixer: StateRecurrence, before: StatesCarry, after: StatesCarry, start: Bool[Array, " b"]
) -> dict[str, Float[Array, "2 b r d"]]:
    """The gates of recurrent states, whose input is computed again from the windows before and after the block."""
    heads = mixer.window.heads
    tiles = heads.keys_and_values(before.window, ~start), heads.keys_and_values(after.window)
    _, read = mixer.cell.update(before.states, mixer.cell.heads(before.states), *tiles)
    return mixer.cell.gate_values(read)
