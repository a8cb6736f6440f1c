"""Rankings of spans that need no training: random and recent spans, overlap with other text, and oracles.

Oracles read the targets that the spans help to predict (Ancient History Language Models, section 2, Oracles, and
section 3.1): they show how much there is to gain, and leak the future.
"""

import dataclasses
from typing import ClassVar

import numpy as np
from jaxtyping import Float, Int, Real

from meliad_like.history.scoring import Candidates, SpanGains
from meliad_like.history.spans import HistoryConfig, Stride, necessary_prefix, random_numbers


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


def _recent(config: HistoryConfig, document: np.ndarray, stride: Stride, ends: np.ndarray) -> np.ndarray:
    return ends


def _prefix_overlap(config: HistoryConfig, document: np.ndarray, stride: Stride, ends: np.ndarray) -> np.ndarray:
    return overlap(document, ends, necessary_prefix(document, stride, config), config)


def _overlap_oracle(config: HistoryConfig, document: np.ndarray, stride: Stride, ends: np.ndarray) -> np.ndarray:
    return overlap(document, ends, document[stride.first : stride.end], config)


RANKINGS = {
    "random": _random,
    "recent": _recent,
    "prefix_overlap": _prefix_overlap,
    "overlap_oracle": _overlap_oracle,
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

    Args:
        document: all its tokens.
        ends: where the spans end.
        other: tokens.
        config: length of the spans, and the measure.
    """
    types, counts = np.unique(other, return_counts=True)
    if not len(types):
        return np.zeros(len(ends))
    length = config.span_length - bool(config.separator)
    places = np.asarray(ends, np.int64)[:, None] - config.span_length + np.arange(length)
    past = np.asarray(document)[: ends.max()]
    type_of = np.full(max(past.max(), types[-1]) + 1, -1)
    type_of[types] = np.arange(len(types))
    shared_type = type_of[past][places]
    cell = np.arange(len(ends))[:, None] * len(types) + shared_type
    in_span = np.bincount(cell[shared_type >= 0], minlength=len(ends) * len(types)).reshape(len(ends), len(types))
    if config.overlap == "multiset":
        return np.minimum(in_span, counts).sum(axis=1)
    common = (in_span > 0).sum(axis=1)
    if config.overlap == "set":
        return common
    different = 1 + (np.diff(np.sort(past[places], axis=1), axis=1) != 0).sum(axis=1)
    return common / (different + len(types) - common)
