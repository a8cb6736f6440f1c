"""Two models on the same documents, token by token: section 4.6 and appendix G of Block-Recurrent Transformers.

A gain is what the first model saves: the bits that the other model pays for a token or word, minus those that the first
model pays.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
from jaxtyping import Float

from meliad_like.config import differences
from meliad_like.errors import UserError
from meliad_like.studies.frames import signed
from meliad_like.studies.page import Chart, Numbers, Study
from meliad_like.studies.readings import ModelLosses, Selection, StudyRequest, choose, open_compared, read
from meliad_like.studies.units import CATEGORIES, PLACES, Units, categories, make_units
from meliad_like.vocabularies.base import BytesVocabularyConfig

MAX_INTERVALS = 400  # of a chart along a document
CONTEXT_BYTES = 110  # of an excerpt, before and after
FORMATS = dict.fromkeys(("units", "tokens", "targets", "token", "distance"), ",")
FORMATS |= dict.fromkeys(("first_bits", "other_bits"), ",.1f")
FORMATS |= {"share": ".1%", "gain_bits": "+,.1f", "gain": "+.2f", "mean gain": "+.4f", "among the top": ",.0f"}
"""Format specifications of the columns of the page's tables."""


def run(
    request: StudyRequest,
    *,
    other: Sequence[str] = (),
    other_step: int | None = None,
    unit: str = "auto",
    top: int = 40,
) -> Study:
    """Two models on the same documents; UserError if there are not two.

    `unit`: what losses are summed over, `word`, `token`, or `auto`; `top`: the number of units with the largest gains.
    """
    if len(other) > 1 or not (other or request.gin_param):
        raise UserError("compare needs one other model: --other=DIR, or --gin_param=... for the same one's settings")
    models = open_compared(request, other, other_step)
    selection = choose(models, request)
    first, second = (read(studied, selection) for studied in models)
    config, names = first.studied.run, selection.documents.names
    if unit == "auto":
        unit = "word" if isinstance(config.vocabulary, BytesVocabularyConfig) else "token"
    window, segment = second.studied.run.model.window_length, config.data.segment_length
    documents = compare(first, second, selection, unit, segment)
    best, worst = (pd.concat([largest(*each, top, sign, unit == "word") for each in documents]) for sign in (1, -1))
    table = pd.concat([table for _, table in documents], ignore_index=True)
    table = table[table["targets"] > 0]
    # By powers of two: 8 stands for 8 to 15 tokens.
    repeated = table[table["distance"] > 0]
    means = repeated["gain"].groupby(2 ** np.log2(repeated["distance"]).astype(int)).mean()
    other_config = dataclasses.replace(second.studied.run, source=config.source, mesh=config.mesh)
    changed = [(name, *map(str, values)) for name, values in differences(config, other_config).items()]
    settings = pd.DataFrame(changed, columns=["field", "first", "other"])
    gain = second.bits_per_token - first.bits_per_token
    better, worse = ((sign * table["gain"] > 0.005).mean() for sign in (1, -1))
    frames, sums, charts, note = [], [], [], "Above zero the first model predicted better."
    for i, name in enumerate(names):
        bits = {"first_bits": first.bits(i), "other_bits": second.bits(i)}
        frames.append(pd.DataFrame({"document": name, "token": selection.whole(i), **bits}))
        counts = {"tokens": len(frames[-1]), "targets": np.count_nonzero(first.counted[i])}
        sums.append({"document": name, **counts, **{which: each.sum() for which, each in bits.items()}})
        extremes, total = _along(bits["other_bits"] - bits["first_bits"])
        charts += [
            Chart(f"gain_{i}", f"Gain by token: {name}", extremes, "token", "gain, bits", note, steps=True),
            Chart(f"total_{i}", f"Gain so far: {name}", total, "token", "sum of the gains, bits"),
        ]
    return Study(
        title=f"{first.studied.label} against {second.studied.label}",
        lead=[
            f"{first.studied.label} pays {first.bits_per_token:.4f} bits per token, {second.studied.label} "
            f"{second.bits_per_token:.4f}: a gain of {signed(gain, 4)}, on {first.num_targets:,} predicted tokens. The "
            f"first predicts {better:.0%} of the {unit}s better and {worse:.0%} worse (by more than 0.005 bits)."
        ],
        parts=[
            *charts,
            Numbers("top", f"The {unit}s with the largest gains", best, FORMATS),
            Numbers("worst", f"The {unit}s with the largest losses", worst, FORMATS),
            Numbers(
                "by_place", f"Where the same {unit} last occurred", _by_group("place", table, best),
                FORMATS,
                "Window: the token that predicts it, or among those that this one sees in a layer of the other model, "
                f"whose window is {window} tokens; through several layers a window that slides shows more. Segment: "
                f"not in the window, but in the same {segment} tokens, counted from the beginning of the document. "
                "Earlier: before the segment.",
            ),
            Chart(
                "by_distance", f"Mean gain by how far back the same {unit} last began",
                pd.DataFrame({"mean gain": means.to_numpy()}, means.index * 2**0.5), "distance, tokens",
                f"gain, bits per {unit}", "In powers of two; the dotted line is the end of the window.", log_x=True,
                mark=window + 1,
            ),
            Numbers(
                "by_category", f"What the top {unit}s are", _by_group("category", table, best), FORMATS,
                "By simple rules, in this order. Title: in a line of at most 80 characters that begins with chapter, "
                "part, act and the like and a number, or that stands between blank lines and is a heading of Markdown, "
                "LaTeX or a wiki, or all in capitals. Identifier: has an underscore, a capital after a small letter, "
                "or digits next to letters. Name: begins with a capital, has a second letter, is not a Roman numeral, "
                "and is nowhere in the document in small letters. Signs and white space are not among the top words.",
            ),
            Numbers("by_document", "By document", pd.DataFrame(sums), FORMATS, "The bits of all tokens."),
            Numbers("settings", "Where the settings differ", settings),
            Numbers("tokens", "All tokens", pd.concat(frames), shown=False),
        ],
        selection=selection,
        details=[first.details(), second.details()],
        summary={"unit": unit, "window": window, "segment": segment, "top": top},
        remarks="Every document begins with a segment, and each model remembers what it can from its beginning on; a "
        "document's first token is read and not predicted. A word is a run of letters, digits and underscores, or of "
        "white space, or one other sign; its bits are the sum over its tokens. Tokens that share a character count as "
        "one.",
    )  # fmt: skip


def compare(
    first: ModelLosses, other: ModelLosses, selection: Selection, unit: str, segment: int
) -> list[tuple[Units, pd.DataFrame]]:
    """The units (`units.make_units`) of each selected document, and a table with a line for each unit.

    Its columns: the `document`, the first `token`, the number of `targets` that cost loss, the bits of both models, the
    `distance` in tokens to the last occurrence (0: none), its `place` (`Units.places`), the `category`, and the `gain`.
    """
    documents = []
    # What the other model cannot see is what the first one may have remembered.
    num_visible = other.studied.run.model.traits.num_visible
    for index, name in enumerate(selection.documents.names):
        units = make_units(selection.whole(index), first.studied.opened.vocabulary, unit)
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


def _along(gains: Float[np.ndarray, " tokens"]) -> tuple[pd.DataFrame, pd.DataFrame]:
    """The gains along a document (Figure 4): the extremes in intervals, and the sums up to their ends."""
    starts = np.arange(0, len(gains), -(-len(gains) // MAX_INTERVALS))
    lowest, highest, sums = (function.reduceat(gains, starts) for function in (np.minimum, np.maximum, np.add))
    extremes = {"largest gain": [*highest.clip(min=0), np.nan], "largest loss": [*lowest.clip(max=0), np.nan]}
    ends = np.append(starts, len(gains))
    return pd.DataFrame(extremes, ends), pd.DataFrame({"gain": np.append(0, sums.cumsum())}, ends)


def _by_group(by: str, table: pd.DataFrame, top: pd.DataFrame) -> pd.DataFrame:
    """The units of each group over all documents, their gains, and how many are among the top ones."""
    groups: Any = table.groupby(by, observed=False)["gain"].agg(units="size", gain_bits="sum")
    means, shares = groups["gain_bits"] / groups["units"], groups["units"] / groups["units"].sum()
    return groups.assign(**{"share": shares, "mean gain": means, "among the top": top[by].value_counts()}).reset_index()
