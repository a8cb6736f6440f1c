"""The interface of sources: documents, references to them, and errors of documents."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from meliad_like.errors import UserError


@dataclass(frozen=True)
class Document:
    """One text, read in order from its first to its last character."""

    name: str
    """Unique within its split, such as `austen/persuasion`."""
    split: str
    """`train`, `validation` or `test`."""
    text: str
    """The whole text; it can be encoded as UTF-8."""
    skipped: tuple[str, ...] = ()
    """The reasons why files of the document were left out, one line each."""


class Reference(Protocol):
    """Where a document is: small enough to be sent to a worker process, which then reads it."""

    def read(self) -> Document:
        """The document.

        Raises:
          NotUTF8Error: it is not UTF-8.
          EmptyDocumentError: it has nothing but whitespace.
          UserError: the document has another problem.
        """
        ...


class Source(Protocol):
    """An ordered collection of documents."""

    @property
    def num_documents(self) -> int | None:
        """None where counting means reading everything."""
        ...

    def references(self) -> Iterator[Reference]:
        """All documents, in an order that depends on nothing but the documents."""
        ...

    def contents(self) -> Iterator[tuple[str, str]]:
        """Pairs (name, digest or size) that change when a document does: what the fingerprint is made of."""
        ...


class NotUTF8Error(UserError):
    """A document that cannot be decoded, or (from JSON escapes) not be encoded, as UTF-8."""


class EmptyDocumentError(UserError):
    """A document without a single character that is not whitespace."""


def decode(raw: bytes, name: str) -> str:
    """`raw` as text, byte for byte: line ends and a byte order mark are kept.

    Raises:
      NotUTF8Error: naming the document and the offset of the first bad byte.
    """
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise NotUTF8Error(
            f"{name} is not UTF-8 (byte 0x{raw[error.start]:02x} at offset {error.start}): "
            "convert it, or leave such files out with FolderSourceConfig.undecodable = 'skip'"
        ) from None


def checked(document: Document) -> Document:
    """The same document, if it has text that can be written as UTF-8 (JSON may escape half a surrogate pair)."""
    if not document.text.strip():
        raise EmptyDocumentError(
            f"document {document.name} is empty: remove it, "
            "or leave such documents out with SourceConfig.empty = 'skip'"
        )
    try:
        document.text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise NotUTF8Error(
            f"document {document.name} has an unpaired surrogate at character {error.start}, which UTF-8 cannot hold: "
            "repair it, or leave such documents out with FolderSourceConfig.undecodable = 'skip'"
        ) from None
    return document
