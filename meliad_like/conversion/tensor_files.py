"""Folders of safetensors files, as Hugging Face's transformers writes them."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
import safetensors.numpy

from meliad_like.errors import UserError, reading
from meliad_like.resumable import read_object

CONFIG_NAME, GENERATION_NAME = "config.json", "generation_config.json"
TENSORS_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"
DTYPES = ("F32", "F16", "BF16")


def tensor_files(folder: Path) -> dict[str, Path]:
    """The file of each tensor, by the tensor's name."""
    if (folder / INDEX_NAME).exists():
        return {name: folder / file for name, file in read_object(folder / INDEX_NAME)["weight_map"].items()}
    if (folder / TENSORS_NAME).exists():
        with opened(folder / TENSORS_NAME) as file:
            return dict.fromkeys(file.keys(), folder / TENSORS_NAME)  # The value is not a mapping.
    advice = "save the model with transformers' save_pretrained(folder, safe_serialization=True)"
    raise UserError(f"{folder} has neither {TENSORS_NAME} nor {INDEX_NAME}: {advice}")


@contextmanager
def opened(path: Path) -> Iterator[Any]:
    """A safetensors file."""
    error = safetensors.SafetensorError
    with reading(path, "safetensors file", error), safetensors.safe_open(path, framework="numpy") as file:
        yield file


def read_tensor(path: Path, name: str) -> np.ndarray:
    """A tensor of a safetensors file, by its name."""
    # The file is mapped again for each tensor; otherwise the pages of earlier tensors would stay in memory.
    with opened(path) as file:
        # Checked first, because numpy lacks some of the types, such as 8 bits.
        if (dtype := file.get_slice(name).get_dtype()) not in DTYPES:
            raise UserError(f"{path}: tensor {name} is {dtype}, and not {', '.join(DTYPES[:-1])} or {DTYPES[-1]}")
        return file.get_tensor(name)


def check_tied(files: Mapping[str, Path], name: str | None, embedding: Any, owner: str | Path) -> None:
    """Checks the tensor of the output embedding, if there is one, of a model whose config.json says that the embedding
    is used again.

    Raises:
      UserError: it has other numbers. Versions 4 of transformers use the embedding nevertheless, later ones don't.
    """
    if name is not None and not np.array_equal(read_tensor(files[name], name).astype(embedding.dtype), embedding):
        raise UserError(
            f"{owner}: {name} is not the embedding, as config.json says: set tie_word_embeddings to false there to use "
            "it, or remove it"
        )


def save_tensors(tensors: Mapping[str, Any], path: Path, metadata: dict[str, str] | None = None) -> None:
    """Writes a safetensors file."""
    path.touch()
    mode = path.stat().st_mode
    arrays = {name: np.asarray(x, order="C") for name, x in tensors.items()}
    safetensors.numpy.save_file(arrays, path, metadata)
    # safetensors makes files that only their owner can read, whatever the umask.
    path.chmod(mode)
