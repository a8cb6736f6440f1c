"""Sums over the tokens of documents, and the figures that follow from them."""

import math
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Score:
    """Sums over tokens."""

    num_tokens: int
    """Tokens that were predicted."""
    nats: float
    """Minus the sum of the logarithms of their probabilities."""
    num_correct: int
    """Those that were the most likely ones."""

    @property
    def bits_per_token(self) -> float:
        return _ratio(self.nats / math.log(2), self.num_tokens)


@dataclass(frozen=True)
class DocumentScore(Score):
    """One document."""

    name: str
    num_bytes: int
    """Bytes of its text in UTF-8."""
    num_words: int
    """Words as `data.token_store.count_words` counts them."""

    @property
    def bits_per_byte(self) -> float:
        return _ratio(self.nats / math.log(2), self.num_bytes)


@dataclass(frozen=True)
class PositionScore(Score):
    """The tokens at positions `start` to `stop` (not included) of all documents; the bins double from a window on."""

    start: int
    stop: int


@dataclass(frozen=True)
class Evaluation:
    """The results of one set of parameters on a split."""

    split: str
    documents: tuple[DocumentScore, ...]
    """In the order of the split; one without a second token has no target."""
    positions: tuple[PositionScore, ...]
    """Loss by position in the document, counted to the token that predicts."""
    documents_in_split: int
    """More than `documents`, where only a part was asked for."""
    seconds: float
    """Wall time, compilation included where this was the evaluator's first call."""
    leaks_the_future: bool = False
    """Whether the reader's selections were made with knowledge of the targets (`data.readers.leaks_the_future`)."""

    @property
    def num_documents(self) -> int:
        return len(self.documents)

    @property
    def num_tokens(self) -> int:
        """Tokens that were predicted: all but each document's first."""
        return sum(document.num_tokens for document in self.documents)

    @property
    def num_bytes(self) -> int:
        return sum(document.num_bytes for document in self.documents)

    @property
    def num_words(self) -> int:
        return sum(document.num_words for document in self.documents)

    @property
    def nats(self) -> float:
        return math.fsum(document.nats for document in self.documents)

    @property
    def bits_per_token(self) -> float:
        return self.nats / math.log(2) / self.num_tokens

    @property
    def perplexity(self) -> float:
        """Per token."""
        return _exp(self.nats / self.num_tokens)

    @property
    def bits_per_byte(self) -> float:
        """Bits of all predicted tokens, ends of documents included, over all bytes."""
        return _ratio(self.nats / math.log(2), self.num_bytes)

    @property
    def tokens_per_word(self) -> float:
        """The scale factor between the losses per word and per token (Block-Recurrent Transformers, appendix I.1)."""
        return _ratio(self.num_tokens, self.num_words)

    @property
    def word_perplexity(self) -> float:
        """exp(nats / words), as PG-19's authors define it; NaN where there are no words."""
        return _exp(_ratio(self.nats, self.num_words))

    @property
    def accuracy(self) -> float:
        """Share of the tokens that were the most likely ones."""
        return sum(document.num_correct for document in self.documents) / self.num_tokens

    @property
    def tokens_per_second(self) -> float:
        return self.num_tokens / self.seconds


def _ratio(total: float, count: int) -> float:
    return total / count if count else math.nan


def _exp(nats: float) -> float:
    with np.errstate(over="ignore"):
        return float(np.exp(nats))
