"""Rankings of spans. Those here need no training: random and recent spans, overlap with other text, and oracles.

Oracles read the targets that the spans help to predict (Ancient History Language Models, section 2, Oracles, and
section 3.1): they show how much there is to gain, and leak the future.
"""

import dataclasses
from typing import ClassVar, Protocol

import numpy as np
from jaxtyping import Float, Int, Real

from meliad_like.errors import UserError
from meliad_like.history.gains import Candidates, SpanGains
from meliad_like.history.spans import HistoryConfig, Stride, candidates, necessary_prefix, random_numbers


class SpanScorer(Protocol):
    """A ranking of the spans that may come into a window.

    Two optional attributes are sums over all calls so far: `flops`, the operations of a model, and `compile_seconds`,
    which do not count as time spent on ranking.
    """

    name: str
    """Name in tables."""
    leaks_the_future: bool
    """Whether the scores depend on the targets that the spans help to predict."""
    runs_a_model: bool
    """Whether candidates cost forward passes, so that `HistoryConfig.max_candidates` limits their number."""
    fingerprint: str
    """Fingerprint of the model that is run; "" where the config alone decides the scores."""

    def scores(
        self, document: Int[np.ndarray, " tokens"], stride: Stride, ends: Int[np.ndarray, " m"]
    ) -> Float[np.ndarray, " m"]:
        """Scores, float32 and finite, of the candidates of a stride that end at `ends` (ascending); higher is better.

        A scorer that does not leak the future reads only the document's tokens before stride.first.
        """
        ...


def rank(
    scorer: SpanScorer, name: str, document: Int[np.ndarray, " tokens"], stride: Stride, config: HistoryConfig
) -> tuple[Int[np.ndarray, " m"], Float[np.ndarray, " m"]]:
    """The ends of the candidates that a scorer ranks, and their scores; `name` is that of the document.

    Raises:
        UserError: a score is not finite.
    """
    ends = candidates(stride, config, all_of_them=not scorer.runs_a_model)
    scores = scorer.scores(document, stride, ends)
    check_finite(scores, scorer.name, stride, name)
    return ends, scores


def check_finite(scores: np.ndarray, scorer: str, stride: Stride, document: str) -> None:
    """
    Raises:
        UserError: a score is not finite.
    """
    if not np.isfinite(scores).all():
        raise UserError(
            f"{scorer} gives no finite scores to spans for the tokens {stride.first:,} to {stride.end - 1:,} of "
            f"{document} (stride {stride.number}): bind the model's activation_dtype = 'float32', or choose other "
            "documents with --document"
        )


@dataclasses.dataclass(frozen=True)
class Ranking:
    """A `SpanScorer` that runs no model; its name is one of RANKINGS."""

    name: str
    config: HistoryConfig
    runs_a_model: ClassVar[bool] = False
    fingerprint: ClassVar[str] = ""

    @property
    def leaks_the_future(self) -> bool:
        return self.name.endswith("oracle")

    def scores(
        self, document: Int[np.ndarray, " tokens"], stride: Stride, ends: Int[np.ndarray, " m"]
    ) -> Float[np.ndarray, " m"]:
        return RANKINGS[self.name](self.config, document, stride, ends).astype(np.float32)


def _random(config: HistoryConfig, document: np.ndarray, stride: Stride, ends: np.ndarray) -> np.ndarray:
    # Other numbers than those that draw candidates; 24 bits of them, which float32 holds exactly.
    return random_numbers(stride, config.seed + 1, len(ends)) >> np.uint64(40)


RANKINGS = {
    "random": _random,
    "recent": lambda config, document, stride, ends: ends,
    "prefix_overlap": lambda config, document, stride, ends: overlap(
        document, ends, necessary_prefix(document, stride, config), config
    ),
    "overlap_oracle": lambda config, document, stride, ends: overlap(
        document, ends, document[stride.first : stride.end], config
    ),
}
"""Functions of (config, document, stride, ends): random numbers that depend on the seed and on the stride's place in
its split; the position in the document; the tokens shared with the necessary prefix; those shared with the targets."""


class ScoreOracle:
    """The spans that alone help most to predict the targets (equation 2)."""

    name = "score_oracle"
    leaks_the_future = True
    runs_a_model = True

    def __init__(self, gains: SpanGains, fingerprint: str = ""):
        """`fingerprint`: that of the model which gives the gains."""
        self._gains, self.fingerprint = gains, fingerprint

    @property
    def flops(self) -> float:
        return self._gains.losses.flops

    def scores(
        self, document: Int[np.ndarray, " tokens"], stride: Stride, ends: Int[np.ndarray, " m"]
    ) -> Float[np.ndarray, " m"]:
        (gains,) = self._gains([Candidates(document, stride, ends)])
        return gains


def overlap(
    document: Int[np.ndarray, " tokens"],
    ends: Int[np.ndarray, " m"],
    other: Int[np.ndarray, " n"],
    config: HistoryConfig,
) -> Real[np.ndarray, " m"]:
    """How much each span has in common with other text, as `HistoryConfig.overlap` measures it.

    A token that a separator replaces is not part of the span.
    """
    types, counts = np.unique(other, return_counts=True)
    if not len(types):
        return np.zeros(len(ends))
    length = config.span_length - bool(config.separator)
    spans = np.asarray(document)[np.asarray(ends)[:, None] - config.span_length + np.arange(length)]
    nearest = np.minimum(np.searchsorted(types, spans), len(types) - 1)
    row, column = np.nonzero(types[nearest] == spans)
    in_span = np.zeros((len(ends), len(types)), np.int64)
    np.add.at(in_span, (row, nearest[row, column]), 1)
    if config.overlap == "multiset":
        return np.minimum(in_span, counts).sum(axis=1)
    common = (in_span > 0).sum(axis=1)
    if config.overlap == "set":
        return common
    different = 1 + (np.diff(np.sort(spans, axis=1), axis=1) != 0).sum(axis=1)
    return common / (different + len(types) - common)
