"""Documents, and what all of their sources have in common."""

import contextlib
import hashlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any, ClassVar, Literal, NamedTuple, NoReturn

from etils import epath

from meliad_like.errors import UserError, one_line, refusals
from meliad_like.registry import Registry, changed_settings, fingerprint, resumable
from meliad_like.remote import CHUNK_BYTES, AnyPath, Version, absolute, is_remote, read_whole
from meliad_like.validation import check_choices

READERS_AT_ONCE = 16  # The number of files of which the contents are compared at the same time.
SPLITS = ("train", "validation", "test")
SOURCES = Registry("source", "meliad_like.sources.files", "meliad_like.sources.records", "meliad_like.sources.hub")
Policy = Literal["stop", "skip"]


@dataclass(frozen=True)
class Document:
    """One text, read in order from its first to its last character."""

    name: str
    """The name of the document, unique within its split, such as `austen/persuasion`."""
    split: str
    """The split of the document: `train`, `validation` or `test`."""
    text: str
    """The whole text; it can be encoded as UTF-8."""
    skipped: tuple[str, ...] = ()
    """The reasons why files of the document were left out, one line each."""
    unscored: tuple[tuple[int, int], ...] = ()
    """Ranges (begin, end) of characters that cost no loss, in order."""
    contents: tuple[tuple[str, str], ...] = ()
    """Pairs (name of a `SourceFile`, SHA-256 of its content) of files that were read for this document."""

    def __post_init__(self) -> None:
        edges = [0, *itertools.chain.from_iterable(self.unscored), len(self.text)]
        if sorted(edges) != edges:
            problem = f"document {self.name} of {len(self.text)} characters has the ranges {self.unscored} without loss"
            raise RecordError(f"{problem}, which are not pairs (begin, end) in order")
        scored = [self.text[begin:end] for begin, end in zip(edges[::2], edges[1::2], strict=True)]
        if all(not part or part.isspace() for part in scored):
            raise EmptyDocumentError(f"document {self.name} is empty: remove it, or set SourceConfig.empty = 'skip'")
        try:
            self.text.encode("utf-8")
        except UnicodeEncodeError as error:
            problem = f"document {self.name} has an unpaired surrogate at character {error.start}"
            raise NotUTF8Error(f"{problem}: repair it, or set FolderSourceConfig.undecodable = 'skip'") from None


Reference = Callable[[], Document]
"""Reads a document, or raises a BadDocumentError. It is small enough to be sent to a worker process."""
Shard = Callable[[], Iterable[Reference]]
"""Some documents that can be read without those before them: a file of records, or all documents."""


class SourceFile(NamedTuple):
    """A file that determines documents."""

    name: str
    """A name that is the same in every folder."""
    path: epath.PathLike
    """Perhaps as text: to make `pathlib`'s path of each of many files takes longer than to list them."""
    version: Version
    shard: int | None
    """The index of the shard that is read from the file; None: it only describes others."""


@dataclass(frozen=True)
class Source:
    """An ordered collection of documents."""

    shards: tuple[Shard, ...]
    """All documents, one shard after the other, in an order that depends on nothing but the documents."""
    num_documents: int | None
    """The number of documents, of a part about the number; None where counting means reading everything."""
    files: tuple[SourceFile, ...]
    """The files that determine the documents."""
    by_share: bool = False
    """Whether the shares of validation and test assign the documents, instead of lists or names of files."""
    passed_over: str = ""
    """A sentence about the files of the folder that are not read, and why."""
    place: str = ""
    """The folder of the files, which not every config names."""
    documents_at_once: int = 1
    """The number of documents that a process reads at the same time: several where each needs a request."""
    contents: dict[str, str] = field(default_factory=dict)
    """SHA-256 of the contents of files that were read, by their names: shards and readers of documents add them."""

    def references(self) -> Iterator[Reference]:
        """All documents."""
        for shard in self.shards:
            yield from shard()

    def only(self, files: Sequence[SourceFile]) -> "Source":
        """The documents of these files alone, which are all files of some shards."""
        shards = sorted({file.shard for file in files if file.shard is not None})
        return replace(self, shards=tuple(self.shards[i] for i in shards), num_documents=None)

    def part(self, index: int, number: int) -> "Source":
        """A part of the documents, of a `number` of parts that follow one another. Each has as many shards; only a
        shard that several parts share is read from its beginning by each of them."""
        shards = []
        for i, shard in enumerate(self.shards):
            # In units of a shard's `number`th share.
            begin, end = (max(0, min(k * len(self.shards) - i * number, number)) for k in (index, index + 1))
            if begin < end:
                shards.append(partial(_share, shard, begin, end, number))
        num_documents = self.num_documents and -(-self.num_documents // number)
        return replace(self, shards=tuple(shards), num_documents=num_documents)


def _share(shard: Shard, begin: int, end: int, number: int) -> Iterable[Reference]:
    """The documents of a shard from `begin` to `end`, in units of its `number`th share."""
    if end - begin == number:
        return shard()
    size = sum(1 for _ in shard())
    return itertools.islice(shard(), begin * size // number, end * size // number)


class BadDocumentError(UserError):
    """A document, or a file of documents, that can't be used."""

    kind: ClassVar[str] = "can't be read"
    """The predicate for a message about several such documents, for example "are empty"."""
    policy: ClassVar[str] = ""
    """The field of the source's config that may leave such a document out; "": none."""


class NotUTF8Error(BadDocumentError):
    """A document that cannot be decoded, or (from JSON escapes) not be encoded, as UTF-8."""

    kind, policy = "are not UTF-8", "undecodable"


class EmptyDocumentError(BadDocumentError):
    """A document without a single character that is not whitespace."""

    kind, policy = "are empty", "empty"


class RecordError(BadDocumentError):
    """A record without the text or the name that it should have."""

    kind = "are not records with the fields"


def raise_bad_document(message: str) -> NoReturn:
    """Raises a BadDocumentError: bound to its message, the `Reference` of a document that can't be read."""
    raise BadDocumentError(message)


def decode(raw: bytes, name: str, encoding: str = "utf-8") -> str:
    """`raw` as text, byte for byte: line ends and a byte order mark are kept. An error names the first bad byte."""
    try:
        return raw.decode(encoding)
    except UnicodeDecodeError as error:
        problem = f"{name} is not {encoding.upper()} (byte 0x{raw[error.start]:02x} at offset {error.start})"
        way_out = "convert it, name the encoding of all files in FolderSourceConfig.encoding (such as 'cp1252')"
        raise NotUTF8Error(f"{problem}: {way_out}, or set FolderSourceConfig.undecodable = 'skip'") from None


@dataclass(frozen=True)
class SourceConfig:
    """The fields that all sources have: how documents are assigned to splits."""

    validation_documents: tuple[str, ...] = ()
    """Names of the documents for validation. If this or `test_documents` names any, all others are for training."""
    test_documents: tuple[str, ...] = ()
    """Names of the documents for the test split."""
    validation_share: float = 0.05
    """Share of the documents for validation, chosen by a hash of their names, unless lists or names of folders and
    files assign them. A split with a share has at least one document, if there are enough."""
    test_share: float = 0.05
    """Share of the documents for the test split, chosen in the same way."""
    empty: Policy = "stop"
    """The treatment of a document without text: `stop` with an error that names it, or `skip` it with a warning."""

    folder: ClassVar[str] = ""
    undecodable: ClassVar[str] = "stop"
    encoding: ClassVar[str] = "utf-8"
    splits_by_name: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check_choices(self)
        shares = self.validation_share, self.test_share
        if min(shares) < 0 or sum(shares) >= 1:
            names = f"validation_share={shares[0]} and test_share={shares[1]}"
            raise UserError(f"{names} must not be negative, and leave some for train")
        if both := set(self.validation_documents) & set(self.test_documents):
            raise UserError(f"{min(both)} is both in validation_documents and in test_documents")

    @property
    def listed(self) -> frozenset[str]:
        """All names in the lists."""
        return frozenset(self.validation_documents) | frozenset(self.test_documents)

    def split_of(self, name: str, found_in: str | None) -> str:
        """The split of a document, by the first of these that applies:

        1. Lists of names, if there are any: all documents that they do not name are for training.
        2. `found_in`: the split that the document's folder or file is named after.
        3. A hash of the document's name, so that a document stays in its split when the collection grows; `fill_splits`
           then takes a document for a split that is still empty.
        """
        if self.listed:
            if name in self.test_documents:
                return "test"
            return "validation" if name in self.validation_documents else "train"
        if found_in is not None:
            return found_in
        # [0, test) [test, test + validation) [the rest: train).
        fraction = _fraction(name)
        if fraction < self.test_share:
            return "test"
        return "validation" if fraction < self.test_share + self.validation_share else "train"

    @property
    def settings(self) -> dict[str, Any]:
        """The kind and all fields but the folder, which may differ between machines."""
        fields = asdict(self).items()
        return {"kind": SOURCES.name_of(self)} | {name: value for name, value in fields if name != "folder"}

    @property
    def settings_fingerprint(self) -> str:
        """SHA-256 of the settings that are not defaults, without the folder."""
        changed = changed_settings(self, SOURCES).items()
        return fingerprint({name: value for name, value in changed if name != "folder"})

    def open(self) -> Source:
        """Opens the source, which may have no documents. Raises a UserError if the folder is missing."""
        raise NotImplementedError


@dataclass(frozen=True)
class FolderSourceConfig(SourceConfig):
    """The fields of sources that read a folder."""

    folder: str = resumable("")  # type: ignore[misc]  # the class variable is for sources without one
    """The folder to read. It may change when a run resumes, because the token store says whether it is the same one."""
    splits_by_name: bool = True  # type: ignore[misc]
    """Whether folders and files named after splits assign documents (`meliad_like/sources/named_splits.py`)."""
    undecodable: Policy = "stop"  # type: ignore[misc]
    """The treatment of a document that is not UTF-8: `stop` or `skip`. In a repository only the file is left out."""
    encoding: str = "utf-8"  # type: ignore[misc]
    """The encoding of text, such as `cp1252`. Tokens are of UTF-8 all the same."""

    def __post_init__(self) -> None:
        super().__post_init__()
        try:
            "a".encode(self.encoding)
        except LookupError:
            raise UserError(f"encoding={self.encoding!r} is not known to Python, as 'utf-8' and 'cp1252' are") from None

    def existing_folder(self) -> AnyPath:
        """The folder's absolute path. Raises a UserError if there is no such folder; an object store has no folders."""
        path = absolute(self.folder)
        if not self.folder or not (is_remote(path) or path.is_dir()):
            hint = "name yours with --gin_param=\"FolderSourceConfig.folder='DIR'\""
            raise UserError(f"there is no folder of documents at FolderSourceConfig.folder = {self.folder!r}: {hint}")
        return path


def open_source(config: SourceConfig) -> Source:
    """Opens the source. Raises a UserError if the folder is missing, or contains no document."""
    source = config.open()
    # The Hub knows those of large files.
    source.contents.update({file.name: file.version.sha256 for file in source.files if file.version.sha256})
    if source.num_documents == 0:
        kind, place = SOURCES.name_of(config), config.folder and f" in {config.folder}"
        raise UserError(f"the {kind} source has no documents{place}: {source.passed_over or 'there are no files'}")
    return source


def source_fingerprint(config: SourceConfig, source: Source) -> str:
    """SHA-256 of the settings and of every document's name and contents, so that it changes if a store would."""
    read_contents(source, (file for file in source.files if file.name not in source.contents))
    return fingerprint([config.settings_fingerprint, *((name, source.contents[name]) for name, *_ in source.files)])


def read_contents(source: Source, files: Iterable[SourceFile]) -> None:
    """Adds SHA-256 of the contents of these files to those of the source."""
    files = list(files)
    with ThreadPoolExecutor(READERS_AT_ONCE) as readers:
        source.contents.update(zip((file.name for file in files), readers.map(_content, files)))


def _content(file: SourceFile) -> str:
    """SHA-256 of the content of a file."""
    path = absolute(file.path)
    try:
        if file.version.size < CHUNK_BYTES:
            return hashlib.sha256(read_whole(path)).hexdigest()
        with path.open("rb") as content:
            return hashlib.file_digest(content, "sha256").hexdigest()
    except refusals() as error:
        raise_if_remote(path, error)
        return "unreadable"  # It will be listed among the bad documents.


def raise_if_remote(path: AnyPath, error: Exception) -> None:
    """Raises a UserError if a file that can't be read is in an object store, where others would fail, too."""
    if is_remote(path):
        raise UserError(f"{path} can't be read: {one_line(error)}; the same command tries it again") from None


def fill_splits(config: SourceConfig, source: Source) -> Source:
    """The source with a document for each split that has a share and is empty, as happens in small collections.

    It is the document of the largest split whose hash is nearest to the shares that are held out, so that it keeps its
    split when documents are added, until one has a nearer hash or the share itself holds one.
    """
    shares = {"train": 1.0, "validation": config.validation_share, "test": config.test_share}
    members: dict[str, list[tuple[float, str]]] = {split: [] for split, share in shares.items() if share}
    for reference in source.references() if source.by_share else ():
        with contextlib.suppress(BadDocumentError):
            document = reference()
            members[document.split].append((_fraction(document.name), document.name))
        if all(members.values()):
            return source
    moves = {}
    for split, documents in members.items():
        largest = max(members.values(), key=len)
        if not documents and len(largest) > 1:
            documents.append(min(largest))
            largest.remove(documents[0])
            moves[documents[0][1]] = split
    if not moves:
        return source
    return replace(source, shards=tuple(partial(_moved, shard, moves) for shard in source.shards))


def _moved(shard: Shard, moves: dict[str, str]) -> Iterator[Reference]:
    return (partial(_move, reference, moves) for reference in shard())


def _move(reference: Reference, moves: dict[str, str]) -> Document:
    document = reference()
    return replace(document, split=moves.get(document.name, document.split))


def _fraction(name: str) -> float:
    """The first 64 bits of a name's SHA-256, as a fraction of 1."""
    # A name from JSON may contain half a surrogate pair.
    digest = hashlib.sha256(name.encode(errors="surrogatepass")).digest()
    return int.from_bytes(digest[:8], "big") / 2**64
