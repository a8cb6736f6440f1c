"""The notation for which layer of a decoder has what, against literal lists."""

import dataclasses

import jax
import pytest
from decoders import mixer_of

from meliad_like import config
from meliad_like.errors import UserError
from meliad_like.layers.rotary import LinearScaling, RotaryScaling, YarnScaling
from meliad_like.mixers.base import MIXERS
from meliad_like.mixers.dot_product_attention import DotProductAttention, LocalAttention
from meliad_like.mixers.gated_delta_rule import GatedDeltaRule
from meliad_like.mixers.recurrent_states import RecurrentStates, StateReader
from meliad_like.mixers.sliding_window import SlidingWindow
from meliad_like.models.decoder import DecoderConfig
from meliad_like.models.model import Model
from meliad_like.models.notation import entries_by_layer
from meliad_like.planning.shrinking import distinct_entries, shrink, smaller_pattern

SIZES = {
    "num_layers": 6,
    "model_width": 16,
    "num_heads": 2,
    "head_size": 8,
    "feedforward_width": 24,
    "window_length": 4,
}
HYBRID = ("gated_delta_rule+feedforward", "gated_delta_rule+feedforward", "sliding_window+feedforward")
WINDOW, STATES = "sliding_window+feedforward", "recurrent_states+feedforward"


def names(decoder):
    """The names of each layer's mixers, joined by +."""
    return ["+".join(map(MIXERS.name_of, mixers)) for mixers in decoder.shape.layers]


@pytest.mark.parametrize(
    ("layers", "expected"),
    [
        (("a",), ["a", "a", "a", "a", "a"]),
        (("a", "a", "b"), ["a", "a", "b", "a", "a"]),
        (("a", ((-2,), "b")), ["a", "a", "a", "b", "a"]),
        (("a", "b", ((0, 4), "c"), ((-4,), "d")), ["c", "d", "a", "b", "c"]),
        (("a", ((0, 1, 2, 3, 4), "b")), ["b", "b", "b", "b", "b"]),
    ],
)
def test_the_entries_of_five_layers(layers, expected):
    assert entries_by_layer(layers, 5) == expected


@pytest.mark.parametrize(
    ("layers", "divisor", "fewer", "expected"),
    [
        (("a", ((-3,), "b")), 1, 12, ("a", ((-3,), "b"))),
        (("a", ((-3,), "b")), 4, 3, ("a", ((2,), "b"))),
        (("a", ((-3, -1), "b")), 4, 3, ("a", ((2,), "b"))),
        (("a", "a", "a", "b"), 4, 3, ("a", "b")),
        # Where pairs would take each other's layer, or leave none to another entry, there is one layer of each kind.
        (("a", ((4,), "b"), ((5,), "c")), 4, 3, ("a", "b", "c")),
        (("a", ((0, 4, 8), "b")), 4, 3, ("a", "b")),
        # An entry that no layer of the whole stack has is in none of the smaller one.
        (("a", (tuple(range(12)), "b")), 4, 3, ("a", ((0, 1, 2), "b"))),
        (("a", (tuple(range(6)), "b"), (tuple(range(6, 12)), "c")), 12, 2, ("b", "c")),
    ],
)
def test_a_smaller_stack_of_twelve_layers_keeps_all_entries(layers, divisor, fewer, expected):
    assert smaller_pattern(layers, 12, divisor, fewer) == expected
    assert set(entries_by_layer(expected, fewer)) == set(entries_by_layer(layers, 12))


def test_what_layers_have_are_the_configs_of_the_names():
    decoder = DecoderConfig(**SIZES, pattern=(WINDOW, "feedforward", ((-1,), f"state_reader+{STATES}")))
    assert names(decoder) == [
        "sliding_window",
        "",
        "sliding_window",
        "",
        "sliding_window",
        "recurrent_states+state_reader",
    ]
    assert decoder.mixers == (RecurrentStates(), SlidingWindow(), StateReader())
    assert decoder.num_block_by_block == 6
    assert all(network is not None for network in decoder.shape.feedforwards)
    assert DecoderConfig(**SIZES, pattern=("rg_lru",)).shape.feedforwards == (None,) * 6


def test_a_layer_has_the_parameters_of_what_its_entry_names_and_no_others():
    decoder = DecoderConfig(**SIZES, pattern=("gated_delta_rule", "feedforward", "sliding_window+gated_delta_rule"))
    layers = Model(decoder, 50).abstract_params["layers"]
    assert set(layers[0]) == {"norm", "mixers", "output"} and set(layers[0]["mixers"]) == {"gated_delta_rule"}
    assert set(layers[1]) == {"feedforward"}
    assert set(layers[2]["mixers"]) == {"gated_delta_rule", "sliding_window"}
    # A layer without attention carries none of it, also while decoding.
    carry = Model(decoder, 50).abstract_carry(1, decoding=True)
    assert set(carry.layers[0]) == {"gated_delta_rule"} and not jax.tree.leaves(carry.layers[1])


def test_in_gin_the_named_mixers_are_bound_by_their_classes():
    bound = [f"DecoderConfig.pattern = {HYBRID}", "GatedDeltaRule.conv_length = 2"]
    decoder = config.parse([], bound).model
    assert names(decoder) == ["gated_delta_rule", "gated_delta_rule", "sliding_window"] * 4
    assert decoder.mixers == (GatedDeltaRule(conv_length=2), SlidingWindow())
    # Another choice for a saved config keeps the mixers that both have.
    changes = config.read_changes([], [f"DecoderConfig.pattern = ('{WINDOW}', ((0,), 'gated_delta_rule'))"])
    assert changes(decoder).mixers == decoder.mixers
    assert changes(DecoderConfig(pattern=(STATES,))).mixers == (GatedDeltaRule(), SlidingWindow())


def test_a_smaller_model_keeps_all_kinds_of_layers():
    run = config.parse([], [f"DecoderConfig.pattern = {HYBRID}"])
    assert names(shrink(run).model) == ["gated_delta_rule", "gated_delta_rule", "sliding_window"]
    ten = config.parse(
        [], [f"DecoderConfig.pattern = {HYBRID + HYBRID + HYBRID + HYBRID[:1]}", "DecoderConfig.num_layers = 10"]
    )
    assert set(names(shrink(ten).model)) == {"gated_delta_rule", "sliding_window"}
    two = config.parse([], [f"DecoderConfig.pattern = ('{WINDOW}', ((4,), '{STATES}'), ((5,), 'mamba2'))"])
    assert set(names(shrink(two).model)) == {"sliding_window", "recurrent_states", "mamba2"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"pattern": ("window+feedforward",)},
            "pattern names 'window', which is not one of .*sliding_window.*feedforward",
        ),
        ({"pattern": ("sliding_window+",)}, "pattern names '', which is not one of"),
        ({"pattern": HYBRID * 3}, "pattern has 9 entries, and the decoder has 6 layers"),
        ({"pattern": ()}, r"pattern=\(\) must begin with entries"),
        ({"pattern": (((0,), STATES),)}, "must begin with entries, such as 'sliding_window"),
        ({"pattern": (WINDOW, ((0,), STATES), WINDOW)}, "must begin with entries"),
        ({"pattern": (WINDOW, ((), STATES))}, "pattern names no layer for 'recurrent_states"),
        ({"pattern": (WINDOW, ((6,), STATES))}, r"pattern=\[6\] names a layer that 6 layers lack"),
        ({"norms_after": (0,), "norms_around": (1, -6)}, "norms_after and norms_around both name layer 0"),
        ({"pattern": (WINDOW, ((0, -6), STATES))}, r"pattern=\[0, -6\] names a layer twice"),
        ({"pattern": (WINDOW, ((0,), STATES), ((0,), "mamba2"))}, r"pattern=\[0, 0\] names a layer twice"),
        ({"pattern": ("recurrent_states+sliding_window",)}, "each have the attention to the window"),
        ({"pattern": ("sliding_window+state_reader",)}, "StateReader reads what recurrent_states publishes"),
        (
            {"mixers": (GatedDeltaRule(conv_length=2),)},
            "has no effect: DecoderConfig.pattern does not name gated",
        ),
        ({"mixers": (GatedDeltaRule(), GatedDeltaRule(conv_length=2))}, "two different GatedDeltaRule: a decoder has"),
        # gin binds a scaling's factor by the scaling's class.
        (
            {
                "mixers": (
                    DotProductAttention(rotary_scaling=LinearScaling(8.0)),
                    LocalAttention(rotary_scaling=LinearScaling(4.0)),
                )
            },
            "two different LinearScaling",
        ),
    ],
)
def test_mistakes(changes, message):
    with pytest.raises(UserError, match=message):
        dataclasses.replace(DecoderConfig(**SIZES), **changes)


@pytest.mark.parametrize(
    ("files", "parameters", "expected"),
    [
        (
            ["block_recurrent/fixed_skip.gin", "block_recurrent/slide_12l.gin"],
            [],
            r"DecoderConfig.pattern is .* in block_recurrent/fixed_skip.gin:2 and .* in block_recurrent/slide_12l.gin",
        ),
        (
            ["block_recurrent/slide_12l.gin"],
            ["RecurrentStates.num_states = 3"],
            r"nothing reads RecurrentStates.num_states: DecoderConfig.pattern is 'sliding_window' \(block_recurrent/",
        ),
        (
            [],
            ["DecoderConfig.mixers = ('sliding_window',)"],
            "DecoderConfig.mixers follows from DecoderConfig.pattern: bind that",
        ),
        (
            [],
            ["RecurrentStates.layers = (-3,)"],
            "nothing reads RecurrentStates.layers: DecoderConfig.pattern is 's",
        ),
        ([], ["DecoderConfig.pattern = 'mamba2'"], "DecoderConfig.pattern='mamba2' must be tuple"),
        ([], ["DecoderConfig.pattern = ((-3, 'mamba2'),)"], "must be tuple"),
    ],
)
def test_a_choice_that_is_made_twice_or_has_no_effect_is_an_error(files, parameters, expected):
    with pytest.raises(UserError, match=expected):
        config.parse(files, parameters)


def test_a_parameter_replaces_a_files_choice_with_its_fields():
    slide = config.parse(["block_recurrent/slide_12l.gin"])
    assert config.parse(["block_recurrent/fixed_skip.gin"], [f"DecoderConfig.pattern = ('{WINDOW}',)"]) == slide


METHODS = [name for name in config.shipped_files() if name.startswith(("block_recurrent/", "mixer/"))]


@pytest.mark.parametrize("method", [name for name in METHODS if name != "block_recurrent/fixed_skip.gin"])
def test_a_method_added_to_the_quickstart_is_that_method_or_an_error_that_names_both(method):
    deep, folder = ["DecoderConfig.num_layers = 8"], method.partition("/")[0]
    both = rf"is .* in \S+\.gin:\d+ and .* in {folder}/\w+\.gin:\d+: leave"
    if method.startswith(("block_recurrent/xl", "block_recurrent/memorizing")):
        # The window is another one.
        with pytest.raises(UserError, match=both):
            config.parse(["quickstart_training.gin", method], deep)
    else:
        alone, added = config.parse([method]).model, config.parse(["quickstart_training.gin", method], deep).model
        assert distinct_entries(added.pattern) == distinct_entries(alone.pattern)
        assert set(map(type, added.mixers)) == set(map(type, alone.mixers))
    with pytest.raises(UserError, match=both):
        config.parse(["quickstart.gin", method], deep)


def test_windows_and_a_longer_span_are_bound_alone_or_together():
    run = config.parse(
        ["mixer/local_attention.gin"],
        [
            "DotProductAttention.span = 5000",
            "SpanAttentionConfig.norm = 'all'",
            "LocalAttention.rotary_scaling = 'yarn'",
        ],
    )
    full, window = (mixer_of(run.model, kind) for kind in (DotProductAttention, LocalAttention))
    assert (full.span, full.norm, full.rotary_base, full.rotary_scaling) == (5000, "all", 1e6, RotaryScaling())
    assert (window.span, window.norm, window.rotary_base, window.rotary_scaling) == (1024, "all", 1e4, YarnScaling())
    assert config.rebuild(config.RunConfig, config.bound_values(run)) == run
