"""Llama models from GGUF files, quantised or not, through the `gguf` package."""

from pathlib import Path
from typing import Any

import numpy as np

from meliad_like.conversion.huggingface import Pretrained
from meliad_like.conversion.huggingface_config import decoder_config, positive
from meliad_like.conversion.pretrained_names import GGUF_LLAMA, check_num_layers, read_parameters
from meliad_like.data.gguf_file import GGUFFile, open_gguf
from meliad_like.errors import UserError
from meliad_like.models.model import Model
from meliad_like.models.pretrained.config import PretrainedConfig

# Metadata of the architecture that have no effect on the model.
HARMLESS = {"vocab_size", "rope.dimension_count", "attention.key_length", "attention.value_length"}


def read_gguf(path: str | Path) -> Pretrained:
    """Reads a Llama model from a GGUF file and dequantises it.

    Raises:
      UserError: the file is damaged, or its model is not supported.
    """
    file = open_gguf(path)
    config = _config(file)
    size = len(file.value("tokenizer.ggml.tokens"))
    file.forget()
    check_num_layers(GGUF_LLAMA, config, file.tensors, str(path))
    template = Model(config, size).abstract_params
    params = read_parameters(GGUF_LLAMA, template, config, file.tensors, file.tensor, str(path))
    return Pretrained(config, size, params)


def _config(file: GGUFFile) -> PretrainedConfig:
    architecture = file.value("general.architecture")
    if architecture != "llama":
        raise UserError(f"{file.path} is a {architecture} model: of GGUF files we read llama")
    left = set(file.keys("llama.")) - HARMLESS

    def take(key: str, kind: type, *default: Any) -> Any:
        left.discard(key)
        value = file.value(f"llama.{key}", *default)
        if type(value) is float:
            # The file has single precision: 9.999999747378752e-06 is the 1e-05 in other files of the model.
            value = float(str(np.float32(value)))
        return positive(str(file.path), f"llama.{key}", value, kind)

    width, heads = take("embedding_length", int), take("attention.head_count", int)
    head_size = take("attention.key_length", int, width // heads)
    for key in ("rope.dimension_count", "attention.value_length"):
        if (value := file.value(f"llama.{key}", head_size)) != head_size:
            raise UserError(f"{file.path}: we can't honour llama.{key} = {value} with heads of {head_size}")
    config = decoder_config(
        str(file.path),
        architecture="llama",
        num_layers=take("block_count", int),
        model_width=width,
        num_heads=heads,
        num_key_value_heads=take("attention.head_count_kv", int, heads),
        head_size=head_size,
        feedforward_width=take("feed_forward_length", int),
        activation="silu",
        max_positions=take("context_length", int),
        norm_epsilon=take("attention.layer_norm_rms_epsilon", float),
        rotary_base=take("rope.freq_base", float, 10_000.0),
        tied_embedding="output.weight" not in file.tensors,
    )
    for key in sorted(left):
        if (value := file.value(f"llama.{key}")) not in (0, False, "none"):
            raise UserError(f"{file.path}: we can't honour llama.{key} = {value!r}")
    return config
