"""Sums over the tokens of documents, and the figures computed from them."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Self

import numpy as np


@dataclass(frozen=True)
class Score:
    """Sums over predicted tokens."""

    num_tokens: int
    nats: float
    """The sum of the tokens' negative log-probabilities, in nats."""
    num_correct: int
    """The number of predicted tokens that were the most likely ones."""

    @property
    def bits_per_token(self) -> float:
        return ratio(self.nats / math.log(2), self.num_tokens)

    @property
    def perplexity(self) -> float:
        """The perplexity per token."""
        return _exp(ratio(self.nats, self.num_tokens))

    @property
    def accuracy(self) -> float:
        return ratio(self.num_correct, self.num_tokens)


@dataclass(frozen=True)
class TextScore(Score):
    """The sums over predicted tokens, and the size of their text."""

    num_bytes: int
    """The number of bytes in UTF-8."""
    num_words: int
    """The number of words, as `data.split.count_words` counts them."""

    @property
    def bits_per_byte(self) -> float:
        """The bits of all predicted tokens, including ends of documents, divided by the number of bytes."""
        return ratio(self.nats / math.log(2), self.num_bytes)

    @property
    def tokens_per_word(self) -> float:
        """The scale factor between the losses per word and per token (Block-Recurrent Transformers, appendix I.1)."""
        return ratio(self.num_tokens, self.num_words)

    @property
    def word_perplexity(self) -> float:
        """exp(nats / words), as PG-19's authors define it; NaN where there are no words."""
        return _exp(ratio(self.nats, self.num_words))


@dataclass(frozen=True)
class DocumentScore(TextScore):
    """The sums over one document."""

    name: str


@dataclass(frozen=True)
class PositionScore(Score):
    """The sums over positions `start` to `stop` (exclusive) of all documents; after a window, bins double."""

    start: int
    stop: int


@dataclass(frozen=True)
class Evaluation(TextScore):
    """The results of one set of parameters on a split; the sums are over all documents."""

    split: str
    documents: tuple[DocumentScore, ...]
    """The documents in the order of the split; a document with a single token has no target."""
    positions: tuple[PositionScore, ...]
    """The losses by position in the document of the token from which the target is predicted."""
    documents_in_split: int
    """The number of documents of the split; more than `documents` if a subset was evaluated."""
    seconds: float
    """The wall time in seconds, without compilation."""
    leaks_the_future: bool = False
    """Whether the reader's selections used the targets (`data.batch.Reader`)."""

    @classmethod
    def of(cls, documents: Iterable[DocumentScore], **fields: Any) -> Self:
        """The evaluation of these documents; `fields` are those that are not sums over them."""
        documents = tuple(documents)
        names = ("num_tokens", "num_correct", "num_bytes", "num_words")
        counts = {name: sum(getattr(document, name) for document in documents) for name in names}
        return cls(documents=documents, nats=math.fsum(document.nats for document in documents), **counts, **fields)

    @property
    def num_documents(self) -> int:
        return len(self.documents)

    @property
    def tokens_per_second(self) -> float:
        return self.num_tokens / self.seconds


def ratio(total: float, count: int) -> float:
    """The ratio of `total` and `count`; NaN if `count` is 0."""
    return total / count if count else math.nan


def _exp(nats: float) -> float:
    with np.errstate(over="ignore"):
        return float(np.exp(nats))
