"""Tokenised documents on disk: memory mapped, addressed by document.

    store.json            format version, fingerprints, totals and checksum of each split
    vocabulary.json ...   the vocabulary
    train/tokens.bin      all documents' tokens, uint16 or uint32, little endian, each document ended by its end token
    train/documents.npy   int64[4, documents]: numbers of tokens, bytes and words, and the end of each name in names.txt
    train/names.txt       names of the documents, each with a newline, in UTF-8
    train/unscored.npy    if there are any, ranges of tokens that cost no loss: int64[2, ranges], begins and ends
    validation/, test/    the same

The folder may lie in an object store (gs://...), which can't be memory mapped: a split is then copied to the local disk
when it is opened for the first time, into `meliad_like/stores` in `$XDG_CACHE_HOME`, by default in `~/.cache`.
"""

import hashlib
import shutil
import sys
from array import array
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from etils import epath

from meliad_like.caches import cache_folder
from meliad_like.data.documents import Source, SourceConfig, open_source, source_fingerprint
from meliad_like.data.split import Documents, Names
from meliad_like.data.vocabulary import Vocabulary, VocabularyConfig, load_vocabulary
from meliad_like.errors import MissingStoreError, StoreError, UserError, refusals
from meliad_like.registry import fingerprint
from meliad_like.remote import (
    CHUNK_BYTES,
    Version,
    absolute,
    any_path,
    copy_folder,
    is_remote,
    one_line,
    size_of,
    version,
)
from meliad_like.resumable import describe_differences, locked, read_json, whole_folder, write_json

FORMAT_VERSION = 5
STORE_NAME = "store.json"
TOKENS_NAME, DOCUMENTS_NAME, NAMES_NAME, UNSCORED_NAME = "tokens.bin", "documents.npy", "names.txt", "unscored.npy"


@dataclass(frozen=True)
class Totals:
    """Sums over the documents of a split, and their checksum."""

    documents: int = 0
    """The number of documents."""
    tokens: int = 0
    """The number of tokens, each document's end included."""
    bytes: int = 0
    """The number of bytes of the documents' text that costs loss, in UTF-8."""
    words: int = 0
    """The number of words of this text, as `count_words` counts them."""
    checksum: str = ""
    """SHA-256 of the split's files but `TOKENS_NAME`."""
    unscored: int = 0
    """The number of tokens that cost no loss because of their place (`Document.unscored`)."""
    unscored_firsts: int = 0
    """The number of documents of which the first token is one of these."""

    def size(self, dtype: str) -> int:
        """The number of bytes of `TOKENS_NAME`, with tokens of this type."""
        return self.tokens * np.dtype(dtype).itemsize


@dataclass(frozen=True)
class StoreInfo:
    """The contents of `store.json`."""

    fingerprint: str
    """SHA-256 of version, source and vocabulary, which together determine the tokens."""
    source: str
    """Fingerprint of the source: its settings, and the names and contents of its documents."""
    source_settings: str
    """Fingerprint of only the source's settings."""
    folder: str
    """The folder of the documents; "": they are of no folder."""
    files: str
    """Fingerprint of the names, sizes and times of the documents' files, which is quickly compared."""
    vocabulary: str
    """Fingerprint of the vocabulary."""
    vocabulary_settings: str
    """Fingerprint of the vocabulary's settings."""
    dtype: str
    """The type of the tokens on disk."""
    splits: dict[str, Totals]
    skipped: list[str]
    """The reasons why documents, or files of documents, were left out."""
    changed: int
    """The number of documents of which decoding does not give the text."""
    settings: dict[str, Any]
    """The settings of the source and of the vocabulary, which messages compare."""


def files_fingerprint(source: Source) -> str:
    """Fingerprint of the names, sizes and times of the files of a source."""
    return fingerprint([(name, *(version[:2] if version else ())) for name, _, version in source.files])


def absolute_folder(source: SourceConfig) -> str:
    """The absolute path of the source's folder; "": it has none."""
    return str(absolute(source.folder)) if source.folder else ""


def short(fingerprint: str) -> str:
    """A fingerprint shortened for messages."""
    return fingerprint[:12]


class TokenStore:
    """A token store, as `prepare` writes it."""

    def __init__(self, folder: epath.PathLike):
        """Opens a store, in a local folder or in an object store.

        Raises:
          UserError: there is no store, it was written by another version, or a file is damaged.
        """
        if not str(folder):
            raise UserError(
                "no token store is named: add the documents of a task, such as --gin_file=task/standard_library.gin, "
                "or bind ReaderConfig.store"
            )
        self.folder = any_path(folder)
        self.info = read_info(self.folder)
        self._opened: dict[epath.Path, Version] = {}
        for split in self.info.splits:
            self._check_size(self.folder / split, split, f"delete {self.folder} and prepare it again")

    @property
    def fingerprint(self) -> str:
        """SHA-256 of everything that determines the tokens."""
        return self.info.fingerprint

    @cached_property
    def vocabulary(self) -> Vocabulary:
        """The vocabulary of the tokens. Raises a UserError if the saved vocabulary is damaged."""
        vocabulary = load_vocabulary(self.folder)
        if vocabulary.fingerprint != self.info.vocabulary:
            raise UserError(
                f"the vocabulary in {self.folder} is not the one of its tokens: delete the store and prepare it again"
            )
        return vocabulary

    def totals(self, split: str) -> Totals:
        """The sums over a split's documents; zero for a split without documents.

        Bytes and words are zero if some tokens cost no loss, because a loss by byte would mean nothing.
        """
        totals = self.info.splits[split]
        return replace(totals, bytes=0, words=0) if self.vocabulary.free else totals

    def split(self, name: str) -> Documents:
        """The documents of a split, whose bytes and words are counted as in `totals`.

        Raises a UserError if the split does not exist, is empty or is damaged.
        Reading a token that is not in the vocabulary raises one, too.
        """
        present = [split for split, totals in self.info.splits.items() if totals.documents]
        if name not in present:
            problem = "has no documents" if name in self.info.splits else "is unknown"
            raise UserError(
                f"split {name!r} {problem} in the token store {self.folder}: choose one of {', '.join(present)}, or "
                "prepare another store, named by ReaderConfig.store, with larger SourceConfig.validation_share or "
                "test_share"
            )
        folder = self._local_copy(name) if is_remote(self.folder) else self.folder / name
        self._opened.setdefault(folder / TOKENS_NAME, version(folder / TOKENS_NAME))
        if _checksum(Path(folder)) != self.info.splits[name].checksum:
            raise UserError(f"{folder / DOCUMENTS_NAME} or {NAMES_NAME} is damaged or missing: prepare the store again")
        lengths, num_bytes, num_words, ends_of_names = np.asarray(np.load(folder / DOCUMENTS_NAME, mmap_mode="r"))
        if self.vocabulary.free:
            num_bytes = num_words = np.zeros_like(lengths)
        stored, begins = np.memmap(folder / TOKENS_NAME, self.info.dtype, "r"), np.cumsum(lengths) - lengths
        text = np.memmap(folder / NAMES_NAME, np.uint8, "r")

        def name_of(document: int) -> str:
            begin = ends_of_names[document - 1] if document else 0
            return text[begin : ends_of_names[document] - 1].tobytes().decode(errors="surrogatepass")

        def read(document: int, start: int, stop: int) -> np.ndarray:
            tokens = stored[begins[document] + start : begins[document] + stop].astype(np.int32)
            if (wrong := np.flatnonzero((tokens < 0) | (tokens >= self.vocabulary.size))).size:
                raise UserError(
                    f"token {tokens[wrong[0]]} at position {start + wrong[0]} of document {name_of(document)} is not "
                    f"in the vocabulary of {self.vocabulary.size}: prepare the token store again"
                )
            return tokens

        def scored(document: int, start: int, stop: int) -> np.ndarray:
            counted, begin = np.ones(stop - start, bool), begins[document] + start
            near = slice(
                np.searchsorted(unscored[1], begin, "right"), np.searchsorted(unscored[0], begin + stop - start)
            )
            for first, last in (unscored[:, near] - begin).T.tolist():
                counted[max(first, 0) : last] = False
            return counted

        names, indices = Names(len(lengths), name_of), np.arange(len(lengths))
        columns = (names, lengths, num_bytes, num_words, read, indices)
        if not self.info.splits[name].unscored:
            return Documents(*columns, free=self.vocabulary.free)
        unscored = np.load(folder / UNSCORED_NAME, mmap_mode="r")
        return Documents(*columns, free=self.vocabulary.free, scored=scored)

    def _local_copy(self, split: str) -> epath.Path:
        """The folder of a copy of a split in an object store, made once for all processes of this machine."""
        # A store that was prepared again gets its own copy.
        copy = cache_folder("stores") / self.fingerprint / split
        with locked(copy.parent / f".{split}.lock"):
            if not copy.exists():
                print(f"copying {self.folder / split} to {copy}", file=sys.stderr)
                try:
                    with whole_folder(copy) as incomplete:
                        copy_folder(self.folder / split, epath.Path(incomplete))
                except refusals() as error:
                    raise UserError(
                        f"{self.folder / split} can't be copied to {copy.parent}: {one_line(error)}; the same command "
                        "tries it again"
                    ) from error
            self._check_size(epath.Path(copy), split, f"delete {copy}, a copy")
        return epath.Path(copy)

    def _check_size(self, folder: epath.Path, split: str, way_out: str) -> None:
        expected = self.info.splits[split].size(self.info.dtype)
        if (size := size_of(folder / TOKENS_NAME)) != expected:
            raise UserError(f"{folder / TOKENS_NAME} has {size} bytes and should have {expected}: {way_out}")

    def check_unchanged(self) -> None:
        """Raises a UserError if a file of tokens was changed after it was opened."""
        for path, opened in self._opened.items():
            if not path.exists() or version(path) != opened:
                raise UserError(f"{path} was changed while it was read: prepare {self.folder} again, or bring it back")

    def check_settings(self, source: SourceConfig, vocabulary: VocabularyConfig) -> None:
        """Raises a UserError if the store was made with other settings, or from other documents."""
        for name, config in ("source", source), ("vocabulary", vocabulary):
            if getattr(self.info, f"{name}_settings") != config.settings_fingerprint:
                differing = describe_differences({name: self.info.settings[name]}, {name: config.settings})
                raise StoreError(
                    str(self.folder),
                    f"the token store {self.folder} was made by other {name} settings than this run's: "
                    f"{differing}; correct the settings, or prepare another store, named by ReaderConfig.store, or "
                    "delete this one and make it again",
                )
        self.check_documents(source)

    def check_documents(self, source: SourceConfig) -> None:
        """Raises a UserError if the store was made from other documents than the source's.

        A folder that was moved is the same one, and it may be missing on machines that only have the store.
        """
        folder, same_folder = absolute_folder(source), absolute_folder(source) == self.info.folder
        try:
            is_there = bool(folder) and any_path(folder).exists()
        except refusals():  # This machine may have no access to the documents.
            is_there = False
        if not folder or (same_folder and not is_there):
            return
        if not is_there:
            change = f"and FolderSourceConfig.folder = {folder!r} does not exist"
        else:
            opened = open_source(source)
            if files_fingerprint(opened) == self.info.files or source_fingerprint(source, opened) == self.info.source:
                return
            change = "which have changed since" if same_folder else f"and those in {folder} are others"
        raise UserError(
            f"the token store {self.folder} was made from the documents in {self.info.folder}, {change}: name the "
            "documents of the store, or prepare another one, named by --store or ReaderConfig.store; "
            "FolderSourceConfig.folder = '' reads the store without its documents"
        )

    def check_vocabulary(self, fingerprint: str, owner: str) -> None:
        """Raises a UserError unless `owner` (such as `the checkpoint DIR`) has this store's vocabulary."""
        if fingerprint != self.info.vocabulary:
            raise UserError(
                f"the vocabulary of {owner} ({short(fingerprint)}) is not that of the token store {self.folder} "
                f"({short(self.info.vocabulary)}): choose the store that it was trained with"
            )


def read_info(folder: Path | epath.Path) -> StoreInfo:
    """Reads `store.json`. Raises a UserError if the store is missing or damaged, or has another version."""
    path = folder / STORE_NAME
    try:
        saved = read_json(path)
    except (FileNotFoundError, NotADirectoryError):
        raise MissingStoreError(str(folder)) from None
    version = saved.pop("version", None) if isinstance(saved, dict) else None
    if type(version) is int and version != FORMAT_VERSION:
        raise UserError(
            f"the token store {folder} has format version {version}, this program reads {FORMAT_VERSION}: "
            "delete it and prepare it again"
        )
    if version is None or saved.pop("checksum", None) != fingerprint(saved):
        raise UserError(f"{path} is damaged: prepare the store again")
    splits = {split: Totals(**totals) for split, totals in saved["splits"].items()}
    return StoreInfo(**saved | {"splits": splits})


def _checksum(folder: Path) -> str:
    """SHA-256 of the files about a split's documents; "" where one is missing."""
    digest = hashlib.sha256()
    try:
        for name in (DOCUMENTS_NAME, NAMES_NAME, *([UNSCORED_NAME] if (folder / UNSCORED_NAME).exists() else [])):
            with (folder / name).open("rb") as file:
                hashlib.file_digest(file, lambda: digest)
    except FileNotFoundError:
        return ""
    return digest.hexdigest()


class SplitWriter:
    """Appends documents to a split. It keeps four numbers per document and two per range of tokens that cost no loss in
    memory, but no names and no tokens."""

    def __init__(self, folder: Path, vocabulary: Vocabulary):
        folder.mkdir(parents=True)
        self._folder = folder
        self._end_of_document, self._dtype = vocabulary.end_of_document, token_dtype(vocabulary.size)
        self._columns, self._unscored = [array("q") for _ in range(4)], [array("q") for _ in range(2)]
        self._tokens, self._names = (folder / TOKENS_NAME).open("wb"), (folder / NAMES_NAME).open("wb")

    def write(
        self,
        name: str,
        tokens: np.ndarray,
        num_bytes: int,
        num_words: int,
        unscored: Sequence[tuple[int, int]] = (),
    ) -> None:
        """Appends a document; `tokens` is int32[n] without the end of the document, `unscored` are ranges of them."""
        begin = self._num_tokens
        for ends, column in zip(zip(*unscored, strict=True), self._unscored):
            column.extend(begin + end for end in ends)
        self._tokens.write(tokens.astype(self._dtype, copy=False).data)
        self._tokens.write(np.array([self._end_of_document], self._dtype).data)
        # Half of a surrogate pair can come from JSON.
        self._names.write(name.encode(errors="surrogatepass") + b"\n")
        for column, value in zip(
            self._columns, (tokens.size + 1, num_bytes, num_words, self._names.tell()), strict=True
        ):
            column.append(value)

    @property
    def _num_tokens(self) -> int:
        return self._tokens.tell() // np.dtype(self._dtype).itemsize

    def append(self, folder: Path, totals: Totals) -> None:
        """Appends all documents of another split. Raises a UserError if it is damaged."""
        num_bytes = size_of(epath.Path(folder / TOKENS_NAME))
        if _checksum(folder) != totals.checksum or num_bytes != totals.size(self._dtype):
            raise UserError(f"{folder} is damaged: delete {folder.parent} and make it again")
        columns = np.load(folder / DOCUMENTS_NAME)
        columns[3] += self._names.tell()
        for column, values in zip(self._columns, columns, strict=True):
            column.frombytes(values.tobytes())
        if totals.unscored:
            for column, values in zip(self._unscored, np.load(folder / UNSCORED_NAME) + self._num_tokens, strict=True):
                column.frombytes(values.tobytes())
        for name, target in ((TOKENS_NAME, self._tokens), (NAMES_NAME, self._names)):
            with (folder / name).open("rb") as file:
                shutil.copyfileobj(file, target, CHUNK_BYTES)

    def close(self) -> Totals:
        """Writes the numbers of all documents, and returns their sums."""
        self._tokens.close()
        self._names.close()
        columns = np.array(self._columns)
        np.save(self._folder / DOCUMENTS_NAME, columns)
        sums, unscored = columns[:3].sum(axis=1).tolist(), np.array(self._unscored)
        if unscored.size:
            np.save(self._folder / UNSCORED_NAME, unscored)
        firsts = int(np.isin(np.cumsum(columns[0]) - columns[0], unscored[0]).sum())
        counts = {"unscored": int((unscored[1] - unscored[0]).sum()), "unscored_firsts": firsts}
        return Totals(columns.shape[1], *sums, checksum=_checksum(self._folder), **counts)


def repeated_name(folder: Path) -> tuple[str, int, int] | None:
    """A name that two documents of a split have, with their numbers in it, from 1; None if all names differ."""
    ends = np.load(folder / DOCUMENTS_NAME)[3].tolist()
    with (folder / NAMES_NAME).open("rb") as file:

        def name(document: int) -> bytes:
            begin = ends[document - 1] if document else 0
            file.seek(begin)
            return file.read(ends[document] - begin)

        # A collection may have more names than fit into memory.
        hashes = np.fromiter((hash(name(document)) for document in range(len(ends))), np.int64, len(ends))
        order = np.argsort(hashes, kind="stable")
        for place in np.flatnonzero(np.diff(hashes[order]) == 0).tolist():
            first, second = order[place : place + 2].tolist()
            if name(first) == name(second):
                return name(first)[:-1].decode(errors="surrogatepass"), first + 1, second + 1
    return None


def token_dtype(vocabulary_size: int) -> str:
    """The smallest type on disk that can represent every id."""
    return "<u2" if vocabulary_size <= 2**16 else "<u4"


def write_info(target: Path, **fields: Any) -> None:
    """Writes the fields of `StoreInfo` into `store.json`, which makes the folder a store; must be called last."""
    saved = asdict(StoreInfo(**fields))
    saved |= {"version": FORMAT_VERSION, "checksum": fingerprint(saved)}
    write_json(target / STORE_NAME, saved)
