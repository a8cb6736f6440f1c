"""A SentencePiece model of meliad_like as a tokenizer of Hugging Face's transformers."""

import shutil

import sentencepiece
from transformers import PreTrainedTokenizer  # type: ignore[import-not-found]  # not a requirement of the package


class MeliadLikeTokenizer(PreTrainedTokenizer):
    """Any text to tokens and back, as its model reads it. Nothing is put before or after it."""

    vocab_files_names = {"vocab_file": "sentencepiece.model"}  # noqa: RUF012

    def __init__(self, vocab_file: str, **settings):
        self.vocab_file, self.model = vocab_file, sentencepiece.SentencePieceProcessor(model_file=vocab_file)
        super().__init__(vocab_file=vocab_file, **settings)

    @property
    def vocab_size(self) -> int:
        return len(self.model)

    def get_vocab(self) -> dict[str, int]:
        return {self.model.id_to_piece(i): i for i in range(len(self.model))}

    def _tokenize(self, text: str, **settings) -> list[str]:
        # SentencePiece writes a space as U+2581, so a U+2581 of the text is written as its bytes.
        first, *further = self.model.encode(text.split("\u2581"), out_type=str)
        return first + [token for part in further for token in ("<0xE2>", "<0x96>", "<0x81>", *part)]

    def _convert_token_to_id(self, token: str) -> int:
        return self.model.piece_to_id(token)

    def _convert_id_to_token(self, index: int) -> str:
        return self.model.id_to_piece(index)

    def convert_tokens_to_string(self, tokens: list[str]) -> str:
        is_byte = self.model.is_byte
        pieces = [
            bytes([int(token[3:-1], 16)])
            if is_byte(self.model.piece_to_id(token))
            else token.replace("\u2581", " ").encode()
            for token in tokens
        ]
        return b"".join(pieces).decode(errors="replace")

    def save_vocabulary(self, save_directory: str, filename_prefix: str | None = None) -> tuple[str]:
        return (shutil.copy(self.vocab_file, f"{save_directory}/sentencepiece.model"),)
