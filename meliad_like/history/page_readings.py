"""The contents of a page of ancient history: the spans that were selected for every stride, and their worth."""

import math
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int

from meliad_like.data.subset import Documents
from meliad_like.data.vocabulary import Vocabulary
from meliad_like.history.evaluation import BASELINE, read_strides
from meliad_like.history.losses import TargetLosses
from meliad_like.history.scoring import Candidates, SpanGains
from meliad_like.history.spans import HistoryConfig, SpanScorer, Stride
from meliad_like.studies.units import Units, make_units

TERM = re.compile(r"[^\W\d_]{3,}(?:['’][^\W\d_]+)?")
BITS = 1 / math.log(2)


class Selection(NamedTuple):
    """A stride for which spans were selected."""

    stride: Stride
    ends: Int[np.ndarray, " spans"]
    """Where the spans end, in the order of the window."""
    predicted: Float[np.ndarray, " spans"]
    """Their scores."""
    gains: Float[np.ndarray, " spans"]
    """The gain of each alone (equation 2), in nats."""
    plain: Float[np.ndarray, " targets"]
    """Losses of the targets with only the most recent text, in nats."""
    selected: Float[np.ndarray, " targets"]
    """Losses with the spans."""

    @property
    def gain(self) -> float:
        """Gain of all spans together on all targets, in bits."""
        return float(np.sum(self.plain - self.selected, dtype=np.float64)) * BITS

    @property
    def gain_per_token(self) -> float:
        return self.gain / len(self.plain)


@dataclass(frozen=True)
class ReadHistory:
    """A document that was read with selected spans, and without."""

    index: int
    name: str
    tokens: Int[np.ndarray, " tokens"]
    units: Units
    """Its words."""
    plain: Float[np.ndarray, " tokens"]
    """Bits by token without spans, float64; 0 for the first token, which is not predicted."""
    selected: Float[np.ndarray, " tokens"]
    """Bits by token with spans."""
    selections: list[Selection]

    @cached_property
    def plain_by_unit(self) -> Float[np.ndarray, " units"]:
        return np.add.reduceat(self.plain, self.units.first)

    @cached_property
    def selected_by_unit(self) -> Float[np.ndarray, " units"]:
        return np.add.reduceat(self.selected, self.units.first)

    @cached_property
    def terms(self) -> list[str]:
        """The word of each unit in lower case; "" where it is not a word of three letters or more."""
        keys = (key.decode("utf-8", "replace") for key in self.units.keys)
        return [key.lower() if TERM.fullmatch(key) else "" for key in keys]

    def terms_between(self, start: int, stop: int) -> set[str]:
        """The words that lie within these tokens."""
        first, last = np.searchsorted(self.units.first, start), np.searchsorted(self.units.stop, stop, side="right")
        return set(self.terms[first:last]) - {""}


def read_histories(
    windows: TargetLosses,
    gains: SpanGains,
    documents: Documents,
    scorer: SpanScorer,
    config: HistoryConfig,
    separator: int | None,
    vocabulary: Vocabulary,
    on_progress: Callable[[int, int], None],
) -> list[ReadHistory]:
    """Reads documents with the spans that a scorer selects, with none, and with every selected span alone.

    Args:
        windows: the model, for whole windows.
        gains: the model, for spans.
        documents, config, separator: as for `read_strides`.
        scorer: what selects.
        vocabulary: vocabulary of the tokens, which decides what words are.
        on_progress: callback with the numbers of tokens read so far and in all.
    """
    histories, num_read = [], 0
    for index, length in enumerate(documents.lengths):
        tokens, readings = documents.tokens(index, 0, int(length)), []
        for reading in read_strides(windows, documents, [scorer], config, separator, index):
            readings.append(reading)
            on_progress(num_read + reading.stride.end, int(np.sum(documents.lengths)))
        num_read += int(length)
        selecting = [reading for reading in readings if reading.chosen]
        worth = gains(Candidates(tokens, reading.stride, reading.chosen[scorer.name]) for reading in selecting)
        selections = [
            Selection(
                reading.stride,
                reading.chosen[scorer.name],
                reading.scores[scorer.name],
                of_spans,
                reading.nats[BASELINE],
                reading.nats[scorer.name],
            )
            for reading, of_spans in zip(selecting, worth, strict=True)
        ]
        # A document's first token is no target.
        plain, selected = (
            np.concatenate([[0.0], *(reading.nats[name] for reading in readings)]) * BITS
            for name in (BASELINE, scorer.name)
        )
        units = make_units(tokens, vocabulary, "word")
        histories.append(ReadHistory(index, documents.names[index], tokens, units, plain, selected, selections))
    return histories


class Term(NamedTuple):
    """A word that selected spans brought into windows that did not have it."""

    text: str
    num_windows: int
    gain: float
    """Gain on all targets of these windows, in bits."""
    num_targets: int
    """Number of targets of these windows."""
    num_predicted: int
    """How often the word is among these targets."""
    own_gain: float
    """Gain on these occurrences alone, in bits."""

    @property
    def gain_per_token(self) -> float:
        return self.gain / self.num_targets


def find_terms(history: ReadHistory, config: HistoryConfig) -> list[Term]:
    """The words that are in selected spans and not in the plain window, by the gain of the windows that they came into.

    Ancient History Language Models, section 3.2, Example: the impact of a word is the difference between the losses
    with the selected and with the original context.

    Args:
        history: a document.
        config: length of the spans, and whether a separator replaces their last tokens.
    """
    found: dict[str, list[Selection]] = defaultdict(list)
    kept = config.span_length - bool(config.separator)
    for selection in history.selections:
        starts = (selection.ends - config.span_length).tolist()
        brought = set().union(*(history.terms_between(start, start + kept) for start in starts))
        for term in brought - history.terms_between(selection.stride.begin, selection.stride.first):
            found[term].append(selection)
    units_of: dict[str, list[int]] = defaultdict(list)
    for unit, term in enumerate(history.terms):
        units_of[term].append(unit)
    gains, terms = history.plain_by_unit - history.selected_by_unit, []
    for text, selections in found.items():
        units = np.array(units_of[text])
        first = history.units.first[units, None]
        strides = np.array([(selection.stride.first, selection.stride.end) for selection in selections])
        predicted = units[((first >= strides[:, 0]) & (first < strides[:, 1])).any(axis=1)]
        terms.append(
            Term(
                text,
                len(selections),
                sum(selection.gain for selection in selections),
                sum(len(selection.plain) for selection in selections),
                len(predicted),
                float(gains[predicted].sum()),
            )
        )
    return sorted(terms, key=lambda term: (-term.gain, -term.own_gain, term.text))


class ChosenSpan(NamedTuple):
    """A span, and the strides for which it was selected."""

    end: int
    num_windows: int
    mean_gain: float
    """Mean gain (equation 2), in nats."""


def find_spans(selections: Sequence[Selection]) -> list[ChosenSpan]:
    """Selected spans, those that were selected most often first."""
    counts, sums = Counter(), Counter()
    for selection in selections:
        ends = selection.ends.tolist()
        counts.update(ends)
        for end, gain in zip(ends, selection.gains.tolist(), strict=True):
            sums[end] += gain
    spans = [ChosenSpan(end, count, sums[end] / count) for end, count in counts.items()]
    return sorted(spans, key=lambda span: (-span.num_windows, -span.mean_gain, span.end))
