"""The interface of vocabularies, the implementation that most kinds share, and the vocabulary of bytes."""

import codecs
import hashlib
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np

from meliad_like.errors import UserError
from meliad_like.remote import write_whole

SETTINGS_NAME = "vocabulary.json"


class Vocabulary(Protocol):
    """Text to ids and back; `decode(encode(text)) == text` where `lossless`."""

    size: int
    """The number of ids, including unused ones."""
    end_of_document: int
    """The id that ends a document. No text is encoded to it, except ends of lines in vocabularies of whole words."""

    @property
    def lossless(self) -> bool:
        """Whether decoding restores every text. If not, bits per byte are too low, and depend on the vocabulary."""
        ...

    @property
    def fingerprint(self) -> str:
        """SHA-256 of everything that determines the ids of a text."""
        ...

    def encode(self, text: str) -> np.ndarray:
        """Encodes a text as int32[tokens], without an end of document."""
        ...

    def decode(self, ids: Iterable[int]) -> str:
        """The text of these ids; bytes that are no UTF-8 become U+FFFD.

        Raises:
          UserError: an id is out of range.
        """
        ...

    def decode_bytes(self, ids: Iterable[int]) -> bytes:
        """The UTF-8 of these ids, which may begin and end within a character. The end of a document has no bytes, or
        is a newline in a vocabulary of whole words.

        Raises:
          UserError: an id is out of range.
        """
        ...

    def stream(self, unfinished: bytes = b"") -> "StreamingDecoder":
        """A decoder that takes one id at a time; `unfinished` bytes of an earlier decoder come first."""
        ...

    def save(self, folder: str | Path) -> None:
        """Saves the vocabulary into an existing folder, for `load_vocabulary`."""
        ...


class StreamingDecoder:
    """Decodes one token at a time and holds back the bytes of a character until it is complete."""

    def __init__(self, vocabulary: Vocabulary, unfinished: bytes = b""):
        self._vocabulary = vocabulary
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._decoder.setstate((unfinished, 0))

    @property
    def unfinished(self) -> bytes:
        """The bytes that are held back."""
        return self._decoder.getstate()[0]

    def push(self, token: int) -> str:
        """The characters that this token completes, often one or more, sometimes none."""
        return self._decoder.decode(self._vocabulary.decode_bytes([token]))

    def finish(self) -> str:
        """The rest: U+FFFD if the text ended within a character, otherwise nothing."""
        return self._decoder.decode(b"", final=True)


class TableVocabulary:
    """A vocabulary in which each id stands for fixed bytes (none for control tokens and padding)."""

    def __init__(self, pieces: Sequence[bytes], end_of_document: int, size_multiple: int):
        self._pieces = pieces
        self.end_of_document = end_of_document
        self.size_multiple = size_multiple
        self.size = -(-max(len(pieces), end_of_document + 1) // size_multiple) * size_multiple

    def decode_bytes(self, ids: Iterable[int]) -> bytes:
        ids = np.asarray(list(ids), np.int64)
        if ids.size and not (ids.min() >= 0 and ids.max() < self.size):
            wrong = ids[(ids < 0) | (ids >= self.size)][0]
            raise UserError(f"token {wrong} is out of range for a vocabulary of {self.size}: it is of another one")
        return b"".join(self._pieces[token] for token in ids if token < len(self._pieces))

    def decode(self, ids: Iterable[int]) -> str:
        return self.decode_bytes(ids).decode("utf-8", "replace")

    def stream(self, unfinished: bytes = b"") -> StreamingDecoder:
        return StreamingDecoder(self, unfinished)  # type: ignore[arg-type]  # subclasses complete the protocol

    def _digest(self, kind: str, model: bytes) -> str:
        settings = [kind, self.size, self.end_of_document, hashlib.sha256(model).hexdigest()]
        return hashlib.sha256(json.dumps(settings).encode()).hexdigest()

    def _save(self, folder: str | Path, kind: str, **more: str) -> None:
        settings = {"kind": kind, "size_multiple": self.size_multiple, **more}
        write_whole(Path(folder) / SETTINGS_NAME, json.dumps(settings, indent=2) + "\n")


class ByteVocabulary(TableVocabulary):
    """The vocabulary of bytes: id i < 256 is the byte i of UTF-8, and 256 ends a document."""

    def __init__(self, size_multiple: int = 1):
        super().__init__([bytes([byte]) for byte in range(256)], 256, size_multiple)

    @property
    def lossless(self) -> bool:
        return True

    @property
    def fingerprint(self) -> str:
        return self._digest("bytes", b"")

    def encode(self, text: str) -> np.ndarray:
        return np.frombuffer(text.encode("utf-8"), np.uint8).astype(np.int32)

    def save(self, folder: str | Path) -> None:
        self._save(folder, "bytes")
