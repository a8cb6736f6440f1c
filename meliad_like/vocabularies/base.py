"""Vocabularies: text to tokens and back. Each kind except bytes has a file of its own.

The end of a document is a token of its own.
"""

import codecs
import hashlib
import io
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from etils import epath

from meliad_like.errors import UserError, reading
from meliad_like.registry import Registry, changed_settings, fingerprint
from meliad_like.remote import local_files, write_whole
from meliad_like.resumable import check_fields, read_json
from meliad_like.validation import check_choices, check_positive

VOCABULARIES = Registry(
    "vocabulary",
    "meliad_like.vocabularies.sentencepiece",
    "meliad_like.vocabularies.tokenizers",
    "meliad_like.vocabularies.dictionary",
    "meliad_like.vocabularies.token_ids",
)
SETTINGS_NAME = "vocabulary.json"
PIECE = 2**16
"""The number of characters of a large text that are encoded at once, and of ids that are decoded."""
DEFAULT_END = "<|endoftext|>"
UNKNOWN = "\u2047"
"""The character that stands for characters for which a vocabulary has no token."""


class Vocabulary:
    """Text to ids and back. Each id stands for fixed bytes (none for control tokens and padding)."""

    kind: ClassVar[str]
    """The name of the kind in `VOCABULARIES`."""
    file_name: ClassVar[str] = ""
    """The name of the file that `save` writes in addition to `SETTINGS_NAME`; "": none."""
    free: ClassVar[tuple[int, ...]] = ()
    """The ids that are read, but cost no loss as targets: they are neither learned nor counted by evaluations."""
    end_is_text: ClassVar[bool] = False
    """Whether a model may write the end of a document inside of a text, as texts that it was trained on have it."""
    prefix: bytes = b""
    """The bytes that `encode` puts before every text."""

    def __init__(
        self,
        pieces: Sequence[bytes],
        end_of_document: int | None,
        size_multiple: int,
        model: str | bytes = b"",
        lossless: bool = True,
        stop_tokens: Sequence[int] = (),
        **settings: str | int | None,
    ):
        """
        Args:
          pieces: the bytes of each id.
          end_of_document: may be the id after the last piece; None: no id ends a document.
          model: contents of the file that `save` writes.
          lossless: whether decoding restores every text, whatever is in it.
          stop_tokens: further ids at which a model stops.
          settings: further fields of the config that loads the saved vocabulary.
        """
        self._pieces = pieces
        self._model = model.encode() if isinstance(model, str) else model
        self._settings = {"kind": self.kind, "size_multiple": size_multiple, **settings}
        if stop_tokens:
            self._settings["stop_tokens"] = list(stop_tokens)
        ends = [end for end in (end_of_document, *stop_tokens) if end is not None]
        self.end_tokens = tuple(dict.fromkeys(ends))
        """The ids at which a model stops: first that of `end_of_document`, if there is one."""
        self.lossless = lossless
        """Whether decoding restores every text. If not, bits per byte are too low, and depend on the vocabulary."""
        self.size = round_up(max([len(pieces), *(end + 1 for end in self.end_tokens)]), size_multiple)
        """The number of ids, including unused ones."""
        self.writable = np.array([bool(piece) for piece in pieces] + [False] * (self.size - len(pieces)))
        """True for the ids that a model may write, bool[size]: those that stand for bytes, and the document's end."""
        self.writable[list(self.end_tokens)] = True

    @property
    def end_of_document(self) -> int:
        """The id that ends a document, which only ends of lines in vocabularies of words are encoded to. Raises a
        UserError if there is none."""
        if not self.end_tokens:
            raise UserError("no token ends this model's documents: name one by TokenIdsVocabularyConfig.end_token")
        return self.end_tokens[0]

    @property
    def fingerprint(self) -> str:
        """SHA-256 of everything that determines the ids of a text."""
        model = hashlib.sha256(self._model).hexdigest()
        return fingerprint([self.kind, self.size, *(self.end_tokens[:1] or [None]), model])

    def encode(self, text: str) -> np.ndarray:
        """Encodes a text as int32[tokens], without an end of document."""
        raise NotImplementedError

    def pieces(self, text: str) -> Iterator[str]:
        """The pieces of a large text whose tokens, one piece after the other, are those of the text."""
        begin, place = 0, PIECE
        while place < len(text):
            if cut := self.boundary(text, place):
                yield text[begin:cut]
                begin = cut
            place = (cut or place) + PIECE
        yield text[begin:]

    def boundary(self, text: str, place: int) -> int | None:
        """A place where a text can be cut into pieces (`pieces`), at or soon after `place`; None: there is none."""
        return None

    def encode_continuation(self, text: str) -> np.ndarray:
        """Encodes a text that continues another one, perhaps inside of a word: without `prefix`."""
        return self.encode(text)

    def restores(self, text: str, ids: np.ndarray) -> bool:
        """Whether decoding a text's tokens gives the text: documents are checked with it while they are prepared."""
        raw, place = text.encode(errors="surrogatepass"), 0
        # Some at a time, because a document may be large.
        for part in np.split(ids, range(PIECE, ids.size, PIECE)):
            decoded = self.decode_bytes(part) if place else self.document_bytes(part)
            if not raw.startswith(decoded, place):
                return False
            place += len(decoded)
        return place == len(raw)

    def lacks(self, character: str) -> bool:
        """Whether the vocabulary has no token for a character: it is lost, or becomes an unknown token."""
        text = self.decode(self.encode(character))
        lost = not text and not character.isspace()
        return text != character and (lost or UNKNOWN in text or "\ufffd" in text)

    def decode(self, ids: Iterable[int]) -> str:
        """The text of these ids; U+FFFD for bytes that are not UTF-8. Raises a UserError if an id is out of range."""
        return self.document_bytes(ids).decode("utf-8", "replace")

    def document_bytes(self, ids: Iterable[int]) -> bytes:
        """The UTF-8 of a text that begins with these ids: `decode_bytes` without `prefix`."""
        return self.decode_bytes(ids).removeprefix(self.prefix)

    def decode_bytes(self, ids: Iterable[int]) -> bytes:
        """The UTF-8 of these ids, which may begin and end within a character. The end of a document has no bytes, or
        is a newline in a vocabulary of whole words. Raises a UserError if an id is out of range."""
        ids = ids if isinstance(ids, np.ndarray) else np.asarray(list(ids), np.int64)
        if ids.size and not (ids.min() >= 0 and ids.max() < self.size):
            wrong = ids[(ids < 0) | (ids >= self.size)][0]
            raise UserError(f"token {wrong} is out of range for a vocabulary of {self.size}: it is of another one")
        # Some at a time: lists take many times the memory of the ids of a large document.
        parts = (part[part < len(self._pieces)].tolist() for part in np.split(ids, range(PIECE, ids.size, PIECE)))
        return b"".join(b"".join(map(self._pieces.__getitem__, part)) for part in parts)

    def save(self, folder: str | Path) -> None:
        """Writes the files that `load_vocabulary` reads into an existing local folder."""
        write_whole(Path(folder) / SETTINGS_NAME, json.dumps(self._settings, indent=2) + "\n")
        if self.file_name:
            write_whole(Path(folder) / self.file_name, self._model)


def utf8_decoder(unfinished: bytes = b"") -> codecs.IncrementalDecoder:
    """A decoder of bytes as they come: the first bytes of a character, here those of `unfinished`, are its state
    (`getstate()[0]`) until the character is complete."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    decoder.setstate((unfinished, 0))
    return decoder


@dataclass(frozen=True)
class VocabularyConfig:
    """The fields that all kinds of vocabularies have."""

    size_multiple: int = 1
    """The multiple to which the size is rounded up for the hardware; the additional ids are never used."""

    size: ClassVar[int] = 32_000

    def __post_init__(self) -> None:
        check_choices(self)
        check_positive(self, ("size_multiple",))

    @property
    def trained(self) -> bool:
        """Whether the vocabulary has to be learned from documents."""
        return False

    @property
    def settings(self) -> dict[str, Any]:
        """The kind and all fields; instead of a model file, the fingerprint of the vocabulary in it."""
        values = {"kind": VOCABULARIES.name_of(self)} | asdict(self)
        return values | ({"model_file": self.make().fingerprint} if values.get("model_file") else {})

    @property
    def settings_fingerprint(self) -> str:
        """SHA-256 of the settings that are not defaults; a model file counts by the vocabulary in it."""
        settings = changed_settings(self, VOCABULARIES)
        if "model_file" in settings:
            settings = {"kind": settings["kind"], "model": self.make().fingerprint}
        return fingerprint(settings)

    def make(self, texts: Iterable[str] = ()) -> Vocabulary:
        """Makes the vocabulary; learns it from `texts` if needed. Raises a UserError if the model file cannot be read,
        or the texts do not hold the configured number of pieces."""
        raise NotImplementedError

    @property
    def expected_size(self) -> int:
        """The number of tokens, or an estimate if the vocabulary has to be learned first."""
        return round_up(self.size, self.size_multiple) if self.trained else self.make().size


@dataclass(frozen=True)
class FileVocabularyConfig(VocabularyConfig):
    """The fields of vocabularies that may come from a file."""

    model_file: str = ""
    """The file to load; "": none."""

    @property
    def trained(self) -> bool:
        return not self.model_file


@VOCABULARIES.register("bytes")
class BytesVocabularyConfig(VocabularyConfig):
    """The 256 bytes of UTF-8 and the end of a document, 257 tokens in all."""

    def make(self, texts: Iterable[str] = ()) -> Vocabulary:
        return ByteVocabulary(self.size_multiple)


class ByteVocabulary(Vocabulary):
    """The vocabulary of bytes: id i < 256 is the byte i of UTF-8, and 256 ends a document."""

    kind = "bytes"

    def __init__(self, size_multiple: int = 1):
        super().__init__([bytes([byte]) for byte in range(256)], 256, size_multiple)

    def encode(self, text: str) -> np.ndarray:
        return np.frombuffer(text.encode("utf-8"), np.uint8).astype(np.int32)

    def boundary(self, text: str, place: int) -> int:
        return place


def read_text(path: Path | epath.Path, what: str) -> str:
    """The text of a file, without a byte order mark; an error names it by `what` it is."""
    with reading(path, what, UnicodeDecodeError), path.open("rb") as file:
        return io.TextIOWrapper(file, encoding="utf-8-sig").read()


def round_up(size: int, multiple: int) -> int:
    """The smallest multiple of `multiple` that is at least `size`."""
    return -(-size // multiple) * multiple


def saved_vocabulary_config(folder: Path) -> VocabularyConfig:
    """The config that loads the vocabulary in a folder. Raises a UserError if it is missing or damaged."""
    path = folder / SETTINGS_NAME
    try:
        settings = read_json(path)
    except FileNotFoundError:
        raise UserError(f"there is no vocabulary in {folder}: {SETTINGS_NAME} is missing") from None
    check_fields(settings, {"kind": str, "size_multiple": int}, str(path))
    config_class: Any = VOCABULARIES[settings.pop("kind")]
    settings = {name: tuple(value) if isinstance(value, list) else value for name, value in settings.items()}
    if issubclass(config_class, FileVocabularyConfig):
        settings["model_file"] = str(folder)
    return config_class(**settings)


def load_vocabulary(folder: epath.PathLike) -> Vocabulary:
    """Loads the vocabulary of a token store or a checkpoint, which may be in an object store."""
    with local_files(folder) as path:
        return saved_vocabulary_config(Path(path)).make()
