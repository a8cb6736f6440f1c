"""Functions that several families share: decoders, mixers and their parameters, positions and kinds of layers."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from meliad_like.config import field_types, fit
from meliad_like.conversion.published.family import FILTERS, TABLES, Fields, Part, linear
from meliad_like.errors import UserError
from meliad_like.layers.rotary import ROTARY_SCALINGS, RotaryScaling
from meliad_like.mixers.base import MIXERS, DecoderShape, MixerConfig
from meliad_like.mixers.dot_product_attention import DotProductAttention, SpanAttentionConfig
from meliad_like.mixers.gated_delta_rule import GatedDeltaRule
from meliad_like.models.decoder import DecoderConfig

BLOCK = 128
"""The default number of tokens of a block, with which documents may begin."""
FULL_SPAN = 8192
"""The default number of tokens that full attention sees: all up to here are cached. Another one is
`DotProductAttention.span`. The positions that a model states (`max_position_embeddings`) have no effect on it."""
SIZES = {"model_width": "hidden_size", "feedforward_width": "intermediate_size", "num_heads": "num_attention_heads"}
"""The usual fields of the sizes of a decoder."""
CONSTANTS = (".attn.bias", ".attn.masked_bias", ".rotary_emb.inv_freq")
"""The ends of names of masks and wavelengths that older versions saved with the parameters; the config has them."""
ROTARY: dict[str, str] = TABLES["rotary"]
ROTARY_REQUIRED = ("factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor")
"""The fields that config.json must have, if its rotary scaling has them."""
MULTIMODAL = ("mrope_section", "mrope_interleaved")
"""Fields of rotary positions of pictures. Positions of text are the usual ones."""


def attention(fields: Fields, kind: type = DotProductAttention, **others: Any) -> SpanAttentionConfig:
    """Attention by the usual fields, and by these of our config: if no span is among them, to all that is cached."""
    bias, heads = fields("attention_bias", bool, False), fields("num_attention_heads", int)
    usual = {"span": FULL_SPAN, "input_bias": bias, "output_bias": bias}
    return kind(**usual | {"num_key_heads": fields("num_key_value_heads", int, heads)} | others)


def places_of_delta_rule(
    mixer: GatedDeltaRule, shape: DecoderShape, ours: str, theirs: str, names: Mapping[str, str]
) -> dict[str, Any]:
    """The places of a layer's gated delta rule and output, as `places_of_attention`. `names` are their modules by ours;
    queries, keys and values may be one."""
    path, (g, h, k, p, *_) = f"{ours}mixers/gated_delta_rule/", mixer.sizes(shape)
    rows = np.split(np.arange(2 * g * k + h * p), [g * k, 2 * g * k])
    joint = names["query"] == names["key"]
    places: dict[str, Any] = linear(f"{ours}output", f"{theirs}{names['output']}")
    for name, of_name in zip(("query", "key", "value"), rows):
        places |= linear(f"{path}{name}", f"{theirs}{names[name]}", rows=of_name if joint else None)
        places[f"{path}{name}_filter"] = Part(f"{theirs}conv1d.weight", FILTERS, of_name)
    for name in ("gate", "strength", "decay"):
        places |= linear(f"{path}{name}", f"{theirs}{names[name]}")
    return places | {
        f"{path}log_rate": Part(f"{theirs}A_log"),
        f"{path}step_bias": Part(f"{theirs}dt_bias"),
        f"{path}norm_scale": Part(f"{theirs}{names['norm']}.weight"),
    }


def rotary(
    fields: Fields, *, base: float = 10_000.0, share: float | None = None, kind: str | None = None
) -> dict[str, Any]:
    """Fields of our attention for rotary positions, from newer and older fields; what is missing has these values. A
    base that is null means no positions; without a `share` they are on all channels of a head. `kind`: the kind of
    layers, if each has its own; a scaling in an older field is then that of full attention."""
    older, saved = fields("rope_scaling", dict, {}), fields("rope_parameters", dict, {})
    owner = f"{fields.owner}: {'rope_parameters' if saved else 'rope_scaling'}"
    if kind is not None:
        saved = fit(saved.get(kind) or {}, dict, f"{fields.owner}: rope_parameters")
    saved = (older if kind in (None, "full_attention") else {}) | saved
    for name in ("rope_theta", "partial_rotary_factor"):
        if name in fields.saved:
            saved.setdefault(name, fields.saved[name])
        fields.without_effect(name)
    fields.without_effect("max_position_embeddings")
    for name in MULTIMODAL:
        saved.pop(name, None)
    theta, stated = saved.pop("rope_theta", base), saved.pop("partial_rotary_factor", share or 1.0)
    if theta is None:
        return {"rotary_share": 0.0}
    if share is None and stated != 1:
        raise UserError(f"{owner}: we can't honour partial_rotary_factor = {stated!r}, only 1")
    return {
        "rotary_base": fit(theta, float, f"{owner}: rope_theta"),
        "rotary_share": fit(stated, float, f"{owner}: partial_rotary_factor"),
        "rotary_scaling": _scaling(saved, owner),
    }


def _scaling(saved: dict[str, Any], owner: str) -> RotaryScaling:
    """The scaling that fields of config.json name, without the base of the wavelengths."""
    old_name = saved.pop("type", "default")
    kind, kinds = saved.pop("rope_type", old_name), [kind for kind in ROTARY_SCALINGS if kind != "none"]
    if kind == "default":
        return RotaryScaling()
    if kind not in kinds:
        raise UserError(f"{owner}: we can't honour rope_type {kind!r}, only default, {', '.join(kinds)}")
    types, fields = field_types(ROTARY_SCALINGS[kind]), {}
    saved = {key: value for key, value in saved.items() if value is not None}
    for key, value in saved.items():
        if (name := ROTARY.get(key)) not in types:
            raise UserError(f"{owner}: we can't honour {key} = {value!r} for rope_type {kind!r}")
        fields[name] = fit(value, types[name], f"{owner}: {key}")
    if missing := [key for key in ROTARY_REQUIRED if ROTARY[key] in types and key not in saved]:
        raise UserError(f"{owner} has no {missing[0]}")
    return ROTARY_SCALINGS[kind](**fields)


def stack(fields: Fields, kinds: Sequence[str], mixers: Mapping[str, MixerConfig], **others: Any) -> DecoderConfig:
    """The decoder whose layers are of these kinds, with a gated network in each. `mixers` are those of the kinds."""
    entries = [f"{MIXERS.name_of(mixers[kind])}+gated_feedforward" for kind in kinds]
    return decoder(fields, entries, [mixers[kind] for kind in sorted(set(kinds))], **others)


def decoder(
    fields: Fields, entries: Sequence[str], mixers: Sequence[MixerConfig], *, tied: bool = False, **others: Any
) -> DecoderConfig:
    """The decoder whose layers have these entries (`DecoderConfig.pattern`). `others` are further fields of it, also in
    place of the usual sizes; `tied` is whether logits share the embedding where the file doesn't say it. Without
    `feedforwards` among them, the file's activation must be that of our networks and of Mamba-2, SiLU."""
    if "feedforwards" not in others:
        fields.only("hidden_act", "silu", "swish")
    sizes = {ours: fields.sizes(theirs)[0] for ours, theirs in SIZES.items() if ours not in others}
    sizes |= others
    usual = {"logit_scale": 1.0, "head_size": sizes["model_width"] // sizes["num_heads"]}
    usual |= {"tied_embedding": fields("tie_word_embeddings", bool, tied)}
    return DecoderConfig(
        **usual | sizes,
        num_layers=len(entries),
        pattern=shortest_period(entries),
        mixers=tuple(mixers),
        window_length=BLOCK,
    )


def shortest_period(kinds: Sequence[str]) -> tuple[str, ...]:
    """The shortest pattern of which the kinds of all layers are repetitions."""
    lengths = (n for n in range(1, len(kinds) + 1) if all(kind == kinds[i % n] for i, kind in enumerate(kinds)))
    return tuple(kinds[: next(lengths, 0)])


LAYER_TYPES = {
    "linear_attention": "recurrent",
    "mamba": "recurrent",
    "full_attention": "attention",
    "attention": "attention",
}
"""Our kinds of layers by their names in newer and older files."""
WINDOWS = {"sliding_attention": "window", "full_attention": "full"}
"""The kinds of layers of attention by their names."""


def layer_types(fields: Fields, default: Sequence[str], names: Mapping[str, str] = LAYER_TYPES) -> tuple[str, ...]:
    """The kind of each layer. `default`: the kinds where config.json has none; `names`: all kinds by their names."""
    kinds = fields("layer_types", tuple[str, ...], None)
    if kinds is None:
        return tuple(default)
    if len(kinds) != len(default):
        raise UserError(f"{fields.owner}: layer_types names {len(kinds)} layers, and there are {len(default)}")
    for kind in kinds:
        if kind not in names:
            raise UserError(f"{fields.owner}: we can't honour layer_types {kind!r}, only {', '.join(names)}")
    return tuple(names[kind] for kind in kinds)
