"""Files of pretrained models, read without PyTorch: folders of Hugging Face's transformers, and GGUF files of Llama."""

import dataclasses
import json
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import safetensors
import safetensors.numpy

from meliad_like.config import field_types, fit
from meliad_like.conversion.parameters import (
    GGUF_LLAMA,
    GPT2,
    LLAMA,
    by_name,
    fill_parameters,
    read_parameters,
    to_tensors,
)
from meliad_like.conversion.pretrained_config import from_gguf, from_huggingface, to_huggingface
from meliad_like.data.gguf_file import open_gguf
from meliad_like.errors import UserError
from meliad_like.mechanisms.window_summary import WindowSummary
from meliad_like.models.model import Model
from meliad_like.models.pretrained.config import PretrainedConfig
from meliad_like.resumable import parse_json, read_json

CONFIG_NAME = "config.json"
TENSORS_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"
RECURRENCE_NAME = "recurrence.safetensors"
# The key in that file's metadata of the recurrence's config and the windows with which it was trained.
RECURRENCE_KEY = "WindowSummary"
WINDOW_FIELDS = ("window_length", "overlap")
TABLES = {"gpt2": GPT2, "llama": LLAMA}
DTYPES = ("F32", "F16", "BF16")
# Masks and wavelengths that older versions saved with the parameters; the config determines them.
CONSTANTS = (".attn.bias", ".attn.masked_bias", ".rotary_emb.inv_freq")


class Pretrained(NamedTuple):
    """A pretrained model: its config and its parameters."""

    config: PretrainedConfig
    vocabulary_size: int
    params: dict[str, Any]
    """The parameters, float32, on the default device."""


def read_huggingface(folder: str | Path) -> Pretrained:
    """Reads a model from config.json and `model.safetensors`, or from several files and their index.

    The model includes a recurrence that `write_huggingface` has saved in the folder, and its windows.
    """
    folder = Path(folder)
    saved = _read_json(folder / CONFIG_NAME)
    config = from_huggingface(saved, str(folder / CONFIG_NAME))
    if type(size := saved.get("vocab_size")) is not int:
        raise UserError(f"{folder / CONFIG_NAME} has no vocab_size")
    files = _files(folder)
    prefix = "transformer." if config.architecture == "gpt2" and "wte.weight" in files else ""
    # A model without its output layer is saved without the prefix.
    names = {prefix + name: name for name in files if not name.endswith(CONSTANTS)}
    if config.tied_embedding:
        names.pop("lm_head.weight", None)

    def read(name: str) -> np.ndarray:
        return _read_tensor(files[names[name]], names[name])

    params = read_parameters(TABLES[config.architecture], config, size, names, read, str(folder))
    if (folder / RECURRENCE_NAME).exists():
        config, recurrence = _read_recurrence(folder / RECURRENCE_NAME, config, size)
        params |= {"recurrence": recurrence}
    return Pretrained(config, size, params)


def read_gguf(path: str | Path) -> Pretrained:
    """Reads a Llama model from a GGUF file and dequantises it."""
    file = open_gguf(path)
    config = from_gguf(file)
    size = len(file.value("tokenizer.ggml.tokens"))

    def read(name: str) -> np.ndarray:
        tensor = file.tensor(name)
        if not name.endswith((".attn_q.weight", ".attn_k.weight")):
            return tensor
        # Rotary pairs are adjacent there. In our parameters their distance is half a head.
        by_pair = tensor.reshape(-1, config.head_size // 2, 2, tensor.shape[-1])
        return np.swapaxes(by_pair, 1, 2).reshape(tensor.shape)

    params = read_parameters(GGUF_LLAMA, config, size, file.tensors, read, str(path))
    return Pretrained(config, size, params)


def write_huggingface(pretrained: Pretrained, end_of_document: int, folder: str | Path) -> None:
    """Writes a model for `transformers` into an existing folder, without the tokenizer.

    A recurrence, which config.json can't express, is saved in a separate file with its fields of the config.
    """
    folder = Path(folder)
    decoder = {name: value for name, value in pretrained.params.items() if name != "recurrence"}
    config = to_huggingface(pretrained.config, pretrained.vocabulary_size, end_of_document)
    tensors = to_tensors(TABLES[pretrained.config.architecture], decoder)
    (folder / CONFIG_NAME).write_text(json.dumps(config, indent=2) + "\n")
    safetensors.numpy.save_file(tensors, folder / TENSORS_NAME, metadata={"format": "pt"})
    if "recurrence" in pretrained.params:
        windows = {name: getattr(pretrained.config, name) for name in WINDOW_FIELDS}
        fields = windows | dataclasses.asdict(pretrained.config.summary)
        metadata = {RECURRENCE_KEY: json.dumps(fields)}
        recurrence = by_name(pretrained.params["recurrence"])
        safetensors.numpy.save_file(recurrence, folder / RECURRENCE_NAME, metadata=metadata)


def _read_recurrence(path: Path, decoder: PretrainedConfig, size: int) -> tuple[PretrainedConfig, dict[str, Any]]:
    """Reads the recurrence: returns the config with it, and its parameters."""
    with _open(path) as file:
        names, metadata = set(file.keys()), file.metadata() or {}
    saved = parse_json(metadata.get(RECURRENCE_KEY, "null"), f"{path}: {RECURRENCE_KEY}")
    types = {name: field_types(PretrainedConfig)[name] for name in WINDOW_FIELDS} | field_types(WindowSummary)
    if not isinstance(saved, dict) or saved.keys() != types.keys():
        raise UserError(
            f"{path} doesn't say what recurrence it is of: write it again with convert huggingface --reverse, or "
            "remove it to have the decoder alone"
        )
    fields = {name: fit(value, types[name], f"{path}: {name}") for name, value in saved.items()}
    windows = {name: fields.pop(name) for name in WINDOW_FIELDS}
    try:
        config = dataclasses.replace(decoder, **windows, mechanisms=(WindowSummary(**fields),))
    except UserError as error:
        raise UserError(f"{path}: {error}") from None
    template = Model(config, size).abstract_params["recurrence"]
    params = fill_parameters(
        template, names, lambda name: name, lambda _, name, leaf: _read_tensor(path, name), str(path)
    )
    return config, params


def _files(folder: Path) -> dict[str, Path]:
    """The file of each tensor, by the tensor's name."""
    if (folder / INDEX_NAME).exists():
        index = _read_json(folder / INDEX_NAME).get("weight_map")
        if not isinstance(index, dict) or not all(isinstance(file, str) for file in index.values()):
            raise UserError(f"{folder / INDEX_NAME} has no weight_map from tensors to files")
        files = {name: folder / file for name, file in index.items()}
    elif (folder / TENSORS_NAME).exists():
        with _open(folder / TENSORS_NAME) as file:
            files = dict.fromkeys(file.keys(), folder / TENSORS_NAME)  # The value is not a mapping.
    else:
        raise UserError(
            f"{folder} has neither {TENSORS_NAME} nor {INDEX_NAME}: save the model with transformers' "
            "save_pretrained(folder, safe_serialization=True)"
        )
    for path in sorted(set(files.values())):
        with _open(path) as file:
            present = set(file.keys())
        if missing := [name for name, place in files.items() if place == path and name not in present]:
            raise UserError(f"{path} has no tensor {missing[0]}, which {INDEX_NAME} says it has")
    return files


def _open(path: Path) -> Any:
    try:
        return safetensors.safe_open(path, framework="numpy")
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}") from None
    except safetensors.SafetensorError as error:
        raise UserError(f"{path} is damaged, or no safetensors file: {error}") from None


def _read_tensor(path: Path, name: str) -> np.ndarray:
    # The file is mapped again for each tensor; otherwise the pages of earlier tensors would stay in memory.
    with _open(path) as file:
        # Checked first, because numpy lacks some of the types, such as 8 bits.
        if (dtype := file.get_slice(name).get_dtype()) not in DTYPES:
            raise UserError(f"{path}: tensor {name} is {dtype}, and not {', '.join(DTYPES[:-1])} or {DTYPES[-1]}")
        return file.get_tensor(name)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        saved = read_json(path)
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from None
    if not isinstance(saved, dict):
        raise UserError(f"{path} is no JSON object")
    return saved
