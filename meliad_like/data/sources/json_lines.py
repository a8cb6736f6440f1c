"""Documents in JSONL files: one JSON object per line, in plain, gzip or Zstandard files."""

import gzip
import hashlib
import io
import os
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import zstandard

from meliad_like.data.sources.base import Document, checked, decode
from meliad_like.data.sources.files import existing_folder, list_files
from meliad_like.data.splits import SPLITS, SplitRule
from meliad_like.errors import UserError
from meliad_like.saved_json import parse_json

SUFFIXES = (".jsonl", ".jsonl.gz", ".jsonl.zst")


@dataclass(frozen=True)
class LineReference:
    """A line, as it stands in its file: a compressed file cannot be read from the middle."""

    line: bytes
    name: str
    """`file:line number`, for messages, and the document's name where no field gives one."""
    found_in: str | None
    """The split that the file is named after."""
    text_field: str
    name_field: str
    rule: SplitRule

    def read(self) -> Document:
        values = parse_json(decode(self.line, self.name), self.name)
        if not isinstance(values, dict):
            raise UserError(f"{self.name} is not a JSON object but {type(values).__name__}")
        name = str(self._value(values, self.name_field)) if self.name_field else self.name
        text = self._value(values, self.text_field)
        if not isinstance(text, str):
            raise UserError(f"{self.name}: the field {self.text_field!r} is no text but {type(text).__name__}")
        return checked(Document(name, self.rule(name, self.found_in), text))

    def _value(self, values: dict, field: str) -> object:
        if field not in values:
            raise UserError(f"{self.name} has no field {field!r}; it has {', '.join(map(repr, values))}")
        return values[field]


@dataclass(frozen=True)
class JsonLinesSource:
    """All lines of some files that are not blank."""

    root: Path
    files: tuple[str, ...]
    text_field: str
    name_field: str
    rule: SplitRule

    @property
    def num_documents(self) -> int | None:
        return None if self.files else 0

    def references(self) -> Iterator[LineReference]:
        for file in self.files:
            split = split_of(file)
            for number, line in enumerate(read_lines(self.root / file), 1):
                if not line.isspace():
                    name = f"{file}:{number}"
                    yield LineReference(line, name, split, self.text_field, self.name_field, self.rule)

    def contents(self) -> Iterator[tuple[str, str]]:
        for file in self.files:
            with (self.root / file).open("rb") as opened:
                yield file, hashlib.file_digest(opened, "sha256").hexdigest()


def json_lines_source(
    path: str, text_field: str, name_field: str, exclude: Sequence[str], rule: SplitRule
) -> JsonLinesSource:
    """The files `.jsonl`, `.jsonl.gz` and `.jsonl.zst` in a folder and below, or a single one.

    Raises:
      UserError: there is neither such a folder nor such a file, or some files are named after splits and others not.
    """
    if path.endswith(SUFFIXES) and os.path.isfile(os.path.expanduser(path)):
        file = Path(path).expanduser().absolute()
        return JsonLinesSource(file.parent, (file.name,), text_field, name_field, rule)
    root = existing_folder(path)
    files = list_files(root, SUFFIXES, exclude)
    others = [file for file in files if split_of(file) is None]
    if others and len(others) < len(files) and not rule.listed:
        # Otherwise their documents would be assigned to all splits.
        raise UserError(
            f"{root} has files or folders named after splits ({', '.join(SPLITS)}), but {others[0]} is not: rename it, "
            "leave it out with TextSource.exclude, or name documents in SourceConfig.test_documents instead"
        )
    return JsonLinesSource(root, tuple(files), text_field, name_field, rule)


def split_of(file: str) -> str | None:
    """The split that a file is named after: train.jsonl, train-00001.jsonl.gz and train/1.jsonl.zst are of train."""
    first = file.split("/")[0].split(".")[0].split("-")[0]
    return first if first in SPLITS else None


def read_lines(path: Path) -> Iterator[bytes]:
    """The file's lines, decompressed, each with its line end.

    Raises:
      UserError: the compressed data is damaged or cut short.
    """
    try:
        with path.open("rb") as file:
            if path.suffix == ".gz":
                yield from gzip.GzipFile(fileobj=file)
            elif path.suffix == ".zst":
                yield from io.BufferedReader(_Zstandard(file), 1 << 20)
            else:
                yield from file
    except (EOFError, zlib.error, gzip.BadGzipFile, zstandard.ZstdError) as error:
        raise UserError(f"{path} cannot be decompressed: {error}") from None


class _Zstandard(io.RawIOBase):
    """Decompresses frame after frame. zstandard's own stream reader takes a file that is cut short for its end."""

    def __init__(self, file: BinaryIO):
        self._file = file
        self._decompressor = zstandard.ZstdDecompressor()
        self._frame = None
        self._compressed = b""
        self._text = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        while not self._text:
            self._compressed = self._compressed or self._file.read(1 << 16)
            if not self._compressed:
                if self._frame is not None:
                    raise EOFError("the file is cut short")
                return 0
            self._frame = self._frame or self._decompressor.decompressobj()
            self._text = memoryview(self._frame.decompress(self._compressed))
            self._compressed = self._frame.unused_data
            if self._frame.eof:
                self._frame = None
        size = min(len(buffer), len(self._text))
        buffer[:size], self._text = self._text[:size], self._text[size:]
        return size
