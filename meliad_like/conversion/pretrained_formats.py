"""The names of fields and tensors in files of pretrained models: config.json and safetensors, and GGUF files.

Unsupported fields are refused, never ignored.
"""

import operator
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import gguf
import numpy as np

from meliad_like.config import field_types, fit
from meliad_like.conversion.parameters import places_by_module
from meliad_like.data.gguf_file import GGUFFile
from meliad_like.errors import UserError
from meliad_like.models.pretrained.config import PretrainedConfig
from meliad_like.models.pretrained.rotary import ROTARY_SCALINGS, RotaryScaling

# Of our activations, the names in the files; the first one is written.
_ACTIVATIONS = {
    "gelu_tanh": ("gelu_new", "gelu_pytorch_tanh", "gelu_fast"),
    "gelu": ("gelu",),
    "relu": ("relu",),
    "silu": ("silu", "swish"),
    "tanh": ("tanh",),
}
ACTIVATIONS = {theirs: ours for ours, names in _ACTIVATIONS.items() for theirs in names}
# Fields that have no effect on the trained model (the run's config sets dropout).
HARMLESS = {
    "_name_or_path", "_attn_implementation_autoset", "_num_labels", "architectures", "attention_dropout", "attn_pdrop",
    "bos_token_id", "do_sample", "dtype", "embd_pdrop", "eos_token_id", "finetuning_task", "gradient_checkpointing",
    "id2label", "initializer_range", "is_llama_config", "keys_to_ignore_at_inference", "label2id", "max_length",
    "model_type", "n_ctx", "name_or_path", "output_past", "pad_token_id", "predict_special_tokens", "problem_type",
    "resid_pdrop", "rope_interleaved", "summary_activation", "summary_first_dropout", "summary_proj_to_labels",
    "summary_type", "summary_use_proj", "task_specific_params", "torch_dtype", "transformers.js_config",
    "transformers_version", "unk_token_id", "use_cache", "vocab_size",
    # Fields for the precision of the softmax, which is always float32 here.
    "reorder_and_upcast_attn",
    # Of GGUF files, which are compared with the size of the heads.
    "llama.vocab_size", "llama.rope.dimension_count", "llama.attention.value_length",
}  # fmt: skip
MISTRAL_WINDOW = 4096
"""The sliding window of a `mistral` model whose file has no `sliding_window`; one that is null has none."""


# The names of our fields in files of GPT-2, of Llama and of Llama in GGUF; "": they have none.
_NAMES: dict[str, tuple[str, str, str]] = {
    "num_layers": ("n_layer", "num_hidden_layers", "llama.block_count"),
    "model_width": ("n_embd", "hidden_size", "llama.embedding_length"),
    "num_heads": ("n_head", "num_attention_heads", "llama.attention.head_count"),
    "num_key_value_heads": ("", "num_key_value_heads", "llama.attention.head_count_kv"),
    "head_size": ("", "head_dim", "llama.attention.key_length"),
    "feedforward_width": ("n_inner", "intermediate_size", "llama.feed_forward_length"),
    "activation": ("activation_function", "hidden_act", ""),
    "max_positions": ("n_positions", "max_position_embeddings", "llama.context_length"),
    "norm_epsilon": ("layer_norm_epsilon", "rms_norm_eps", "llama.attention.layer_norm_rms_epsilon"),
    "rotary_base": ("", "rope_theta", "llama.rope.freq_base"),
    "sliding_window": ("", "sliding_window", ""),
    "tied_embedding": ("tie_word_embeddings", "tie_word_embeddings", ""),
}


class Format(NamedTuple):
    """What the files of one kind of model contain."""

    architecture: str
    names: Mapping[str, str]
    """The names of our fields."""
    defaults: Mapping[str, Any]
    """What a missing field means, some as a function of the fields before it; fields without a default are required."""
    fixed: Mapping[str, Any] = {}
    """The only supported values of other fields; a missing field means this value."""
    class_name: str = ""
    """The model's class in transformers."""


_DEFAULTS: dict[str, Any] = {
    "num_key_value_heads": operator.itemgetter("num_heads"),
    "head_size": lambda fields: fields["model_width"] // fields["num_heads"],
    "rotary_base": 10_000.0,
    "sliding_window": 0,
}
_GPT2_DEFAULTS = _DEFAULTS | {
    "feedforward_width": lambda fields: 4 * fields["model_width"],
    "norm_epsilon": 1e-5,
    "tied_embedding": True,
}
_LLAMA_DEFAULTS = _DEFAULTS | {"norm_epsilon": 1e-6, "tied_embedding": False}
_MISTRAL_DEFAULTS = {name: default for name, default in _LLAMA_DEFAULTS.items() if name != "num_key_value_heads"}
_GPT2_FIXED = {"scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False, "add_cross_attention": False}
_LLAMA_FIXED = {"attention_bias": False, "mlp_bias": False, "pretraining_tp": 1, "rope_interleaved": False}
_GPT2, _LLAMA, _GGUF = ({ours: names[i] for ours, names in _NAMES.items() if names[i]} for i in range(3))
FORMATS = {
    "gpt2": Format("gpt2", _GPT2, _GPT2_DEFAULTS, _GPT2_FIXED, "GPT2LMHeadModel"),
    "llama": Format("llama", _LLAMA, _LLAMA_DEFAULTS, _LLAMA_FIXED | {"sliding_window": None}, "LlamaForCausalLM"),
    "mistral": Format("llama", _LLAMA, _MISTRAL_DEFAULTS, _LLAMA_FIXED, "MistralForCausalLM"),
}
"""The formats of config.json, by its model_type."""
GGUF = Format("llama", _GGUF, _DEFAULTS)
# The fields of our rotary scalings by those in config.json; those that it must have, if its scaling has them.
_ROTARY = {
    "factor": "factor",
    "original_max_position_embeddings": "original_positions",
    "low_freq_factor": "low_frequency_factor",
    "high_freq_factor": "high_frequency_factor",
    "beta_fast": "fast_turns",
    "beta_slow": "slow_turns",
    "attention_factor": "scale",
    "truncate": "whole_limits",
}
_ROTARY_REQUIRED = ("factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor")


# Their modules by ours.
_GPT2_MODULES = {
    "embedding": "transformer.wte",
    "positions": "transformer.wpe",
    "output_embedding": "lm_head",
    "final_norm": "transformer.ln_f",
    "attention_norm": "transformer.h.{}.ln_1",
    "query": "transformer.h.{}.attn.c_attn",
    "key": "transformer.h.{}.attn.c_attn",
    "value": "transformer.h.{}.attn.c_attn",
    "output": "transformer.h.{}.attn.c_proj",
    "feedforward_norm": "transformer.h.{}.ln_2",
    "feedforward_hidden": "transformer.h.{}.mlp.c_fc",
    "feedforward_output": "transformer.h.{}.mlp.c_proj",
}
_LLAMA_MODULES = {
    "embedding": "model.embed_tokens",
    "output_embedding": "lm_head",
    "final_norm": "model.norm",
    "attention_norm": "model.layers.{}.input_layernorm",
    "query": "model.layers.{}.self_attn.q_proj",
    "key": "model.layers.{}.self_attn.k_proj",
    "value": "model.layers.{}.self_attn.v_proj",
    "output": "model.layers.{}.self_attn.o_proj",
    "feedforward_norm": "model.layers.{}.post_attention_layernorm",
    "feedforward_gate": "model.layers.{}.mlp.gate_proj",
    "feedforward_hidden": "model.layers.{}.mlp.up_proj",
    "feedforward_output": "model.layers.{}.mlp.down_proj",
}
_IN_GGUF = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 1)
_GGUF_MODULES = {
    ours: str(_IN_GGUF.get_name(theirs.format(0))).replace(".0.", ".{}.") for ours, theirs in _LLAMA_MODULES.items()
}
GPT2 = places_by_module(_GPT2_MODULES, transposed=False, parts=("query", "key", "value"))
LLAMA = places_by_module(_LLAMA_MODULES)
GGUF_LLAMA = places_by_module(_GGUF_MODULES)
PLACES = {"gpt2": GPT2, "llama": LLAMA}


def from_huggingface(saved: Mapping[str, Any], owner: str) -> PretrainedConfig:
    """The config of the decoder in a config.json, whose name is `owner`; its window is all positions."""
    saved, kind = dict(saved), saved.get("model_type")
    if kind not in list(FORMATS):
        raise UserError(f"{owner}: model_type {kind!r} is not one of {', '.join(FORMATS)}")
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
    return _read(saved, FORMATS[kind], owner, rotary_scaling=_read_scaling(rotary, f"{owner}: rope_scaling"))


def _read_scaling(saved: dict[str, Any], owner: str) -> RotaryScaling:
    old_name = saved.pop("type", "default")
    kind, kinds = saved.pop("rope_type", old_name), [kind for kind in ROTARY_SCALINGS if kind != "none"]
    if kind == "default":
        return RotaryScaling()
    if kind not in kinds:
        raise UserError(f"{owner}: we can't honour rope_type {kind!r}, only default, {', '.join(kinds)}")
    types, fields = field_types(ROTARY_SCALINGS[kind]), {}
    saved = {key: value for key, value in saved.items() if value is not None}
    for key, value in saved.items():
        if (name := _ROTARY.get(key)) not in types:
            raise UserError(f"{owner}: we can't honour {key} = {value!r} for rope_type {kind!r}")
        fields[name] = fit(value, types[name], f"{owner}: {key}")
    if missing := [key for key in _ROTARY_REQUIRED if _ROTARY[key] in types and key not in saved]:
        raise UserError(f"{owner} has no {missing[0]}")
    return _make(ROTARY_SCALINGS[kind], owner, fields)


def from_gguf(file: GGUFFile) -> PretrainedConfig:
    """The config of the decoder in a GGUF file; its window is all positions."""
    architecture = file.value("general.architecture")
    if architecture != "llama":
        raise UserError(f"{file.path} is a {architecture} model: of GGUF files we read llama")
    # The file has single precision: 9.999999747378752e-06 is the 1e-05 in other files of the model.
    saved = {
        key: float(str(np.float32(value))) if type(value) is float else value
        for key, value in file.values("llama.").items()
    }
    tied = "output.weight" not in file.tensors
    config = _read(saved, GGUF, str(file.path), activation="silu", tied_embedding=tied)
    for key in ("llama.rope.dimension_count", "llama.attention.value_length"):
        if (value := saved.get(key, config.head_size)) != config.head_size:
            raise UserError(f"{file.path}: we can't honour {key} = {value} with heads of {config.head_size}")
    return config


def _read(saved: Mapping[str, Any], form: Format, owner: str, **fields: Any) -> PretrainedConfig:
    """The config of a file with these entries, and with the fields that are known otherwise."""
    types = field_types(PretrainedConfig)
    for name in (name for name in _NAMES if name not in fields):
        key = form.names.get(name)
        value = None if key is None else saved.get(key)
        if value is not None:
            if name == "activation" and (value := ACTIVATIONS.get(value)) is None:
                raise UserError(f"{owner}: {key} {saved[key]!r} is not one of {', '.join(ACTIVATIONS)}")
            fields[name] = fit(value, types[name], f"{owner}: {key}")
            if types[name] in (int, float) and fields[name] <= 0:
                raise UserError(f"{owner}: {key} = {value!r} must be positive")
        elif name not in form.defaults:
            raise UserError(f"{owner} has no {key}")
        else:
            default = form.defaults[name]
            fields[name] = default(fields) if callable(default) else default
    known = HARMLESS | set(form.names.values())
    for key, value in saved.items():
        # An unknown switch that is off has no effect.
        if key not in known and value not in (None, False, {}, [], "none"):
            raise UserError(f"{owner}: we can't honour {key} = {value!r}, which we don't know and may change the model")
    fields |= {"architecture": form.architecture, "window_length": fields["max_positions"]}
    return _make(PretrainedConfig, owner, fields)


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
    fields = {key: getattr(config, name) for name, key in form.names.items() if key not in form.fixed}
    fields[form.names["activation"]] = _ACTIVATIONS[config.activation][0]
    if (scaling := config.rotary_scaling) != RotaryScaling():
        rotary = {key: getattr(scaling, name, None) for key, name in _ROTARY.items()}
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
