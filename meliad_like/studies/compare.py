"""Two models on the same documents, token by token: section 4.6 and appendix G of Block-Recurrent Transformers.

A gain is what the first model saves: the bits that the other model pays for a token or word, minus those that the first
model pays.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import pandas as pd
from jaxtyping import Float, Int

from meliad_like.config import differences
from meliad_like.data.vocabulary import BytesVocabularyConfig
from meliad_like.errors import UserError
from meliad_like.studies.page import Chart, Series, TextView, write_page
from meliad_like.studies.readings import Chosen, ModelLosses, StudyRequest, choose, open_compared, read
from meliad_like.studies.units import CATEGORIES, PLACES, Units, categories, make_units
from meliad_like.tables import Table, signed

MAX_INTERVALS = 400  # of a chart along a document
CONTEXT_BYTES = 110  # of an excerpt, before and after
_BITS = ["first_bits", "other_bits"]


def run(request: StudyRequest) -> None:
    """Writes the page of two models, or raises UserError if there are not two."""
    if len(request.other) > 1 or not (request.other or request.gin_param):
        raise UserError("compare needs one other model: --other=DIR, or --gin_param=... for the same one's settings")
    first, other = subjects = open_compared(request)
    chosen = choose(subjects, request)
    _write(request, chosen, read(first, chosen), read(other, chosen), f"{first.label} against {other.label}")


class ReadDocument(NamedTuple):
    """A document that two models read."""

    index: int
    name: str
    tokens: Int[np.ndarray, " tokens"]
    first: Float[np.ndarray, " tokens"]
    """Bits of each token, float64; 0 for the first token, which is not predicted, and where a token costs none."""
    other: Float[np.ndarray, " tokens"]
    units: Units
    table: pd.DataFrame
    """A line for each unit: its first `token`, the number of `targets` that cost loss, `first_bits`, `other_bits`, the
    `distance` in tokens to the last occurrence (0: none), its `place` and `category`, and its `gain`."""

    def top(self, count: int, *, words: bool, losses: bool = False) -> pd.DataFrame:
        """At most `count` units with the largest gains (or losses), the largest first, in their contexts (`before`,
        `text`, `after`); `words`: without signs and white space."""
        chosen = self.table[self.table["category"] != "sign"] if words else self.table
        gains = -chosen["gain"] if losses else chosen["gain"]
        best = chosen.loc[gains[gains > 0].nlargest(count).index]
        texts = pd.DataFrame(map(self._in_context, best.index), best.index, ["before", "text", "after"])
        head = pd.DataFrame({"document": self.index, "token": best["token"]}, index=best.index)
        return pd.concat([head, texts, best.drop(columns=["token", "targets"])], axis=1)

    def _in_context(self, unit: int) -> tuple[str, str, str]:
        text, start, end = self.units.text, int(self.units.starts[unit]), int(self.units.ends[unit])
        parts = text[max(start - CONTEXT_BYTES, 0) : start], text[start:end], text[end : end + CONTEXT_BYTES]
        before, own, after = (part.decode("utf-8", "replace") for part in parts)
        return before.lstrip("\ufffd"), own, after.rstrip("\ufffd")


def compare(first: ModelLosses, other: ModelLosses, chosen: Chosen, unit: str, segment: int) -> list[ReadDocument]:
    """Compares the losses of two models by units (`units.make_units`) of the chosen documents.

    `segment`: see `Units.places`.
    """
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
                "targets": np.add.reduceat(np.append(0, first.counted[index]), units.first),
                "first_bits": np.add.reduceat(ours, units.first),
                "other_bits": np.add.reduceat(theirs, units.first),
                "distance": units.distances(),
                "place": pd.Categorical(units.places(visible, segment), [*PLACES]),
                "category": pd.Categorical(categories(units), [*CATEGORIES]),
            }
        )
        table["gain"] = table["other_bits"] - table["first_bits"]
        documents.append(ReadDocument(index, name, tokens, ours, theirs, units, table))
    return documents


def _write(request: StudyRequest, chosen: Chosen, first: ModelLosses, other: ModelLosses, title: str) -> None:
    """Writes `index.html`, `summary.json`, `top.csv` and `tokens.npz`."""
    bytewise = isinstance(first.subject.run.vocabulary, BytesVocabularyConfig)
    unit = request.unit if request.unit != "auto" else "word" if bytewise else "token"
    window, segment = other.subject.run.model.window_length, first.subject.run.data.segment_length
    documents, words = compare(first, other, chosen, unit, segment), unit == "word"
    best = [document.top(request.top, words=words) for document in documents]
    worst = [document.top(request.top, words=words, losses=True) for document in documents]
    top, gains = pd.concat(best), np.concatenate([d.table["gain"][d.table["targets"] > 0] for d in documents])
    settings = {"unit": unit, "window": window, "segment": segment}
    groups = {by: _groups(documents, by) for by in ("place", "category", "distance")}
    bits = [
        (d.name, len(d.tokens), int(d.table["targets"].sum()), float(d.first.sum()), float(d.other.sum()))
        for d in documents
    ]
    by_document = pd.DataFrame(bits, columns=["name", "tokens", "targets", *_BITS])
    _write_arrays(request, documents, top)
    saved = {"title": title, "first": first.details(), "other": other.details(), "top": request.top}
    saved |= {**settings, "documents": by_document.to_dict("records")}
    saved |= {f"by_{by}": g.rename_axis("label").reset_index().to_dict("records") for by, g in groups.items()}
    saved |= {f"top_by_{by}": top[by].value_counts().to_dict() for by in ("category", "place")}
    chosen.write_summary(request.output, saved)
    run = first.subject.run
    other_run = dataclasses.replace(other.subject.run, source=run.source, mesh=run.mesh)
    changed = [(name, *map(str, values)) for name, values in differences(run, other_run).items()]
    write_page(
        request.output / "index.html",
        "compare.html",
        title=title,
        first=first,
        other=other,
        chosen=chosen,
        better=(gains > 0.005).mean(),
        worse=(gains < -0.005).mean(),
        parts=[
            {"charts": _charts(document), "gains": [*gained.itertuples()], "losses": [*lost.itertuples()]}
            for document, gained, lost in zip(documents, best, worst, strict=True)
        ],
        place_names=PLACES,
        view=TextView(first.label, other.label, [(d.units, *d.table[_BITS].to_numpy().T) for d in documents]),
        by_place=_group_table(groups["place"], PLACES, top["place"], unit),
        by_distance=_by_distance(groups["distance"], unit, window),
        by_category=_group_table(groups["category"], CATEGORIES, top["category"], unit),
        by_document=_document_table(by_document),
        differences=Table("", ("where their settings differ", "first", "other"), changed),
        **settings,
    )


def _write_arrays(request: StudyRequest, documents: Sequence[ReadDocument], top: pd.DataFrame) -> None:
    """Writes `top.csv`, and `tokens.npz`: the names and lengths of the documents, the token ids of all of them, one
    document after the other, and the bits that each model paid for them (0 for a document's first token)."""
    np.savez_compressed(
        request.output / "tokens.npz",
        names=np.array([document.name for document in documents]),
        lengths=np.array([len(document.tokens) for document in documents]),
        tokens=np.concatenate([document.tokens for document in documents]),
        first_bits=np.concatenate([document.first for document in documents]),
        other_bits=np.concatenate([document.other for document in documents]),
    )
    names = {document.index: document.name for document in documents}
    top.assign(document=top["document"].map(names)).to_csv(request.output / "top.csv", index=False)


def _charts(document: ReadDocument) -> list[Chart]:
    """The gains along a document (Figure 4)."""
    gains = document.other - document.first
    starts = np.arange(0, len(gains), -(-len(gains) // MAX_INTERVALS))
    lowest, highest, sums = (function.reduceat(gains, starts) for function in (np.minimum, np.maximum, np.add))
    edges = np.append(starts, len(gains))
    among = f"of {edges[1]:,} tokens"
    spread = Chart(
        title="Gain by token",
        x_label="token",
        y_label="gain, bits",
        series=[
            Series(f"largest gain {among}", edges, np.maximum(highest, 0), "bars", "1"),
            Series(f"largest loss {among}", edges, np.minimum(lowest, 0), "bars", "2"),
        ],
        caption="Above zero the first model predicted better. Click or tap to read the text there; the violet "
        "stripe is the page that is open.",
        document=document.index,
    )
    total = Chart(
        title="Gain so far",
        x_label="token",
        y_label="sum of the gains, bits",
        series=[Series("", edges, np.append(0, sums.cumsum()))],
        document=document.index,
    )
    return [spread, total]


def _groups(documents: Sequence[ReadDocument], by: str) -> pd.DataFrame:
    """The number of `units`, and their `gain_bits` in all, of each group over all documents.

    `by`: `place`, `category`, or `distance`: by powers of two, where 8 stands for 8 to 15 tokens.
    """
    units = pd.concat([document.table for document in documents])
    units = units[units["targets"] > 0]
    if by == "distance":
        units = units[units["distance"] > 0]
        units = units.assign(distance=2 ** np.log2(units["distance"]).astype(int))
    gains = units.groupby(by, observed=False)["gain"]
    return pd.DataFrame({"units": gains.size(), "gain_bits": gains.sum()})


def _by_distance(distances: pd.DataFrame, unit: str, window: int) -> Chart:
    return Chart(
        title=f"Mean gain by how far back the same {unit} last began",
        x_label="distance, tokens",
        y_label=f"gain, bits per {unit}",
        series=[Series("", distances.index * 2**0.5, distances["gain_bits"] / distances["units"])],
        caption="In powers of two; the dotted line is the end of the window.",
        log_x=True,
        marks=[window + 1],
    )


def _group_table(found: pd.DataFrame, names: Mapping[str, str], top: pd.Series, unit: str) -> Table:
    """Units, their gains, and how many are among the top ones, whose groups are given."""
    units, among = f"{unit}s", f"of the top {len(top):,}"
    frame = pd.DataFrame(
        {
            "": found.index.map(names).astype(str),
            units: found["units"],
            "share": found["units"] / found["units"].sum(),
            "gain, bits": [signed(gain, 1) for gain in found["gain_bits"]],
            f"per {unit}": [signed(mean, 4) for mean in found["gain_bits"] / found["units"]],
            among: top.value_counts().reindex(found.index),
        }
    )
    return Table.of(frame, formats={units: ",", "share": ".1%", among: ","})


def _document_table(found: pd.DataFrame) -> Table:
    targets = found["targets"].clip(lower=1)
    first, other = (found[name] / targets for name in _BITS)
    frame = pd.DataFrame({"document": found["name"], "tokens": targets, "first": first, "other": other})
    frame["gain"] = [signed(gain, 4) for gain in other - first]
    return Table.of(frame, formats={"tokens": ",", "first": ".4f", "other": ".4f"})
