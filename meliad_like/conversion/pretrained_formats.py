"""The names of fields and tensors in files of pretrained models: config.json and safetensors, and GGUF files.

Unsupported fields are refused, never ignored.
"""

import functools
import operator
import re
from collections.abc import Callable, Mapping
from typing import Any

import gguf
import numpy as np

from meliad_like.config import field_types, fit
from meliad_like.conversion.parameters import Place
from meliad_like.data.gguf_file import GGUFFile
from meliad_like.errors import UserError
from meliad_like.models.pretrained.config import PretrainedConfig
from meliad_like.models.pretrained.rotary import ROTARY_SCALINGS, RotaryScaling

ACTIVATIONS = {
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu": "gelu",
    "relu": "relu",
    "silu": "silu",
    "swish": "silu",
    "tanh": "tanh",
}
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
# The only supported value; a missing field means this value.
_LLAMA_FIXED = {"attention_bias": False, "mlp_bias": False, "pretraining_tp": 1, "rope_interleaved": False}
FIXED = {
    "gpt2": {"scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False, "add_cross_attention": False},
    "llama": {**_LLAMA_FIXED, "sliding_window": None},
    "mistral": _LLAMA_FIXED,
}
ARCHITECTURES = {"gpt2": "gpt2", "llama": "llama", "mistral": "llama"}
"""Our architecture of each model_type."""
CLASSES = {"gpt2": "GPT2LMHeadModel", "llama": "LlamaForCausalLM", "mistral": "MistralForCausalLM"}
MISTRAL_WINDOW = 4096
"""The sliding window of a `mistral` model whose file has no `sliding_window`; one that is null has none."""


# The names of our fields in files of GPT-2, of Llama and of Llama in GGUF; None: they have none.
_NAMES: dict[str, tuple[str | None, str | None, str | None]] = {
    "num_layers": ("n_layer", "num_hidden_layers", "llama.block_count"),
    "model_width": ("n_embd", "hidden_size", "llama.embedding_length"),
    "num_heads": ("n_head", "num_attention_heads", "llama.attention.head_count"),
    "num_key_value_heads": (None, "num_key_value_heads", "llama.attention.head_count_kv"),
    "head_size": (None, "head_dim", "llama.attention.key_length"),
    "feedforward_width": ("n_inner", "intermediate_size", "llama.feed_forward_length"),
    "activation": ("activation_function", "hidden_act", None),
    "max_positions": ("n_positions", "max_position_embeddings", "llama.context_length"),
    "norm_epsilon": ("layer_norm_epsilon", "rms_norm_eps", "llama.attention.layer_norm_rms_epsilon"),
    "rotary_base": (None, "rope_theta", "llama.rope.freq_base"),
    "sliding_window": (None, "sliding_window", None),
    "tied_embedding": ("tie_word_embeddings", "tie_word_embeddings", None),
}
_GPT2_NAMES, _LLAMA_NAMES, _GGUF_NAMES = (
    {ours: theirs for ours, names in _NAMES.items() if (theirs := names[i]) is not None} for i in range(3)
)
NAMES = {"gpt2": _GPT2_NAMES, "llama": _LLAMA_NAMES, "mistral": _LLAMA_NAMES, "gguf": _GGUF_NAMES}
# What a missing field means, some as a function of the fields before it; fields without a default are required.
_DEFAULTS: dict[str, Any] = {
    "num_key_value_heads": operator.itemgetter("num_heads"),
    "head_size": lambda fields: fields["model_width"] // fields["num_heads"],
    "rotary_base": 10_000.0,
    "sliding_window": 0,
}
_LLAMA_DEFAULTS = _DEFAULTS | {"norm_epsilon": 1e-6, "tied_embedding": False}
_GPT2_DEFAULTS = {"feedforward_width": lambda fields: 4 * fields["model_width"], "norm_epsilon": 1e-5}
DEFAULTS = {
    "gpt2": {**_DEFAULTS, **_GPT2_DEFAULTS, "tied_embedding": True},
    "llama": _LLAMA_DEFAULTS,
    "mistral": {name: default for name, default in _LLAMA_DEFAULTS.items() if name != "num_key_value_heads"},
    "gguf": _DEFAULTS,
}
# Of each rope_type: our fields by those in the file, which must be there unless they are in ROTARY_OPTIONAL.
ROTARY_FIELDS = {
    "linear": {"factor": "factor"},
    "dynamic": {"factor": "factor"},
    "llama3": {
        "factor": "factor",
        "original_max_position_embeddings": "original_positions",
        "low_freq_factor": "low_frequency_factor",
        "high_freq_factor": "high_frequency_factor",
    },
    "yarn": {
        "factor": "factor",
        "original_max_position_embeddings": "original_positions",
        "beta_fast": "fast_turns",
        "beta_slow": "slow_turns",
        "attention_factor": "scale",
        "truncate": "whole_limits",
    },
}
ROTARY_OPTIONAL = {"beta_fast", "beta_slow", "attention_factor", "truncate"}


def _linear(ours: str, theirs: str, **how: Any) -> dict[str, Place]:
    return {
        f"{ours}/kernel": Place(f"{theirs}.weight", **how),
        f"{ours}/bias": Place(f"{theirs}.bias", part=how.get("part")),
    }


def _norm(ours: str, theirs: str) -> dict[str, Place]:
    return {f"{ours}/scale": Place(f"{theirs}.weight"), f"{ours}/bias": Place(f"{theirs}.bias")}


# `{}` stands for the layer's number.
_GPT2 = {
    "embedding": Place("transformer.wte.weight"),
    "positions": Place("transformer.wpe.weight"),
    "output_embedding": Place("lm_head.weight"),
    **_norm("final_norm", "transformer.ln_f"),
    **_norm("attention_norm", "transformer.h.{}.ln_1"),
    **_linear("query", "transformer.h.{}.attn.c_attn", part=0),
    **_linear("key", "transformer.h.{}.attn.c_attn", part=1),
    **_linear("value", "transformer.h.{}.attn.c_attn", part=2),
    **_linear("output", "transformer.h.{}.attn.c_proj"),
    **_norm("feedforward_norm", "transformer.h.{}.ln_2"),
    **_linear("feedforward_hidden", "transformer.h.{}.mlp.c_fc"),
    **_linear("feedforward_output", "transformer.h.{}.mlp.c_proj"),
}
_LLAMA = {
    "embedding": Place("model.embed_tokens.weight"),
    "output_embedding": Place("lm_head.weight"),
    **_norm("final_norm", "model.norm"),
    **_norm("attention_norm", "model.layers.{}.input_layernorm"),
    **_linear("query", "model.layers.{}.self_attn.q_proj", transposed=True),
    **_linear("key", "model.layers.{}.self_attn.k_proj", transposed=True),
    **_linear("value", "model.layers.{}.self_attn.v_proj", transposed=True),
    **_linear("output", "model.layers.{}.self_attn.o_proj", transposed=True),
    **_norm("feedforward_norm", "model.layers.{}.post_attention_layernorm"),
    **_linear("feedforward_gate", "model.layers.{}.mlp.gate_proj", transposed=True),
    **_linear("feedforward_hidden", "model.layers.{}.mlp.up_proj", transposed=True),
    **_linear("feedforward_output", "model.layers.{}.mlp.down_proj", transposed=True),
}
_IN_GGUF = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 1)


def _gguf_name(name: str) -> str:
    gguf_name = _IN_GGUF.get_name(name.format(0), (".weight", ".bias"))
    assert gguf_name is not None
    return gguf_name.replace("blk.0.", "blk.{}.")


_GGUF_LLAMA = {ours: where._replace(name=_gguf_name(where.name)) for ours, where in _LLAMA.items()}


def _place(table: Mapping[str, Place], path: str) -> Place:
    if match := re.fullmatch(r"blocks/(\d+)/(.+)", path):
        place = table[match[2]]
        return place._replace(name=place.name.format(match[1]))
    return table[path]


GPT2, LLAMA, GGUF_LLAMA = (functools.partial(_place, table) for table in (_GPT2, _LLAMA, _GGUF_LLAMA))
"""Functions from the path of a parameter of ours to its place in such a file."""
PLACES = {"gpt2": GPT2, "llama": LLAMA}


def from_huggingface(saved: Mapping[str, Any], owner: str) -> PretrainedConfig:
    """The config of the decoder in a config.json, whose name is `owner`; its window is all positions."""
    saved = dict(saved)
    kind = saved.get("model_type")
    if not isinstance(kind, str) or kind not in FIXED:
        raise UserError(f"{owner}: model_type {kind!r} is not one of {', '.join(FIXED)}")
    for key, value in FIXED[kind].items():
        if saved.pop(key, value) not in (value, None):
            raise UserError(f"{owner}: we can't honour {key}, which must be {value!r} for a {kind} model")
    if kind == "mistral":
        saved.setdefault("sliding_window", MISTRAL_WINDOW)
    scaling = {}
    if kind != "gpt2":
        # Newer versions have the base of the wavelengths next to their scaling.
        rotary = {}
        for key in ("rope_scaling", "rope_parameters"):
            rotary |= fit(saved.pop(key, None) or {}, dict, f"{owner}: {key}")
        if (base := rotary.pop("rope_theta", None)) is not None:
            saved["rope_theta"] = base
        scaling["rotary_scaling"] = _read_scaling(rotary, f"{owner}: rope_scaling")
    return _read(saved, kind, owner, architecture=ARCHITECTURES[kind], **scaling)


def _read_scaling(saved: dict[str, Any], owner: str) -> RotaryScaling:
    old_name = saved.pop("type", "default")
    kind = saved.pop("rope_type", old_name)
    if kind == "default":
        return RotaryScaling()
    if not isinstance(kind, str) or kind not in ROTARY_FIELDS:
        raise UserError(f"{owner}: we can't honour rope_type {kind!r}, only default, {', '.join(ROTARY_FIELDS)}")
    scaling_class, fields, names = ROTARY_SCALINGS[kind], {}, ROTARY_FIELDS[kind]
    types = field_types(scaling_class)
    saved = {key: value for key, value in saved.items() if value is not None}
    for key, value in saved.items():
        if key not in names:
            raise UserError(f"{owner}: we can't honour {key} = {value!r} for rope_type {kind!r}")
        fields[names[key]] = fit(value, types[names[key]], f"{owner}: {key}")
    if missing := [key for key in names if key not in saved and key not in ROTARY_OPTIONAL]:
        raise UserError(f"{owner} has no {missing[0]}")
    return _make(scaling_class, owner, fields)


def from_gguf(file: GGUFFile) -> PretrainedConfig:
    """The config of the decoder in a GGUF file; its window is all positions."""
    architecture = file.value("general.architecture")
    if architecture != "llama":
        raise UserError(f"{file.path} is a {architecture} model: of GGUF files we read llama")
    saved = file.values("llama.")
    # The file has single precision: 9.999999747378752e-06 is the 1e-05 in other files of the model.
    saved = {key: float(str(np.float32(x))) if type(x) is float else x for key, x in saved.items()}
    tied = "output.weight" not in file.tensors
    fixed = {"architecture": architecture, "activation": "silu", "tied_embedding": tied}
    config = _read(saved, "gguf", str(file.path), **fixed)
    for key in ("llama.rope.dimension_count", "llama.attention.value_length"):
        if (value := saved.get(key, config.head_size)) != config.head_size:
            raise UserError(f"{file.path}: we can't honour {key} = {value} with heads of {config.head_size}")
    return config


def _read(saved: Mapping[str, Any], kind: str, owner: str, **fields: Any) -> PretrainedConfig:
    """The config of a file of this kind with these entries, and with the fields that are known otherwise."""
    types, names = field_types(PretrainedConfig), NAMES[kind]
    for name in (name for name in _NAMES if name not in fields):
        key = names.get(name)
        if key is not None and (value := saved.get(key)) is not None:
            if name == "activation":
                if value not in ACTIVATIONS:
                    raise UserError(f"{owner}: {key} {value!r} is not one of {', '.join(ACTIVATIONS)}")
                value = ACTIVATIONS[value]
            fields[name] = fit(value, types[name], f"{owner}: {key}")
            if types[name] in (int, float) and fields[name] <= 0:
                raise UserError(f"{owner}: {key} = {value!r} must be positive")
        elif name not in DEFAULTS[kind]:
            raise UserError(f"{owner} has no {key}")
        else:
            default = DEFAULTS[kind][name]
            fields[name] = default(fields) if callable(default) else default
    known = HARMLESS | set(names.values())
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
    activations = {ours: theirs for theirs, ours in reversed(ACTIVATIONS.items())}
    fields = {key: getattr(config, name) for name, key in NAMES[kind].items()}
    fields[NAMES[kind]["activation"]] = activations[config.activation]
    if kind == "llama":
        del fields["sliding_window"]
    if (scaling := config.rotary_scaling) != RotaryScaling():
        rope_type = ROTARY_SCALINGS.name_of(scaling)
        rotary = {key: getattr(scaling, name) for key, name in ROTARY_FIELDS[rope_type].items()}
        fields["rope_scaling"] = {"rope_type": rope_type} | {k: v for k, v in rotary.items() if v is not None}
    return fields | {
        "model_type": kind,
        "architectures": [CLASSES[kind]],
        "vocab_size": vocabulary_size,
        "bos_token_id": end_of_document,
        "eos_token_id": end_of_document,
        "dtype": "float32",
    }
