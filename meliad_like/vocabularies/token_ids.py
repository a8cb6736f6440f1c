"""The vocabulary of a model without a tokenizer: token ids that stand for no text."""

from collections.abc import Iterable, Sequence

from meliad_like.errors import UserError
from meliad_like.registry import size
from meliad_like.validation import check_positive
from meliad_like.vocabularies.base import VOCABULARIES, Vocabulary, VocabularyConfig


@VOCABULARIES.register("token_ids")
class TokenIdsVocabularyConfig(VocabularyConfig):
    """Token ids without a text, as of a published model whose folder has no tokenizer."""

    num_tokens: int = size(32_000, "fixed")
    """The number of ids."""
    end_token: int | None = None
    """The id that ends a document; None: none, so that generation doesn't stop, and documents can't be read."""

    stop_tokens: tuple[int, ...] = ()
    """Further ids at which a model stops to write."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_positive(self, ("num_tokens",))
        if self.end_token is not None and not 0 <= self.end_token < self.num_tokens:
            name = "TokenIdsVocabularyConfig.end_token"
            raise UserError(f"{name}={self.end_token} must be at least 0 and below num_tokens={self.num_tokens}")

    def make(self, texts: Iterable[str] = ()) -> Vocabulary:
        return TokenIdsVocabulary(self.num_tokens, self.end_token, self.size_multiple, self.stop_tokens)


class TokenIdsVocabulary(Vocabulary):
    """Token ids without a text: a text is refused, and ids have no bytes."""

    kind, end_is_text = "token_ids", True

    def __init__(self, num_tokens: int, end_token: int | None, size_multiple: int = 1, stop_tokens: Sequence[int] = ()):
        pieces, settings = [b""] * num_tokens, {"num_tokens": num_tokens, "end_token": end_token}
        super().__init__(pieces, end_token, size_multiple, lossless=False, stop_tokens=stop_tokens, **settings)
        self.writable[:num_tokens] = True

    def encode(self, text: str):
        raise UserError("this model has no tokenizer: give it token ids, not a text")
