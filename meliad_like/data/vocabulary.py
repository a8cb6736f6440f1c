"""Vocabularies: text to tokens and back, by bytes, SentencePiece, whole words, or the BPE of a pretrained model.

The end of a document is a token of its own.
"""

import hashlib
import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Literal, get_args

from etils import epath

from meliad_like.data.dictionary_vocabulary import (
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
from meliad_like.remote import local_files
from meliad_like.saved_json import check_fields, read_json
from meliad_like.validation import check_choices, check_positive

__all__ = [
    "MODEL_NAME",
    "TOKENIZER_NAME",
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

Kind = Literal["bytes", "sentencepiece", "tokenizers", "dictionary"]
ModelType = Literal["unigram", "bpe"]


@dataclass(frozen=True)
class VocabularyConfig:
    """How text becomes tokens."""

    kind: Kind = "bytes"
    """`bytes`: the 256 bytes of UTF-8 and the end of a document, 257 in all. `sentencepiece`: loaded or trained.
    `tokenizers`: the byte-level BPE of a pretrained model. `dictionary`: whole words between spaces, by rank; loaded
    from a dictionary of fairseq, or counted."""
    model_file: str = ""
    """`sentencepiece`: a `.model` file to load; "": train one on the source's training documents.
    `tokenizers`: a tokenizer.json, a GGUF file, or a folder with tokenizer.json or with vocab.json and merges.txt.
    `dictionary`: fairseq's dict.txt; "": count all words of the training documents."""
    end_token: str = ""
    """`tokenizers`: what ends a document; "": <|endoftext|> where there is one, else what ends a text by the file."""
    model_type: ModelType = "unigram"
    """Training: `unigram` or `bpe`."""
    size: int = 32_000
    """Training: number of tokens, with the end of a document, one unknown token and 256 bytes among them."""
    keep_whitespace: bool = True
    """Training: whether text comes back exactly as it was (no normalisation, spaces, tabs and newlines as they are,
    rare characters as bytes). False: SentencePiece's own defaults, which lose newlines and repeated spaces."""
    training_bytes: int = 100_000_000
    """Training: size of the sample of text to learn from, in bytes (about)."""
    size_multiple: int = 1
    """Rounds the size up to a multiple that the hardware likes; the ids that this adds are never used."""

    def __post_init__(self) -> None:
        check_choices(self)
        if self.kind == "tokenizers" and not self.model_file:
            raise UserError("VocabularyConfig.kind = 'tokenizers' needs a VocabularyConfig.model_file")
        check_positive(self, ("size", "training_bytes", "size_multiple"))

    @property
    def trained(self) -> bool:
        """Whether the vocabulary has to be learned from documents."""
        return self.kind in ("sentencepiece", "dictionary") and not self.model_file

    @property
    def settings_fingerprint(self) -> str:
        """SHA-256 of the settings that matter for this kind, and of the model file's contents.

        Raises:
          UserError: the model file cannot be read.
        """
        settings = {"kind": self.kind, "size_multiple": self.size_multiple}
        if self.kind == "dictionary":
            settings["model"] = "" if self.trained else make_vocabulary(self).fingerprint
        elif self.trained:
            settings = {key: value for key, value in asdict(self).items() if key not in ("model_file", "end_token")}
        elif self.kind == "sentencepiece":
            settings["model"] = hashlib.sha256(read_model(self.model_file)).hexdigest()
        elif self.kind == "tokenizers":
            settings["model"] = make_vocabulary(self).fingerprint
        return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()


def load_vocabulary(folder: epath.PathLike) -> Vocabulary:
    """The vocabulary that `save` wrote into a token store or a checkpoint.

    Args:
      folder: local, or of an object store.

    Raises:
      UserError: there is none, or it is damaged.
    """
    with local_files(folder) as path:
        try:
            settings = read_json(path / SETTINGS_NAME)
        except FileNotFoundError:
            raise UserError(f"there is no vocabulary in {folder}: {SETTINGS_NAME} is missing") from None
        check_fields(settings, {"kind": str, "size_multiple": int}, f"{folder}/{SETTINGS_NAME}")
        kind, size_multiple = settings["kind"], settings["size_multiple"]
        if kind not in get_args(Kind) or size_multiple < 1:
            raise UserError(f"{folder}/{SETTINGS_NAME} is damaged: kind is {kind!r}, size_multiple {size_multiple}")
        if kind == "bytes":
            return ByteVocabulary(size_multiple)
        if kind == "tokenizers":
            check_fields(settings, {"end_token": str}, f"{folder}/{SETTINGS_NAME}")
            tokenizer, _ = read_tokenizer(path / TOKENIZER_NAME)
            return TokenizersVocabulary(tokenizer, settings["end_token"], size_multiple)
        if kind == "dictionary":
            return DictionaryVocabulary(read_dictionary(path), size_multiple)
        return SentencePieceVocabulary(read_model(path / MODEL_NAME), size_multiple)


def make_vocabulary(config: VocabularyConfig, texts: Iterable[str] = ()) -> Vocabulary:
    """The vocabulary that the config describes, if need be learned from `texts`.

    Raises:
      UserError: the model file cannot be read, or the texts do not hold as many pieces as asked for.
    """
    if config.kind == "bytes":
        return ByteVocabulary(config.size_multiple)
    if config.kind == "tokenizers":
        tokenizer, end = read_tokenizer(config.model_file)
        return TokenizersVocabulary(tokenizer, config.end_token or end, config.size_multiple)
    if config.kind == "dictionary":
        counts = count_words(texts) if config.trained else read_dictionary(config.model_file)
        return DictionaryVocabulary(counts, config.size_multiple)
    if config.trained:
        return SentencePieceVocabulary(train_sentencepiece(config, texts), config.size_multiple)
    return SentencePieceVocabulary(read_model(config.model_file), config.size_multiple)
