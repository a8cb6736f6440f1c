"""Which layers have which mixers."""

import dataclasses

import jax
import pytest

from meliad_like import config
from meliad_like.errors import UserError
from meliad_like.mixers.base import MIXERS
from meliad_like.mixers.external_memory import ExternalMemory
from meliad_like.mixers.gated_delta_rule import GatedDeltaRule
from meliad_like.mixers.recurrent_states import RecurrentStates, StateReader
from meliad_like.mixers.sliding_window import SlidingWindow
from meliad_like.models.decoder import DecoderConfig
from meliad_like.models.model import Model
from meliad_like.run.shrinking import shrink

SIZES = {
    "num_layers": 6,
    "model_width": 16,
    "num_heads": 2,
    "head_size": 8,
    "feedforward_width": 24,
    "window_length": 4,
}
HYBRID = ("gated_delta_rule+feedforward", "gated_delta_rule+feedforward", "sliding_window+feedforward")


def names(decoder):
    """The names of each layer's mixers, joined by +."""
    return ["+".join(map(MIXERS.name_of, mixers)) for mixers in decoder.shape.layers]


def test_a_pattern_is_repeated_up_to_the_last_layer():
    decoder = DecoderConfig(**SIZES | {"num_layers": 5}, pattern=HYBRID)
    assert names(decoder) == ["gated_delta_rule"] * 2 + ["sliding_window"] + ["gated_delta_rule"] * 2
    assert decoder.shape.feedforward_layers == tuple(range(5))


def test_a_layer_has_the_parameters_of_what_the_pattern_names_and_no_others():
    decoder = DecoderConfig(**SIZES, pattern=("gated_delta_rule", "feedforward", "sliding_window+gated_delta_rule"))
    layers = Model(decoder, 50).abstract_params["layers"]
    assert set(layers[0]) == {"norm", "mixers", "output"} and set(layers[0]["mixers"]) == {"gated_delta_rule"}
    assert set(layers[1]) == {"feedforward"}
    assert set(layers[2]["mixers"]) == {"gated_delta_rule", "sliding_window"}
    # A layer without attention carries none of it, also while decoding.
    carry = Model(decoder, 50).abstract_carry(1, decoding=True)
    assert set(carry.layers[0]) == {"gated_delta_rule"} and not jax.tree.leaves(carry.layers[1])


def test_a_mixer_that_names_layers_is_added_to_a_pattern():
    hybrid = DecoderConfig(**SIZES, pattern=HYBRID, mixers=(RecurrentStates(layers=(1,)),))
    assert names(hybrid)[1] == "gated_delta_rule+recurrent_states"


def test_the_window_and_readers_leave_layers_to_others():
    decoder = DecoderConfig(**SIZES, mixers=(SlidingWindow(), ExternalMemory(layers=(2,), num_slots=128)))
    assert names(decoder) == ["sliding_window"] * 2 + ["external_memory"] + ["sliding_window"] * 3
    reading = decoder.without_mixer(ExternalMemory).with_mixer(RecurrentStates(layers=(-1,))).with_mixer(StateReader())
    assert names(reading) == ["sliding_window+state_reader"] * 5 + ["recurrent_states"]
    assert reading.num_block_by_block == 6


def test_in_gin_a_pattern_alone_is_a_stack():
    decoder = config.parse([], [f"DecoderConfig.pattern = {HYBRID}"]).model
    assert names(decoder) == ["gated_delta_rule", "gated_delta_rule", "sliding_window"] * 4
    assert decoder.mixers == (GatedDeltaRule(), SlidingWindow())


def test_a_smaller_model_keeps_all_kinds_of_layers():
    run = config.parse([], [f"DecoderConfig.pattern = {HYBRID}"])
    assert names(shrink(run).model) == ["gated_delta_rule", "gated_delta_rule", "sliding_window"]
    ten = config.parse(
        [], [f"DecoderConfig.pattern = {HYBRID + HYBRID + HYBRID + HYBRID[:1]}", "DecoderConfig.num_layers = 10"]
    )
    assert set(names(shrink(ten).model)) == {"gated_delta_rule", "sliding_window"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"pattern": ("window+feedforward",)}, "pattern names 'window', which is not one of"),
        ({"pattern": HYBRID * 3}, "pattern has 9 entries, and the decoder has 6 layers"),
        (
            {"pattern": HYBRID, "mixers": (GatedDeltaRule(layers=(1,)),)},
            r"so that GatedDeltaRule.layers=\(1,\) has no effect",
        ),
        ({"pattern": HYBRID, "mixers": (RecurrentStates(),)}, r"RecurrentStates.layers=\(\) names no layer"),
        (
            {"pattern": ("recurrent_states+sliding_window",)},
            "layer 0 can't have both RecurrentStates and SlidingWindow",
        ),
        ({"mixers": (SlidingWindow(layers=(0,)),)}, "layer 1 has no mixer by which it sees other tokens"),
        ({"mixers": (SlidingWindow(layers=(6,)),)}, r"SlidingWindow.layers=\(6,\) names a layer that 6 layers lack"),
        ({"mixers": (SlidingWindow(layers=(0, -6)),)}, r"SlidingWindow.layers=\(0, -6\) names a layer twice"),
        ({"mixers": (SlidingWindow(), StateReader())}, "StateReader reads what RecurrentStates publishes: add it too"),
        ({"mixers": (SlidingWindow(), SlidingWindow())}, "mixers hold two of the same class"),
    ],
)
def test_mistakes(changes, message):
    with pytest.raises(UserError, match=message):
        dataclasses.replace(DecoderConfig(**SIZES), **changes)
