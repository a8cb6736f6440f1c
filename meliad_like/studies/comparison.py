"""Two readings of the same documents, token by token (Block-Recurrent Transformers, section 4.6 and appendix G).

A gain is what the first model saves: the bits that the other one pays for a token or word, less those that the first
one pays.
"""

import csv
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float, Int

from meliad_like.studies.readings import Chosen, Reading
from meliad_like.studies.units import CATEGORIES, PLACES, Units, categories, make_units

CONTEXT_BYTES = 110  # of an excerpt, before and after


class Group(NamedTuple):
    """Sums over units that have something in common."""

    label: str
    num_units: int
    gain: float
    """Bits, over all of them."""

    @property
    def mean(self) -> float:
        return self.gain / self.num_units if self.num_units else math.nan


class Excerpt(NamedTuple):
    """A unit in its place."""

    document: int
    token: int
    """Its first, counted from 0."""
    before: str
    text: str
    after: str
    first_bits: float
    other_bits: float
    distance: int
    """Tokens since the same unit last began; 0: never."""
    place: str
    """One of PLACES."""
    category: str
    """One of CATEGORIES."""

    @property
    def gain(self) -> float:
        return self.other_bits - self.first_bits


@dataclass(frozen=True)
class ReadDocument:
    """A document that two models read."""

    index: int
    name: str
    tokens: Int[np.ndarray, " tokens"]
    first: Float[np.ndarray, " tokens"]
    """Bits by token, float64; 0 for the first token, which nobody predicts."""
    other: Float[np.ndarray, " tokens"]
    units: Units
    places: Int[np.ndarray, " units"]
    categories: Int[np.ndarray, " units"]

    @cached_property
    def first_by_unit(self) -> Float[np.ndarray, " units"]:
        return np.add.reduceat(self.first, self.units.first)

    @cached_property
    def other_by_unit(self) -> Float[np.ndarray, " units"]:
        return np.add.reduceat(self.other, self.units.first)

    @property
    def gains(self) -> Float[np.ndarray, " tokens"]:
        return self.other - self.first

    @property
    def gains_by_unit(self) -> Float[np.ndarray, " units"]:
        return self.other_by_unit - self.first_by_unit

    def top(self, count: int, *, words: bool, losses: bool = False) -> list[Excerpt]:
        """The units with the largest gains, the largest first.

        Args:
          count: so many, if there are.
          words: leave signs and white space out.
          losses: those with the largest losses instead.
        """
        gains = -self.gains_by_unit if losses else self.gains_by_unit
        if words:
            gains = np.where(self.categories == CATEGORIES.index("sign"), 0, gains)
        order = np.argsort(-gains, kind="stable")[:count]
        distances = self.units.distances()
        return [self._excerpt(unit, int(distances[unit])) for unit in order.tolist() if gains[unit] > 0]

    def _excerpt(self, unit: int, distance: int) -> Excerpt:
        text, start, end = self.units.text, int(self.units.starts[unit]), int(self.units.ends[unit])

        def words(start: int, end: int) -> str:
            return text[start:end].decode("utf-8", "replace")

        return Excerpt(
            self.index,
            int(self.units.first[unit]),
            words(max(start - CONTEXT_BYTES, 0), start).lstrip("\ufffd"),
            words(start, end),
            words(end, end + CONTEXT_BYTES).rstrip("\ufffd"),
            float(self.first_by_unit[unit]),
            float(self.other_by_unit[unit]),
            distance,
            PLACES[self.places[unit]],
            CATEGORIES[self.categories[unit]],
        )


def compare(first: Reading, other: Reading, chosen: Chosen, unit: str, segment: int) -> list[ReadDocument]:
    """Puts two readings side by side.

    Args:
      first, other: of the chosen documents.
      unit: `word` or `token` (`units.make_units`).
      segment: in tokens, for `Units.places`.
    """
    documents = []
    # What the other model cannot see is what the first one may have remembered.
    num_visible = other.subject.opened.model.num_visible
    for index, name in enumerate(chosen.documents.names):
        tokens = chosen.documents.tokens(index, 0, int(chosen.documents.lengths[index]))
        units = make_units(tokens, first.subject.opened.vocabulary, unit)
        ours, theirs = (np.append(0.0, reading.losses[index] / math.log(2)) for reading in (first, other))
        places, kinds = units.places(num_visible(np.maximum(units.first - 1, 0)), segment), categories(units)
        documents.append(ReadDocument(index, name, tokens, ours, theirs, units, places, kinds))
    return documents


def by_place(documents: Sequence[ReadDocument]) -> list[Group]:
    """Gains by where the same unit last occurred."""
    return _groups(PLACES, [document.places for document in documents], documents)


def by_category(documents: Sequence[ReadDocument]) -> list[Group]:
    """Gains by kind of word."""
    return _groups(CATEGORIES, [document.categories for document in documents], documents)


def by_distance(documents: Sequence[ReadDocument]) -> list[Group]:
    """Gains by how far back the same unit last began, in powers of two: the group `8` holds 8 to 15 tokens."""
    exponents = [np.frexp(document.units.distances())[1] for document in documents]
    labels = [str(2**exponent // 2) for exponent in range(max(int(e.max()) for e in exponents) + 1)]
    return _groups(labels, exponents, documents)[1:]


def _groups(labels: Sequence[str], indices: list[np.ndarray], documents: Sequence[ReadDocument]) -> list[Group]:
    index = np.concatenate(indices)
    gains = np.concatenate([document.gains_by_unit for document in documents])
    counts = np.bincount(index, minlength=len(labels))
    totals = np.bincount(index, gains, minlength=len(labels))
    return [Group(*row) for row in zip(labels, counts.tolist(), totals.tolist(), strict=True)]


class Curve(NamedTuple):
    """Gains along a document, in stretches of the same number of tokens."""

    edges: Int[np.ndarray, " stretches+1"]
    lowest: Float[np.ndarray, " stretches"]
    highest: Float[np.ndarray, " stretches"]
    total: Float[np.ndarray, " stretches"]
    """Sum up to the end of each."""


def along(gains: Float[np.ndarray, " tokens"], most_stretches: int = 400) -> Curve:
    """The gains of a document's tokens, few enough numbers to be drawn (Figure 4)."""
    length = -(-len(gains) // most_stretches)
    starts = np.arange(0, len(gains), length)
    sums = np.add.reduceat(gains, starts)
    return Curve(
        np.append(starts, len(gains)),
        np.minimum.reduceat(gains, starts),
        np.maximum.reduceat(gains, starts),
        np.cumsum(sums),
    )


def summary(documents: Sequence[ReadDocument], top: Sequence[Excerpt]) -> dict[str, Any]:
    """All that the page's tables say, for JSON."""

    def rows(groups: list[Group]) -> list[dict[str, Any]]:
        return [{"label": g.label, "units": g.num_units, "gain_bits": g.gain} for g in groups]

    return {
        "documents": [
            {
                "name": document.name,
                "tokens": len(document.tokens),
                "first_bits": float(document.first.sum()),
                "other_bits": float(document.other.sum()),
            }
            for document in documents
        ],
        "by_place": rows(by_place(documents)),
        "by_category": rows(by_category(documents)),
        "by_distance": rows(by_distance(documents)),
        "top_by_category": {kind: sum(excerpt.category == kind for excerpt in top) for kind in CATEGORIES},
        "top_by_place": {place: sum(excerpt.place == place for excerpt in top) for place in PLACES},
    }


def write_numbers(folder: Path, documents: Sequence[ReadDocument], top: Sequence[Excerpt]) -> None:
    """Writes `tokens.npz` and `top.csv`.

    `tokens.npz`: names and lengths of the documents; token ids of all of them, one after the other; and the bits that
    each model paid for them (0 for a document's first token).
    """
    np.savez_compressed(
        folder / "tokens.npz",
        names=np.array([document.name for document in documents]),
        lengths=np.array([len(document.tokens) for document in documents]),
        tokens=np.concatenate([document.tokens for document in documents]),
        first_bits=np.concatenate([document.first for document in documents]),
        other_bits=np.concatenate([document.other for document in documents]),
    )
    with (folder / "top.csv").open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(("document", *Excerpt._fields[1:], "gain"))
        for excerpt in top:
            writer.writerow((documents[excerpt.document].name, *excerpt[1:], excerpt.gain))
