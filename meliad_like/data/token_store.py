"""Tokenised documents on disk: memory mapped, addressed by document.

    store.json            format version, fingerprints, totals of each split
    vocabulary.json ...   the vocabulary
    train/tokens.bin      all documents' tokens, uint16 or uint32, little endian, each document ended by its end token
    train/documents.npy   int64[documents, 3]: tokens, bytes, words
    train/names.json      names of the documents
    validation/, test/    the same

The folder may lie in an object store (gs://...), which can't be memory mapped: a split is then copied to the local disk
when it is opened for the first time (`store_copy`).
"""

import hashlib
import json
import os
import tokenize
from dataclasses import asdict, dataclass, fields
from functools import cached_property
from pathlib import Path

import numpy as np
from etils import epath

from meliad_like.data.documents import SourceConfig
from meliad_like.data.splits import SPLITS
from meliad_like.data.store_copy import local_split
from meliad_like.data.vocabulary import Vocabulary, VocabularyConfig, load_vocabulary
from meliad_like.errors import UserError
from meliad_like.remote import any_path, size_of
from meliad_like.saved_json import check_fields, read_json

FORMAT_VERSION = 1
STORE_NAME = "store.json"
DTYPES = ("<u2", "<u4")


@dataclass(frozen=True)
class Totals:
    """Sums over the documents of a split."""

    documents: int = 0
    """The number of documents."""
    tokens: int = 0
    """The number of tokens, each document's end included."""
    bytes: int = 0
    """The number of bytes of the documents' text in UTF-8."""
    words: int = 0
    """The number of words, as `count_words` counts them."""


@dataclass(frozen=True)
class StoreInfo:
    """The contents of `store.json`."""

    version: int
    """The version of the format."""
    fingerprint: str
    """SHA-256 of version, source and vocabulary, which together determine the tokens."""
    source: str
    """Fingerprint of the source: its settings, and the names and contents of its documents."""
    source_settings: str
    """Fingerprint of only the source's settings."""
    vocabulary: str
    """Fingerprint of the vocabulary."""
    vocabulary_settings: str
    """Fingerprint of the vocabulary's settings."""
    dtype: str
    """Type of the tokens on disk."""
    splits: dict[str, Totals]
    """Totals of each split."""
    skipped: tuple[str, ...]
    """The reasons why documents, or files of documents, were left out."""


def store_fingerprint(source: str, vocabulary: str) -> str:
    """The fingerprint of a store, computed from those of its source and its vocabulary."""
    return hashlib.sha256(json.dumps([FORMAT_VERSION, source, vocabulary]).encode()).hexdigest()


def short(fingerprint: str) -> str:
    """A fingerprint shortened for messages."""
    return fingerprint[:12]


def count_words(text: str) -> int:
    """The number of words, separated by whitespace.

    PG-19's authors publish counts (train 1,973,136,207, validation 3,007,061, test 6,966,499: Rae et al.,
    arXiv:1911.05507, Table 2, and the README of google-deepmind/pg19) but not their code. Their word-level perplexity
    divides by "the number of tokens" of untokenised text, and Appendix I of arXiv:2203.07852 says
    that "the word count ignores whitespace": that is, runs of characters that are not whitespace.
    """
    return len(text.split())


class Split:
    """The documents of one split."""

    def __init__(self, folder: epath.Path, names: list[str], statistics: np.ndarray, tokens: np.ndarray):
        self.names = names
        """A name for each document."""
        self.lengths = statistics[:, 0]
        """int64[documents]: the number of tokens of each document, its end included."""
        self.num_bytes = statistics[:, 1]
        """int64[documents]: the number of bytes of each document's text in UTF-8."""
        self.num_words = statistics[:, 2]
        """int64[documents]: the number of words of each document (`count_words`)."""
        self._folder = folder
        self._tokens = tokens
        self._starts = np.concatenate([[0], np.cumsum(self.lengths)])

    def __len__(self) -> int:
        return len(self.names)

    def tokens(self, document: int, start: int, stop: int) -> np.ndarray:
        """int32[stop - start]: the tokens of a document in this range, copied out of the memory map.

        Raises:
          IndexError: the document does not exist, or has no such tokens.
        """
        if not 0 <= document < len(self):
            raise IndexError(f"document {document} of {len(self)} in {self._folder}")
        if not 0 <= start <= stop <= self.lengths[document]:
            raise IndexError(f"tokens {start} to {stop} of a document with {self.lengths[document]} in {self._folder}")
        first = self._starts[document]
        return self._tokens[first + start : first + stop].astype(np.int32)


class TokenStore:
    """A token store, as `prepare` writes it."""

    def __init__(self, folder: epath.PathLike):
        """Opens a store and checks that it is complete.

        Args:
          folder: a local folder, or one of an object store.

        Raises:
          UserError: there is no store, it was written by another version, or a file is damaged.
        """
        self.folder = any_path(folder)
        self.info = read_info(self.folder)
        self._opened: dict[epath.Path, tuple[int, int]] = {}
        for split in self.info.splits:
            path = self.folder / split / "tokens.bin"
            expected, found = self._token_bytes(split), size_of(path)
            if found != expected:
                raise UserError(
                    f"{path} has {found} bytes and should have {expected}: delete {self.folder} and prepare it again"
                )

    @property
    def fingerprint(self) -> str:
        """SHA-256 of everything that determines the tokens."""
        return self.info.fingerprint

    @cached_property
    def vocabulary(self) -> Vocabulary:
        """The vocabulary of the tokens.

        Raises:
          UserError: the saved vocabulary is damaged.
        """
        vocabulary = load_vocabulary(self.folder)
        if vocabulary.fingerprint != self.info.vocabulary:
            raise UserError(
                f"the vocabulary in {self.folder} is not the one that the store was made with "
                f"({short(self.info.vocabulary)}): delete it and prepare it again"
            )
        return vocabulary

    def totals(self, split: str) -> Totals:
        """The sums over a split's documents; zero for a split without documents."""
        return self.info.splits[split]

    def split(self, name: str) -> Split:
        """The documents of a split.

        Raises:
          UserError: the split does not exist, is empty or is damaged.
        """
        if name not in self.info.splits or not self.info.splits[name].documents:
            present = ", ".join(split for split, totals in self.info.splits.items() if totals.documents)
            why = "has no documents" if name in self.info.splits else "is unknown"
            raise UserError(f"split {name!r} {why} in the token store {self.folder}, which has {present}")
        folder = local_split(self.folder, self.fingerprint, name, self._token_bytes(name))
        self._opened.setdefault(folder / "tokens.bin", _size_and_time(folder / "tokens.bin"))
        names, statistics = _read_documents(folder, self.info.splits[name])
        return Split(folder, names, statistics, np.memmap(folder / "tokens.bin", self.info.dtype, "r"))

    def _token_bytes(self, split: str) -> int:
        return self.info.splits[split].tokens * np.dtype(self.info.dtype).itemsize

    def check_unchanged(self) -> None:
        """
        Raises:
          UserError: a file of tokens was changed after it was opened.
        """
        for path, before in self._opened.items():
            if _size_and_time(path) != before:
                raise UserError(f"{path} was changed while it was read: prepare {self.folder} again, or bring it back")

    def check_settings(self, source: SourceConfig, vocabulary: VocabularyConfig) -> None:
        """Raises a UserError unless the store was made with these settings. The documents are not read."""
        pairs = (
            ("source", self.info.source_settings, source.settings_fingerprint),
            ("vocabulary", self.info.vocabulary_settings, vocabulary.settings_fingerprint),
        )
        for name, stored, wanted in pairs:
            if stored != wanted:
                raise UserError(
                    f"the token store {self.folder} was made by other {name} settings ({short(stored)}) than this "
                    f"run's ({short(wanted)}): prepare another store, or correct the settings"
                )

    def check_vocabulary(self, fingerprint: str, owner: str) -> None:
        """Raises a UserError unless `owner` (such as `the checkpoint DIR`) has this store's vocabulary."""
        if fingerprint != self.info.vocabulary:
            raise UserError(
                f"the vocabulary of {owner} ({short(fingerprint)}) is not that of the token store {self.folder} "
                f"({short(self.info.vocabulary)}): choose the store that it was trained with"
            )


def read_info(folder: Path | epath.Path) -> StoreInfo:
    """Reads `store.json`.

    Raises:
      UserError: the store is missing or damaged, or has another version.
    """
    path = folder / STORE_NAME
    try:
        saved = read_json(path)
    except (FileNotFoundError, NotADirectoryError):
        raise UserError(
            f"there is no token store at {folder}: make it with python -m meliad_like.prepare --store={folder}"
        ) from None
    check_fields(saved, {"version": int}, str(path))
    if saved["version"] != FORMAT_VERSION:
        raise UserError(
            f"the token store {folder} has format version {saved['version']}, this program reads {FORMAT_VERSION}: "
            "delete it and prepare it again"
        )
    types = {field.name: str for field in fields(StoreInfo)} | {"version": int, "splits": dict, "skipped": list}
    check_fields(saved, types, str(path))
    splits = {}
    for split in SPLITS:
        totals = saved["splits"].get(split)
        check_fields(totals, {field.name: int for field in fields(Totals)}, f"{path}, {split}")
        splits[split] = Totals(**{field.name: totals[field.name] for field in fields(Totals)})
    info = StoreInfo(**{name: saved[name] for name in types} | {"splits": splits, "skipped": tuple(saved["skipped"])})
    # The fingerprint is also used as the name of a folder for copies.
    if info.dtype not in DTYPES or info.fingerprint != store_fingerprint(info.source, info.vocabulary):
        raise UserError(
            f"{path} is damaged: its fingerprint or dtype is not what it should be; prepare the store again"
        )
    return info


def _size_and_time(path: epath.Path) -> tuple[int, int]:
    if not path.exists():
        return 0, 0
    status = os.stat(path)
    return status.st_size, status.st_mtime_ns


def _read_documents(folder: epath.Path, totals: Totals) -> tuple[list[str], np.ndarray]:
    """The names of a split's documents, and int64[documents, 3]: their numbers of tokens, bytes and words."""
    try:
        names = read_json(folder / "names.json")
        # Not np.load, which also opens archives and can unpickle.
        statistics = np.array(np.lib.format.open_memmap(folder / "documents.npy", "r"))
    except FileNotFoundError as error:
        raise UserError(f"{error.filename} is missing: prepare the token store again") from None
    # The errors of numpy and its header parser for a truncated or overwritten file.
    except (ValueError, OSError, EOFError, TypeError, OverflowError, SyntaxError, tokenize.TokenError) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"{folder / 'documents.npy'} is damaged ({error}): prepare the token store again") from None
    intact = (
        isinstance(names, list)
        and len(names) == totals.documents
        and all(isinstance(name, str) for name in names)
        and statistics.dtype == np.int64
        and statistics.shape == (totals.documents, 3)
        and (statistics >= [1, 0, 0]).all()
        and statistics.sum(axis=0).tolist() == [totals.tokens, totals.bytes, totals.words]
    )
    if not intact:
        raise UserError(
            f"{folder} is damaged: documents.npy and names.json don't add up to what {STORE_NAME} says, {totals}: "
            "prepare the token store again"
        )
    return names, statistics


class SplitWriter:
    """Appends documents to a split. It keeps three numbers and a name per document in memory, but no tokens."""

    def __init__(self, folder: Path, vocabulary: Vocabulary, dtype: str):
        folder.mkdir(parents=True)
        self._folder = folder
        self._vocabulary = vocabulary
        self._dtype = dtype
        self._names: list[str] = []
        self._statistics: list[tuple[int, int, int]] = []
        self._file = (folder / "tokens.bin").open("wb")

    def write(self, name: str, tokens: np.ndarray, num_bytes: int, num_words: int) -> None:
        """Appends a document; `tokens` is int32[n] without the end of the document.

        Raises:
          UserError: a token is out of range.
        """
        if tokens.size and not (tokens.min() >= 0 and tokens.max() < self._vocabulary.size):
            wrong = tokens[(tokens < 0) | (tokens >= self._vocabulary.size)][0]
            raise UserError(
                f"token {wrong} of document {name} is out of range for a vocabulary of {self._vocabulary.size}"
            )
        self._file.write(np.append(tokens, self._vocabulary.end_of_document).astype(self._dtype).tobytes())
        self._names.append(name)
        self._statistics.append((tokens.size + 1, num_bytes, num_words))

    def close(self) -> Totals:
        """Writes the names and numbers of all documents, and returns the sums."""
        self._file.close()
        statistics = np.asarray(self._statistics, np.int64).reshape(-1, 3)
        np.save(self._folder / "documents.npy", statistics)
        (self._folder / "names.json").write_text(json.dumps(self._names))
        return Totals(len(self._names), *map(int, statistics.sum(axis=0)))


def token_dtype(vocabulary_size: int) -> str:
    """The smaller of the two types, if it can represent every id; otherwise the larger one."""
    return "<u2" if vocabulary_size <= 2**16 else "<u4"


def write_info(folder: Path, info: StoreInfo) -> None:
    """Writes `store.json`, which makes the folder a store; must be called last."""
    assert set(info.splits) == set(SPLITS)
    (folder / STORE_NAME).write_text(json.dumps(asdict(info), indent=2) + "\n")
