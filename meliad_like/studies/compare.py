"""Two models on the same documents: section 4.6 and appendix G of Block-Recurrent Transformers."""

from collections.abc import Mapping, Sequence
from typing import Any
from xml.etree.ElementTree import Element

import numpy as np
import pandas as pd

from meliad_like.config import differences
from meliad_like.data.vocabulary import BytesVocabularyConfig
from meliad_like.errors import UserError
from meliad_like.studies import comparison
from meliad_like.studies.comparison import ReadDocument
from meliad_like.studies.page import (
    Chart,
    Series,
    document_choice,
    document_part,
    figure,
    note,
    pack,
    paragraph,
    section,
    table,
    tag,
    text_view,
    write_page,
)
from meliad_like.studies.readings import Chosen, Reading, StudyRequest, choose, open_compared, read
from meliad_like.tables import Table, signed

SHOWN = 10  # of the top units, before one asks for more
MAX_INTERVALS = 400  # of a chart along a document

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


def run(request: StudyRequest) -> None:
    """Writes the study into the folder `request.output`.

    Raises:
      UserError: there is nothing to compare with, or a checkpoint, store, split or document is missing.
    """
    if len(request.others) > 1 or not (request.others or request.gin_params):
        raise UserError("compare needs one other model: --other=DIR, or --gin_param=... for the same one's settings")
    first, other = subjects = open_compared(request)
    chosen = choose(subjects, request)
    page = ComparisonPage(request, chosen, read(first, chosen), read(other, chosen))
    page.write(f"{first.label} against {other.label}")


class ComparisonPage:
    """The page of two readings of the same documents, and its files of numbers."""

    def __init__(self, request: StudyRequest, chosen: Chosen, first: Reading, other: Reading, clear_every: int = 0):
        """`clear_every`: charts along a document have a vertical line after each such number of tokens, if not 0."""
        self.chosen, self.first, self.other = chosen, first, other
        self._folder, self._num_top, self._clear_every = request.output, request.top, clear_every
        bytewise = isinstance(first.subject.run.vocabulary, BytesVocabularyConfig)
        self._unit = request.unit if request.unit != "auto" else "word" if bytewise else "token"
        self._window, self._segment = other.subject.run.model.window_length, first.subject.run.data.segment_length
        self._documents = comparison.compare(first, other, chosen, self._unit, self._segment)

    def write(self, title: str, more: Sequence[Element] = (), details: Mapping[str, Any] | None = None) -> None:
        """Writes `index.html`, `summary.json`, `top.csv` and `tokens.npz`.

        Args:
          title: of the page.
          more: further sections, after the charts by document.
          details: further entries of summary.json.
        """
        documents, words = self._documents, self._unit == "word"
        gains = [document.top(self._num_top, words=words) for document in documents]
        losses = [document.top(self._num_top, words=words, losses=True) for document in documents]
        top = pd.concat(gains)
        comparison.write_numbers(self._folder, documents, top)
        saved = {"title": title, "first": self.first.details(), "other": self.other.details()}
        saved |= {"unit": self._unit, "top": self._num_top, "window": self._window, "segment": self._segment}
        self.chosen.write_summary(self._folder, saved | dict(details or {}) | comparison.summary(documents, top))
        names, lengths = self.chosen.documents.names, self.chosen.documents.lengths
        packed = [pack(d.units, d.table["first_bits"].to_numpy(), d.table["other_bits"].to_numpy()) for d in documents]
        sections = [
            section("Along a document", document_choice(names, lengths), *map(self._part, documents, gains, losses)),
            *more,
            text_view(self.first.label, self.other.label, self._gains(), packed),
            *self._tables(top),
            self._facts(),
        ]
        write_page(self._folder / "index.html", title, self._lead(), sections)

    def _gains(self) -> np.ndarray:
        return np.concatenate([document.table["gain"] for document in self._documents])

    def _lead(self) -> list[Element]:
        ours, theirs, gains = self.first.bits_per_token, self.other.bits_per_token, self._gains()
        better, worse = (float((sign * gains > 0.005).mean()) for sign in (1, -1))
        return [
            paragraph(
                tag("span", self.first.label, class_="first"),
                f" pays {ours:.4f} bits per token, ",
                tag("span", self.other.label, class_="other"),
                f" {theirs:.4f}: a gain of {signed(theirs - ours, 4)}. The first predicts {better:.0%} of the "
                f"{self._unit}s better and {worse:.0%} worse (by more than 0.005 bits).",
            ),
            note(f"{self.chosen.title}; {self.first.num_targets:,} predicted tokens.", "about"),
        ]

    def _part(self, document: ReadDocument, best: pd.DataFrame, worst: pd.DataFrame) -> Element:
        """The charts of a document (Figure 4), and its units with the largest gains and losses."""
        gains = document.other - document.first
        starts = np.arange(0, len(gains), -(-len(gains) // MAX_INTERVALS))
        lowest, highest, sums = (function.reduceat(gains, starts) for function in (np.minimum, np.maximum, np.add))
        edges = np.append(starts, len(gains))
        among = f"of {edges[1]:,} tokens"
        num_targets = len(gains) - 1
        marks = range(self._clear_every, num_targets, self._clear_every) if self._clear_every else ()
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
            marks=list(marks),
            document=document.index,
        )
        total = Chart(
            title="Gain so far",
            x_label="token",
            y_label="sum of the gains, bits",
            series=[Series("", edges, np.append(0, sums.cumsum()))],
            marks=list(marks),
            document=document.index,
        )
        lists = [
            section(f"The {len(units)} {self._unit}s with the largest {which}", *_excerpts(units), level=3)
            for which, units in (("gain", best), ("loss", worst))
        ]
        return document_part(document.index, figure(spread), figure(total), *lists)

    def _tables(self, top: pd.DataFrame) -> list[Element]:
        unit = self._unit
        distances = comparison.groups(self._documents, "distance")
        curve = Chart(
            title=f"Mean gain by how far back the same {unit} last began",
            x_label="distance, tokens",
            y_label=f"gain, bits per {unit}",
            series=[Series("", distances.index * 2**0.5, distances["gain_bits"] / distances["units"])],
            caption="In powers of two; the dotted line is the end of the window.",
            log_x=True,
            marks=[self._window + 1],
        )
        places = note(
            "In the window: the token that predicts it, or among those that this one sees in a layer of the other "
            f"model, whose window is {self._window:,} tokens; through several layers a window that slides shows "
            f"more. In the segment: not in the window, but in the same {self._segment:,} tokens, counted from the "
            "beginning of the document. Before the segment: earlier than that."
        )
        kinds = note(
            "By simple rules, in this order. Title: in a line of at most 80 characters that begins with chapter, part, "
            "act and the like and a number, or that stands between blank lines and is a heading of Markdown, LaTeX or "
            "a wiki, or all in capitals. Identifier: has an underscore, a capital after a small letter, or digits "
            "beside letters. Name: begins with a capital, has a second letter, is no Roman numeral, and is nowhere in "
            f"the document in small letters. {'Signs and white space are not among the top.' * (unit == 'word')}"
        )
        by_place = self._group_table(top, "place", PLACE_NAMES)
        documents = comparison.by_document(self._documents)
        bits = documents[["first_bits", "other_bits"]].div((documents["tokens"] - 1).clip(lower=1), axis=0)
        rows = [
            (name, f"{max(tokens - 1, 1):,}", f"{first:.4f}", f"{other:.4f}", signed(other - first, 4))
            for name, tokens, first, other in zip(documents["name"], documents["tokens"], *bits.to_numpy().T)
        ]
        return [
            section(f"Where the same {unit} last occurred", by_place, places, figure(curve)),
            section(f"What the top {unit}s are", self._group_table(top, "category", CATEGORY_NAMES), kinds),
            section("By document", table(("document", "tokens", "first", "other", "gain"), rows, "Bits per token.")),
        ]

    def _group_table(self, top: pd.DataFrame, by: str, names: Mapping[str, str]) -> Element:
        """Units, their gains, and how many are among the top ones, by `place` or `category`."""
        found, units, among = comparison.groups(self._documents, by), f"{self._unit}s", f"of the top {len(top):,}"
        frame = pd.DataFrame(
            {
                "": found.index.map(names).astype(str),
                units: found["units"],
                "share": found["units"] / found["units"].sum(),
                "gain, bits": [signed(gain, 1) for gain in found["gain_bits"]],
                f"per {self._unit}": [signed(mean, 4) for mean in found["gain_bits"] / found["units"]],
                among: top[by].value_counts().reindex(found.index),
            }
        )
        content = Table.of(frame, formats={units: ",", "share": ".1%", among: ","})
        return table(content.header, content.rows)

    def _facts(self) -> Element:
        explanation = (
            "Every document begins with a segment, and each model remembers what it can from its beginning on; a "
            "document's first token is read and not predicted. "
        )
        explanation += (
            "A word is a run of letters, digits and underscores, or of white space, or one other sign; its bits are "
            "the sum over its tokens."
            if self._unit == "word"
            else "Tokens that share a character count as one."
        )
        details = [self.first.details(), self.other.details()]
        facts = self.chosen.facts("What is compared", details, ("first", "other"), explanation)
        found = differences(self.first.subject.run, self.other.subject.run).items()
        rows = [(name, *map(str, values)) for name, values in found if not name.startswith(("source.", "mesh."))]
        if rows:
            facts.append(table(("where their settings differ", "first", "other"), rows))
        return facts


def _excerpts(units: pd.DataFrame) -> list[Element]:
    """The list of some units in their contexts."""
    items = [_excerpt(unit) for unit in units.itertuples()]
    if not items:
        return [note("None: the two readings are the same.")]
    shown = tag("ol", *items[:SHOWN], class_="places")
    if len(items) <= SHOWN:
        return [shown]
    return [
        shown,
        tag("details", tag("summary", f"{len(items) - SHOWN} more"), tag("ol", *items[SHOWN:], class_="places")),
    ]


def _excerpt(unit: Any) -> Element:
    seen = f"the same {unit.distance:,} tokens before, " if unit.distance else ""
    facts = tag(
        "div",
        f"{signed(unit.gain, 2)} bits: ",
        tag("span", f"{unit.first_bits:.2f}", class_="first"),
        " instead of ",
        tag("span", f"{unit.other_bits:.2f}", class_="other"),
        f" · token {unit.token:,} · {seen}{PLACE_NAMES[unit.place]} · {unit.category}",
        class_="facts",
    )
    # White space can't be seen, and an end has no text.
    shown = unit.text if unit.text.strip() else repr(unit.text).strip("'") or "(end of the document)"
    text = tag("p", unit.before, tag("mark", shown), unit.after, class_="excerpt")
    return tag("li", tag("a", facts, text, href=f"#{unit.document}:{unit.token}"))
