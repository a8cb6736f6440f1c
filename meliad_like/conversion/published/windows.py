"""Pretrained decoders, which read by windows: their fields in config.json, both ways, and the file of a recurrence.

The names of fields are in `windows.toml`.
"""

import dataclasses
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from meliad_like.config import field_types, fit
from meliad_like.conversion.parameters import fill
from meliad_like.conversion.published.family import TABLES, Fields
from meliad_like.conversion.published.parts import ROTARY
from meliad_like.conversion.tensor_files import opened, read_tensor, save_tensors
from meliad_like.errors import UserError
from meliad_like.families.pretrained.config import DECODER_FIELDS, PretrainedConfig
from meliad_like.families.pretrained.recurrence import WindowSummary
from meliad_like.layers.rotary import ROTARY_SCALINGS, RotaryScaling
from meliad_like.resumable import parse_json
from meliad_like.training.checkpoints import named_arrays

ACTIVATIONS: dict[str, str] = {theirs: ours for ours, names in TABLES["activations"].items() for theirs in names}
DERIVED: dict[str, Callable[[Mapping[str, Any]], int]] = {
    "num_key_value_heads": lambda fields: fields["num_heads"],
    "head_size": lambda fields: fields["model_width"] // fields["num_heads"],
    "feedforward_width": lambda fields: 4 * fields["model_width"],
}
"""The values of fields that follow from others."""
RECURRENCE_NAME = "recurrence.safetensors"
# The key in that file's metadata of the recurrence's config and the windows with which it was trained.
RECURRENCE_KEY = "WindowSummary"
WINDOW_FIELDS = ("window_length", "overlap")


FORMATS = {
    "gpt2": TABLES["gpt2"],
    "llama": (_LLAMA := TABLES["llama"]),
    "mistral": _LLAMA
    | {"class_name": "MistralForCausalLM", "names": _LLAMA["names"] | {"sliding_window": "sliding_window"}}
    | {"derived": ["head_size"]},
}
"""The formats of config.json, by its model_type."""


def read_config(fields: Fields, **given: Any) -> PretrainedConfig:
    """The decoder in a config.json, whose window is all positions. `given` are fields that are known already."""
    form, owner, types = FORMATS[fields.saved["model_type"]], fields.owner, field_types(PretrainedConfig)
    for key, value in form["fixed"].items():
        fields.only(key, value)
    values: dict[str, Any] = {"architecture": form["architecture"], **given}
    for name in (name for name in DECODER_FIELDS if name not in values):
        key = form["names"].get(name)
        if key is not None and fields.saved.get(key) is not None:
            values[name] = value = fields(key, types[name] if name != "activation" else str)
            if name == "activation":
                if value not in ACTIVATIONS:
                    raise UserError(f"{owner}: {key} {value!r} is not one of {', '.join(ACTIVATIONS)}")
                values[name] = ACTIVATIONS[value]
            elif types[name] in (int, float) and value <= 0:
                raise UserError(f"{owner}: {key} = {value!r} must be positive")
        elif name in form["derived"]:
            values[name] = DERIVED[name](values)
        elif name in form["defaults"]:
            values[name] = form["defaults"][name]
        else:
            raise UserError(f"{owner} has no {key}")
        if key is not None:
            fields.without_effect(key)
    return PretrainedConfig(**values, window_length=values["max_positions"])


def config_json(config: PretrainedConfig, vocabulary_size: int, end_of_document: int) -> dict[str, Any]:
    """The config.json of the decoder, whose recurrence it can't express."""
    form = FORMATS[kind := "mistral" if config.sliding_window else config.architecture]
    fields = {key: getattr(config, name) for name, key in form["names"].items()}
    fields[form["names"]["activation"]] = TABLES["activations"][config.activation][0]
    if (scaling := config.rotary_scaling) != RotaryScaling():
        named = {key: getattr(scaling, name, None) for key, name in ROTARY.items()}
        rope_type = {"rope_type": ROTARY_SCALINGS.name_of(scaling)}
        fields["rope_scaling"] = rope_type | {key: value for key, value in named.items() if value is not None}
    return fields | {
        "model_type": kind,
        "architectures": [form["class_name"]],
        "vocab_size": vocabulary_size,
        "bos_token_id": end_of_document,
        "eos_token_id": end_of_document,
    }


def with_recurrence(path: Path, decoder: PretrainedConfig) -> PretrainedConfig:
    """The decoder with the recurrence of a file, and the windows with which it was trained."""
    with opened(path) as file:
        metadata = file.metadata() or {}
    saved = parse_json(metadata.get(RECURRENCE_KEY, "null"), f"{path}: {RECURRENCE_KEY}")
    types = {name: field_types(PretrainedConfig)[name] for name in WINDOW_FIELDS} | field_types(WindowSummary)
    if not isinstance(saved, dict) or saved.keys() != types.keys():
        advice = "write it again with convert huggingface --reverse, or remove it to have the decoder alone"
        raise UserError(f"{path} doesn't say what recurrence it is of: {advice}")
    fields = {name: fit(value, types[name], f"{path}: {name}") for name, value in saved.items()}
    windows = {name: fields.pop(name) for name in WINDOW_FIELDS}
    return dataclasses.replace(decoder, **windows, recurrence=(WindowSummary(**fields),))


def read_recurrence(path: Path, template: Any) -> Any:
    """The parameters of the recurrence of a file; `template` has their shapes and dtypes."""
    with opened(path) as file:
        names = set(file.keys())
    return fill(template, names, lambda name: (name,), lambda name: read_tensor(path, name), str(path))


def write_recurrence(config: PretrainedConfig, params: dict[str, Any], folder: Path) -> None:
    """Writes the recurrence, which config.json can't express, with its fields of the config."""
    assert config.summary is not None
    fields = {name: getattr(config, name) for name in WINDOW_FIELDS} | dataclasses.asdict(config.summary)
    save_tensors(named_arrays(params), folder / RECURRENCE_NAME, {RECURRENCE_KEY: json.dumps(fields)})
