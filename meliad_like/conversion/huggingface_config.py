"""Converts Hugging Face's config.json and our PretrainedConfig. Unsupported fields are refused, never ignored."""

import math
from collections.abc import Mapping
from typing import Any

from meliad_like.errors import UserError
from meliad_like.models.pretrained.config import PretrainedConfig

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
}  # fmt: skip
# The only supported value; a missing field means this value.
FIXED = {
    "gpt2": {"scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False, "add_cross_attention": False},
    "llama": {
        "attention_bias": False,
        "mlp_bias": False,
        "pretraining_tp": 1,
        "rope_scaling": None,
        "rope_interleaved": False,
        "sliding_window": None,
    },
}


def from_huggingface(saved: Mapping[str, Any], owner: str) -> PretrainedConfig:
    """The config of the decoder that a config.json describes; its window is all positions.

    Raises:
      UserError: a field is missing, unknown, or has an unsupported value; `owner` is the file's name.
    """
    saved = dict(saved)
    architecture = saved.get("model_type")
    if not isinstance(architecture, str) or architecture not in FIXED:
        raise UserError(f"{owner}: model_type {architecture!r} is not one of {', '.join(FIXED)}")
    for key, value in FIXED[architecture].items():
        if saved.pop(key, value) not in (value, None):
            raise UserError(f"{owner}: we can't honour {key}, which must be {value!r} for a {architecture} model")
    reader = _Reader(saved, owner)
    fields = _gpt2(reader) if architecture == "gpt2" else _llama(reader)
    for key, value in reader.left.items():
        # An unknown switch that is off has no effect.
        if key not in HARMLESS and value not in (None, False, {}, []):
            raise UserError(f"{owner}: we don't know {key} = {value!r}, and can't tell whether it changes the model")
    return decoder_config(owner, architecture=architecture, **fields)


def decoder_config(owner: str, **fields: Any) -> PretrainedConfig:
    """The config of a decoder with these fields; its window is all positions.

    Raises:
      UserError: the fields are inconsistent; `owner` is the name of their file.
    """
    try:
        return PretrainedConfig(**fields, window_length=fields["max_positions"])
    except UserError as error:
        raise UserError(f"{owner}: {error}") from None


def positive(owner: str, key: str, value: Any, kind: type) -> Any:
    """`value`, which must be a positive and finite number of this kind.

    Raises:
      UserError: the value is something else; `owner` is the name of its file.
    """
    if type(value) is not kind and not (kind is float and type(value) is int):
        raise UserError(f"{owner}: {key} = {value!r} is no {kind.__name__}")
    if not 0 < value < math.inf:
        raise UserError(f"{owner}: {key} = {value!r} must be positive")
    return kind(value)


class _Reader:
    """Takes fields out of a config.json; fields left at the end are unknown."""

    def __init__(self, saved: dict[str, Any], owner: str):
        self.left = saved
        self._owner = owner

    def take(self, key: str, kind: type, *default: Any) -> Any:
        value = self.left.pop(key, None)
        if value is None:
            if default:
                return default[0]
            raise UserError(f"{self._owner} has no {key}")
        if kind in (int, float):
            return positive(self._owner, key, value, kind)
        if type(value) is not kind:
            raise UserError(f"{self._owner}: {key} = {value!r} is no {kind.__name__}")
        return value

    def activation(self, key: str) -> str:
        name = self.take(key, str)
        if name not in ACTIVATIONS:
            raise UserError(f"{self._owner}: {key} {name!r} is not one of {', '.join(ACTIVATIONS)}")
        return ACTIVATIONS[name]

    def rotary_base(self) -> float:
        """The base of rotary wavelengths: `rope_theta`, or in newer versions `rope_parameters` without scaling."""
        base = self.take("rope_theta", float, 10_000.0)
        for key, value in self.take("rope_parameters", dict, {}).items():
            if key == "rope_theta":
                base = positive(self._owner, "rope_parameters.rope_theta", value, float)
            elif (key, value) != ("rope_type", "default"):
                raise UserError(f"{self._owner}: we can't honour rope_parameters.{key} = {value!r}")
        return base


def _gpt2(reader: _Reader) -> dict[str, Any]:
    width, heads = reader.take("n_embd", int), reader.take("n_head", int)
    return {
        "num_layers": reader.take("n_layer", int),
        "model_width": width,
        "num_heads": heads,
        "num_key_value_heads": heads,
        "head_size": width // heads,
        "feedforward_width": reader.take("n_inner", int, 4 * width),
        "activation": reader.activation("activation_function"),
        "max_positions": reader.take("n_positions", int),
        "norm_epsilon": reader.take("layer_norm_epsilon", float, 1e-5),
        "tied_embedding": reader.take("tie_word_embeddings", bool, True),
    }


def _llama(reader: _Reader) -> dict[str, Any]:
    width, heads = reader.take("hidden_size", int), reader.take("num_attention_heads", int)
    return {
        "num_layers": reader.take("num_hidden_layers", int),
        "model_width": width,
        "num_heads": heads,
        "num_key_value_heads": reader.take("num_key_value_heads", int, heads),
        "head_size": reader.take("head_dim", int, width // heads),
        "feedforward_width": reader.take("intermediate_size", int),
        "activation": reader.activation("hidden_act"),
        "max_positions": reader.take("max_position_embeddings", int),
        "norm_epsilon": reader.take("rms_norm_eps", float, 1e-6),
        "rotary_base": reader.rotary_base(),
        "tied_embedding": reader.take("tie_word_embeddings", bool, False),
    }


def to_huggingface(config: PretrainedConfig, vocabulary_size: int, end_of_document: int) -> dict[str, Any]:
    """The config.json of the decoder, whose recurrence it can't express."""
    common = {
        "model_type": config.architecture,
        "vocab_size": vocabulary_size,
        "bos_token_id": end_of_document,
        "eos_token_id": end_of_document,
        "tie_word_embeddings": config.tied_embedding,
        "dtype": "float32",
    }
    names = {ours: theirs for theirs, ours in reversed(ACTIVATIONS.items())}
    if config.architecture == "gpt2":
        if (config.num_key_value_heads, config.num_heads * config.head_size) != (config.num_heads, config.model_width):
            raise UserError(
                "a gpt2 config.json can't express num_key_value_heads, or heads that don't add up to the width"
            )
        return common | {
            "architectures": ["GPT2LMHeadModel"],
            "n_layer": config.num_layers,
            "n_embd": config.model_width,
            "n_head": config.num_heads,
            "n_inner": config.feedforward_width,
            "n_positions": config.max_positions,
            "activation_function": names[config.activation],
            "layer_norm_epsilon": config.norm_epsilon,
        }
    return common | {
        "architectures": ["LlamaForCausalLM"],
        "num_hidden_layers": config.num_layers,
        "hidden_size": config.model_width,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_size,
        "intermediate_size": config.feedforward_width,
        "hidden_act": names[config.activation],
        "max_position_embeddings": config.max_positions,
        "rms_norm_eps": config.norm_epsilon,
        "rope_theta": config.rotary_base,
    }
