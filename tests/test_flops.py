"""The count of operations, against XLA's own and against numbers worked out by hand."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from decoders import with_mixer

from meliad_like.layers.feedforward import GatedFeedForward
from meliad_like.mixers.dot_product_attention import DotProductAttention
from meliad_like.mixers.external_memory import ExternalMemory
from meliad_like.mixers.recurrent_states import RecurrentStates, StateReader
from meliad_like.models.decoder import DecoderConfig
from meliad_like.models.model import Model

SLIDE = DecoderConfig()


def with_states(config=SLIDE, layers=(-3,), **fields):
    return with_mixer(config, RecurrentStates(**fields), layers)


PAPER = with_states()
LOGITS = 2 * 1024 * 256


def test_a_layer_of_the_paper_by_hand():
    # d = 1024, h * k = d, f = 4 d, w = d / 2: projections 6 d², tile 4 d², output 2 d², feed-forward 16 d².
    assert SLIDE.flops(256).forward == 12 * 28 * 1024**2 + LOGITS


@pytest.mark.parametrize(
    ("gate", "cell", "states"),
    [
        # Tokens: 28 d² and cross-query 2 d², cross-attention 2 d², wider output 2 d². With one state per token:
        # projections 8 d², attention 2 d² + 4 d², then output, gates and network.
        ("fixed", "skip", 4),
        ("lstm", "skip", 4 + 2 * 4),
        ("fixed", "dual", 4 + 8 + 8),
        ("lstm", "dual", 4 + 2 * 4 + 8 + 8 + 2 * 8),
        ("fixed", "single", 16 + 8),
        ("lstm", "single", 16 + 8 + 2 * 8),
    ],
)
def test_a_recurrent_layer_of_the_paper_by_hand(gate, cell, states):
    assert with_states(gate=gate, cell=cell).flops(256).forward == (11 * 28 + 34 + 14 + states) * 1024**2 + LOGITS


def test_recurrence_costs_about_one_more_layer():
    """With four layers and a byte vocabulary it is a little less."""
    sizes = {"num_layers": 4, "model_width": 256, "num_heads": 4, "head_size": 64, "feedforward_width": 1024}
    slide = DecoderConfig(**sizes, window_length=128)
    recurrent = with_states(slide, layers=(-2,), num_states=128).flops(256).forward
    assert recurrent / dataclasses.replace(slide, extra_layers=1).flops(256).forward == pytest.approx(0.972, abs=1e-3)


def test_attention_to_a_span_by_hand():
    """With the sizes that change no result: the blocks in the cache, and how far a token sees."""
    config = DotProductAttention(span=2 * 512 + 1, num_key_heads=2, gate=True)
    d, h, k = SLIDE.model_width, SLIDE.num_heads, SLIDE.head_size
    assert config.ring(SLIDE.shape) == 3
    assert config.traits(SLIDE.shape).attends_to(np.array([0, 5, 10**6])).tolist() == [0, 5, 1024]
    assert config.flops(SLIDE.shape).forward == 2 * d * k * (2 * h + 2 * 2) + 4 * 3 * 512 * h * k


def test_a_gated_network_by_hand():
    assert GatedFeedForward().flops(8, 20).forward == 3 * 2 * 8 * 20


def test_feedback_and_memory_by_hand():
    slide = 12 * 28 * 1024**2
    # Eleven layers read the states, which is a recurrent layer without its states' own 18 d².
    assert with_mixer(with_states(), StateReader()).flops(256).forward == slide + (12 * 6 + 18) * 1024**2 + LOGITS
    # 65,536 slots are 64 d, so the search is 128 d²; attention to 128 memories is d² / 2, twice with its gradient.
    memorizing = with_mixer(SLIDE, ExternalMemory(), (-4,)).flops(256)
    assert memorizing.forward == slide + 128.5 * 1024**2 + LOGITS
    assert memorizing.training == 3 * (slide + LOGITS) + (128 + 2 * 0.5) * 1024**2


def test_training_is_three_forward_passes():
    assert PAPER.flops(32_000).training == 3 * ((11 * 28 + 52) * 1024**2 + 2 * 1024 * 32_000)


@pytest.mark.parametrize("cell", [None, "skip", "single", "dual"])
def test_xla_counts_nearly_the_same(cell):
    sizes = {"num_layers": 2, "model_width": 256, "num_heads": 2, "head_size": 96, "feedforward_width": 384}
    config = DecoderConfig(**sizes, window_length=64)
    if cell is not None:
        config = with_states(config, layers=(1,), num_states=80, cell=cell, gate="lstm")
    model = Model(config, vocabulary_size=200)

    def forward(params, carry, tokens):
        module = model.bind(params)
        # One block: XLA counts the body of a loop once.
        hidden, carry = module(tokens, carry, jnp.zeros((2, 1), bool))
        return module.logits(hidden), carry

    tokens = jax.ShapeDtypeStruct((2, 64), np.int32)
    # An argument, because products with a carry of zeros are left out.
    arguments = model.abstract_params, model.abstract_carry(2), tokens
    counted = jax.jit(forward).lower(*arguments).compile().cost_analysis()["flops"]
    # What is not a matrix product is left out of ours.
    assert 1.0 < counted / (tokens.size * config.flops(200).forward) < 1.04
