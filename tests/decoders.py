"""Decoders with recurrent states for the tests, and queries of their configs."""

import dataclasses

from meliad_like.mixers.recurrent_states import RecurrentStates
from meliad_like.models.decoder import DecoderConfig


def recurrent(config: DecoderConfig, /, **changes) -> DecoderConfig:
    """The config with other fields of its own, or of its recurrent states, which it gets if it has none."""
    own = {field.name for field in dataclasses.fields(config)}
    states = {name: value for name, value in changes.items() if name not in own}
    old = config.mixer(RecurrentStates) or RecurrentStates()
    mechanisms = (*config.without_mixer(RecurrentStates).mixers, dataclasses.replace(old, **states))
    changes = {name: value for name, value in changes.items() if name in own}
    return dataclasses.replace(config, mixers=mechanisms, **changes)


def recurrent_layers(config: DecoderConfig) -> set[int]:
    """The layers with recurrent states, counted from 0."""
    states = config.mixer(RecurrentStates)
    return set() if states is None else set(states.indices(config.total_layers))
