"""The contents of a page of ancient history: the spans that were selected for every stride, and their worth."""

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import pandas as pd
from jaxtyping import Float, Int

from meliad_like.history.evaluation import BASELINE, read_strides
from meliad_like.history.gains import Candidates
from meliad_like.history.opening import Opened
from meliad_like.history.selection import SpanScorer
from meliad_like.history.spans import HistoryConfig, Stride
from meliad_like.studies.units import Units, make_units

TERM = re.compile(r"[^\W\d_]{3,}(?:['’][^\W\d_]+)?")
BITS = 1 / math.log(2)


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
    strides: pd.DataFrame
    """The strides for which spans were selected: the fields of `Stride`, the bits of the targets without spans
    (`plain`), and the `gain` of all spans together on them, in bits."""
    spans: pd.DataFrame
    """Their spans in the order of the window: `number` of the stride, `end`, `predicted` (the score), and the `gain` of
    each alone (equation 2), both in nats."""

    @cached_property
    def bits_by_unit(self) -> tuple[Float[np.ndarray, " units"], Float[np.ndarray, " units"]]:
        """Bits by word with spans, and without."""
        return np.add.reduceat(self.selected, self.units.first), np.add.reduceat(self.plain, self.units.first)

    @property
    def gain_by_unit(self) -> Float[np.ndarray, " units"]:
        selected, plain = self.bits_by_unit
        return plain - selected

    @cached_property
    def terms(self) -> list[str]:
        """The word of each unit in lower case; "" where it is not a word of three letters or more."""
        keys = (key.decode("utf-8", "replace") for key in self.units.keys)
        return [key.lower() if TERM.fullmatch(key) else "" for key in keys]

    def terms_between(self, start: int, stop: int) -> set[str]:
        """The words that lie within these tokens."""
        first, last = np.searchsorted(self.units.first, start), np.searchsorted(self.units.stop, stop, side="right")
        return set(self.terms[first:last]) - {""}


def read_histories(opened: Opened, scorer: SpanScorer, on_progress: Callable[[int, int], None]) -> list[ReadHistory]:
    """Reads documents with the spans that a scorer selects, with none, and with every selected span alone.

    `on_progress`: callback with the numbers of tokens read so far and in all.
    """
    windows, span_gains, documents, name = opened.windows(), opened.gains(), opened.documents, scorer.name
    histories, ends = [], np.cumsum(documents.lengths)
    for index, length in enumerate(documents.lengths):
        tokens, readings = documents.tokens(index, 0, int(length)), []
        for reading in read_strides(windows, documents, [scorer], opened.config, opened.separator, index):
            readings.append(reading)
            on_progress(int(ends[index] - length) + reading.stride.end, int(ends[-1]))
        # A document's first token is no target.
        plain, selected = (
            np.concatenate([[0.0], *(reading.nats[each] for reading in readings)]) * BITS for each in (BASELINE, name)
        )
        selecting = [reading for reading in readings if reading.chosen]
        strides = pd.DataFrame([reading.stride for reading in selecting], columns=Stride._fields)
        for column, bits in {"plain": plain, "gain": plain - selected}.items():
            sums = np.append(0.0, np.cumsum(bits))
            strides[column] = sums[strides["end"]] - sums[strides["first"]] if len(strides) else 0.0
        gains = span_gains(Candidates(tokens, reading.stride, reading.chosen[name]) for reading in selecting)
        spans = [
            {"number": reading.stride.number, "end": end, "predicted": predicted, "gain": gain}
            for reading, of_spans in zip(selecting, gains, strict=True)
            for end, predicted, gain in zip(
                reading.chosen[name].tolist(), reading.scores[name].tolist(), of_spans.tolist(), strict=True
            )
        ]
        histories.append(
            ReadHistory(
                index,
                documents.names[index],
                tokens,
                make_units(tokens, opened.checkpoint.vocabulary, "word"),
                plain,
                selected,
                strides,
                pd.DataFrame(spans, columns=["number", "end", "predicted", "gain"]),
            )
        )
    return histories


def find_terms(history: ReadHistory, config: HistoryConfig) -> pd.DataFrame:
    """The words that are in selected spans and not in the plain window, by the gain of the windows that they came into.

    Ancient History Language Models, section 3.2, Example: the impact of a word is the difference between the losses
    with the selected and with the original context.

    Returns:
        For each word: its `text`, `num_windows`, their `gain` in bits and `num_targets`, how often the word is among
        these targets (`num_predicted`), and the gain on these occurrences alone (`own_gain`).
    """
    kept = config.span_length - bool(config.separator)
    words, found = np.array(history.terms), []
    ends = history.spans.groupby("number")["end"]
    strides: Any = history.strides
    for stride in strides.itertuples():
        starts = (ends.get_group(stride.number) - config.span_length).tolist()
        brought = set().union(*(history.terms_between(start, start + kept) for start in starts))
        targets = slice(*np.searchsorted(history.units.first, (stride.first, stride.end)))
        for term in brought - history.terms_between(stride.begin, stride.first):
            own = history.gain_by_unit[targets][words[targets] == term]
            found.append((term, 1, stride.gain, stride.end - stride.first, len(own), own.sum()))
    columns = ["text", "num_windows", "gain", "num_targets", "num_predicted", "own_gain"]
    terms = pd.DataFrame(found, columns=columns).groupby("text", as_index=False).sum()
    return terms.sort_values(["gain", "own_gain", "text"], ascending=[False, False, True], ignore_index=True)


def find_spans(spans: pd.DataFrame) -> pd.DataFrame:
    """Selected spans, those that were selected most often first: `end`, `num_windows`, `mean_gain` in nats."""
    found = spans.groupby("end")["gain"].agg(num_windows="size", mean_gain="mean").reset_index()
    return found.sort_values(["num_windows", "mean_gain", "end"], ascending=[False, False, True])
