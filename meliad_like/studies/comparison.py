"""Two readings of the same documents, token by token (Block-Recurrent Transformers, section 4.6 and appendix G).

A gain is what the first model saves: the bits that the other model pays for a token or word, minus those that the first
model pays.
"""

import math
from collections.abc import Hashable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from jaxtyping import Float, Int

from meliad_like.studies.readings import Chosen, Reading
from meliad_like.studies.units import CATEGORIES, PLACES, Units, categories, make_units

CONTEXT_BYTES = 110  # of an excerpt, before and after


class ReadDocument(NamedTuple):
    """A document that two models read."""

    index: int
    name: str
    tokens: Int[np.ndarray, " tokens"]
    first: Float[np.ndarray, " tokens"]
    """Bits of each token, float64; 0 for the first token, which is not predicted."""
    other: Float[np.ndarray, " tokens"]
    units: Units
    table: pd.DataFrame
    """A line for each unit: its first `token`, `first_bits`, `other_bits`, `gain`, the `distance` in tokens to the last
    occurrence (0: none), and its `place` and `category`."""

    @property
    def gains(self) -> Float[np.ndarray, " tokens"]:
        return self.other - self.first

    def top(self, count: int, *, words: bool, losses: bool = False) -> pd.DataFrame:
        """The units with the largest gains, the largest first, in their contexts (`before`, `text`, `after`).

        Args:
          count: the number of units, if there are that many.
          words: leave signs and white space out.
          losses: take the units with the largest losses instead.
        """
        chosen = self.table[self.table["category"] != "sign"] if words else self.table
        gains = -chosen["gain"] if losses else chosen["gain"]
        best = chosen.loc[gains[gains > 0].nlargest(count).index]
        texts = [self._in_context(unit) for unit in best.index]
        contexts = pd.DataFrame(texts, index=best.index, columns=["before", "text", "after"])
        head = pd.DataFrame({"document": self.index, "token": best["token"]}, index=best.index)
        return pd.concat([head, contexts, best.drop(columns=["token", "gain"]), best["gain"]], axis=1)

    def _in_context(self, unit: int) -> tuple[str, str, str]:
        text, start, end = self.units.text, int(self.units.starts[unit]), int(self.units.ends[unit])
        parts = text[max(start - CONTEXT_BYTES, 0) : start], text[start:end], text[end : end + CONTEXT_BYTES]
        before, own, after = (part.decode("utf-8", "replace") for part in parts)
        return before.lstrip("\ufffd"), own, after.rstrip("\ufffd")


def compare(first: Reading, other: Reading, chosen: Chosen, unit: str, segment: int) -> list[ReadDocument]:
    """Compares two readings of the chosen documents.

    Args:
      first, other: of the chosen documents.
      chosen: the documents.
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
        visible = num_visible(np.maximum(units.first - 1, 0))
        table = pd.DataFrame(
            {
                "token": units.first,
                "first_bits": np.add.reduceat(ours, units.first),
                "other_bits": np.add.reduceat(theirs, units.first),
                "distance": units.distances(),
                "place": pd.Categorical(units.places(visible, segment), PLACES),
                "category": pd.Categorical(categories(units), CATEGORIES),
            }
        )
        table["gain"] = table["other_bits"] - table["first_bits"]
        documents.append(ReadDocument(index, name, tokens, ours, theirs, units, table))
    return documents


def groups(documents: Sequence[ReadDocument], by: str) -> pd.DataFrame:
    """The number of `units`, and their `gain_bits` in all, of each place or category.

    Args:
      documents: of which all units are taken together.
      by: `place`, `category`, or `distance`: by powers of two, where 8 stands for 8 to 15 tokens.
    """
    units = pd.concat([document.table for document in documents])
    if by == "distance":
        units = units[units["distance"] > 0]
        units = units.assign(distance=2 ** np.log2(units["distance"]).astype(int))
    gains = units.groupby(by, observed=False)["gain"]
    return pd.DataFrame({"units": gains.size(), "gain_bits": gains.sum()})


class Curve(NamedTuple):
    """Gains along a document, in intervals of the same number of tokens."""

    edges: Int[np.ndarray, " intervals+1"]
    lowest: Float[np.ndarray, " intervals"]
    highest: Float[np.ndarray, " intervals"]
    total: Float[np.ndarray, " intervals"]
    """The sum up to the end of each interval."""


def along(gains: Float[np.ndarray, " tokens"], most_intervals: int = 400) -> Curve:
    """The gains of a document's tokens, in few enough numbers to be drawn (Figure 4)."""
    starts = np.arange(0, len(gains), -(-len(gains) // most_intervals))
    lowest, highest, sums = (function.reduceat(gains, starts) for function in (np.minimum, np.maximum, np.add))
    return Curve(np.append(starts, len(gains)), lowest, highest, np.cumsum(sums))


def summary(documents: Sequence[ReadDocument], top: pd.DataFrame) -> dict[str, Any]:
    """The figures of the page's tables, for JSON."""

    def lines(by: str) -> list[dict[Hashable, Any]]:
        return groups(documents, by).rename_axis("label").reset_index().to_dict("records")

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
        "by_place": lines("place"),
        "by_category": lines("category"),
        "by_distance": lines("distance"),
        "top_by_category": top["category"].value_counts().to_dict(),
        "top_by_place": top["place"].value_counts().to_dict(),
    }


def write_numbers(folder: Path, documents: Sequence[ReadDocument], top: pd.DataFrame) -> None:
    """Writes `tokens.npz` and `top.csv`.

    `tokens.npz` has the names and lengths of the documents, the token ids of all of them, one document after the other,
    and the bits that each model paid for them (0 for a document's first token).
    """
    np.savez_compressed(
        folder / "tokens.npz",
        names=np.array([document.name for document in documents]),
        lengths=np.array([len(document.tokens) for document in documents]),
        tokens=np.concatenate([document.tokens for document in documents]),
        first_bits=np.concatenate([document.first for document in documents]),
        other_bits=np.concatenate([document.other for document in documents]),
    )
    names = {document.index: document.name for document in documents}
    top.assign(document=top["document"].map(names)).to_csv(folder / "top.csv", index=False)
