"""Decoders with recurrent states for the tests, and queries of their configs."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from meliad_like.mixers.base import MIXERS, MixerConfig
from meliad_like.mixers.recurrent_states import RecurrentStates, StateReader
from meliad_like.models.decoder import DecoderConfig
from meliad_like.models.model import Model
from meliad_like.registry import names_in

WINDOWS = [name for name, mixer in MIXERS.items() if mixer.has_window]
"""The mixers with attention to the window."""


def with_mixer(config: DecoderConfig, mixer: MixerConfig, layers: tuple[int, ...] | None = None) -> DecoderConfig:
    """The config with a mixer in the layers of these numbers (None: in all that `DecoderConfig.pattern` repeats): in
    the place of the attention to the window if it has that itself, otherwise in addition to it."""
    name = MIXERS.name_of(mixer)

    def added(entry: str) -> str:
        names = [other for other in names_in(entry) if not mixer.has_window or other not in WINDOWS]
        return "+".join(dict.fromkeys((name, *names)))

    repeated = [entry for entry in config.pattern if isinstance(entry, str)]
    pairs = [pair for pair in config.pattern[len(repeated) :] if name not in names_in(pair)]
    if layers is None:
        repeated = [added(entry) for entry in repeated]
    else:
        pairs.append((layers, added(repeated[0])))
    mixers = (*(other for other in config.mixers if type(other) is not type(mixer)), mixer)
    return dataclasses.replace(config, pattern=(*repeated, *pairs), mixers=mixers)


def mixer_of(config: DecoderConfig, kind: type[Any]) -> Any:
    """The config of the mixer of this class; None if the decoder has none."""
    return next((mixer for mixer in config.mixers if isinstance(mixer, kind)), None)


def recurrent(
    config: DecoderConfig, /, layers: tuple[int, ...] | None = None, feedback: bool = False, **changes
) -> DecoderConfig:
    """The config with other fields of its own, or of its recurrent states, which it gets in the first layer if it has
    none; `layers` have states, and `feedback` is whether other layers read them."""
    of_decoder = {field.name for field in dataclasses.fields(config)}
    states = {name: changes.pop(name) for name in list(changes) if name not in of_decoder}
    old = mixer_of(config, RecurrentStates) or RecurrentStates()
    layers = layers or tuple(config.layers_with(RecurrentStates)) or (0,)
    others = tuple(other for other in config.mixers if other != old)
    without = tuple(entry for entry in config.pattern if "recurrent_states" not in names_in(entry))
    # A decoder without states has none to clear.
    cleared = {name: changes.pop(name) for name in ("clear_states",) if name in changes}
    config = dataclasses.replace(config, pattern=without, mixers=others, **changes)
    config = with_mixer(config, dataclasses.replace(old, **states), layers)
    config = with_mixer(config, StateReader()) if feedback else config
    return dataclasses.replace(config, **cleared)


def recurrent_layers(config: DecoderConfig) -> set[int]:
    """The layers with recurrent states, counted from 0."""
    return set(config.layers_with(RecurrentStates))


def gradient_over_segments(config: DecoderConfig, tokens, start):
    """The gradient of a loss of the hidden vectors of segments [s, b, n], read one after the other with dropout, and
    these vectors with the last carry. The segments are read in a loop, so that one of them is compiled."""
    model = Model(config, 32)

    def perturbed(x):
        # So that no scale is 1 and no bias is 0.
        return x + 0.3 * jax.random.normal(jax.random.key(x.size), x.shape)

    def loss(params):
        module = model.bind(params)

        def read(carry, segment):
            tokens, start, key = segment
            hidden, carry = module(tokens, carry, start, key)
            return carry, hidden

        keys = jax.random.split(jax.random.key(1), len(tokens))
        carry, hidden = jax.lax.scan(read, module.init_carry(tokens.shape[1]), (tokens, start, keys))
        return jnp.sum(hidden[0] ** 2) + jnp.sum(hidden[1:] ** 3), (hidden, carry)

    return jax.jit(jax.grad(loss, has_aux=True))(jax.tree.map(perturbed, model.init(jax.random.key(0))))
