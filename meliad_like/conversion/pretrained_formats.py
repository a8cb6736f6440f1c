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


def _width_by_heads(fields: Mapping[str, Any]) -> int:
    return fields["model_width"] // fields["num_heads"]


_heads = operator.itemgetter("num_heads")
REQUIRED = object()
# Our field: its name in the file ("": it has none), and its default, which may follow from the fields before it.
Table = Mapping[str, tuple[str, Any]]
FIELDS: dict[str, Table] = {
    "gpt2": {
        "num_layers": ("n_layer", REQUIRED),
        "model_width": ("n_embd", REQUIRED),
        "num_heads": ("n_head", REQUIRED),
        "num_key_value_heads": ("", _heads),
        "head_size": ("", _width_by_heads),
        "feedforward_width": ("n_inner", lambda fields: 4 * fields["model_width"]),
        "activation": ("activation_function", REQUIRED),
        "max_positions": ("n_positions", REQUIRED),
        "norm_epsilon": ("layer_norm_epsilon", 1e-5),
        "tied_embedding": ("tie_word_embeddings", True),
    },
    "llama": {
        "num_layers": ("num_hidden_layers", REQUIRED),
        "model_width": ("hidden_size", REQUIRED),
        "num_heads": ("num_attention_heads", REQUIRED),
        "num_key_value_heads": ("num_key_value_heads", _heads),
        "head_size": ("head_dim", _width_by_heads),
        "feedforward_width": ("intermediate_size", REQUIRED),
        "activation": ("hidden_act", REQUIRED),
        "max_positions": ("max_position_embeddings", REQUIRED),
        "norm_epsilon": ("rms_norm_eps", 1e-6),
        "rotary_base": ("rope_theta", 10_000.0),
        "tied_embedding": ("tie_word_embeddings", False),
    },
}
FIELDS["mistral"] = {
    **FIELDS["llama"],
    "num_key_value_heads": ("num_key_value_heads", REQUIRED),
    "sliding_window": ("sliding_window", 0),
}
# Of each rope_type: the field in the file, ours, and whether it must be there.
_POSITIONS = ("original_max_position_embeddings", "original_positions", True)
ROTARY_FIELDS = {
    "linear": [("factor", "factor", True)],
    "dynamic": [("factor", "factor", True)],
    "llama3": [
        ("factor", "factor", True),
        _POSITIONS,
        ("low_freq_factor", "low_frequency_factor", True),
        ("high_freq_factor", "high_frequency_factor", True),
    ],
    "yarn": [
        ("factor", "factor", True),
        _POSITIONS,
        ("beta_fast", "fast_turns", False),
        ("beta_slow", "slow_turns", False),
        ("attention_factor", "scale", False),
        ("truncate", "whole_limits", False),
    ],
}
GGUF_FIELDS: Table = {
    "num_layers": ("llama.block_count", REQUIRED),
    "model_width": ("llama.embedding_length", REQUIRED),
    "num_heads": ("llama.attention.head_count", REQUIRED),
    "num_key_value_heads": ("llama.attention.head_count_kv", _heads),
    "head_size": ("llama.attention.key_length", _width_by_heads),
    "feedforward_width": ("llama.feed_forward_length", REQUIRED),
    "max_positions": ("llama.context_length", REQUIRED),
    "norm_epsilon": ("llama.attention.layer_norm_rms_epsilon", REQUIRED),
    "rotary_base": ("llama.rope.freq_base", 10_000.0),
}


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
    found = _IN_GGUF.get_name(name.format(0), (".weight", ".bias"))
    assert found is not None
    return found.replace("blk.0.", "blk.{}.")


_GGUF_LLAMA = {ours: where._replace(name=_gguf_name(where.name)) for ours, where in _LLAMA.items()}


def _place(table: Mapping[str, Place], path: str) -> Place:
    if match := re.fullmatch(r"blocks/(\d+)/(.+)", path):
        found = table[match[2]]
        return found._replace(name=found.name.format(match[1]))
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
        # Newer versions have the base of the wavelengths beside their scaling.
        rotary = {}
        for key in ("rope_scaling", "rope_parameters"):
            rotary |= fit(saved.pop(key, None) or {}, dict, f"{owner}: {key}")
        if (base := rotary.pop("rope_theta", None)) is not None:
            saved["rope_theta"] = base
        scaling["rotary_scaling"] = _read_scaling(rotary, f"{owner}: rope_scaling")
    return _read(saved, FIELDS[kind], owner, architecture=ARCHITECTURES[kind], **scaling)


def _read_scaling(saved: dict[str, Any], owner: str) -> RotaryScaling:
    old_name = saved.pop("type", "default")
    kind = saved.pop("rope_type", old_name)
    if kind == "default":
        return RotaryScaling()
    if not isinstance(kind, str) or kind not in ROTARY_FIELDS:
        raise UserError(f"{owner}: we can't honour rope_type {kind!r}, only default, {', '.join(ROTARY_FIELDS)}")
    scaling_class, fields = ROTARY_SCALINGS[kind], {}
    types = field_types(scaling_class)
    for key, name, required in ROTARY_FIELDS[kind]:
        if (value := saved.pop(key, None)) is not None:
            fields[name] = fit(value, types[name], f"{owner}: {key}")
        elif required:
            raise UserError(f"{owner} has no {key}")
    if unknown := [key for key, value in saved.items() if value is not None]:
        raise UserError(f"{owner}: we can't honour {unknown[0]} = {saved[unknown[0]]!r} for rope_type {kind!r}")
    try:
        return scaling_class(**fields)
    except UserError as error:
        raise UserError(f"{owner}: {error}") from None


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
    config = _read(saved, GGUF_FIELDS, str(file.path), **fixed)
    for key in ("llama.rope.dimension_count", "llama.attention.value_length"):
        if (value := saved.get(key, config.head_size)) != config.head_size:
            raise UserError(f"{file.path}: we can't honour {key} = {value} with heads of {config.head_size}")
    return config


def _read(saved: Mapping[str, Any], table: Table, owner: str, **fields: Any) -> PretrainedConfig:
    types = field_types(PretrainedConfig)
    for name, (key, default) in table.items():
        if (value := saved.get(key)) is not None:
            if name == "activation":
                if value not in ACTIVATIONS:
                    raise UserError(f"{owner}: {key} {value!r} is not one of {', '.join(ACTIVATIONS)}")
                value = ACTIVATIONS[value]
            fields[name] = fit(value, types[name], f"{owner}: {key}")
            if types[name] in (int, float) and fields[name] <= 0:
                raise UserError(f"{owner}: {key} = {value!r} must be positive")
        elif default is REQUIRED:
            raise UserError(f"{owner} has no {key}")
        else:
            fields[name] = default(fields) if isinstance(default, Callable) else default
    known = HARMLESS | {key for key, _ in table.values()}
    for key, value in saved.items():
        # An unknown switch that is off has no effect.
        if key not in known and value not in (None, False, {}, [], "none"):
            raise UserError(f"{owner}: we can't honour {key} = {value!r}, which we don't know and may change the model")
    try:
        return PretrainedConfig(**fields, window_length=fields["max_positions"])
    except UserError as error:
        raise UserError(f"{owner}: {error}") from None


def to_huggingface(config: PretrainedConfig, vocabulary_size: int, end_of_document: int) -> dict[str, Any]:
    """The config.json of the decoder, whose recurrence it can't express."""
    heads = (config.num_key_value_heads, config.num_heads * config.head_size)
    if config.architecture == "gpt2" and heads != (config.num_heads, config.model_width):
        raise UserError("a gpt2 config.json can't express num_key_value_heads, or heads that don't add up to the width")
    kind = "mistral" if config.sliding_window else config.architecture
    names = {ours: theirs for theirs, ours in reversed(ACTIVATIONS.items())}
    fields = {key: getattr(config, name) for name, (key, _) in FIELDS[kind].items() if key}
    activation, _ = FIELDS[kind]["activation"]
    if (scaling := config.rotary_scaling) != RotaryScaling():
        rope_type = ROTARY_SCALINGS.name_of(scaling)
        rotary = {key: getattr(scaling, name) for key, name, _ in ROTARY_FIELDS[rope_type]}
        fields["rope_scaling"] = {"rope_type": rope_type} | {k: v for k, v in rotary.items() if v is not None}
    return fields | {
        activation: names[config.activation],
        "model_type": kind,
        "architectures": [CLASSES[kind]],
        "vocab_size": vocabulary_size,
        "bos_token_id": end_of_document,
        "eos_token_id": end_of_document,
        "dtype": "float32",
    }
