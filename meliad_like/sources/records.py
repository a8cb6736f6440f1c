"""Documents in records with a field for the text: JSON lines, rows of parquet files, examples of TFDS."""

import functools
import gzip
import hashlib
import io
import itertools
import shutil
import sys
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from tempfile import TemporaryFile
from typing import IO, Any, ClassVar

import numpy as np

from meliad_like.errors import UserError, refusals
from meliad_like.remote import CHUNK_BYTES, AnyPath, Version, absolute, is_remote, version
from meliad_like.resumable import parse_json
from meliad_like.sources.base import (
    SOURCES,
    SPLITS,
    BadDocumentError,
    Document,
    FolderSourceConfig,
    RecordError,
    Reference,
    Source,
    SourceFile,
    decode,
    raise_bad_document,
    raise_if_remote,
)
from meliad_like.sources.files import FilesSourceConfig, list_files
from meliad_like.sources.named_splits import named_splits, names_assign, splits_of_path

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

# pyarrow and tensorflow_datasets take a second to import, and worker processes import this module.
INFO_NAME = "dataset_info.json"
ROWS_AT_ONCE, READ_BYTES = 64, 2**18
SPLIT_FIELD = "split"
LARGEST_WINDOW: dict[int, int] = {zstd.DecompressionParameter.window_log_max: 31}
"""Files that were compressed with `zstd --long=31` need 2 GiB of memory."""


@dataclass(frozen=True)
class RecordsSourceConfig(FolderSourceConfig):
    """The fields of sources of records."""

    text_field: str = "text"
    """The field that holds a document's text (`book_text` in PG-19)."""
    name_field: str = ""
    """The field that holds a document's name; "": documents are numbered."""
    unscored_field: str = ""
    """The field that says what is read and costs no loss, neither in training nor in evaluations: a text that comes
    before the document's text, such as the prompt of a completion, or a list of ranges [begin, end] of the text's
    characters. These parts are tokenised separately from the rest. "": everything costs loss."""

    def document(self, record: Mapping[str, Any], place: str, found_in: str | None) -> Document:
        """The document of a record; its place is its name where no field gives one."""

        def value(field: str) -> Any:
            if field not in record:
                raise RecordError(f"{place} has no field {field!r}; it has {', '.join(map(repr, record))}")
            saved = record[field]
            return decode(saved, f"{place}: the field {field!r}", self.encoding) if isinstance(saved, bytes) else saved

        text, name = value(self.text_field), value(self.name_field) if self.name_field else place
        text = "" if text is None else text  # The field of the table is empty.
        unscored = (value(self.unscored_field) if self.unscored_field else None) or ()
        for field, content, kinds in ((self.text_field, text, str), (self.name_field, name, (str, int, np.integer))):
            if not isinstance(content, kinds):
                raise RecordError(f"{place}: the field {field!r} is not text but {type(content).__name__}")
        if isinstance(unscored, str):
            text, unscored = unscored + text, [(0, len(unscored))]
        if not isinstance(unscored, (list, tuple)) or any(
            not isinstance(each, (list, tuple)) or [*map(type, each)] != [int, int] for each in unscored
        ):
            raise RecordError(f"{place}: the field {self.unscored_field!r} is neither text nor pairs of whole numbers")
        named = splits_of_path(str(value(SPLIT_FIELD))) - {"train"} if SPLIT_FIELD in record else ()
        if named and found_in is None and self.splits_by_name and not self.listed:
            way_out = "write the records of each split to a file named after it"
            raise BadDocumentError(f"{place} is of {min(named)} by its field {SPLIT_FIELD!r}, not read: {way_out}")
        ranges = tuple((begin, end) for begin, end in unscored)
        return Document(str(name), self.split_of(str(name), found_in), text, unscored=ranges)


@dataclass(frozen=True)
class RecordFilesSourceConfig(RecordsSourceConfig, FilesSourceConfig):
    """The fields of sources of files with many records; the folder may also be one such file."""

    usual_suffixes: ClassVar[tuple[str, ...]] = ()
    """The suffixes of the files that this kind of source reads."""
    unreadable: ClassVar[str] = ""
    """The words of a message for a damaged file."""

    def open(self) -> Source:
        root, files, splits, passed_over = self.find_files()
        # `zstd FILE` keeps the file.
        if copies := {f"{file}{suffix}" for file in files for suffix in (".gz", ".zst")} & {*files}:
            copy = root / min(copies)
            raise UserError(f"{copy} is {copy.stem} again: remove one of them, or leave it out with exclude")
        by_share = not names_assign(splits)
        contents = tuple(SourceFile(file, root / file, files[file], i) for i, file in enumerate(files))
        found_in = {} if by_share else splits
        hashes: dict[str, str] = {}
        shards = tuple(partial(self._references, file, root / file, found_in.get(file), hashes) for file in files)
        dealt = by_share and not self.listed
        return Source(shards, None if files else 0, contents, dealt, passed_over, str(root), contents=hashes)

    def find_files(self) -> tuple[AnyPath, dict[str, Version], dict[str, str], str]:
        """The folder, the files (`list_files`), the split that each is named after, and which files were not read."""
        path, passed_over = absolute(self.folder), ""
        suffixes = self.suffixes or self.usual_suffixes
        if self.folder.endswith(suffixes) and path.is_file():
            root, files = path.parent, {path.name: version(path)}
        else:
            root = self.existing_folder()
            files, passed_over = list_files(root, suffixes, self.exclude)
        return root, files, named_splits(self, root, files, splits_of_path), passed_over

    def _references(self, file: str, path: AnyPath, split: str | None, hashes: dict[str, str]) -> Iterator[Reference]:
        number = 0
        try:
            hashed = None if file in hashes else partial(hashes.__setitem__, file)
            for number, record in enumerate(self.records(path, hashed), 1):
                if record:
                    # The record itself: a compressed file cannot be read from the middle.
                    yield partial(self.read, record, f"{file}:{number}", split)
        except (*refusals(), *self.damage()) as error:
            if not isinstance(error, self.damage()):
                raise_if_remote(path, error)
            text = getattr(error, "strerror", None)
            reason = f"can't be read: {text}" if text else f"{self.unreadable}: {error}"
            yield partial(raise_bad_document, f"{path} {' '.join(reason.split())} (after record {number})")

    def records(self, path: AnyPath, hashed: Callable[[str], None] | None) -> Iterator[Any]:
        """The argument of `read` for each record of a file; something false where a record is left out. A file that was
        read from its beginning to its end is `hashed` (SHA-256 of its content; None: it is known)."""
        raise NotImplementedError

    def damage(self) -> tuple[type[Exception], ...]:
        """The errors that `records` raises if a file is damaged, in addition to an OSError."""
        raise NotImplementedError

    def read(self, record: Any, place: str, found_in: str | None) -> Document:
        """The document of a record."""
        return self.document(record, place, found_in)


@SOURCES.register("jsonl")
class JsonLinesSource(RecordFilesSourceConfig):
    """Files with one JSON object per line (`.jsonl` and `.ndjson`, also compressed by gzip or zstd, as which `.json.gz`
    and `.json.zst` are read too); the folder may also be one such file."""

    usual_suffixes = (
        ".jsonl", ".jsonl.gz", ".jsonl.zst", ".ndjson", ".ndjson.gz", ".ndjson.zst", ".json.gz", ".json.zst",
    )  # fmt: skip
    unreadable = "cannot be decompressed"

    def records(self, path: AnyPath, hashed: Callable[[str], None] | None) -> Iterator[bytes]:
        zstd_open = partial(zstd.open, options=LARGEST_WINDOW)
        plain = partial(io.BufferedReader, buffer_size=READ_BYTES)
        open_file: Any = {".gz": gzip.open, ".zst": zstd_open}.get(path.suffix, plain)
        with path.open("rb") as raw, open_file(content := _Hashed(raw)) as file:
            yield from (b"" if line.isspace() else line for line in file)
            while content.read(READ_BYTES):
                pass  # behind what is compressed
            if hashed:
                hashed(content.hash.hexdigest())

    def damage(self) -> tuple[type[Exception], ...]:
        return EOFError, gzip.BadGzipFile, zlib.error, zstd.ZstdError

    def read(self, record: bytes, place: str, found_in: str | None) -> Document:
        text = decode(record, place, self.encoding)
        try:
            # Some programs for Windows put a byte order mark before a file's first record.
            parsed = parse_json(text.removeprefix("\ufeff"), place)
        except UserError as error:
            raise RecordError(str(error)) from None
        if not isinstance(parsed, dict):
            raise RecordError(f"{place} is not a JSON object but {type(parsed).__name__}")
        return self.document(parsed, place, found_in)


class _Hashed(io.RawIOBase):
    """A file that is read once, from its beginning, with SHA-256 of what was read."""

    def __init__(self, file: IO[bytes]):
        self._file, self.hash = file, hashlib.sha256()

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        size = self._file.readinto(buffer)  # type: ignore[attr-defined]
        self.hash.update(memoryview(buffer)[:size])
        return size


@SOURCES.register("parquet")
class ParquetSource(RecordFilesSourceConfig):
    """Parquet files (`.parquet`), one document per row; the folder may also be one such file."""

    usual_suffixes = (".parquet",)
    unreadable = "cannot be read as parquet"

    def records(self, path: AnyPath, hashed: Callable[[str], None] | None) -> Iterator[dict[str, Any]]:
        from pyarrow import parquet

        with path.open("rb") as raw, TemporaryFile() as copy:
            # Its rows are not read from the beginning to the end, and a remote file is read once.
            if hashed and is_remote(path):
                shutil.copyfileobj(content := _Hashed(raw), copy, CHUNK_BYTES)
                hashed(content.hash.hexdigest())
                raw = copy
            file = parquet.ParquetFile(raw)
            names = file.schema_arrow.names
            fields = [name for name in (self.text_field, self.name_field, self.unscored_field) if name]
            if not set(fields) <= set(names):
                # The error of each row lists the fields that there are.
                yield from itertools.repeat(dict.fromkeys(names), file.metadata.num_rows)
                return
            for rows in file.iter_batches(ROWS_AT_ONCE, columns=[*fields, *({SPLIT_FIELD} & set(names))]):
                yield from rows.to_pylist()

    def damage(self) -> tuple[type[Exception], ...]:
        from pyarrow import ArrowException

        return ArrowException, UnicodeDecodeError


@SOURCES.register("tfds")
class TfdsSource(RecordsSourceConfig):
    """A TensorFlow Datasets dataset in array_record files; the folder is the `data_dir`, or one version's folder."""

    dataset: str = "pg19"
    """Name of the dataset, if `folder` holds several."""

    def open(self) -> Source:
        """Raises a UserError if there is no dataset, or there are several, or its format needs TensorFlow."""
        import tensorflow_datasets as tfds

        root = self._version_folder()
        info = tfds.builder_from_directory(root).info
        if info.file_format != tfds.core.FileFormat.ARRAY_RECORD:
            written_as = "an unknown" if info.file_format is None else info.file_format.value
            build = f"tfds build {info.name} --file_format=array_record"
            raise UserError(f"{root} is in {written_as} format, which needs TensorFlow: write it again with {build}")
        if unknown := [split for split in info.splits if split not in SPLITS]:
            raise UserError(f"{root} has a split {unknown[0]!r}; the splits that can be read are {', '.join(SPLITS)}")
        sizes = {split: info.splits[split].num_examples for split in SPLITS if split in info.splits}
        # The info names the version, the splits, and every file's number of examples; a version's files never change.
        contents = (SourceFile(info.full_name, root / INFO_NAME, version(root / INFO_NAME), 0),)
        held_out = self.splits_by_name and not {"validation", "test"}.isdisjoint(sizes)
        by_share = not held_out and not self.listed
        references = partial(self._references, str(root), sizes, held_out)
        return Source((references,), sum(sizes.values()), contents, by_share)

    def _version_folder(self) -> AnyPath:
        root = self.existing_folder()
        if is_remote(root):
            raise UserError(f"a dataset of TensorFlow Datasets is read from a disk alone: copy {root} to one")
        if (root / INFO_NAME).exists():
            return root
        versions = sorted(path.parent for path in (root / self.dataset).rglob(INFO_NAME))
        if not versions:
            build = f"tfds build {self.dataset} --file_format=array_record --data_dir={root}"
            raise UserError(f"{root} has no dataset {self.dataset!r} (no {INFO_NAME}): write it with {build}")
        if len(versions) > 1:
            names = ", ".join(map(str, versions))
            raise UserError(f"{root} has several versions of a dataset: set FolderSourceConfig.folder to one, {names}")
        return versions[0]

    def _references(self, root: str, sizes: dict[str, int], held_out: bool) -> Iterator[Reference]:
        for split, size in sizes.items():
            for index in range(size):
                yield partial(self.read, root, split, index, split if held_out else None)

    def read(self, root: str, dataset_split: str, index: int, found_in: str | None) -> Document:
        """One example of the dataset in `root`."""
        return self.document(_data_source(root, dataset_split)[index], f"{dataset_split}/{index}", found_in)


@functools.cache
def _data_source(folder: str, split: str) -> Any:
    """The opened split, once in each process."""
    import tensorflow_datasets as tfds

    # Its decorator hides the parameters from type checkers.
    return tfds.builder_from_directory(folder).as_data_source(split=split)  # type: ignore[call-arg]
