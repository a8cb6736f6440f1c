"""Tokenised documents on disk: memory mapped, addressed by document.

    store.json            format version, fingerprints, totals and checksum of each split
    vocabulary.json ...   the vocabulary
    train/tokens.bin      all documents' tokens, uint16 or uint32, little endian, each document ended by its end token
    train/documents.npy   int64[4, documents]: numbers of tokens, bytes and words, and the end of each name in names.txt
    train/names.txt       names of the documents, each with a newline, in UTF-8
    train/unscored.npy    if there are any, ranges of tokens that cost no loss: int64[2, ranges], begins and ends
    validation/, test/    the same
    files.json            the files of the documents: name -> [size, time of the last change, SHA-256]
    version-2/ ...        all of these but the vocabulary, of documents that were added later

A store grows by versions: each has the documents of the one before, with the same numbers, and then those added. Splits
in an object store (gs://...) are copied to the user's cache directory (`caches.cache_folder("stores")`) when they are
opened for the first time.
"""

import functools
import hashlib
import itertools
import json
import operator
import sys
from collections.abc import Collection, Iterable, Sequence
from dataclasses import asdict, astuple, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from etils import epath

from meliad_like.caches import cache_folder
from meliad_like.data.split import Documents, Names
from meliad_like.errors import StoreError, UserError, one_line, refusals
from meliad_like.registry import fingerprint
from meliad_like.remote import Version, absolute, any_path, copy_folder, is_remote, size_of, version, write_whole
from meliad_like.resumable import describe_differences, locked, read_json, read_object, whole_folder, write_json
from meliad_like.sources.base import Source, SourceConfig, SourceFile, open_source, read_contents
from meliad_like.vocabularies.base import Vocabulary, VocabularyConfig, load_vocabulary

FORMAT_VERSION = 5
STORE_NAME, FILES_NAME = "store.json", "files.json"
TOKENS_NAME, DOCUMENTS_NAME, NAMES_NAME, UNSCORED_NAME = "tokens.bin", "documents.npy", "names.txt", "unscored.npy"


@dataclass(frozen=True)
class Totals:
    """Sums over the documents of a split, and their checksum."""

    documents: int = 0
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

    def __add__(self, other: "Totals") -> "Totals":
        """The sums over both; checksums follow one another."""
        return Totals(*map(operator.add, astuple(self), astuple(other)))

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
    """Fingerprint of its settings."""
    dtype: str
    """The type of the tokens on disk."""
    splits: dict[str, Totals]
    skipped: list[str]
    """The reasons why documents, or files of documents, were left out."""
    changed: int
    """The number of documents of which decoding does not give the text."""
    settings: dict[str, Any]
    """The settings of the source and of the vocabulary, which messages compare."""
    by_share: bool
    """`Source.by_share`."""


def files_fingerprint(source: Source) -> str:
    """Fingerprint of the names, sizes and times of the files of a source."""
    return fingerprint([(file.name, *file.version[:2]) for file in source.files])


def absolute_folder(source: SourceConfig) -> str:
    """The absolute path of the source's folder; "": it has none."""
    return str(absolute(source.folder)) if source.folder else ""


def short(fingerprint: str) -> str:
    """A fingerprint shortened for messages."""
    return fingerprint[:12]


class TokenStore:
    """A token store, as `prepare` writes it."""

    def __init__(self, folder: epath.PathLike, version: int | None = None):
        """Opens a store in a local folder or an object store, in this `version` (from 1; None: the newest). Raises a
        UserError if there is no store, it was written by another version, or a file is damaged."""
        if not str(folder):
            raise UserError("no token store is named: add documents (--gin_file=task/...), or bind ReaderConfig.store")
        self.folder = any_path(folder)
        infos = [read_info(self.folder)]
        while ((added := self.folder / version_name(len(infos) + 1)) / STORE_NAME).exists():
            infos.append(read_info(added))
        self.newest, self.infos = len(infos), infos[:version]
        self.version = len(self.infos)
        self.info = _summed(self.infos)
        self._opened: dict[epath.Path, Version] = {}
        for place, info in zip(self.folders, self.infos, strict=True):
            for split in info.splits:
                _check_size(place / split, split, info, f"delete {self.folder} and prepare it again")

    @property
    def folders(self) -> list[epath.Path]:
        """The folder of the documents of each version that were not in the version before."""
        return [self.folder, *(self.folder / version_name(i) for i in range(2, self.version + 1))]

    def read_by(self, fingerprints: Collection[str]) -> "TokenStore":
        """The version that has one of these fingerprints; this one if there is none."""
        for i, info in enumerate(self.infos, 1):
            if info.fingerprint in fingerprints and i < self.version:
                return TokenStore(self.folder, i)
        return self

    @property
    def fingerprint(self) -> str:
        """SHA-256 of everything that determines the tokens."""
        return self.info.fingerprint

    @cached_property
    def vocabulary(self) -> Vocabulary:
        """The vocabulary of the tokens. Raises a UserError if the saved vocabulary is damaged."""
        vocabulary = load_vocabulary(self.folder)
        if vocabulary.fingerprint != self.info.vocabulary:
            raise UserError(f"the vocabulary in {self.folder} is not that of its tokens: delete and prepare it again")
        return vocabulary

    def totals(self, split: str) -> Totals:
        """The sums over a split's documents. Bytes and words are zero for a vocabulary with ids that cost no loss,
        because a loss by byte would mean nothing."""
        totals = self.info.splits[split]
        return replace(totals, bytes=0, words=0) if self.vocabulary.free else totals

    def split(self, name: str) -> Documents:
        """The documents of a split, whose bytes and words are counted as in `totals`. Raises a UserError if it does not
        exist, is empty or is damaged; reading a token that is not in the vocabulary raises one, too."""
        present = [split for split, totals in self.info.splits.items() if totals.documents]
        if name not in present:
            problem = "has no documents" if name in self.info.splits else "is unknown"
            way_out = f"choose one of {', '.join(present)}, or prepare another store with larger shares (SourceConfig)"
            raise UserError(f"split {name!r} {problem} in the token store {self.folder}: {way_out}")
        versions = zip(self.folders, self.infos, strict=True)
        members = [self._documents(name, folder, info) for folder, info in versions if info.splits[name].documents]
        return members[0] if len(members) == 1 else Documents.joined(members)

    def _documents(self, name: str, place: epath.Path, info: StoreInfo) -> Documents:
        """The documents of a split that are in the folder of a version."""
        folder = self._local_copy(name, place, info) if is_remote(self.folder) else place / name
        self._opened.setdefault(folder / TOKENS_NAME, version(folder / TOKENS_NAME))
        if checksum(Path(folder)) != info.splits[name].checksum:
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
                token = f"token {tokens[wrong[0]]} at position {start + wrong[0]} of document {name_of(document)}"
                raise UserError(f"{token} is not in the vocabulary of {self.vocabulary.size}: prepare the store again")
            return tokens

        def scored(document: int, start: int, stop: int) -> np.ndarray:
            counted, begin = np.ones(stop - start, bool), begins[document] + start
            near = np.searchsorted(unscored[1], begin, "right"), np.searchsorted(unscored[0], begin + stop - start)
            for first, last in (unscored[:, slice(*near)] - begin).T.tolist():
                counted[max(first, 0) : last] = False
            return counted

        names, indices = Names(len(lengths), name_of), np.arange(len(lengths))
        columns = (names, lengths, num_bytes, num_words, read, indices)
        if not info.splits[name].unscored:
            return Documents(*columns, free=self.vocabulary.free)
        unscored = np.load(folder / UNSCORED_NAME, mmap_mode="r")
        return Documents(*columns, free=self.vocabulary.free, scored=scored)

    def _local_copy(self, split: str, place: epath.Path, info: StoreInfo) -> epath.Path:
        """The folder of a copy of a split in an object store, made once for all processes of this machine."""
        # A store that was prepared again gets its own copy.
        copy = cache_folder("stores") / info.fingerprint / split
        with locked(copy.parent / f".{split}.lock"):
            if not copy.exists():
                print(f"copying {place / split} to {copy}", file=sys.stderr)
                try:
                    with whole_folder(copy) as incomplete:
                        copy_folder(place / split, epath.Path(incomplete))
                except refusals() as error:
                    problem = f"{place / split} can't be copied to {copy.parent}: {one_line(error)}"
                    raise UserError(f"{problem}; the same command tries it again") from error
            _check_size(epath.Path(copy), split, info, f"delete {copy}, a copy")
        return epath.Path(copy)

    def check_unchanged(self) -> None:
        """Raises a UserError if a file of tokens was changed after it was opened."""
        for path, opened in self._opened.items():
            if not path.exists() or version(path) != opened:
                raise UserError(f"{path} was changed while it was read: prepare {self.folder} again, or bring it back")

    def check_settings(
        self, source: SourceConfig, vocabulary: VocabularyConfig, opened: Source | None = None
    ) -> list[SourceFile]:
        """The same as `check_documents`. Raises a UserError also if the store was made with other settings."""
        for name, config in ("source", source), ("vocabulary", vocabulary):
            if getattr(self.info, f"{name}_settings") != config.settings_fingerprint:
                differing = describe_differences({name: self.info.settings[name]}, {name: config.settings})
                problem = f"the token store {self.folder} was made by other {name} settings than this run's"
                way_out = "correct them, or prepare another ReaderConfig.store, or delete this one and make it again"
                raise StoreError(str(self.folder), f"{problem}: {differing}; {way_out}")
        return self.check_documents(source, opened)

    def check_documents(self, source: SourceConfig, opened: Source | None = None) -> list[SourceFile]:
        """The files of the source that it did not have when the store was made, whose documents `prepare` adds. Raises
        a UserError if the store was made from other documents. A folder may have moved, or be missing here."""
        folder, same_folder = absolute_folder(source), absolute_folder(source) == self.info.folder
        try:
            is_there = bool(folder) and any_path(folder).exists()
        except refusals():  # This machine may have no access to the documents.
            is_there = False
        if not folder or (same_folder and not is_there):
            return []
        if not is_there:
            change = f"and FolderSourceConfig.folder = {folder!r} does not exist"
        else:
            opened = opened or open_source(source)
            if (added := self.added_files(source, opened)) is not None:
                return added
            change = "which have changed since" if same_folder else f"and those in {folder} are others"
        problem = f"the token store {self.folder} was made from the documents in {self.info.folder}, {change}"
        way_out = "name these documents, or prepare another store (--store, ReaderConfig.store)"
        raise UserError(f"{problem}: {way_out}; FolderSourceConfig.folder = '' reads the store without its documents")

    def added_files(self, config: SourceConfig, source: Source) -> list[SourceFile] | None:
        """The files of a source that it did not have when the store was made; None if others have changed since.

        The contents of the other files are then those of the source, so that nobody reads them again.
        """
        if files_fingerprint(source) == self.info.files:
            return []
        saved: dict[str, list] = {}
        for folder in self.folders:
            saved |= read_object(folder / FILES_NAME)
        old = [file for file in source.files if file.name in saved]
        touched = [file for file in old if saved[file.name][:2] != [*file.version[:2]]]
        read_contents(source, (file for file in touched if file.name not in source.contents))
        changed = [file for file in touched if saved[file.name][2] != source.contents[file.name]]
        added = [file for file in source.files if file.name not in saved]
        grown = {file.shard for file in added}
        if (
            any(file.shard is not None for file in changed)
            # A document has another file, files are missing, or documents are dealt in another way.
            or any(file.shard in grown for file in old)
            or len(old) < len(saved)
            or (added and source.by_share != self.info.by_share)
            # Without new documents, the descriptions of the old ones have changed.
            or (changed and not added)
        ):
            return None
        source.contents.update((file.name, saved[file.name][2]) for file in old if file not in changed)
        return added + changed

    def check_vocabulary(self, fingerprint: str, owner: str) -> None:
        """Raises a UserError unless `owner` (such as `the checkpoint DIR`) has this store's vocabulary."""
        if fingerprint != self.info.vocabulary:
            theirs, ours = short(fingerprint), short(self.info.vocabulary)
            problem = f"the vocabulary of {owner} ({theirs}) is not that of the token store {self.folder} ({ours})"
            raise UserError(f"{problem}: choose the store that it was trained with")


def read_info(folder: Path | epath.Path) -> StoreInfo:
    """Reads `store.json`. Raises a UserError if the store is missing or damaged, or has another version."""
    path = folder / STORE_NAME
    try:
        saved = read_json(path)
    except (FileNotFoundError, NotADirectoryError):
        raise StoreError(str(folder), f"there is no token store at {folder}: make it") from None
    version = saved.pop("version", None) if isinstance(saved, dict) else None
    if type(version) is int and version != FORMAT_VERSION:
        raise UserError(f"{folder} has format version {version}, not {FORMAT_VERSION}: delete it and prepare it again")
    if version is None or saved.pop("checksum", None) != fingerprint(saved):
        raise UserError(f"{path} is damaged: prepare the store again")
    splits = {split: Totals(**totals) for split, totals in saved["splits"].items()}
    return StoreInfo(**saved | {"splits": splits})


def version_name(version: int) -> str:
    """The name of the folder of what a version adds, in that of the store."""
    return f"version-{version}"


def _summed(infos: Sequence[StoreInfo]) -> StoreInfo:
    """The newest of these versions, with the sums over all of them."""
    splits = {name: functools.reduce(operator.add, (info.splits[name] for info in infos)) for name in infos[0].splits}
    skipped = list(itertools.chain.from_iterable(info.skipped for info in infos))
    changed = sum(info.changed for info in infos)
    return replace(infos[-1], splits=splits, skipped=skipped, changed=changed)


def _check_size(folder: epath.Path, split: str, info: StoreInfo, way_out: str) -> None:
    expected = info.splits[split].size(info.dtype)
    if (size := size_of(folder / TOKENS_NAME)) != expected:
        raise UserError(f"{folder / TOKENS_NAME} has {size} bytes and should have {expected}: {way_out}")


def checksum(folder: Path) -> str:
    """SHA-256 of the files about a split's documents; "" where one is missing."""
    digest = hashlib.sha256()
    try:
        for name in (DOCUMENTS_NAME, NAMES_NAME, *([UNSCORED_NAME] if (folder / UNSCORED_NAME).exists() else [])):
            with (folder / name).open("rb") as file:
                hashlib.file_digest(file, lambda: digest)
    except FileNotFoundError:
        return ""
    return digest.hexdigest()


def token_dtype(vocabulary_size: int) -> str:
    """The smallest type on disk that can represent every id."""
    return "<u2" if vocabulary_size <= 2**16 else "<u4"


def write_info(target: Path, opened: Source, files: Iterable[SourceFile], **fields: Any) -> None:
    """Writes `files.json`, of these files of a source whose contents are known, and the fields of `StoreInfo` into
    `store.json`, which makes the folder a store; must be called last."""
    contents = {file.name: [*file.version[:2], opened.contents[file.name]] for file in files}
    write_whole(target / FILES_NAME, json.dumps(contents))
    saved = asdict(StoreInfo(**fields, files=files_fingerprint(opened), by_share=opened.by_share))
    saved |= {"version": FORMAT_VERSION, "checksum": fingerprint(saved)}
    write_json(target / STORE_NAME, saved)
