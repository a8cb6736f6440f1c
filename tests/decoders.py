"""Decoders with recurrent states for the tests, and queries of their configs."""

import dataclasses

import jax
import jax.numpy as jnp

from meliad_like.mixers.recurrent_states import RecurrentStates, StateReader
from meliad_like.models.decoder import DecoderConfig
from meliad_like.models.model import Model


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
