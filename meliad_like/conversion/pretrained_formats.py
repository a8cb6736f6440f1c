"""The formats of pretrained models in config.json and safetensors: their fields and names of tensors.

The names are in `pretrained_formats.toml`. Unsupported fields are refused, never ignored.
"""

import tomllib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from meliad_like.config import field_types, fit
from meliad_like.conversion.parameters import places_by_module
from meliad_like.errors import UserError
from meliad_like.layers.rotary import ROTARY_SCALINGS, RotaryScaling
from meliad_like.models.pretrained.config import DECODER_FIELDS, PretrainedConfig

_TABLES: dict[str, Any] = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())
HARMLESS: list[str] = _TABLES["harmless"]
ACTIVATIONS: dict[str, str] = {theirs: ours for ours, names in _TABLES["activations"].items() for theirs in names}
ROTARY: dict[str, str] = _TABLES["rotary"]
ROTARY_REQUIRED = ("factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor")
"""The fields that config.json must have, if its rotary scaling has them."""
CONSTANTS = (".attn.bias", ".attn.masked_bias", ".rotary_emb.inv_freq")
"""The ends of names of masks and wavelengths that older versions saved with the parameters; the config has them."""
MISTRAL_WINDOW = 4096
"""The sliding window of a `mistral` model whose file has no `sliding_window`; one that is null has none."""
DERIVED: dict[str, Callable[[Mapping[str, Any]], int]] = {
    "num_key_value_heads": lambda fields: fields["num_heads"],
    "head_size": lambda fields: fields["model_width"] // fields["num_heads"],
    "feedforward_width": lambda fields: 4 * fields["model_width"],
}
"""The values of fields that follow from others."""


class Format(NamedTuple):
    """The contents of the files of one kind of model."""

    architecture: str
    names: Mapping[str, str]
    """The names of our fields."""
    defaults: Mapping[str, Any]
    """The values of missing fields; fields without a default that are not derived either are required."""
    derived: Sequence[str]
    """The fields that follow from others (`DERIVED`) where they are missing."""
    fixed: Mapping[str, Any] = {}
    """The only supported values of other fields; a missing field means this value."""
    class_name: str = ""
    """The model's class in transformers."""
    modules: Mapping[str, str] = {}
    """The names of our modules."""


_GPT2, _LLAMA = (Format(**_TABLES[name]) for name in ("gpt2", "llama"))
_MISTRAL = _LLAMA._replace(
    class_name="MistralForCausalLM",
    names={**_LLAMA.names, "sliding_window": "sliding_window"},
    derived=["head_size"],
)
FORMATS = {"gpt2": _GPT2, "llama": _LLAMA, "mistral": _MISTRAL}
"""The formats of config.json, by its model_type."""
GPT2 = places_by_module(_GPT2.modules, transposed=False, parts=("query", "key", "value"))
LLAMA = places_by_module(_LLAMA.modules)
PLACES = {"gpt2": GPT2, "llama": LLAMA}


def from_huggingface(saved: Mapping[str, Any], owner: str, others: Sequence[str] = ()) -> PretrainedConfig:
    """The config of the decoder in a config.json, whose name is `owner`; its window is all positions. `others` are
    model types that something else reads."""
    saved, kind = dict(saved), saved.get("model_type")
    if kind not in list(FORMATS):
        raise UserError(f"{owner}: model_type {kind!r} is not one of {', '.join(dict.fromkeys((*FORMATS, *others)))}")
    for key, value in FORMATS[kind].fixed.items():
        if saved.pop(key, value) not in (value, None):
            raise UserError(f"{owner}: we can't honour {key}, which must be {value!r} for a {kind} model")
    if kind == "mistral":
        saved.setdefault("sliding_window", MISTRAL_WINDOW)
    rotary = {}
    for key in ("rope_scaling", "rope_parameters"):
        rotary |= fit(saved.pop(key, None) or {}, dict, f"{owner}: {key}")
    # Newer versions have the base of the wavelengths next to their scaling.
    saved["rope_theta"] = rotary.pop("rope_theta", saved.get("rope_theta"))
    return _read(saved, FORMATS[kind], owner, rotary_scaling=read_scaling(rotary, f"{owner}: rope_scaling"))


def read_scaling(saved: dict[str, Any], owner: str) -> RotaryScaling:
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
    return _make(ROTARY_SCALINGS[kind], owner, fields)


def _read(saved: Mapping[str, Any], form: Format, owner: str, rotary_scaling: RotaryScaling) -> PretrainedConfig:
    """The config of a file with these entries, whose rotary scaling is already known."""
    types = field_types(PretrainedConfig)
    fields: dict[str, Any] = {"architecture": form.architecture, "rotary_scaling": rotary_scaling}
    for name in (name for name in DECODER_FIELDS if name not in fields):
        key = form.names.get(name)
        value = None if key is None else saved.get(key)
        if value is not None:
            if name == "activation" and (value := ACTIVATIONS.get(value)) is None:
                raise UserError(f"{owner}: {key} {saved[key]!r} is not one of {', '.join(ACTIVATIONS)}")
            fields[name] = fit(value, types[name], f"{owner}: {key}")
            if types[name] in (int, float) and fields[name] <= 0:
                raise UserError(f"{owner}: {key} = {value!r} must be positive")
        elif name in form.derived:
            fields[name] = DERIVED[name](fields)
        elif name in form.defaults:
            fields[name] = form.defaults[name]
        else:
            raise UserError(f"{owner} has no {key}")
    known = {*HARMLESS, *form.names.values()}
    for key, value in saved.items():
        # An unknown switch that is off has no effect.
        if key not in known and value not in (None, False, {}, [], "none"):
            raise UserError(f"{owner}: we can't honour {key} = {value!r}, which we don't know and may change the model")
    return _make(PretrainedConfig, owner, fields | {"window_length": fields["max_positions"]})


def _make(config_class: Callable[..., Any], owner: str, fields: Mapping[str, Any]) -> Any:
    """The config of these fields, whose errors name the owner."""
    try:
        return config_class(**fields)
    except UserError as error:
        raise UserError(f"{owner}: {error}") from None


def to_huggingface(config: PretrainedConfig, vocabulary_size: int, end_of_document: int) -> dict[str, Any]:
    """The config.json of the decoder, whose recurrence it can't express."""
    heads = (config.num_key_value_heads, config.num_heads * config.head_size)
    if config.architecture == "gpt2" and heads != (config.num_heads, config.model_width):
        raise UserError("a gpt2 config.json can't express num_key_value_heads, or heads that don't add up to the width")
    kind = "mistral" if config.sliding_window else config.architecture
    form = FORMATS[kind]
    fields = {key: getattr(config, name) for name, key in form.names.items()}
    fields[form.names["activation"]] = _TABLES["activations"][config.activation][0]
    if (scaling := config.rotary_scaling) != RotaryScaling():
        rotary = {key: getattr(scaling, name, None) for key, name in ROTARY.items()}
        rope_type = {"rope_type": ROTARY_SCALINGS.name_of(scaling)}
        fields["rope_scaling"] = rope_type | {key: value for key, value in rotary.items() if value is not None}
    return fields | {
        "model_type": kind,
        "architectures": [form.class_name],
        "vocab_size": vocabulary_size,
        "bos_token_id": end_of_document,
        "eos_token_id": end_of_document,
        "dtype": "float32",
    }
