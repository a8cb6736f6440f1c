"""Decoders with recurrent states for the tests, and queries of their configs."""

import dataclasses

from meliad_like.mixers.recurrent_states import RecurrentStates, StateReader
from meliad_like.models.decoder import DecoderConfig


def recurrent(config: DecoderConfig, /, feedback: str = "none", **changes) -> DecoderConfig:
    """The config with other fields of its own, or of its recurrent states, which it gets if it has none; `feedback` is
    which of the states other layers read."""
    of_decoder = {field.name for field in dataclasses.fields(config)}
    states = {name: value for name, value in changes.items() if name not in of_decoder}
    old = config.mixer(RecurrentStates) or RecurrentStates(layers=(0,))
    mixers = (*config.without_mixer(RecurrentStates).mixers, dataclasses.replace(old, **states))
    if feedback != "none":
        mixers += (StateReader(which=feedback),)  # type: ignore[arg-type]
    changes = {name: value for name, value in changes.items() if name in of_decoder}
    return dataclasses.replace(config, mixers=mixers, **changes)


def recurrent_layers(config: DecoderConfig) -> set[int]:
    """The layers with recurrent states, counted from 0."""
    return set(config.layers_with(RecurrentStates))
