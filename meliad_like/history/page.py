"""The page of documents that were read with spans of their past: which spans, from where, and their worth."""

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from meliad_like.data.readers import label
from meliad_like.history.opening import Opened
from meliad_like.history.page_readings import ReadHistory, find_spans, find_terms
from meliad_like.history.selection import SpanScorer
from meliad_like.studies.page import Chart, Series, TextView, pack, write_page
from meliad_like.tables import Table, signed

SHOWN_SPANS = 10  # number of those that were selected most often
WIDTH = 1000  # of a picture, in its own coordinates
WITH, WITHOUT = "with selected spans", "with only the most recent text"


def write_history_page(
    folder: Path, opened: Opened, scorer: SpanScorer, histories: Sequence[ReadHistory], num_terms: int
) -> None:
    """Writes `index.html` and `summary.json` into a folder, which is made if needed.

    Args:
        opened: the model and the documents, which were read with the spans that the scorer selects.
        num_terms: number of words that are shown of each document.
    """
    folder.mkdir(parents=True, exist_ok=True)
    config, leaks = opened.config, scorer.leaks_the_future
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
    terms = [find_terms(history, config) for history in histories]
    documents = [_summary(history, found[:num_terms]) for history, found in zip(histories, terms, strict=True)]
    summary = {"selection": scorer.name, "leaks_the_future": leaks, **details, "documents": documents}
    (folder / "summary.json").write_text(json.dumps(summary, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    gains = np.concatenate([history.gain_by_unit for history in histories])
    texts = [pack(history.units, *history.bits_by_unit) for history in histories]
    write_page(
        folder / "index.html",
        "history.html",
        __package__,
        title=f"Ancient history selected by {label(scorer.name, leaks)}",
        leaks=leaks,
        totals=_totals(histories),
        config=config,
        width=WIDTH,
        names=[history.name for history in histories],
        lengths=[len(history.tokens) for history in histories],
        parts=[
            None if history.strides.empty else _part(history, opened, found, num_terms)
            for history, found in zip(histories, terms, strict=True)
        ],
        view=TextView(WITH, WITHOUT, gains, texts),
        details=details,
    )


def _totals(histories: Sequence[ReadHistory]) -> dict[str, Any]:
    """The figures of the lead; empty if nothing was selected."""
    strides, spans = (pd.concat([getattr(history, name) for history in histories]) for name in ("strides", "spans"))
    if strides.empty:
        return {}
    num_targets = int((strides["end"] - strides["first"]).sum())
    correlation = spans["gain"].corr(spans["predicted"])
    return {
        "windows": len(strides),
        "targets": num_targets,
        "with_spans": (strides["plain"] - strides["gain"]).sum() / num_targets,
        "without": strides["plain"].sum() / num_targets,
        "better": (strides["gain"] > 0).mean(),
        "spans": len(spans),
        "helping": (spans["gain"] > 0).mean(),
        "mean_gain": spans["gain"].mean(),
        # There is none with a constant.
        "correlation": None if np.isnan(correlation) else correlation,
    }


def _part(history: ReadHistory, opened: Opened, terms: pd.DataFrame, num_terms: int) -> dict[str, Any]:
    """What the page shows of a document for which spans were selected."""
    config, vocabulary, tokens = opened.config, opened.checkpoint.vocabulary, history.tokens
    strides: Any = history.strides
    gains = (strides["gain"] / (strides["end"] - strides["first"])).tolist()

    def span(end: int, **facts: Any) -> dict[str, Any]:
        start = end - config.span_length
        return {
            "start": start,
            "end": end,
            "text": vocabulary.decode(tokens[start : end - bool(config.separator)]),
            **facts,
        }

    def stride(place: Any, gain: float) -> dict[str, Any]:
        # In the order of the window: the last one is next to the recent text.
        spans: Any = history.spans[history.spans["number"] == place.number]
        marks = [("window", place.begin, place.first), ("targets", place.first, place.end)]
        marks += [("helps" if s.gain > 0 else "harms", s.end - config.span_length, s.end) for s in spans.itertuples()]
        scale = WIDTH / len(tokens)
        return {
            "first": place.first,
            "end": place.end,
            "gain": gain,
            "best": gain == max(gains),
            # At least as wide as can be seen, however long the document is.
            "marks": [(kind, scale * start, max(scale * (end - start), 3.0)) for kind, start, end in marks],
            "spans": [span(s.end, gain=s.gain, predicted=s.predicted) for s in spans.itertuples()],
            "text": vocabulary.decode(tokens[place.first : place.end]),
        }

    frequent: Any = find_spans(history.spans)[:SHOWN_SPANS]
    return {
        "gains": Chart(
            title="Gain by stride",
            x_label="token",
            y_label="gain, bits per token",
            # Before the first selection there is nothing to gain.
            series=[
                Series(
                    f"better {WITH}|worse",
                    [0, *strides["first"], strides["end"].iloc[-1]],
                    [0, *gains],
                    "bars",
                    "sign",
                )
            ],
            caption="Gain of all spans of a stride together. Click or tap to read the text there.",
            document=history.index,
        ),
        "by_impact": term_table(terms, "gain", num_terms),
        "by_own_gain": term_table(terms, "own_gain", num_terms),
        "frequent": [span(s.end, num_windows=s.num_windows, mean_gain=s.mean_gain) for s in frequent.itertuples()],
        "strides": [stride(place, gain) for place, gain in zip(strides.itertuples(), gains, strict=True)],
    }


def term_table(terms: pd.DataFrame, measure: str, most: int) -> Table:
    """The words with the largest positive values of a measure; at most `most`."""
    chosen: Any = terms[terms[measure] > 0].nlargest(most, measure)
    rows = [
        (t.text, f"{t.num_windows:,}", signed(t.gain / t.num_targets, 4), f"{t.num_predicted:,}", signed(t.own_gain, 2))
        for t in chosen.itertuples()
    ]
    header = ("word", "windows", "their gain, bits per token", "predicted there", "gain on the word itself, bits")
    return Table("", header, rows)


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
