"""BPE vocabularies of pretrained models, in `tokenizers`: of bytes, or of characters as SentencePiece merges them."""

import itertools
import json
import re
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from etils import epath
from tokenizers import Tokenizer

from meliad_like.errors import UserError
from meliad_like.registry import fingerprint
from meliad_like.remote import any_path
from meliad_like.resumable import read_object
from meliad_like.vocabularies.base import (
    DEFAULT_END,
    PIECE,
    UNKNOWN,
    VOCABULARIES,
    FileVocabularyConfig,
    Vocabulary,
    read_text,
)

TOKENIZER_NAME = "tokenizer.json"
TOKENIZER_CONFIG_NAME = "tokenizer_config.json"
CONTEXT, MAX_TRIALS = 256, 16
END_OF_WORD = re.compile(r"[^\W\d_](?=\W)")
# The ways of splitting text that lose nothing of it, unless they are told to remove what they split at.
KEEPING_STEPS = ("ByteLevel", "Digits", "Punctuation", "Split", "UnicodeScripts")

_PRINTABLE = [*range(33, 127), *range(161, 173), *range(174, 256)]
_OTHERS = [byte for byte in range(256) if byte not in _PRINTABLE]
BYTE_CHARACTERS = {chr(byte): byte for byte in _PRINTABLE} | {chr(256 + i): byte for i, byte in enumerate(_OTHERS)}
"""The bytes by the characters in which byte-level vocabularies write them; printable bytes stand for themselves."""
SPACE = "\u2581"
"""The character in which SentencePiece writes a space."""
BYTE_TOKENS = {f"<0x{byte:02X}>": byte for byte in range(256)}
"""The tokens for the bytes of a character that has no token of its own, in vocabularies of characters."""
_SPACES = {"type": "Replace", "pattern": {"String": SPACE}, "content": " "}
OF_CHARACTERS = (
    {"type": "Replace", "pattern": {"String": " "}, "content": SPACE},
    {"type": "Sequence", "decoders": [_SPACES, {"type": "ByteFallback"}, {"type": "Fuse"}]},
)
"""The normalizer and the decoder of a BPE of characters that puts no space before a text, such as Gemma's."""


@VOCABULARIES.register("tokenizers")
class TokenizersVocabularyConfig(FileVocabularyConfig):
    """The BPE of a pretrained model: a tokenizer.json, or a folder with one."""

    end_token: str = ""
    """The token that ends a document; "": <|endoftext|> if there is one, otherwise the file's end-of-text token."""
    begin_token: str = ""
    """The token that begins a document; "": none."""
    stop_tokens: tuple[int, ...] = ()
    """The ids of further tokens at which a model stops to write."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.model_file:
            raise UserError("RunConfig.vocabulary = 'tokenizers' needs a TokenizersVocabularyConfig.model_file")

    def make(self, texts: Iterable[str] = ()) -> Vocabulary:
        tokenizer, end = read_tokenizer(self.model_file)
        end = self.end_token or end
        return TokenizersVocabulary(tokenizer, end, self.size_multiple, self.stop_tokens, self.begin_token)


class TokenizersVocabulary(Vocabulary):
    """A BPE of bytes or of characters. Text that looks like a control token is encoded as ordinary text.

    A text's tokens depend on the text alone, and are always the same: what a file says of dropout, truncation, padding,
    a space before each text and tokens around it is switched off, except for the token that begins a document.
    """

    kind, file_name = "tokenizers", TOKENIZER_NAME

    def __init__(
        self,
        tokenizer_json: str,
        end_token: str,
        size_multiple: int = 1,
        stop_tokens: Sequence[int] = (),
        begin_token: str = "",
    ):
        """`tokenizer_json` is the contents of a tokenizer.json; documents end with `end_token`, and begin with
        `begin_token` ("": none). Raises a UserError if it is no such BPE, or texts are encoded to its end token."""
        self.end_token = end_token
        text_alone, settings = _of_text_alone(tokenizer_json, end_token)
        self._tokenizer = tokenizer = _parse(text_alone)
        # Control tokens are not recognised in prompts and documents.
        tokenizer.encode_special_tokens = True
        # Both may be saved with the tokenizer; documents would be cut.
        tokenizer.no_truncation()
        tokenizer.no_padding()
        if (end := tokenizer.token_to_id(end_token)) is None:
            what = f"has no token {end_token!r}" if end_token else "doesn't say which token ends a text"
            raise UserError(f"the tokenizer {what}: set TokenizersVocabularyConfig.end_token")
        self._begin: list[int] = []
        if begin_token:
            if (begin := tokenizer.token_to_id(begin_token)) is None:
                raise UserError(f"the tokenizer has no token TokenizersVocabularyConfig.begin_token={begin_token!r}")
            self._begin.append(begin)
        ids, added = tokenizer.get_vocab(), tokenizer.get_added_tokens_decoder()
        of_characters, pieces = _is_of_characters(settings), [b""] * (max(ids.values()) + 1)
        for token, i in ids.items():
            pieces[i] = _bytes_of(token, of_characters)
        has_bytes = _has_bytes(settings)
        lossless = has_bytes and _keeps_text(settings) and len(set(ids.values())) == len(ids)
        merged = settings["model"]["vocab"]
        # A space is written as `SPACE`, so one of the text itself would come back as a space.
        self._escaped = [merged[f"<0x{byte:02X}>"] for byte in SPACE.encode()] if of_characters and has_bytes else []
        if end_token in merged and self._merges_to(pieces[end], end):
            way_out = "set TokenizersVocabularyConfig.end_token to one that is in no text"
            raise UserError(f"texts are encoded to the tokenizer's token {end_token!r}: {way_out}")
        for i, token in added.items():
            piece = b"" if token.special else token.content.replace(SPACE, " " if of_characters else SPACE).encode()
            # A token that is both added and merged from bytes may have two texts.
            has_two = piece != pieces[i] and token.content in merged and self._merges_to(pieces[i], i)
            if has_two or (not token.special and (token.lstrip or token.rstrip)):
                lossless = False
            pieces[i] = piece
        pieces[end] = b""
        unknown = ids.get(settings["model"].get("unk_token"))
        if unknown is not None and not has_bytes:
            pieces[unknown] = UNKNOWN.encode()
        joined = any(re.search(r"[^\W\d_] ", piece.decode(errors="ignore")) for piece in pieces)
        self._is_cut_at_spaces = of_characters and not joined
        for token in self._begin:
            pieces[token] = b""
        names = {"end_token": end_token} | ({"begin_token": begin_token} if begin_token else {})
        super().__init__(pieces, end, size_multiple, text_alone, lossless, stop_tokens, **names)

    @property
    def fingerprint(self) -> str:
        plain = super().fingerprint
        return fingerprint([plain, *self._begin]) if self._begin else plain

    def tokenizer_json(self) -> str:
        """The contents of a tokenizer.json that doesn't cut or fill texts."""
        settings = json.loads(self._model)
        if settings.get("truncation") or settings.get("padding"):
            return json.dumps(settings | {"truncation": None, "padding": None})
        return self._model.decode()

    def encode(self, text: str) -> np.ndarray:
        return np.concatenate([np.asarray(self._begin, np.int32), self.encode_continuation(text)])

    def encode_continuation(self, text: str) -> np.ndarray:
        # In pieces, because `tokenizers` takes some hundred bytes of memory for each character.
        return np.concatenate([self._encode(piece) for piece in self.pieces(text)])

    def boundary(self, text: str, place: int) -> int | None:
        ends = (match.end() for match in END_OF_WORD.finditer(text, place, place + PIECE))
        return next((end for end in itertools.islice(ends, MAX_TRIALS) if self._is_boundary(text, end)), None)

    def _encode(self, text: str) -> np.ndarray:
        parts = text.split(SPACE) if self._escaped else [text]
        first, *further = (one.ids for one in self._tokenizer.encode_batch_fast(parts, add_special_tokens=False))
        return np.asarray(first + [token for ids in further for token in (*self._escaped, *ids)], np.int32)

    def _is_boundary(self, text: str, place: int) -> bool:
        """Whether a text's tokens are those before a place and those after it. Words are split there, and what is
        around it has the same tokens in two parts, which no added token, lookahead or normalisation joins. In a BPE of
        characters, no token is on both sides."""
        before, after = text[place - CONTEXT : place], text[place : place + CONTEXT]
        words = self._tokenizer.pre_tokenizer and self._tokenizer.pre_tokenizer.pre_tokenize_str(before + after)
        is_word = any(start == len(before) for _, (start, _) in words or ())
        if not (is_word or (self._is_cut_at_spaces and after[0] == " ")):
            return False
        parts = np.concatenate([self._encode(before), self._encode(after)])
        return np.array_equal(parts, self._encode(before + after))

    def _merges_to(self, piece: bytes, token: int) -> bool:
        """Whether the bytes of a token are encoded to it. A part of a character may be."""
        try:
            return token in self._encode(piece.decode())
        except UnicodeDecodeError:
            return True


def _of_text_alone(tokenizer_json: str, end_token: str) -> tuple[str, dict[str, Any]]:
    """A tokenizer.json whose tokens are a function of the text, and its contents: the same file, with the same
    fingerprint, if nothing in it had to be changed."""
    settings = json.loads(tokenizer_json)
    before, model = json.dumps(settings), settings["model"]
    if model.get("dropout"):
        model["dropout"] = None
    if model.get("unk_token") == end_token and not _has_bytes(settings):
        model["unk_token"] = None
    for step in _steps(settings.get("pre_tokenizer")):
        if step.get("add_prefix_space"):
            step["add_prefix_space"] = False
    for token in settings.get("added_tokens") or ():
        # Control tokens alone are not looked for in texts.
        token["special"] = token["special"] or token["content"] == end_token
    after = json.dumps(settings)
    return (tokenizer_json if after == before else after), settings


def _is_of_characters(settings: dict[str, Any]) -> bool:
    """Whether a tokenizer.json has a BPE of characters."""
    return (settings.get("normalizer"), settings.get("decoder")) == OF_CHARACTERS


def _has_bytes(settings: dict[str, Any]) -> bool:
    """Whether a tokenizer.json has tokens for all bytes."""
    model = settings["model"]
    if _is_of_characters(settings):
        return bool(model.get("byte_fallback")) and BYTE_TOKENS.keys() <= model["vocab"].keys()
    return BYTE_CHARACTERS.keys() <= model["vocab"].keys()


def _keeps_text(settings: dict[str, Any]) -> bool:
    """Whether the words that a tokenizer.json splits a text into are the text."""
    model, steps = settings["model"], _steps(settings.get("pre_tokenizer"))
    of_characters = _is_of_characters(settings)
    return (
        not (model.get("continuing_subword_prefix") or model.get("end_of_word_suffix"))
        and (of_characters or not settings.get("normalizer"))
        and [step["type"] for step in steps].count("ByteLevel") == (not of_characters)
        and all(step["type"] in KEEPING_STEPS and step.get("behavior") != "Removed" for step in steps)
    )


def _steps(splitter: dict[str, Any] | None) -> list[dict[str, Any]]:
    """The steps in which the pre-tokenizer of a tokenizer.json splits text into words."""
    if splitter and splitter["type"] == "Sequence":
        return [step for part in splitter["pretokenizers"] for step in _steps(part)]
    return [splitter] if splitter else []


def _bytes_of(token: str, of_characters: bool) -> bytes:
    """The bytes of a token; none for reserved ones of a BPE of bytes, which may be written in any characters."""
    if of_characters:
        return bytes([BYTE_TOKENS[token]]) if token in BYTE_TOKENS else token.replace(SPACE, " ").encode()
    is_merged = all(map(BYTE_CHARACTERS.__contains__, token))
    return bytes(map(BYTE_CHARACTERS.__getitem__, token)) if is_merged else b""


def read_tokenizer(path: epath.PathLike) -> tuple[str, str]:
    """The contents of a tokenizer.json (`path`, or in this folder), and the token that ends documents: `DEFAULT_END` if
    there is one, otherwise the one that the folder's `TOKENIZER_CONFIG_NAME` names."""
    path, end = any_path(path), ""
    if path.is_dir():
        settings, path = path / TOKENIZER_CONFIG_NAME, path / TOKENIZER_NAME
        if not path.exists():
            writer = "AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER) in transformers"
            raise UserError(f"{path} is missing: {writer} writes it from a tokenizer's other files")
        end = read_object(settings).get("eos_token") or "" if settings.exists() else ""
        # transformers writes a token alone or with its properties.
        end = end["content"] if isinstance(end, dict) else end
    tokenizer = read_text(path, "tokenizer")
    return tokenizer, end if _parse(tokenizer, str(path)).token_to_id(DEFAULT_END) is None else DEFAULT_END


def _parse(tokenizer_json: str, owner: str = "the tokenizer") -> Tokenizer:
    try:
        tokenizer = Tokenizer.from_str(tokenizer_json)
    except Exception as error:  # The library raises no more specific exception.
        raise UserError(f"{owner} is not a {TOKENIZER_NAME}: {error}") from None
    # The type of the loaded model, not of the file: older files, such as GPT-2's, don't have one.
    kinds = (type(tokenizer.model).__name__, tokenizer.decoder and type(tokenizer.decoder).__name__)
    if kinds != ("BPE", "ByteLevel") and not (kinds[0] == "BPE" and _is_of_characters(json.loads(tokenizer_json))):
        problem = f"{owner} is {kinds[0]} with decoder {kinds[1]}, not a byte-level BPE, nor of characters as Gemma's"
        fields = "RunConfig.vocabulary = 'sentencepiece', SentencePieceVocabularyConfig.model_file = 'tokenizer.model'"
        raise UserError(f"{problem}; a SentencePiece model is read by {fields}")
    return tokenizer
