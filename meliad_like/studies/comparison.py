"""Two readings of the same documents, token by token (Block-Recurrent Transformers, section 4.6 and appendix G).

A gain is what the first model saves: the bits that the other model pays for a token or word, minus those that the first
model pays.
"""

import math
from collections.abc import Sequence
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
    """A line for each unit: its first `token`, `first_bits`, `other_bits`, the `distance` in tokens to the last
    occurrence (0: none), its `place` and `category`, and its `gain`."""

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
        texts = pd.DataFrame(map(self._in_context, best.index), best.index, ["before", "text", "after"])
        head = pd.DataFrame({"document": self.index, "token": best["token"]}, index=best.index)
        return pd.concat([head, texts, best.drop(columns="token")], axis=1)

    def _in_context(self, unit: int) -> tuple[str, str, str]:
        text, start, end = self.units.text, int(self.units.starts[unit]), int(self.units.ends[unit])
        parts = text[max(start - CONTEXT_BYTES, 0) : start], text[start:end], text[end : end + CONTEXT_BYTES]
        before, own, after = (part.decode("utf-8", "replace") for part in parts)
        return before.lstrip("\ufffd"), own, after.rstrip("\ufffd")


def compare(first: Reading, other: Reading, chosen: Chosen, unit: str, segment: int) -> list[ReadDocument]:
    """Compares two readings of the chosen documents by units (`units.make_units`); `segment`: see `Units.places`."""
    documents = []
    # What the other model cannot see is what the first one may have remembered.
    num_visible = other.subject.run.model.num_visible
    for index, name in enumerate(chosen.documents.names):
        tokens = chosen.whole(index)
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
    """The number of `units`, and their `gain_bits` in all, of each group over all documents.

    `by`: `place`, `category`, or `distance`: by powers of two, where 8 stands for 8 to 15 tokens.
    """
    units = pd.concat([document.table for document in documents])
    if by == "distance":
        units = units[units["distance"] > 0]
        units = units.assign(distance=2 ** np.log2(units["distance"]).astype(int))
    gains = units.groupby(by, observed=False)["gain"]
    return pd.DataFrame({"units": gains.size(), "gain_bits": gains.sum()})


def by_document(documents: Sequence[ReadDocument]) -> pd.DataFrame:
    """The `name` of each document, the number of its `tokens`, and the bits that each model paid for all of them."""
    rows = [(d.name, len(d.tokens), float(d.first.sum()), float(d.other.sum())) for d in documents]
    return pd.DataFrame(rows, columns=["name", "tokens", "first_bits", "other_bits"])


def summary(documents: Sequence[ReadDocument], top: pd.DataFrame) -> dict[str, Any]:
    """The figures of the page's tables, for JSON."""
    by = {name: groups(documents, name).rename_axis("label") for name in ("place", "category", "distance")}
    return {
        "documents": by_document(documents).to_dict("records"),
        **{f"by_{name}": found.reset_index().to_dict("records") for name, found in by.items()},
        **{f"top_by_{name}": top[name].value_counts().to_dict() for name in ("category", "place")},
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
