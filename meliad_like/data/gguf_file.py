"""Metadata and tensors of GGUF files, through the `gguf` package."""

from pathlib import Path
from typing import Any

import gguf
import numpy as np

from meliad_like.errors import UserError, reading

ROWS = 4096  # Rows of a tensor that are dequantised at once, which takes several times their memory.


class _Reader(gguf.GGUFReader):
    """A reader that refuses an array which is longer than its file before it reads the elements one by one."""

    def _get_field_parts(self, orig_offs: int, raw_type: int) -> Any:
        if raw_type == gguf.GGUFValueType.ARRAY:
            # The type of the elements in four bytes, then their number in eight; an element has at least one byte.
            length = self._get(orig_offs + 4, np.uint64)[0]
            if length > self.data.nbytes:
                raise ValueError(f"an array of {length} elements in a file of {self.data.nbytes} bytes")
        return super()._get_field_parts(orig_offs, raw_type)


class GGUFFile:
    """The metadata and tensors of a GGUF file, which are read on demand."""

    def __init__(self, path: Path, reader: gguf.GGUFReader):
        self.path = path
        self.tensors = {tensor.name: tensor for tensor in reader.tensors}
        self._fields = reader.fields

    def value(self, key: str, *default: Any) -> Any:
        """The value of a metadata key. A missing key without a default, and damaged text, are UserErrors."""
        if (field := self._fields.get(key)) is not None:
            try:
                return field.contents()
            except UnicodeDecodeError as error:
                raise UserError(f"{self.path}: {key} is damaged: {error}") from None
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
        return GGUFFile(Path(path), _Reader(path))
