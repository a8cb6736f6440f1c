"""Tokenised documents on disk: memory mapped, addressed by document.

    store.json            format version, fingerprints, totals of each split
    vocabulary.json ...   the vocabulary
    train/tokens.bin      all documents' tokens, uint16 or uint32, little endian, each document ended by its end token
    train/documents.npy   int64[documents, 3]: tokens, bytes, words
    train/names.json      names of the documents
    validation/, test/    the same

The folder is on a local disk: object stores cannot be memory mapped.
"""

import json
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from meliad_like.data.documents import SourceConfig
from meliad_like.data.splits import SPLITS
from meliad_like.data.vocabulary import Vocabulary, VocabularyConfig, load_vocabulary
from meliad_like.errors import UserError

FORMAT_VERSION = 1
STORE_NAME = "store.json"


@dataclass(frozen=True)
class Totals:
    """Sums over the documents of a split."""

    documents: int = 0
    """Number of documents."""
    tokens: int = 0
    """Tokens, each document's end included."""
    bytes: int = 0
    """Bytes of the documents' text in UTF-8."""
    words: int = 0
    """Words as `count_words` counts them."""


@dataclass(frozen=True)
class StoreInfo:
    """The contents of `store.json`."""

    version: int
    """Of the format."""
    fingerprint: str
    """SHA-256 of version, source and vocabulary: of everything that decides the tokens."""
    source: str
    """Fingerprint of the source: its settings, and the names and contents of its documents."""
    source_settings: str
    """Fingerprint of the source's settings alone."""
    vocabulary: str
    """Fingerprint of the vocabulary."""
    vocabulary_settings: str
    """Fingerprint of the settings that the vocabulary was made by."""
    dtype: str
    """Type of the tokens on disk."""
    splits: dict[str, Totals]
    """Totals of each split."""
    skipped: tuple[str, ...]
    """Why documents, or files of them, were left out."""


def short(fingerprint: str) -> str:
    """As much of a fingerprint as a message needs."""
    return fingerprint[:12]


def count_words(text: str) -> int:
    """Number of words between whitespace.

    PG-19's authors publish counts (train 1,973,136,207, validation 3,007,061, test 6,966,499: Rae et al.,
    arXiv:1911.05507, Table 2, and the README of google-deepmind/pg19) but not their code. Their word-level perplexity
    divides by "the number of tokens" of text that was not tokenised otherwise, and Appendix I of arXiv:2203.07852 says
    that "the word count ignores whitespace": that is, runs of characters that are not whitespace.
    """
    return len(text.split())


class Split:
    """The documents of one split."""

    def __init__(self, folder: Path, names: list[str], statistics: np.ndarray, tokens: np.ndarray):
        self.names = names
        """A name for each document."""
        self.lengths = statistics[:, 0]
        """int64[documents]: tokens of each document, its end included."""
        self.num_bytes = statistics[:, 1]
        """int64[documents]: bytes of each document's text in UTF-8."""
        self.num_words = statistics[:, 2]
        """int64[documents]: words of each document (`count_words`)."""
        self._folder = folder
        self._tokens = tokens
        self._starts = np.concatenate([[0], np.cumsum(self.lengths)])

    def __len__(self) -> int:
        return len(self.names)

    def tokens(self, document: int, start: int, stop: int) -> np.ndarray:
        """int32[stop - start]: these tokens of a document, copied out of the memory map.

        Raises:
          IndexError: there is no such document, or it has no such tokens.
        """
        if not 0 <= document < len(self):
            raise IndexError(f"document {document} of {len(self)} in {self._folder}")
        if not 0 <= start <= stop <= self.lengths[document]:
            raise IndexError(f"tokens {start} to {stop} of a document with {self.lengths[document]} in {self._folder}")
        first = self._starts[document]
        return self._tokens[first + start : first + stop].astype(np.int32)


class TokenStore:
    """A store that `prepare` wrote."""

    def __init__(self, folder: str | Path):
        """Opens a store and checks that it is complete.

        Raises:
          UserError: there is none, it was written by another version, or a file does not have the size it should.
        """
        self.folder = Path(folder).expanduser()
        self.info = read_info(self.folder)
        for split, totals in self.info.splits.items():
            path = self.folder / split / "tokens.bin"
            expected = totals.tokens * np.dtype(self.info.dtype).itemsize
            found = path.stat().st_size if path.exists() else 0
            if found != expected:
                raise UserError(
                    f"{path} has {found} bytes and should have {expected}: delete {self.folder} and prepare it again"
                )

    @property
    def fingerprint(self) -> str:
        """SHA-256 of everything that decides the tokens."""
        return self.info.fingerprint

    @cached_property
    def vocabulary(self) -> Vocabulary:
        """The vocabulary of the tokens."""
        return load_vocabulary(self.folder)

    def totals(self, split: str) -> Totals:
        """Sums over a split's documents; zero for a split without any."""
        return self.info.splits[split]

    def split(self, name: str) -> Split:
        """The documents of a split.

        Raises:
          UserError: there is no such split, or no document in it.
        """
        if name not in self.info.splits or not self.info.splits[name].documents:
            present = ", ".join(split for split, totals in self.info.splits.items() if totals.documents)
            why = "has no documents" if name in self.info.splits else "is unknown"
            raise UserError(f"split {name!r} {why} in the token store {self.folder}, which has {present}")
        folder = self.folder / name
        tokens = np.memmap(folder / "tokens.bin", self.info.dtype, "r")
        return Split(folder, json.loads((folder / "names.json").read_text()), np.load(folder / "documents.npy"), tokens)

    def check_settings(self, source: SourceConfig, vocabulary: VocabularyConfig) -> None:
        """Raises a UserError unless the store was made by these settings. The documents themselves are not read."""
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


def read_info(folder: Path) -> StoreInfo:
    """Reads `store.json`.

    Raises:
      UserError: there is no store, or one of another version.
    """
    try:
        saved = json.loads((folder / STORE_NAME).read_text())
    except (FileNotFoundError, NotADirectoryError):
        raise UserError(
            f"there is no token store at {folder}: make it with python -m meliad_like.prepare --store={folder}"
        ) from None
    if saved["version"] != FORMAT_VERSION:
        raise UserError(
            f"the token store {folder} has format version {saved['version']}, this program reads {FORMAT_VERSION}: "
            "delete it and prepare it again"
        )
    splits = {split: Totals(**totals) for split, totals in saved.pop("splits").items()}
    return StoreInfo(**{**saved, "skipped": tuple(saved["skipped"])}, splits=splits)


class SplitWriter:
    """Appends documents to a split; holds three numbers and a name per document in memory, and no tokens."""

    def __init__(self, folder: Path, vocabulary: Vocabulary, dtype: str):
        folder.mkdir(parents=True)
        self._folder = folder
        self._vocabulary = vocabulary
        self._dtype = dtype
        self._names: list[str] = []
        self._statistics: list[tuple[int, int, int]] = []
        self._file = (folder / "tokens.bin").open("wb")

    def write(self, name: str, tokens: np.ndarray, num_bytes: int, num_words: int) -> None:
        """Appends a document; `tokens` int32[n] without its end.

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
        """Writes what is known per document, and returns the sums."""
        self._file.close()
        statistics = np.asarray(self._statistics, np.int64).reshape(-1, 3)
        np.save(self._folder / "documents.npy", statistics)
        (self._folder / "names.json").write_text(json.dumps(self._names))
        return Totals(len(self._names), *map(int, statistics.sum(axis=0)))


def token_dtype(vocabulary_size: int) -> str:
    """The smallest of the two types that holds every id."""
    return "<u2" if vocabulary_size <= 2**16 else "<u4"


def write_info(folder: Path, info: StoreInfo) -> None:
    """Writes `store.json`, which makes the folder a store: to be called last."""
    assert set(info.splits) == set(SPLITS)
    (folder / STORE_NAME).write_text(json.dumps(asdict(info), indent=2) + "\n")
