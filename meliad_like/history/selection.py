"""Rankings of spans. Those here run no model: random and recent spans, and overlap with other text.

Oracles read the targets that the spans help to predict (Ancient History Language Models, sections 2 and 3.1): they show
how much there is to gain, and leak the future.
"""

import numpy as np
from jaxtyping import Int, Real

from meliad_like.errors import UserError
from meliad_like.history.settings import HistoryConfig
from meliad_like.history.spans import Ends, Scores, Stride, Tokens, candidates, necessary_prefix, random_numbers, select


class SpanScorer:
    """A ranking of the spans that may come into a window. The defaults are those of one that runs no model."""

    name: str
    """The name of the ranking in tables."""
    leaks_the_future: bool
    """Whether the scores depend on the targets that the spans help to predict."""
    runs_a_model = False
    """Whether candidates cost forward passes, so that `HistoryConfig.max_candidates` limits their number."""
    fingerprint = ""
    """Fingerprint of the model that is run; "" where the config alone decides the scores."""

    @property
    def flops(self) -> float:
        """Operations of the model in all calls so far."""
        return 0.0

    def scores(self, document: Tokens, stride: Stride, ends: Ends) -> Scores:
        """Scores, float32 and finite, of the candidates of a stride that end at `ends` (ascending); higher is better.

        A scorer that does not leak the future reads only the document's tokens before stride.first.
        """
        raise NotImplementedError


def choose(scorer: SpanScorer, name: str, document: Tokens, stride: Stride, config: HistoryConfig) -> Ends:
    """The spans that a scorer selects, in the order of the window; `name` is the document's. Raises a UserError if a
    score is not finite."""
    ends = candidates(stride, config, all_of_them=not scorer.runs_a_model)
    scores = scorer.scores(document, stride, ends)
    check_finite(scores, scorer.name, stride, name)
    return select(scores, ends, config)


def check_finite(scores: np.ndarray, scorer: str, stride: Stride, document: str) -> None:
    """Raises a UserError if a score is not finite."""
    if not np.isfinite(scores).all():
        place = f"the tokens {stride.first:,} to {stride.end - 1:,} of {document} (stride {stride.number})"
        way_out = "bind the model's activation_dtype = 'float32', or choose other documents with --document"
        raise UserError(f"{scorer} gives no finite scores to spans for {place}: {way_out}")


class Ranking(SpanScorer):
    """A `SpanScorer` that runs no model; its name is one of RANKINGS."""

    def __init__(self, name: str, config: HistoryConfig):
        self.name, self.leaks_the_future, self._config = name, name.endswith("oracle"), config

    def scores(self, document: Tokens, stride: Stride, ends: Ends) -> Scores:
        return RANKINGS[self.name](self._config, document, stride, ends).astype(np.float32)


RANKINGS = {
    # Other numbers than those that draw candidates; 24 bits of them, which float32 holds exactly.
    "random": lambda config, document, stride, ends: (
        random_numbers(stride, config.seed + 1, len(ends)) >> np.uint64(40)
    ),
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


def overlap(document: Tokens, ends: Ends, text: Int[np.ndarray, " n"], config: HistoryConfig) -> Real[np.ndarray, " m"]:
    """The overlap of each span with a text, as `HistoryConfig.overlap` measures it.

    A token that a separator replaces is not part of the span.
    """
    types, counts = np.unique(text, return_counts=True)
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
