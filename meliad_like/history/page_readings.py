"""What a page of ancient history tells: the spans that were selected for every stride, and what they were worth."""

import math
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float, Int

from meliad_like.data.vocabulary import Vocabulary
from meliad_like.evaluation.perplexity import Documents
from meliad_like.history.evaluation import BASELINE, read_strides
from meliad_like.history.losses import TargetLosses
from meliad_like.history.scoring import Request, SpanGains
from meliad_like.history.spans import HistoryConfig, SpanScorer, Stride
from meliad_like.studies.units import Units, make_units

TERM = re.compile(r"[^\W\d_]{3,}(?:['’][^\W\d_]+)?")
BITS = 1 / math.log(2)


class Selection(NamedTuple):
    """A stride for which spans were selected."""

    stride: Stride
    ends: Int[np.ndarray, " spans"]
    """Of the spans, in the order of the window."""
    predicted: Float[np.ndarray, " spans"]
    """What the selector gave each of them."""
    gains: Float[np.ndarray, " spans"]
    """What each is worth alone (equation 2), in nats."""
    plain: Float[np.ndarray, " targets"]
    """The losses of the targets with the most recent text alone, in nats."""
    selected: Float[np.ndarray, " targets"]
    """Those with the spans."""

    @property
    def gain(self) -> float:
        """Of all targets by all spans together, in bits."""
        return float(np.sum(self.plain - self.selected, dtype=np.float64)) * BITS

    @property
    def gain_per_token(self) -> float:
        return self.gain / len(self.plain)


@dataclass(frozen=True)
class ReadHistory:
    """A document as it was read with selected spans, and without."""

    index: int
    name: str
    tokens: Int[np.ndarray, " tokens"]
    units: Units
    """Its words."""
    plain: Float[np.ndarray, " tokens"]
    """Bits by token, float64; 0 for the first token, which nobody predicts."""
    selected: Float[np.ndarray, " tokens"]
    selections: list[Selection]

    @cached_property
    def plain_by_unit(self) -> Float[np.ndarray, " units"]:
        return np.add.reduceat(self.plain, self.units.first)

    @cached_property
    def selected_by_unit(self) -> Float[np.ndarray, " units"]:
        return np.add.reduceat(self.selected, self.units.first)

    @cached_property
    def terms(self) -> list[str]:
        """The word of each unit in small letters; "" where it is none of three letters or more."""
        keys = (key.decode("utf-8", "replace") for key in self.units.keys)
        return [key.lower() if TERM.fullmatch(key) else "" for key in keys]

    def terms_between(self, start: int, stop: int) -> Counter[str]:
        """The words that lie within these tokens, with how often they do."""
        first, last = np.searchsorted(self.units.first, start), np.searchsorted(self.units.stop, stop, side="right")
        return Counter(term for term in self.terms[first:last] if term)


def read_histories(
    windows: TargetLosses,
    gains: SpanGains,
    documents: Documents,
    scorer: SpanScorer,
    config: HistoryConfig,
    separator: int | None,
    vocabulary: Vocabulary,
    on_progress: Callable[[int, int], None] | None = None,
) -> list[ReadHistory]:
    """Reads documents with the spans that a selection chooses, with none, and every chosen span alone.

    Args:
        windows: the model, for whole windows.
        gains: the model, for spans.
        documents, config, separator: as of `read_strides`.
        scorer: what selects.
        vocabulary: says what words are.
        on_progress: told how many tokens are read, and how many there are.
    """
    tokens = [documents.tokens(i, 0, int(length)) for i, length in enumerate(documents.lengths)]
    by_document: list[list[Any]] = [[] for _ in tokens]
    done, total = 0, int(np.sum(documents.lengths))
    for reading in read_strides(windows, documents, [scorer], config, separator):
        by_document[reading.document].append(reading)
        done += reading.stride.num_targets
        if on_progress is not None:
            on_progress(done, total)
    choosing = [reading for readings in by_document for reading in readings if scorer.name in reading.chosen]
    worth = gains(Request(tokens[r.document], r.stride, r.chosen[scorer.name]) for r in choosing)
    of_stride = {(reading.document, reading.stride.number): gain for reading, gain in zip(choosing, worth)}
    histories = []
    for index, readings in enumerate(by_document):
        plain, selected = (
            np.concatenate([_whole(reading.nats[name], reading.stride) for reading in readings]) * BITS
            for name in (BASELINE, scorer.name)
        )
        selections = [
            Selection(
                reading.stride,
                reading.chosen[scorer.name],
                reading.scores[scorer.name],
                of_stride[index, reading.stride.number],
                reading.nats[BASELINE],
                reading.nats[scorer.name],
            )
            for reading in readings
            if scorer.name in reading.chosen
        ]
        units = make_units(tokens[index], vocabulary, "word")
        histories.append(ReadHistory(index, documents.names[index], tokens[index], units, plain, selected, selections))
    return histories


def _whole(nats: Float[np.ndarray, " targets"], stride: Stride) -> Float[np.ndarray, " tokens"]:
    """With 0 for a document's first token, which is no target."""
    return np.pad(nats.astype(np.float64), (stride.num_targets - len(nats), 0))


class Term(NamedTuple):
    """A word that selected spans brought into windows that did not have it."""

    text: str
    num_windows: int
    gain: float
    """Of all targets of these windows, in bits."""
    num_targets: int
    """Targets of these windows."""
    num_predicted: int
    """How often it is among these targets."""
    own_gain: float
    """Of these occurrences alone, in bits."""

    @property
    def gain_per_token(self) -> float:
        return self.gain / self.num_targets


def find_terms(history: ReadHistory, config: HistoryConfig) -> list[Term]:
    """The words that selected spans have and the plain window has not, by the gain of the windows that they came into.

    Section 3.2, Example: impact is the difference of the losses with the selected and with the original context.

    Args:
        history: a document.
        config: how long spans are, and whether a separator takes the place of their last tokens.
    """
    found: dict[str, list[Selection]] = {}
    kept = config.span_length - bool(config.separator)
    for selection in history.selections:
        starts = (selection.ends - config.span_length).tolist()
        brought = set().union(*(history.terms_between(start, start + kept) for start in starts))
        present = history.terms_between(selection.stride.begin, selection.stride.first)
        for term in brought - present.keys():
            found.setdefault(term, []).append(selection)
    gains = history.plain_by_unit - history.selected_by_unit
    places: dict[str, list[int]] = {}
    for unit, term in enumerate(history.terms):
        if term in found:
            places.setdefault(term, []).append(unit)
    terms = []
    for text, selections in found.items():
        first = history.units.first[places[text]]
        among = np.zeros(len(first), bool)
        for selection in selections:
            among |= (first >= selection.stride.first) & (first < selection.stride.end)
        terms.append(
            Term(
                text,
                len(selections),
                sum(selection.gain for selection in selections),
                sum(len(selection.plain) for selection in selections),
                int(among.sum()),
                float(gains[places[text]][among].sum()),
            )
        )
    return sorted(terms, key=lambda term: (-term.gain, -term.own_gain, term.text))


class ChosenSpan(NamedTuple):
    """A span, and the strides that it was selected for."""

    end: int
    num_windows: int
    mean_gain: float
    """By equation 2, in nats."""


def find_spans(selections: Sequence[Selection]) -> list[ChosenSpan]:
    """Selected spans, those that were selected most often first."""
    gains: dict[int, list[float]] = {}
    for selection in selections:
        for end, gain in zip(selection.ends.tolist(), selection.gains.tolist(), strict=True):
            gains.setdefault(end, []).append(gain)
    spans = [ChosenSpan(end, len(found), sum(found) / len(found)) for end, found in gains.items()]
    return sorted(spans, key=lambda span: (-span.num_windows, -span.mean_gain, span.end))
