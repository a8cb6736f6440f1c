"""Rankings of spans that need no training: chance and recency, overlap with other text, and oracles.

Oracles read the targets that the spans are to help to predict (Ancient History Language Models, section 2, Oracles, and
section 3.1): they say how much there is to gain, and leak the future.
"""

import numpy as np
from jaxtyping import Float, Int

from meliad_like.history.scoring import Request, SpanGains
from meliad_like.history.spans import HistoryConfig, Stride, necessary_prefix, random_numbers


class RandomSpans:
    """Spans by chance: a pure function of the seed and of the stride's place in its split."""

    name = "random"
    leaks_the_future = False
    runs_a_model = False

    def __init__(self, config: HistoryConfig):
        self._seed = config.seed

    def scores(
        self, document: Int[np.ndarray, " tokens"], stride: Stride, ends: Int[np.ndarray, " m"]
    ) -> Float[np.ndarray, " m"]:
        # Other numbers than those that candidates are drawn by; 24 bits of them, which float32 holds exactly.
        return (random_numbers(stride, self._seed + 1, len(ends)) >> np.uint64(40)).astype(np.float32)


class RecentSpans:
    """The last spans before the recent text."""

    name = "recent"
    leaks_the_future = False
    runs_a_model = False

    def scores(
        self, document: Int[np.ndarray, " tokens"], stride: Stride, ends: Int[np.ndarray, " m"]
    ) -> Float[np.ndarray, " m"]:
        return np.asarray(ends, np.float32)


class PrefixOverlap:
    """Spans that share the most tokens with the necessary prefix."""

    name = "prefix_overlap"
    leaks_the_future = False
    runs_a_model = False

    def __init__(self, config: HistoryConfig):
        self._config = config

    def scores(
        self, document: Int[np.ndarray, " tokens"], stride: Stride, ends: Int[np.ndarray, " m"]
    ) -> Float[np.ndarray, " m"]:
        return overlap(document, ends, necessary_prefix(document, stride, self._config), self._config)


class OverlapOracle:
    """Spans that share the most tokens with the targets."""

    name = "overlap_oracle"
    leaks_the_future = True
    runs_a_model = False

    def __init__(self, config: HistoryConfig):
        self._config = config

    def scores(
        self, document: Int[np.ndarray, " tokens"], stride: Stride, ends: Int[np.ndarray, " m"]
    ) -> Float[np.ndarray, " m"]:
        return overlap(document, ends, document[stride.first : stride.end], self._config)


class ScoreOracle:
    """Spans that alone help most to predict the targets (equation 2)."""

    name = "score_oracle"
    leaks_the_future = True
    runs_a_model = True

    def __init__(self, gains: SpanGains):
        self._gains = gains

    @property
    def flops(self) -> float:
        return self._gains.flops

    def scores(
        self, document: Int[np.ndarray, " tokens"], stride: Stride, ends: Int[np.ndarray, " m"]
    ) -> Float[np.ndarray, " m"]:
        (gains,) = self._gains([Request(document, stride, ends)])
        return gains


def overlap(
    document: Int[np.ndarray, " tokens"],
    ends: Int[np.ndarray, " m"],
    other: Int[np.ndarray, " n"],
    config: HistoryConfig,
) -> Float[np.ndarray, " m"]:
    """How much each span has in common with other text, float32, as `HistoryConfig.overlap` measures it.

    The token whose place a separator takes is no part of a span.

    Args:
        document: all its tokens.
        ends: of the spans.
        other: tokens.
    """
    length = config.span_length - bool(config.separator)
    places = np.asarray(ends, np.int64)[:, None] - config.span_length + np.arange(length)
    types, counts = np.unique(other, return_counts=True)
    if not len(types):
        return np.zeros(len(ends), np.float32)
    past = np.asarray(document)[: ends.max()]
    type_of = np.full(max(past.max(), types[-1]) + 1, -1)
    type_of[types] = np.arange(len(types))
    tokens, shared_type = past[places], type_of[past][places]
    cell = np.arange(len(ends))[:, None] * len(types) + shared_type
    in_span = np.bincount(cell[shared_type >= 0], minlength=len(ends) * len(types)).reshape(len(ends), len(types))
    return _MEASURES[config.overlap](in_span, counts, tokens).astype(np.float32)


def _multiset(in_span, counts, tokens):
    return np.minimum(in_span, counts).sum(axis=1)


def _set(in_span, counts, tokens):
    return (in_span > 0).sum(axis=1)


def _jaccard(in_span, counts, tokens):
    different = 1 + (np.diff(np.sort(tokens, axis=1), axis=1) != 0).sum(axis=1)
    both = _set(in_span, counts, tokens)
    return both / (different + len(counts) - both)


_MEASURES = {"multiset": _multiset, "set": _set, "jaccard": _jaccard}
