"""Two models on the same documents: section 4.6 and appendix G of Block-Recurrent Transformers."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd

from meliad_like.config import differences
from meliad_like.data.vocabulary import BytesVocabularyConfig
from meliad_like.errors import UserError
from meliad_like.studies import comparison
from meliad_like.studies.comparison import ReadDocument
from meliad_like.studies.page import Chart, Series, TextView, pack, write_page
from meliad_like.studies.readings import Chosen, Reading, StudyRequest, choose, open_compared, read
from meliad_like.tables import Table, signed

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

    def write(
        self,
        title: str,
        details: Mapping[str, Any] | None = None,
        template: str = "compare.html",
        **more: Any,
    ) -> None:
        """Writes `index.html`, `summary.json`, `top.csv` and `tokens.npz`.

        Args:
          title: of the page.
          details: further entries of summary.json.
          template: of the page, with what it needs in `more`.
        """
        documents, words = self._documents, self._unit == "word"
        best = [document.top(self._num_top, words=words) for document in documents]
        worst = [document.top(self._num_top, words=words, losses=True) for document in documents]
        top, gains = pd.concat(best), np.concatenate([document.table["gain"] for document in documents])
        comparison.write_numbers(self._folder, documents, top)
        settings = {"unit": self._unit, "window": self._window, "segment": self._segment}
        saved = {"title": title, "first": self.first.details(), "other": self.other.details(), "top": self._num_top}
        saved |= settings | dict(details or {}) | comparison.summary(documents, top)
        self.chosen.write_summary(self._folder, saved)
        bits = [[d.table[name].to_numpy() for name in ("first_bits", "other_bits")] for d in documents]
        packed = [pack(document.units, *paid) for document, paid in zip(documents, bits, strict=True)]
        run = self.first.subject.run
        other = dataclasses.replace(self.other.subject.run, source=run.source, mesh=run.mesh)
        changed = [(name, *map(str, values)) for name, values in differences(run, other).items()]
        write_page(
            self._folder / "index.html",
            template,
            title=title,
            first=self.first,
            other=self.other,
            chosen=self.chosen,
            better=(gains > 0.005).mean(),
            worse=(gains < -0.005).mean(),
            parts=[
                {"charts": self._charts(document), "gains": _lines(gained), "losses": _lines(lost)}
                for document, gained, lost in zip(documents, best, worst, strict=True)
            ],
            place_names=PLACE_NAMES,
            view=TextView(self.first.label, self.other.label, gains, packed),
            by_place=self._group_table(top, "place", PLACE_NAMES),
            by_distance=self._by_distance(),
            by_category=self._group_table(top, "category", CATEGORY_NAMES),
            by_document=self._document_table(),
            differences=Table("", ("where their settings differ", "first", "other"), changed),
            **settings,
            **more,
        )

    def _charts(self, document: ReadDocument) -> list[Chart]:
        """The gains along a document (Figure 4)."""
        gains = document.other - document.first
        starts = np.arange(0, len(gains), -(-len(gains) // MAX_INTERVALS))
        lowest, highest, sums = (function.reduceat(gains, starts) for function in (np.minimum, np.maximum, np.add))
        edges = np.append(starts, len(gains))
        among = f"of {edges[1]:,} tokens"
        every = self._clear_every
        marks = range(every, len(gains) - 1, every) if every else ()
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
        return [spread, total]

    def _by_distance(self) -> Chart:
        distances = comparison.groups(self._documents, "distance")
        return Chart(
            title=f"Mean gain by how far back the same {self._unit} last began",
            x_label="distance, tokens",
            y_label=f"gain, bits per {self._unit}",
            series=[Series("", distances.index * 2**0.5, distances["gain_bits"] / distances["units"])],
            caption="In powers of two; the dotted line is the end of the window.",
            log_x=True,
            marks=[self._window + 1],
        )

    def _group_table(self, top: pd.DataFrame, by: str, names: Mapping[str, str]) -> Table:
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
        return Table.of(frame, formats={units: ",", "share": ".1%", among: ","})

    def _document_table(self) -> Table:
        documents = comparison.by_document(self._documents)
        targets = (documents["tokens"] - 1).clip(lower=1)
        first, other = (documents[f"{name}_bits"] / targets for name in ("first", "other"))
        frame = pd.DataFrame({"document": documents["name"], "tokens": targets, "first": first, "other": other})
        frame["gain"] = [signed(gain, 4) for gain in other - first]
        return Table.of(frame, formats={"tokens": ",", "first": ".4f", "other": ".4f"})


def _lines(units: pd.DataFrame) -> list[Any]:
    return list(units.itertuples())
