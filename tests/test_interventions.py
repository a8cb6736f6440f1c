"""What is exchanged in memories equals a plain loop over documents and blocks."""

import functools

import jax
import numpy as np
import pytest
from decoders import with_mixer
from fake_split import FakeSplit

from meliad_like import config
from meliad_like.mesh import MeshConfig, make_mesh
from meliad_like.mixers.external_memory import ExternalMemory
from meliad_like.mixers.recurrent_states import RecurrentStates
from meliad_like.models.decoder import DecoderConfig
from meliad_like.models.model import Model
from meliad_like.studies import __main__
from meliad_like.studies.interventions import KINDS, exchange, losses_after, next_lanes

W, C, V = 4, 2, 32
LENGTHS = [31, 26, 18]
"""The longest first, as a reader gives them to its lanes."""


class Split(FakeSplit):
    """Random tokens below V."""

    vocabulary_size = V

    def tokens(self, document, start, stop):
        return super().tokens(document, start, stop) * 7919 % V


@functools.cache
def make():
    sizes = {"num_layers": 2, "model_width": 16, "num_heads": 2, "head_size": 8, "feedforward_width": 16}
    settings = DecoderConfig(**sizes, window_length=W, logit_scale=1.0)
    settings = with_mixer(settings, RecurrentStates(num_states=4), (1,))
    model = Model(with_mixer(settings, ExternalMemory(num_slots=2 * W, num_neighbors=3), (0,)), V)
    return model, jax.jit(model.init)(jax.random.key(0))


@functools.partial(jax.jit, static_argnums=0)
def read_block(model, params, carry, tokens, targets, start):
    """Returns the carry after a block of one document, and the loss of each target."""
    losses, carry = model.bind(params).losses(tokens[None], targets[None], carry, start[None, None], slice_length=W)
    return carry, losses.nats[0]


def blocks_of(tokens):
    """(inputs, targets, number of targets) of each block of a document."""
    padded = np.pad(tokens, (0, W))
    for i in range(0, len(tokens) - 1, W):
        yield padded[i : i + W], padded[i + 1 : i + W + 1], min(W, len(tokens) - 1 - i)


def carries_of(model, params, tokens):
    """The carry before each block of an undisturbed document, and after its last whole one."""
    module = model.bind(params)
    carries = [module.init_carry(1)]
    for i, (inputs, targets, number) in enumerate(blocks_of(tokens)):
        if number == W and (i + 1) * W < len(tokens) - 1:
            carries.append(read_block(model, params, carries[-1], inputs, targets, np.array(i == 0))[0])
    return carries


def by_a_plain_loop(kind, names):
    """The losses by document, one at a time; with a lane for each document the next one is the next lane's."""
    (model, params), split = make(), Split(LENGTHS)
    texts = [split.tokens(i, 0, length) for i, length in enumerate(LENGTHS)]
    undisturbed, results = [carries_of(model, params, text) for text in texts], []
    for document, text in enumerate(texts):
        own, other = undisturbed[document], undisturbed[(document + 1) % len(texts)]
        carry, nats, frozen = own[0], [], None
        for i, (inputs, targets, number) in enumerate(blocks_of(text)):
            source = frozen
            if i and i % C == 0:
                source = {
                    "shuffled": other[min(i, len(other) - 1)],
                    "earlier": own[i - C],
                    "cleared": own[0],
                    "frozen": own[i],
                }[kind]
                frozen = source if kind == "frozen" else None
            if source is not None:
                carry = exchange(model.config, carry, source, names)
            carry, losses = read_block(model, params, carry, inputs, targets, np.array(i == 0))
            nats.append(losses[:number])
        results.append(np.concatenate(nats))
    return results


def test_the_command_line_has_all_kinds():
    assert tuple(KINDS) == __main__.KINDS


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_is_a_plain_loop(kind):
    names = ("recurrent_states", "external_memory") if kind in ("shuffled", "frozen") else ("recurrent_states",)
    model, params = make()
    mesh = make_mesh(MeshConfig(), jax.devices()[:1])
    run = config.parse()
    results = losses_after(run, model, params, Split(LENGTHS), mesh, kind, names, C * W)
    for ours, theirs in zip(results, by_a_plain_loop(kind, names), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-5)


def test_another_document_is_one_that_has_been_read():
    assert next_lanes(np.array([True, True, True])).tolist() == [1, 2, 0]
    assert next_lanes(np.array([True, False, True, False])).tolist() == [2, 2, 0, 0]
