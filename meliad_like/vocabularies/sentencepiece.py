"""SentencePiece vocabularies: loaded, and learned from documents."""

import functools
import io
import re
from collections.abc import Iterable, Iterator
from typing import Literal

import numpy as np
import sentencepiece
from etils import epath
from sentencepiece.sentencepiece_model_pb2 import ModelProto  # type: ignore  # made when it is imported

from meliad_like.errors import UserError, reading
from meliad_like.remote import any_path
from meliad_like.validation import check_positive
from meliad_like.vocabularies.base import PIECE, VOCABULARIES, FileVocabularyConfig, Vocabulary

ModelType = Literal["unigram", "bpe"]
MODEL_NAME = "sentencepiece.model"
# SentencePiece learns from "sentences". Ours are some lines of text with their line ends, so that newlines and
# indentation are learned like everything else, and short enough that a sample of them spans all documents.
SENTENCE_LENGTH = 4096  # In characters; SentencePiece counts bytes, at most four per character.

END_OF_WORD = re.compile(r"[^\W\d_](?= )")
TRAINING_CHARACTERS = 100_000_000
"""The size of the sample of text to learn from, about."""


@VOCABULARIES.register("sentencepiece")
class SentencePieceVocabularyConfig(FileVocabularyConfig):
    """A SentencePiece model: a `.model` file, or one that is trained, by the fields, on the training documents."""

    model_type: ModelType = "unigram"
    size: int = 32_000  # type: ignore[misc]  # the class variable is for vocabularies whose size is not chosen
    """The number of tokens, including the end of a document, one unknown token and 256 bytes."""
    split_digits: bool = False
    """Whether every digit is a token of its own, so that equal numbers have equal tokens wherever they are."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive(self, ("size",))

    def make(self, texts: Iterable[str] = ()) -> Vocabulary:
        model = train_sentencepiece(self, texts) if self.trained else read_model(self.model_file)
        return SentencePieceVocabulary(model, self.size_multiple)


class SentencePieceVocabulary(Vocabulary):
    """A SentencePiece model. Its end-of-sentence token ends documents; a model without one gets a new last id."""

    kind, file_name = "sentencepiece", MODEL_NAME

    def __init__(self, model: bytes, size_multiple: int = 1):
        self._processor = processor = sentencepiece.SentencePieceProcessor(model_proto=model)
        pieces = []
        self._byte_ids: dict[int, int] = {}
        for token in range(len(processor)):
            piece = processor.id_to_piece(token)
            if processor.is_byte(token):
                byte = int(piece[3:-1], 16)  # Byte pieces are written as <0x41>.
                self._byte_ids[byte] = token
                pieces.append(bytes([byte]))
            elif processor.is_control(token) or processor.is_unused(token):
                pieces.append(b"")
            else:
                pieces.append((" \u2047 " if processor.is_unknown(token) else piece.replace("\u2581", " ")).encode())
        if processor.encode("a", out_type=str)[0].startswith("\u2581"):
            self.prefix = b" "
        self._removes_whitespace = not processor.encode(" ")
        end = processor.eos_id() if processor.eos_id() >= 0 else len(processor)
        # Such a model replaces nothing but spaces, by U+2581, and has a token for each byte of any other character.
        proto = ModelProto.FromString(model)
        rules = proto.normalizer_spec
        changes = rules.precompiled_charsmap or rules.add_dummy_prefix or rules.remove_extra_whitespaces
        has_bytes = len(self._byte_ids) == 256 and proto.trainer_spec.byte_fallback
        lossless = has_bytes and rules.escape_whitespaces and not (changes or self.prefix)
        super().__init__(pieces, end, size_multiple, model, lossless)
        # Texts can be cut at the end of a word if no token is on both sides of it. In a unigram model, the rounding
        # of sums from the text's beginning decides between equals.
        merges = proto.trainer_spec.model_type == proto.trainer_spec.BPE
        joined = any(END_OF_WORD.search(piece.decode(errors="ignore")) for piece in pieces)
        self._is_cut = lossless and merges and not joined

    @property
    def end_piece(self) -> str | None:
        """The model's token that ends documents; None if it has none."""
        end = self._processor.eos_id()
        return self._processor.id_to_piece(end) if end >= 0 else None

    def encode(self, text: str) -> np.ndarray:
        if len(self._byte_ids) < 256 or self.prefix:
            return np.asarray(self._processor.encode(text), np.int32)
        # SentencePiece writes a space as U+2581, so a U+2581 of the text itself would come back as a space.
        escaped, tokens = [self._byte_ids[byte] for byte in "\u2581".encode()], []
        # In pieces, because SentencePiece takes some hundred bytes of memory for each character.
        for piece in self.pieces(text):
            first, *further = self._processor.encode(piece.split("\u2581"))
            tokens.append(np.asarray(first + [token for part in further for token in (*escaped, *part)], np.int32))
        return np.concatenate(tokens)

    def boundary(self, text: str, place: int) -> int | None:
        end = END_OF_WORD.search(text, place, place + PIECE) if self._is_cut else None
        return end and end.end()

    def encode_continuation(self, text: str) -> np.ndarray:
        # Where SentencePiece removes whitespace, the space that begins a text stays only as the prefix.
        if not self.prefix or (self._removes_whitespace and text[:1].isspace()):
            return self.encode(text)
        return np.asarray(self._without_prefix.encode(text), np.int32)

    @functools.cached_property
    def _without_prefix(self) -> sentencepiece.SentencePieceProcessor:
        """The model without a space before the text."""
        model = ModelProto.FromString(self._model)
        model.normalizer_spec.add_dummy_prefix = False
        return sentencepiece.SentencePieceProcessor(model_proto=model.SerializeToString())


def read_model(path: epath.PathLike) -> bytes:
    """The contents of a SentencePiece model file, or of that in the folder of a saved vocabulary."""
    path = any_path(path)
    path = path / MODEL_NAME if path.is_dir() else path
    with reading(path, "SentencePiece model", RuntimeError):
        model = path.read_bytes()
        sentencepiece.SentencePieceProcessor().LoadFromSerializedProto(model)
    return model


def train_sentencepiece(config: SentencePieceVocabularyConfig, texts: Iterable[str]) -> bytes:
    """The serialised model learned from a random sample (of fixed seed) of `texts`, which are read once, as a stream.

    Text is taken as it is, so that decoding restores it: no normalisation, whitespace unchanged, and bytes for
    characters that are too rare for a piece (Appendix I of arXiv:2203.07852 discusses what vocabularies that drop
    whitespace do to the measures). Ids: 0 unknown, 1 end of document, then 256 bytes, pieces. Raises a UserError if
    there are fewer pieces.
    """
    model, problems = io.BytesIO(), []

    def watched() -> Iterator[str]:
        try:
            yield from sentences(texts)
        # Ctrl-C included: SentencePiece makes a RuntimeError of everything.
        except BaseException as problem:
            problems.append(problem)
            raise

    sentencepiece.set_random_generator_seed(0)
    try:
        sentencepiece.SentencePieceTrainer.train(  # type: ignore[attr-defined]  # made at import time
            sentence_iterator=watched(),
            model_writer=model,
            model_type=config.model_type,
            vocab_size=config.size,
            byte_fallback=True,
            split_digits=config.split_digits,
            unk_id=0,
            eos_id=1,
            bos_id=-1,
            pad_id=-1,
            input_sentence_size=-(-TRAINING_CHARACTERS // SENTENCE_LENGTH),
            max_sentence_length=4 * SENTENCE_LENGTH,
            # Sums of floats depend on the number of threads: a fixed number gives the same model on any machine.
            num_threads=8,
            minloglevel=2,
            normalization_rule_name="identity",
            add_dummy_prefix=False,
            remove_extra_whitespaces=False,
            allow_whitespace_only_pieces=True,
        )
    except RuntimeError as error:
        if problems:
            raise problems[0] from None
        reason = str(error).splitlines()[-1].rpartition("] ")[2]  # The reason follows file, line and condition.
        raise UserError(f"can't train SentencePieceVocabularyConfig.size = {config.size}: {reason}") from None
    return model.getvalue()


def sentences(texts: Iterable[str]) -> Iterator[str]:
    """Cuts texts into pieces of at most `SENTENCE_LENGTH` characters, at line ends if possible."""
    for text in texts:
        piece = ""
        for line in text.splitlines(keepends=True):
            if piece and len(piece) + len(line) > SENTENCE_LENGTH:
                yield piece
                piece = ""
            piece += line
            while len(piece) > SENTENCE_LENGTH:
                yield piece[:SENTENCE_LENGTH]
                piece = piece[SENTENCE_LENGTH:]
        if piece:
            yield piece
