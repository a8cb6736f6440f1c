"""Byte-level BPE vocabularies of pretrained models, in `tokenizers`, read from the file formats of the models."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from meliad_like.data.vocabulary import DEFAULT_END, VOCABULARIES, FileVocabularyConfig, Vocabulary, read_text
from meliad_like.errors import UserError
from meliad_like.resumable import read_object

TOKENIZER_NAME = "tokenizer.json"
TOKENIZER_CONFIG_NAME = "tokenizer_config.json"
# llama.cpp's names of the pre-tokenizers, which split text before byte pairs are merged.
GGUF_PRE_TOKENIZERS = {"gpt-2": (), "smollm": (pre_tokenizers.Digits(individual_digits=True),)}
CONTROL, USER_DEFINED = 3, 4  # Two of GGUF's types of tokens.


@VOCABULARIES.register("tokenizers")
@dataclass(frozen=True)
class TokenizersVocabularyConfig(FileVocabularyConfig):
    """The byte-level BPE of a pretrained model: a tokenizer.json, a GGUF file, or a folder with tokenizer.json or with
    vocab.json and merges.txt."""

    end_token: str = ""
    """The token that ends a document; "": <|endoftext|> if there is one, otherwise the file's end-of-text token."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.model_file:
            raise UserError("RunConfig.vocabulary = 'tokenizers' needs a TokenizersVocabularyConfig.model_file")

    def make(self, texts: Iterable[str] = ()) -> Vocabulary:
        tokenizer, end = read_tokenizer(self.model_file)
        return TokenizersVocabulary(tokenizer, self.end_token or end, self.size_multiple)


class TokenizersVocabulary(Vocabulary):
    """A byte-level BPE. Text that looks like a control token is encoded as ordinary text."""

    kind, file_name = "tokenizers", TOKENIZER_NAME

    def __init__(self, tokenizer_json: str, end_token: str, size_multiple: int = 1):
        """
        Args:
          tokenizer_json: the contents of a tokenizer.json.
          end_token: the token that ends documents.

        Raises:
          UserError: the tokenizer is not a byte-level BPE, or has no such token.
        """
        self.end_token = end_token
        self._tokenizer = tokenizer = _parse(tokenizer_json)
        # Control tokens are not recognised in prompts and documents.
        tokenizer.encode_special_tokens = True
        # Truncation and padding may be saved with the tokenizer; documents would be cut.
        tokenizer.no_truncation()
        tokenizer.no_padding()
        if (end := tokenizer.token_to_id(end_token)) is None:
            what = f"has no token {end_token!r}" if end_token else "doesn't say which token ends a text"
            raise UserError(f"the tokenizer {what}: set TokenizersVocabularyConfig.end_token")
        added = tokenizer.get_added_tokens_decoder()
        to_byte = {character: byte for byte, character in _byte_characters().items()}

        def piece(token: int) -> bytes:
            if token in added:
                return b"" if added[token].special else added[token].content.encode()
            text = tokenizer.id_to_token(token) or ""
            # Reserved tokens, which no bytes are merged to, may be written in any characters.
            return bytes(map(to_byte.__getitem__, text)) if all(map(to_byte.__contains__, text)) else b""

        num_tokens = max(tokenizer.get_vocab().values()) + 1
        pieces = [piece(token) for token in range(num_tokens)]
        super().__init__(pieces, end, size_multiple, tokenizer_json, end_token=end_token)

    def for_tokenizers(self) -> tuple[str, str] | None:
        return self._model.decode(), self.end_token

    def encode(self, text: str) -> np.ndarray:
        return np.asarray(self._tokenizer.encode(text, add_special_tokens=False).ids, np.int32)


def read_tokenizer(path: str | Path) -> tuple[str, str]:
    """The contents of a tokenizer.json, and the token that ends documents (`DEFAULT_END`, if there is one).

    Args:
      path: a tokenizer.json, a GGUF file, or a folder with tokenizer.json or with vocab.json and merges.txt.
    """
    path = Path(path).expanduser()
    end = ""
    if path.suffix == ".gguf":
        tokenizer, end = _from_gguf(path)
    elif not path.is_dir():
        tokenizer = read_text(path, "tokenizer")
    elif (path / TOKENIZER_NAME).exists():
        tokenizer = read_text(path / TOKENIZER_NAME, "tokenizer")
        if (path / TOKENIZER_CONFIG_NAME).exists():
            token = read_object(path / TOKENIZER_CONFIG_NAME).get("eos_token") or ""
            end = token["content"] if isinstance(token, dict) else token
    elif (path / "vocab.json").exists():
        tokenizer = _from_merges(path / "vocab.json", path / "merges.txt")
    else:
        raise UserError(f"{path} has no tokenizer: neither {TOKENIZER_NAME} nor vocab.json and merges.txt")
    if _parse(tokenizer, str(path)).token_to_id(DEFAULT_END) is not None:
        end = DEFAULT_END
    return tokenizer, end


def byte_tokenizer() -> tuple[str, str]:
    """The contents of a tokenizer.json whose tokens are the bytes, and after them its token that ends documents."""
    bytes_alone = {character: byte for byte, character in _byte_characters().items()}
    return _byte_level(bytes_alone, [], [DEFAULT_END], [], (), "bytes"), DEFAULT_END


def _from_merges(vocabulary: Path, merges: Path) -> str:
    lines = read_text(merges, "tokenizer").splitlines()
    pairs = [line for line in lines if line and not line.startswith("#version")]
    return _byte_level(read_object(vocabulary), pairs, [DEFAULT_END], [], (), str(merges))


def _from_gguf(path: Path) -> tuple[str, str]:
    # Reading the file's header takes a second, so it is read only if needed.
    from meliad_like.data.gguf_file import open_gguf

    file = open_gguf(path)
    # Older files don't name the pre-tokenizer, and their models have different ones.
    model, pre = file.value("tokenizer.ggml.model", ""), file.value("tokenizer.ggml.pre", "default")
    if model != "gpt2" or pre not in GGUF_PRE_TOKENIZERS:
        raise UserError(
            f"{path}: we can't honour its tokenizer {model!r} with pre-tokenizer {pre!r}, only 'gpt2' with "
            f"{', '.join(GGUF_PRE_TOKENIZERS)}: give the model's own {TOKENIZER_NAME}"
        )
    tokens, kinds = file.value("tokenizer.ggml.tokens"), file.value("tokenizer.ggml.token_type")
    special, plain = ([t for t, kind in zip(tokens, kinds) if kind == role] for role in (CONTROL, USER_DEFINED))
    ids = {token: i for i, token in enumerate(tokens)}
    tokenizer = _byte_level(
        ids, file.value("tokenizer.ggml.merges"), special, plain, GGUF_PRE_TOKENIZERS[pre], str(path)
    )
    return tokenizer, tokens[file.value("tokenizer.ggml.eos_token_id")]


def _byte_level(
    vocabulary: dict[str, int],
    merges: Sequence[str],
    special: list[str],
    plain: list[str],
    splitters: tuple,
    owner: str,
) -> str:
    pairs = [tuple(merge.split(" ")) for merge in merges]
    for pair in pairs:
        if len(pair) != 2 or not all(part in vocabulary for part in (*pair, "".join(pair))):
            raise UserError(f"{owner}: the merge {' '.join(pair)!r} is not of tokens of its vocabulary")
    tokenizer = Tokenizer(models.BPE(vocabulary, pairs))
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*splitters, byte_level])  # type: ignore[assignment]
    tokenizer.decoder = decoders.ByteLevel()  # type: ignore[assignment]
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in special])
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in plain])
    return tokenizer.to_str()


def _parse(tokenizer_json: str, owner: str = "the tokenizer") -> Tokenizer:
    try:
        tokenizer = Tokenizer.from_str(tokenizer_json)
    except Exception as error:  # The library raises no more specific exception.
        raise UserError(f"{owner} is not a {TOKENIZER_NAME}: {error}") from None
    # The type of the loaded model, not of the file: older files, such as GPT-2's, don't have one.
    kinds = (type(tokenizer.model).__name__, tokenizer.decoder and type(tokenizer.decoder).__name__)
    if kinds != ("BPE", "ByteLevel"):
        raise UserError(
            f"{owner} is {kinds[0]} with decoder {kinds[1]}, not a byte-level BPE; a SentencePiece model is read by "
            "RunConfig.vocabulary = 'sentencepiece'"
        )
    return tokenizer


def _byte_characters() -> dict[int, str]:
    """The characters in which byte-level vocabularies write the bytes; printable bytes stand for themselves."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    further = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(256 + i) for i, byte in enumerate(further)}
