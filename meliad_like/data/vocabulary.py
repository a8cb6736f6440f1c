"""Vocabularies: text to tokens and back, by bytes, SentencePiece, whole words, or the BPE of a pretrained model.

The end of a document is a token of its own.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Literal

from etils import epath

from meliad_like.data.dictionary_vocabulary import (
    DICTIONARY_NAME,
    DictionaryVocabulary,
    count_words,
    read_dictionary,
)
from meliad_like.data.sentencepiece_vocabulary import (
    MODEL_NAME,
    SentencePieceVocabulary,
    read_model,
    train_sentencepiece,
)
from meliad_like.data.table_vocabulary import SETTINGS_NAME, ByteVocabulary, StreamingDecoder, Vocabulary
from meliad_like.data.tokenizers_vocabulary import TOKENIZER_NAME, TokenizersVocabulary, read_tokenizer
from meliad_like.errors import UserError
from meliad_like.registry import Registry, fingerprint, to_plain
from meliad_like.remote import local_files
from meliad_like.saved_json import check_fields, read_json
from meliad_like.validation import check_choices, check_positive

__all__ = [
    "MODEL_NAME",
    "TOKENIZER_NAME",
    "VOCABULARIES",
    "ByteVocabulary",
    "DictionaryVocabulary",
    "SentencePieceVocabulary",
    "StreamingDecoder",
    "TokenizersVocabulary",
    "Vocabulary",
    "VocabularyConfig",
    "load_vocabulary",
    "make_vocabulary",
]

ModelType = Literal["unigram", "bpe"]
VOCABULARIES = Registry("vocabulary")


@dataclass(frozen=True)
class VocabularyConfig:
    """The fields that all kinds of vocabularies have."""

    size_multiple: int = 1
    """Rounds the size up to a multiple that is efficient on the hardware; the additional ids are never used."""

    def __post_init__(self) -> None:
        check_choices(self)
        check_positive(self, ("size_multiple",))

    @property
    def trained(self) -> bool:
        """Whether the vocabulary has to be learned from documents."""
        return False

    @property
    def progress(self) -> str:
        """The text that the terminal shows while the vocabulary is learned."""
        return ""

    @property
    def settings_fingerprint(self) -> str:
        """SHA-256 of the settings that are not defaults; a model file counts by the vocabulary in it.

        Raises:
          UserError: the model file cannot be read.
        """
        settings = to_plain(self, VOCABULARIES, changed_only=True)
        if "model_file" in settings:
            settings = {"kind": settings["kind"], "model": self.make(()).fingerprint}
        return fingerprint(settings)

    def make(self, texts: Iterable[str]) -> Vocabulary:
        """Makes the vocabulary; learns it from `texts` if needed."""
        raise NotImplementedError

    @staticmethod
    def load(folder: Path, settings: dict[str, Any]) -> Vocabulary:
        """Loads what `Vocabulary.save` wrote into a folder; `settings` are the contents of its SETTINGS_NAME."""
        raise NotImplementedError

    def of_folder(self, folder: str, vocabulary: Vocabulary) -> "VocabularyConfig":
        """The config that loads a vocabulary saved in a folder, instead of learning it again."""
        return self

    @property
    def expected_size(self) -> int:
        """The number of tokens, if it is known before the vocabulary is learned."""
        return make_vocabulary(self).size


@VOCABULARIES.register("bytes")
@dataclass(frozen=True)
class BytesVocabularyConfig(VocabularyConfig):
    """The 256 bytes of UTF-8 and the end of a document, 257 tokens in all."""

    def make(self, texts: Iterable[str]) -> Vocabulary:
        return ByteVocabulary(self.size_multiple)

    @staticmethod
    def load(folder: Path, settings: dict[str, Any]) -> Vocabulary:
        return ByteVocabulary(settings["size_multiple"])


@dataclass(frozen=True)
class FileVocabularyConfig(VocabularyConfig):
    """The fields of vocabularies that may come from a file."""

    model_file: str = ""
    """The file to load; "": none."""

    # The name of the file that the vocabulary's `save` writes.
    saved_name: ClassVar[str] = ""

    def of_folder(self, folder: str, vocabulary: Vocabulary) -> "VocabularyConfig":
        return replace(self, model_file=f"{folder}/{self.saved_name}")


@VOCABULARIES.register("sentencepiece")
@dataclass(frozen=True)
class SentencePieceVocabularyConfig(FileVocabularyConfig):
    """A SentencePiece model: a `.model` file, or one that is trained on the source's training documents, to which the
    fields apply."""

    model_type: ModelType = "unigram"
    size: int = 32_000
    """The number of tokens, including the end of a document, one unknown token and 256 bytes."""
    keep_whitespace: bool = True
    """Whether decoding restores text exactly (no normalisation, whitespace unchanged, rare characters as bytes). False:
    SentencePiece's own defaults, which lose newlines and repeated spaces."""
    training_bytes: int = 100_000_000
    """The approximate size in bytes of the sample of text to learn from."""

    saved_name = MODEL_NAME

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive(self, ("size", "training_bytes"))

    @property
    def trained(self) -> bool:
        return not self.model_file

    @property
    def progress(self) -> str:
        return f"training a {self.model_type} vocabulary of {self.size}"

    def make(self, texts: Iterable[str]) -> Vocabulary:
        model = train_sentencepiece(self, texts) if self.trained else read_model(self.model_file)
        return SentencePieceVocabulary(model, self.size_multiple)

    @staticmethod
    def load(folder: Path, settings: dict[str, Any]) -> Vocabulary:
        return SentencePieceVocabulary(read_model(folder / MODEL_NAME), settings["size_multiple"])

    @property
    def expected_size(self) -> int:
        return -(-self.size // self.size_multiple) * self.size_multiple if self.trained else super().expected_size


@VOCABULARIES.register("tokenizers")
@dataclass(frozen=True)
class TokenizersVocabularyConfig(FileVocabularyConfig):
    """The byte-level BPE of a pretrained model: a tokenizer.json, a GGUF file, or a folder with tokenizer.json or with
    vocab.json and merges.txt."""

    end_token: str = ""
    """The token that ends a document; "": <|endoftext|> if there is one, otherwise the file's end-of-text token."""

    saved_name = TOKENIZER_NAME

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.model_file:
            raise UserError("RunConfig.vocabulary = 'tokenizers' needs a TokenizersVocabularyConfig.model_file")

    def make(self, texts: Iterable[str]) -> Vocabulary:
        tokenizer, end = read_tokenizer(self.model_file)
        return TokenizersVocabulary(tokenizer, self.end_token or end, self.size_multiple)

    @staticmethod
    def load(folder: Path, settings: dict[str, Any]) -> Vocabulary:
        check_fields(settings, {"end_token": str}, f"{folder}/{SETTINGS_NAME}")
        tokenizer, _ = read_tokenizer(folder / TOKENIZER_NAME)
        return TokenizersVocabulary(tokenizer, settings["end_token"], settings["size_multiple"])

    def of_folder(self, folder: str, vocabulary: Vocabulary) -> "VocabularyConfig":
        assert isinstance(vocabulary, TokenizersVocabulary)
        return replace(self, model_file=f"{folder}/{self.saved_name}", end_token=vocabulary.end_token)


@VOCABULARIES.register("dictionary")
@dataclass(frozen=True)
class DictionaryVocabularyConfig(FileVocabularyConfig):
    """Whole words between spaces, by rank, from fairseq's dict.txt or counted in the training documents."""

    saved_name = DICTIONARY_NAME

    @property
    def trained(self) -> bool:
        return not self.model_file

    @property
    def progress(self) -> str:
        return "counting words"

    def make(self, texts: Iterable[str]) -> Vocabulary:
        counts = count_words(texts) if self.trained else read_dictionary(self.model_file)
        return DictionaryVocabulary(counts, self.size_multiple)

    @staticmethod
    def load(folder: Path, settings: dict[str, Any]) -> Vocabulary:
        return DictionaryVocabulary(read_dictionary(folder), settings["size_multiple"])

    @property
    def expected_size(self) -> int:
        # The number of different words is not known before the documents are read.
        return -(-32_000 // self.size_multiple) * self.size_multiple if self.trained else super().expected_size


def load_vocabulary(folder: epath.PathLike) -> Vocabulary:
    """Loads the vocabulary that `save` wrote into a token store or a checkpoint.

    Args:
      folder: a local folder, or one of an object store.

    Raises:
      UserError: the vocabulary is missing or damaged.
    """
    with local_files(folder) as path:
        try:
            settings = read_json(path / SETTINGS_NAME)
        except FileNotFoundError:
            raise UserError(f"there is no vocabulary in {folder}: {SETTINGS_NAME} is missing") from None
        check_fields(settings, {"kind": str, "size_multiple": int}, f"{folder}/{SETTINGS_NAME}")
        kind, size_multiple = settings["kind"], settings["size_multiple"]
        if kind not in VOCABULARIES or size_multiple < 1:
            raise UserError(f"{folder}/{SETTINGS_NAME} is damaged: kind is {kind!r}, size_multiple {size_multiple}")
        return VOCABULARIES[kind].load(Path(path), settings)


def make_vocabulary(config: VocabularyConfig, texts: Iterable[str] = ()) -> Vocabulary:
    """Makes the vocabulary that the config describes; learns it from `texts` if needed.

    Raises:
      UserError: the model file cannot be read, or the texts do not hold the configured number of pieces.
    """
    return config.make(texts)
