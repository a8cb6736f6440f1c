"""Metadata and tensors of GGUF files, through the `gguf` package."""

from pathlib import Path
from typing import Any

import gguf
import numpy as np

from meliad_like.errors import UserError, reading

ROWS = 4096  # Rows of a tensor that are dequantised at once, which takes several times their memory.


class GGUFFile:
    """The metadata and tensors of a GGUF file, which are read on demand."""

    def __init__(self, path: Path, reader: gguf.GGUFReader):
        self.path = path
        self.tensors = {tensor.name: tensor for tensor in reader.tensors}
        self._fields = reader.fields

    def value(self, key: str, *default: Any) -> Any:
        """The value of a metadata key. A missing key without a default is a UserError."""
        if (field := self._fields.get(key)) is not None:
            return field.contents()
        if default:
            return default[0]
        raise UserError(f"{self.path} has no {key}")

    def values(self, prefix: str) -> dict[str, Any]:
        """The values of the metadata keys that begin with `prefix`."""
        return {key: self.value(key) for key in self._fields if key.startswith(prefix)}

    def tensor(self, name: str) -> np.ndarray:
        """A tensor in float32, dequantised if needed. Raises a UserError if `gguf` can't dequantise it."""
        tensor = self.tensors[name]
        stored, values = tensor.data, np.empty(tuple(int(size) for size in reversed(tensor.shape)), np.float32)
        try:
            for first in range(0, len(values), ROWS):
                # Not memory mapped: pages of the file would stay in memory as long as it is open.
                rows = stored[first : first + ROWS]
                offset = int(tensor.data_offset) + first * (stored.nbytes // len(stored))
                rows = np.fromfile(self.path, rows.dtype, rows.size, offset=offset).reshape(rows.shape)
                values[first : first + ROWS] = gguf.quants.dequantize(rows, tensor.tensor_type)
        except NotImplementedError:
            raise UserError(f"{self.path}: tensor {name} is {tensor.tensor_type.name}, which gguf can't read") from None
        return values


def open_gguf(path: str | Path) -> GGUFFile:
    """Maps a file and reads its metadata. Raises a UserError if it is missing, truncated, or not a GGUF file."""
    # The reader's errors if the header or the tensors are truncated.
    with reading(path, "GGUF file", ValueError, IndexError, KeyError, OverflowError):
        return GGUFFile(Path(path), gguf.GGUFReader(path))
