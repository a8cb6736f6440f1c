"""The page of documents that were read with spans of their past: which spans, from where, and their gains."""

import dataclasses
import json
import math
import re
from collections.abc import Callable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from jaxtyping import Float, Int

from meliad_like.data.readers import label
from meliad_like.evaluation.report import with_progress
from meliad_like.history.config import HistoryConfig
from meliad_like.history.evaluation import BASELINE, read_strides
from meliad_like.history.gains import Candidates
from meliad_like.history.opening import Opened
from meliad_like.history.selection import SpanScorer
from meliad_like.history.spans import Stride
from meliad_like.studies.page import text_view, write_page
from meliad_like.studies.units import Units, make_units
from meliad_like.tables import Table

TERM = re.compile(r"[^\W\d_]{3,}(?:['’][^\W\d_]+)?")
BITS = 1 / math.log(2)
SHOWN_SPANS = 10  # number of those that were selected most often
WITH, WITHOUT = "with selected spans", "with only the most recent text"


@dataclasses.dataclass(frozen=True)
class ReadHistory:
    """A document that was read with selected spans, and without."""

    name: str
    tokens: Int[np.ndarray, " tokens"]
    units: Units
    """The words of the document."""
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
    span_gains, documents, name = opened.gains(), opened.documents, scorer.name
    histories, ends = [], np.cumsum(documents.lengths)
    for index, length in enumerate(documents.lengths):
        tokens, readings = documents.tokens(index, 0, int(length)), []
        for reading in read_strides(opened.windows, documents, [scorer], opened.layout, index):
            readings.append(reading)
            on_progress(int(ends[index] - length) + reading.stride.end, int(ends[-1]))
        # A document's first token is not a target.
        plain, selected = (
            np.concatenate([[0.0], *(reading.nats[each] for reading in readings)]) * BITS for each in (BASELINE, name)
        )
        selecting = [reading for reading in readings if reading.spans]
        strides = pd.DataFrame([reading.stride for reading in selecting], columns=Stride._fields)
        for column, bits in {"plain": plain, "gain": plain - selected}.items():
            sums = np.append(0.0, np.cumsum(bits))
            strides[column] = sums[strides["end"]] - sums[strides["first"]] if len(strides) else 0.0
        columns = {
            "end": [reading.spans[name] for reading in selecting],
            "predicted": [reading.scores[name] for reading in selecting],
            "gain": list(span_gains(Candidates(tokens, reading.stride, reading.spans[name]) for reading in selecting)),
        }
        spans = pd.DataFrame({"number": strides["number"], **columns}).explode(list(columns), ignore_index=True)
        spans = spans.astype({"end": int, "predicted": float, "gain": float})
        units = make_units(tokens, opened.checkpoint.vocabulary, "word")
        histories.append(ReadHistory(documents.names[index], tokens, units, plain, selected, strides, spans))
    return histories


def find_terms(history: ReadHistory, config: HistoryConfig) -> pd.DataFrame:
    """The words that are in selected spans and not in the plain window, by the gain of the windows that they came into.

    Ancient History Language Models, section 3.2, Example: the impact of a word is the difference between the losses
    with the selected and with the original context.

    Returns:
        For each word: its `text`, `num_windows`, their `gain` in bits and `num_targets`, how often the word is among
        these targets (`num_predicted`), and the gain on these occurrences alone (`own_gain`).
    """
    num_tokens = config.span_length - bool(config.separator)
    words, rows = np.array(history.terms), []
    selected, plain = history.bits_by_unit
    ends = history.spans.groupby("number")["end"]
    strides: Any = history.strides
    for stride in strides.itertuples():
        starts = (ends.get_group(stride.number) - config.span_length).tolist()
        brought = set().union(*(history.terms_between(start, start + num_tokens) for start in starts))
        targets = slice(*np.searchsorted(history.units.first, (stride.first, stride.end)))
        for term in brought - history.terms_between(stride.begin, stride.first):
            gains = (plain - selected)[targets][words[targets] == term]
            rows.append((term, 1, stride.gain, stride.end - stride.first, len(gains), gains.sum()))
    columns = ["text", "num_windows", "gain", "num_targets", "num_predicted", "own_gain"]
    terms = pd.DataFrame(rows, columns=columns).groupby("text", as_index=False).sum()
    return terms.sort_values(["gain", "own_gain", "text"], ascending=[False, False, True], ignore_index=True)


def find_spans(spans: pd.DataFrame) -> pd.DataFrame:
    """Selected spans, those that were selected most often first: `end`, `num_windows`, `mean_gain` in nats."""
    by_end = spans.groupby("end")["gain"].agg(num_windows="size", mean_gain="mean").reset_index()
    return by_end.sort_values(["num_windows", "mean_gain", "end"], ascending=[False, False, True])


def write_history_page(folder: Path, opened: Opened, scorer: SpanScorer, num_terms: int) -> None:
    """Reads the documents with the spans that a scorer selects, and writes `index.html` and `summary.json`.

    `num_terms`: number of words that are shown of each document.
    """
    histories = with_progress(opened.request.split, lambda progress: read_histories(opened, scorer, progress))
    folder.mkdir(parents=True, exist_ok=True)
    config, leaks = opened.layout.config, scorer.leaks_the_future
    details: dict[str, Any] = {
        "checkpoint": opened.request.checkpoint,
        "step": opened.checkpoint.step,
        "parameters": opened.checkpoint.model.num_parameters,
        "split": opened.request.split,
        "token store": opened.store.fingerprint[:12],
        "selection reads": "the targets (leaks the future)" if leaks else "only the past",
        **{name.replace("_", " "): value for name, value in dataclasses.asdict(config).items()},
    }
    # What a learned selector reads is in its own config.
    del details["selector context"]
    with_terms = [(history, find_terms(history, config)) for history in histories]
    documents = [_summary(history, terms[:num_terms]) for history, terms in with_terms]
    summary = {"selection": scorer.name, "leaks_the_future": leaks, **details, "documents": documents}
    (folder / "summary.json").write_text(json.dumps(summary, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    write_page(
        folder,
        "history",
        Path(__file__).parent / "templates",
        title=f"Ancient history selected by {label(scorer.name, leaks)}",
        leaks=leaks,
        totals=_totals(histories),
        config=config,
        names=[history.name for history in histories],
        lengths=[len(history.tokens) for history in histories],
        documents=[None if h.strides.empty else _part(h, opened, terms, num_terms) for h, terms in with_terms],
        view=text_view(WITH, WITHOUT, [(history.units, *history.bits_by_unit) for history in histories]),
        details=[details],
        selection=None,
    )


def _totals(histories: Sequence[ReadHistory]) -> dict[str, Any]:
    """The figures of the lead; empty if nothing was selected."""
    strides, spans = (pd.concat([getattr(history, name) for history in histories]) for name in ("strides", "spans"))
    if strides.empty:
        return {}
    num_targets = int((strides["end"] - strides["first"]).sum())
    return {
        "windows": len(strides),
        "targets": num_targets,
        "with_spans": (strides["plain"] - strides["gain"]).sum() / num_targets,
        "without": strides["plain"].sum() / num_targets,
        "better": (strides["gain"] > 0).mean(),
        "spans": len(spans),
        "helping": (spans["gain"] > 0).mean(),
        "mean_gain": spans["gain"].mean(),
        "correlation": spans["gain"].corr(spans["predicted"]),
    }


def _part(history: ReadHistory, opened: Opened, terms: pd.DataFrame, num_terms: int) -> dict[str, Any]:
    """What the page shows of a document for which spans were selected."""
    config, decode, tokens = opened.layout.config, opened.checkpoint.vocabulary.decode, history.tokens

    def with_texts(spans: pd.DataFrame) -> pd.DataFrame:
        starts = spans["end"] - config.span_length
        stops = spans["end"] - bool(config.separator)
        return spans.assign(start=starts, text=[decode(tokens[slice(*each)]) for each in zip(starts, stops)])

    strides = history.strides
    texts = [decode(tokens[first:end]) for first, end in zip(strides["first"], strides["end"])]
    gains = strides["gain"] / (strides["end"] - strides["first"])
    # Before the first selection there is nothing to gain.
    along = pd.Series([0.0, *gains, np.nan], [0, *strides["first"], strides["end"].iloc[-1]])
    return {
        "gains": pd.DataFrame({"better": along.clip(lower=0), "worse": along.clip(upper=0)}),
        "by_impact": term_table(terms, "gain", num_terms),
        "by_own_gain": term_table(terms, "own_gain", num_terms),
        "frequent": with_texts(find_spans(history.spans)[:SHOWN_SPANS]),
        "strides": strides.assign(gain=gains, best=gains == gains.max(), text=texts),
        # In the order of the window: the last one is next to the recent text.
        "spans": with_texts(history.spans),
    }


def term_table(terms: pd.DataFrame, measure: str, most: int) -> Table:
    """The words with the largest positive values of a measure; at most `most`."""
    best = terms[terms[measure] > 0].nlargest(most, measure)
    columns = {
        "word": best["text"],
        "windows": best["num_windows"],
        "their gain, bits per token": best["gain"] / best["num_targets"],
        "predicted there": best["num_predicted"],
        "gain on the word itself, bits": best["own_gain"],
    }
    return Table.of(pd.DataFrame(columns), formats=dict(zip(columns, ("", ",", "+,.4f", ",", "+,.2f"))))


def _summary(history: ReadHistory, terms: pd.DataFrame) -> dict[str, Any]:
    spans = history.spans.rename(columns={"end": "span_ends", "gain": "gains_nats"}).groupby("number").agg(list)
    strides = history.strides[["number", "first", "end", "gain"]].rename(columns={"gain": "gain_bits"})
    return {
        "name": history.name,
        "tokens": len(history.tokens),
        "plain_bits": float(history.plain.sum()),
        "selected_bits": float(history.selected.sum()),
        "strides": strides.join(spans, on="number").to_dict("records"),
        "terms": terms.to_dict("records"),
    }
