"""The page of two readings of the same documents, and its files of numbers."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from xml.etree.ElementTree import Element

import numpy as np
import pandas as pd

from meliad_like.studies import comparison
from meliad_like.studies.comparison import ReadDocument
from meliad_like.studies.page import (
    Chart,
    Series,
    document_choice,
    document_part,
    facts_table,
    figure,
    paragraph,
    section,
    table,
    tag,
    write_page,
)
from meliad_like.studies.readings import Chosen, Reading, changed_settings, write_summary
from meliad_like.studies.text_view import pack, text_view
from meliad_like.tables import Table, signed

SHOWN = 10  # of the top units, before one asks for more

PLACE_NAMES = {
    "window": "in the window",
    "segment": "in the segment",
    "earlier": "before the segment",
    "never": "never before",
}

CATEGORY_NAMES = {
    "title": "titles",
    "name": "names",
    "identifier": "identifiers",
    "word": "other words",
    "sign": "signs and white space",
}


class Settings(NamedTuple):
    """The settings of a comparison."""

    unit: str
    """`word` or `token`."""
    top: int
    """The number of units with the largest gains, and losses, that are listed for each document."""
    window: int
    """The window of the other model, in tokens."""
    segment: int


def compare_page(
    folder: Path,
    title: str,
    first: Reading,
    other: Reading,
    chosen: Chosen,
    settings: Settings,
    *,
    marks: Callable[[ReadDocument], Sequence[int]] = lambda document: (),
    more: Callable[[list[ReadDocument]], Sequence[Element]] = lambda documents: (),
    details: dict[str, Any] | None = None,
) -> None:
    """Writes `index.html`, `summary.json`, `top.csv` and `tokens.npz`.

    Args:
      folder: made if it doesn't exist.
      title: of the page.
      first, other: the readings; gains are those of the first.
      chosen: the documents.
      settings: of the comparison.
      marks: the tokens of a document at which its charts have vertical lines.
      more: further sections, after the charts by document.
      details: further entries of summary.json.
    """
    documents = comparison.compare(first, other, chosen, settings.unit, settings.segment)
    gains, losses = (
        [document.top(settings.top, words=settings.unit == "word", losses=losses) for document in documents]
        for losses in (False, True)
    )
    top = pd.concat(gains)
    folder.mkdir(parents=True, exist_ok=True)
    comparison.write_numbers(folder, documents, top)
    models = {"title": title, "first": first.details(), "other": other.details()}
    write_summary(folder, chosen, models | settings._asdict() | (details or {}) | comparison.summary(documents, top))
    by_document = [document_choice(chosen.documents.names, chosen.documents.lengths)]
    by_document += [
        _document_part(document, best, worst, marks(document), settings)
        for document, best, worst in zip(documents, gains, losses, strict=True)
    ]
    write_page(
        folder / "index.html",
        title,
        _lead(first, other, chosen, documents, settings),
        [
            section("Along a document", *by_document),
            *more(documents),
            text_view(
                first.label,
                other.label,
                np.concatenate([document.table["gain"] for document in documents]),
                [pack(d.units, d.table["first_bits"].to_numpy(), d.table["other_bits"].to_numpy()) for d in documents],
            ),
            *_tables(documents, top, settings),
            _facts(first, other, chosen, settings),
        ],
    )


def _lead(
    first: Reading, other: Reading, chosen: Chosen, documents: list[ReadDocument], settings: Settings
) -> list[Element]:
    gain = other.bits_per_token - first.bits_per_token
    per_unit = np.concatenate([document.table["gain"] for document in documents])
    better, worse = (float((sign * per_unit > 0.005).mean()) for sign in (1, -1))
    return [
        paragraph(
            tag("span", first.label, class_="first"),
            f" pays {first.bits_per_token:.4f} bits per token, ",
            tag("span", other.label, class_="other"),
            f" {other.bits_per_token:.4f}: a gain of {signed(gain, 4)}. The first predicts {better:.0%} of the "
            f"{settings.unit}s better and {worse:.0%} worse (by more than 0.005 bits).",
        ),
        tag("p", f"{chosen.title}; {first.num_targets:,} predicted tokens.", class_="about"),
    ]


def _document_part(
    document: ReadDocument, gains: pd.DataFrame, losses: pd.DataFrame, marks: Sequence[int], settings: Settings
) -> Element:
    curve = comparison.along(document.gains)
    among = f"of {int(curve.edges[1]):,} tokens"
    spread = Chart(
        title="Gain by token",
        x_label="token",
        y_label="gain, bits",
        series=[
            Series(f"largest gain {among}", curve.edges, np.maximum(curve.highest, 0), "bars", "1"),
            Series(f"largest loss {among}", curve.edges, np.minimum(curve.lowest, 0), "bars", "2"),
        ],
        caption="Above zero the first model predicted better. Click or tap to read the text there; the violet stripe "
        "is the page that is open.",
        marks=marks,
        document=document.index,
    )
    total = Chart(
        title="Gain so far",
        x_label="token",
        y_label="sum of the gains, bits",
        series=[Series("", curve.edges, np.append(0, curve.total))],
        marks=marks,
        document=document.index,
    )
    lists = [
        section(f"The {len(gains)} {settings.unit}s with the largest gain", *_places(gains), level=3),
        section(f"The {len(losses)} {settings.unit}s with the largest loss", *_places(losses), level=3),
    ]
    return document_part(document.index, figure(spread), figure(total), *lists)


def _places(excerpts: pd.DataFrame) -> list[Element]:
    items = [_item(excerpt) for excerpt in excerpts.itertuples()]
    if not items:
        return [tag("p", "None: the two readings are the same.", class_="note")]
    shown = tag("ol", *items[:SHOWN], class_="places")
    if len(items) <= SHOWN:
        return [shown]
    rest = tag("details", tag("summary", f"{len(items) - SHOWN} more"), tag("ol", *items[SHOWN:], class_="places"))
    return [shown, rest]


def _item(excerpt: Any) -> Element:
    seen = f"the same {excerpt.distance:,} tokens before, " if excerpt.distance else ""
    facts = tag(
        "div",
        f"{signed(excerpt.gain, 2)} bits: ",
        tag("span", f"{excerpt.first_bits:.2f}", class_="first"),
        " instead of ",
        tag("span", f"{excerpt.other_bits:.2f}", class_="other"),
        f" · token {excerpt.token:,} · {seen}{PLACE_NAMES[excerpt.place]} · {excerpt.category}",
        class_="facts",
    )
    # White space can't be seen, and an end has no text.
    shown = excerpt.text if excerpt.text.strip() else repr(excerpt.text).strip("'") or "(end of the document)"
    text = tag("p", excerpt.before, tag("mark", shown), excerpt.after, class_="excerpt")
    return tag("li", tag("a", facts, text, href=f"#{excerpt.document}:{excerpt.token}"))


def _tables(documents: list[ReadDocument], top: pd.DataFrame, settings: Settings) -> list[Element]:
    unit = settings.unit
    distances = comparison.groups(documents, "distance")
    means = distances["gain_bits"] / distances["units"]
    curve = Chart(
        title=f"Mean gain by how far back the same {unit} last began",
        x_label="distance, tokens",
        y_label=f"gain, bits per {unit}",
        series=[Series("", distances.index.to_numpy() * 2**0.5, means.to_numpy())],
        caption="In powers of two; the dotted line is the end of the window.",
        log_x=True,
        marks=[settings.window + 1],
    )
    return [
        section(
            f"Where the same {unit} last occurred",
            _group_table(documents, top, "place", PLACE_NAMES, unit),
            tag(
                "p",
                "In the window: the token that predicts it, or among those that this one sees in a layer of the other "
                f"model, whose window is {settings.window:,} tokens; through several layers a window that slides shows "
                f"more. In the segment: not in the window, but in the same {settings.segment:,} tokens, counted from "
                "the beginning of the document. Before the segment: earlier than that.",
                class_="note",
            ),
            figure(curve),
        ),
        section(
            f"What the top {unit}s are",
            _group_table(documents, top, "category", CATEGORY_NAMES, unit),
            tag(
                "p",
                "By simple rules, in this order. Title: in a line of at most 80 characters that begins with chapter, "
                "part, act and the like and a number, or that stands between blank lines and is a heading of "
                "Markdown, LaTeX or a wiki, or all in capitals. Identifier: has an underscore, a capital after a "
                "small letter, or digits beside letters. Name: begins with a capital, has a second letter, is no "
                "Roman numeral, and is nowhere in the document in small letters. "
                + ("Signs and white space are not among the top." if unit == "word" else ""),
                class_="note",
            ),
        ),
        _document_table(documents),
    ]


def _group_table(
    documents: list[ReadDocument], top: pd.DataFrame, by: str, names: Mapping[str, str], unit: str
) -> Element:
    """Units, their gains, and how many are among the top ones, by `place` or `category`."""
    found = comparison.groups(documents, by)
    frame = pd.DataFrame(
        {
            "": found.index.map(names).astype(str),
            f"{unit}s": found["units"],
            "share": found["units"] / found["units"].sum(),
            "gain, bits": [signed(gain, 1) for gain in found["gain_bits"]],
            f"per {unit}": [signed(mean, 4) for mean in found["gain_bits"] / found["units"]],
            f"of the top {len(top):,}": top[by].value_counts().reindex(found.index),
        }
    )
    formats = {f"{unit}s": ",", "share": ".1%", f"of the top {len(top):,}": ","}
    content = Table.of(frame, formats=formats)
    return table(content.header, content.rows)


def _document_table(documents: list[ReadDocument]) -> Element:
    rows = []
    for document in documents:
        targets = max(len(document.tokens) - 1, 1)
        first, other = document.first.sum() / targets, document.other.sum() / targets
        rows.append((document.name, f"{targets:,}", f"{first:.4f}", f"{other:.4f}", signed(other - first, 4)))
    header = ("document", "tokens", "first", "other", "gain")
    return section("By document", table(header, rows, "Bits per token."))


def _facts(first: Reading, other: Reading, chosen: Chosen, settings: Settings) -> Element:
    return section(
        "What is compared",
        facts_table([first.details(), other.details()], ("", "first", "other")),
        *_differences(first, other),
        tag(
            "p",
            f"Documents: {chosen.description}. Every document begins with a segment, and each model remembers what it "
            "can from its beginning on; a document's first token is read and not predicted. "
            + (
                "A word is a run of letters, digits and underscores, or of white space, or one other sign; its bits "
                "are the sum over its tokens."
                if settings.unit == "word"
                else "Tokens that share a character count as one."
            ),
            class_="about",
        ),
    )


def _differences(first: Reading, other: Reading) -> list[Element]:
    rows = changed_settings(first.subject.run, other.subject.run)
    return [table(("where their settings differ", "first", "other"), rows)] if rows else []
