"""Two models on the same documents, token by token: section 4.6 and appendix G of Block-Recurrent Transformers.

A gain is what the first model saves: the bits that the other model pays for a token or word, minus those that the first
model pays.
"""

import dataclasses

import numpy as np
import pandas as pd
from jaxtyping import Float

from meliad_like.config import differences
from meliad_like.data.vocabulary import BytesVocabularyConfig
from meliad_like.errors import UserError
from meliad_like.studies.page import text_view, write_page
from meliad_like.studies.readings import ModelLosses, Selection, StudyRequest, choose, open_compared, read
from meliad_like.studies.units import CATEGORIES, PLACES, Units, categories, make_units
from meliad_like.tables import Table

MAX_INTERVALS = 400  # of a chart along a document
CONTEXT_BYTES = 110  # of an excerpt, before and after
FORMATS = {
    **dict.fromkeys(("units", "tokens", "targets"), ","),
    **dict.fromkeys(("first_bits", "other_bits"), ",.1f"),
    "share": ".1%",
    "gain_bits": "+,.1f",
    "mean gain": "+.4f",
    "among the top": ",.0f",
}
"""Format specifications of the columns of the page's tables."""


def run(request: StudyRequest) -> None:
    """Writes the page of two models, `summary.json`, `top.csv` and `tokens.npz`; UserError if there are not two."""
    if len(request.other) > 1 or not (request.other or request.gin_param):
        raise UserError("compare needs one other model: --other=DIR, or --gin_param=... for the same one's settings")
    subjects = open_compared(request)
    selection = choose(subjects, request)
    first, other = (read(subject, selection) for subject in subjects)
    config, unit = first.subject.run, request.unit
    if unit == "auto":
        unit = "word" if isinstance(config.vocabulary, BytesVocabularyConfig) else "token"
    documents = compare(first, other, selection, unit, config.data.segment_length)
    best, worst = ([largest(*each, request.top, sign, unit == "word") for each in documents] for sign in (1, -1))
    top, table = pd.concat(best), pd.concat([table for _, table in documents], ignore_index=True)
    table = table[table["targets"] > 0]
    groups = {by: _groups(table, table[by]) for by in ("place", "category")}
    # By powers of two: 8 stands for 8 to 15 tokens.
    distances = table["distance"][table["distance"] > 0]
    groups["distance"] = _groups(table, 2 ** np.log2(distances).astype(int))
    sums = _write_tokens(request, selection, first, other)
    top.to_csv(request.output / "top.csv", index=False)
    title = f"{first.label} against {other.label}"
    settings = {"unit": unit, "window": other.subject.run.model.window_length, "segment": config.data.segment_length}
    saved = {"top": request.top, **settings, "documents": sums.to_dict("records")}
    saved |= {f"by_{by}": group.rename_axis("label").reset_index().to_dict("records") for by, group in groups.items()}
    saved |= {f"top_by_{by}": top[by].value_counts().to_dict() for by in ("category", "place")}
    other_config = dataclasses.replace(other.subject.run, source=config.source, mesh=config.mesh)
    changed = [(name, *map(str, values)) for name, values in differences(config, other_config).items()]
    means = groups["distance"]["gain_bits"] / groups["distance"]["units"]
    write_page(
        request.output,
        "compare",
        saved,
        title=title,
        selection=selection,
        first=first,
        other=other,
        details=[first.details(), other.details()],
        better=(table["gain"] > 0.005).mean(),
        worse=(table["gain"] < -0.005).mean(),
        charts=[_along(other.bits(index) - first.bits(index)) for index in range(len(documents))],
        excerpts=[{"gain": [*b.itertuples()], "loss": [*w.itertuples()]} for b, w in zip(best, worst)],
        view=text_view(first.label, other.label, [(units, t.first_bits, t.other_bits) for units, t in documents]),
        tables={by: _group_table(groups[by], top[by]) for by in ("place", "category")},
        by_distance=pd.DataFrame({"mean gain": means.to_numpy()}, means.index * 2**0.5),
        by_document=Table.of(sums, formats=FORMATS),
        differences=Table("", ("where their settings differ", "first", "other"), changed),
        **settings,
    )


def compare(
    first: ModelLosses, other: ModelLosses, selection: Selection, unit: str, segment: int
) -> list[tuple[Units, pd.DataFrame]]:
    """The units (`units.make_units`) of each selected document, and a table with a line for each unit.

    Its columns: the `document`, the first `token`, the number of `targets` that cost loss, `first_bits`, `other_bits`,
    the `distance` in tokens to the last occurrence (0: none), its `place` (`Units.places`) and `category`, and its
    `gain`.
    """
    documents = []
    # What the other model cannot see is what the first one may have remembered.
    num_visible = other.subject.run.model.num_visible
    for index, name in enumerate(selection.documents.names):
        units = make_units(selection.whole(index), first.subject.opened.vocabulary, unit)
        visible = num_visible(np.maximum(units.first - 1, 0))
        table = pd.DataFrame(
            {
                "document": name,
                "token": units.first,
                "targets": np.add.reduceat(np.append(0, first.counted[index]), units.first),
                "first_bits": np.add.reduceat(first.bits(index), units.first),
                "other_bits": np.add.reduceat(other.bits(index), units.first),
                "distance": units.distances(),
                "place": pd.Categorical(units.places(visible, segment), PLACES),
                "category": pd.Categorical(categories(units), CATEGORIES),
            }
        )
        documents.append((units, table.assign(gain=table["other_bits"] - table["first_bits"])))
    return documents


def largest(units: Units, table: pd.DataFrame, count: int, sign: int, words: bool) -> pd.DataFrame:
    """At most `count` lines of a table with the largest gains (`sign` 1) or losses (-1), in their contexts (`before`,
    `text`, `after`); `words`: without signs and white space."""
    gains = sign * (table[table["category"] != "sign"] if words else table)["gain"]
    best = table.loc[gains[gains > 0].nlargest(count).index]
    texts = []
    for start, end in zip(units.starts[best.index], units.ends[best.index], strict=True):
        spans = (max(start - CONTEXT_BYTES, 0), start), (start, end), (end, end + CONTEXT_BYTES)
        before, text, after = (units.text[slice(*span)].decode("utf-8", "replace") for span in spans)
        texts.append((before.lstrip("\ufffd"), text, after.rstrip("\ufffd")))
    context = pd.DataFrame(texts, best.index, ["before", "text", "after"])
    return pd.concat([best[["document", "token"]], context, best.loc[:, "first_bits":]], axis=1)


def _write_tokens(request: StudyRequest, selection: Selection, first: ModelLosses, other: ModelLosses) -> pd.DataFrame:
    """Writes `tokens.npz`: the names and lengths of the documents, the token ids of all of them, one document after the
    other, and the bits that each model paid for them. Returns the sums over each document."""
    indices, lengths = range(len(selection.documents.names)), np.array(selection.documents.lengths)
    bits = {f"{name}_bits": [*map(model.bits, indices)] for name, model in (("first", first), ("other", other))}
    arrays = {"tokens": [*map(selection.whole, indices)], **bits}
    joined = {name: np.concatenate(parts) for name, parts in arrays.items()}
    names = np.array(selection.documents.names)
    np.savez_compressed(request.output / "tokens.npz", names=names, lengths=lengths, **joined)
    targets = [int(np.count_nonzero(which)) for which in first.counted]
    sums = {name: [part.sum() for part in parts] for name, parts in bits.items()}
    return pd.DataFrame({"name": selection.documents.names, "tokens": lengths, "targets": targets, **sums})


def _along(gains: Float[np.ndarray, " tokens"]) -> dict[str, pd.DataFrame]:
    """The gains along a document (Figure 4): the extremes in intervals, and the sums up to their ends."""
    starts = np.arange(0, len(gains), -(-len(gains) // MAX_INTERVALS))
    lowest, highest, sums = (function.reduceat(gains, starts) for function in (np.minimum, np.maximum, np.add))
    extremes = {"largest gain": [*highest.clip(min=0), np.nan], "largest loss": [*lowest.clip(max=0), np.nan]}
    ends = np.append(starts, len(gains))
    return {
        "extremes": pd.DataFrame(extremes, ends),
        "total": pd.DataFrame({"gain": np.append(0, sums.cumsum())}, ends),
    }


def _groups(table: pd.DataFrame, by: pd.Series) -> pd.DataFrame:
    """The number of `units`, and their `gain_bits` in all, of each group over all documents."""
    gains = table.loc[by.index, "gain"].groupby(by, observed=False)
    return pd.DataFrame({"units": gains.size(), "gain_bits": gains.sum()})


def _group_table(groups: pd.DataFrame, top: pd.Series) -> Table:
    """Units, their gains, and how many are among the top ones, whose groups are given."""
    means, counts = groups["gain_bits"] / groups["units"], top.value_counts()
    shares = groups["units"] / groups["units"].sum()
    frame = groups.assign(**{"share": shares, "mean gain": means, "among the top": counts}).reset_index()
    return Table.of(frame, formats=FORMATS)
