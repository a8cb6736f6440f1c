"""The page of a document that was read with spans of its ancient history: which spans, from where, and their worth."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from meliad_like.data.readers import label
from meliad_like.data.vocabulary import Vocabulary
from meliad_like.history.page_readings import BITS, ReadHistory, Selection, find_spans, find_terms
from meliad_like.history.selection import SpanScorer
from meliad_like.history.spans import HistoryConfig
from meliad_like.studies.page import Chart, Series, TextView, pack, write_page
from meliad_like.tables import Table, signed

SHOWN_SPANS = 10  # number of those that were selected most often
WIDTH = 1000  # of a picture, in its own coordinates
WITH, WITHOUT = "with selected spans", "with only the most recent text"


def write_history_page(
    folder: Path,
    histories: Sequence[ReadHistory],
    scorer: SpanScorer,
    config: HistoryConfig,
    vocabulary: Vocabulary,
    details: dict[str, Any],
    num_terms: int = 20,
) -> None:
    """Writes `index.html` and `summary.json` into a folder, which is made if needed.

    Args:
        histories: the documents.
        scorer: what selected the spans.
        config: how windows are assembled.
        vocabulary: vocabulary of the tokens.
        details: facts about model, selector and documents, for the page's last table.
        num_terms: number of words that are shown of each document.
    """
    folder.mkdir(parents=True, exist_ok=True)
    terms = [find_terms(history, config) for history in histories]
    summary = {
        "selection": scorer.name,
        "leaks_the_future": scorer.leaks_the_future,
        **details,
        "documents": [_summary(history, found[:num_terms]) for history, found in zip(histories, terms, strict=True)],
    }
    (folder / "summary.json").write_text(json.dumps(summary, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    gains = np.concatenate([history.gain_by_unit for history in histories])
    texts = [pack(history.units, *history.bits_by_unit) for history in histories]
    write_page(
        folder / "index.html",
        "history.html",
        __package__,
        title=f"Ancient history selected by {label(scorer.name, scorer.leaks_the_future)}",
        leaks=scorer.leaks_the_future,
        totals=_totals([selection for history in histories for selection in history.selections]),
        config=config,
        width=WIDTH,
        names=[history.name for history in histories],
        lengths=[len(history.tokens) for history in histories],
        parts=[
            _part(history, config, vocabulary, found, num_terms) if history.selections else None
            for history, found in zip(histories, terms, strict=True)
        ],
        view=TextView(WITH, WITHOUT, gains, texts),
        details=details,
    )


def _totals(selections: Sequence[Selection]) -> dict[str, Any]:
    """The figures of the lead; empty if nothing was selected."""
    if not selections:
        return {}
    selected, plain, gains, predicted = (
        np.concatenate([getattr(selection, name) for selection in selections]).astype(np.float64)
        for name in ("selected", "plain", "gains", "predicted")
    )
    varying = gains.std() and predicted.std()
    return {
        "windows": len(selections),
        "targets": len(plain),
        "with_spans": selected.mean() * BITS,
        "without": plain.mean() * BITS,
        "better": np.mean([selection.gain > 0 for selection in selections]),
        "spans": len(gains),
        "helping": (gains > 0).mean(),
        "mean_gain": gains.mean(),
        "correlation": np.corrcoef(gains, predicted)[0, 1] if varying else None,
    }


def _part(
    history: ReadHistory, config: HistoryConfig, vocabulary: Vocabulary, terms: pd.DataFrame, num_terms: int
) -> dict[str, Any]:
    """What the page shows of a document for which spans were selected."""
    selections, tokens = history.selections, history.tokens
    # Before the first selection there is nothing to gain.
    places = [0, *(selection.stride.first for selection in selections), selections[-1].stride.end]
    gains = [0, *(selection.gain_per_token for selection in selections)]

    def span(end: int, **facts: Any) -> dict[str, Any]:
        start = end - config.span_length
        return {
            "start": start,
            "end": end,
            "text": vocabulary.decode(tokens[start : end - bool(config.separator)]),
            **facts,
        }

    def stride(selection: Selection) -> dict[str, Any]:
        first, end = selection.stride.first, selection.stride.end
        spans = zip(selection.ends.tolist(), selection.gains.tolist(), selection.predicted.tolist(), strict=True)
        return {
            "first": first,
            "end": end,
            "gain": selection.gain_per_token,
            "best": selection.gain_per_token == max(gains[1:]),
            "marks": _marks(selection, len(tokens), config),
            # In the order of the window: the last one is next to the recent text.
            "spans": [span(end, gain=gain, predicted=predicted) for end, gain, predicted in spans],
            "text": vocabulary.decode(tokens[first:end]),
        }

    frequent: Any = find_spans(selections)[:SHOWN_SPANS]
    return {
        "gains": Chart(
            title="Gain by stride",
            x_label="token",
            y_label="gain, bits per token",
            series=[Series(f"better {WITH}|worse", places, gains, "bars", "sign")],
            caption="Gain of all spans of a stride together. Click or tap to read the text there.",
            document=history.index,
        ),
        "by_impact": term_table(terms, "gain", num_terms),
        "by_own_gain": term_table(terms, "own_gain", num_terms),
        "frequent": [span(s.end, num_windows=s.num_windows, mean_gain=s.mean_gain) for s in frequent.itertuples()],
        "strides": [stride(selection) for selection in selections],
    }


def _marks(selection: Selection, length: int, config: HistoryConfig) -> list[tuple[str, float, float]]:
    """A line of a picture: (kind, place, width) of a stride's window, its targets and its spans in the document."""
    stride = selection.stride
    marks = [("window", stride.begin, stride.first), ("targets", stride.first, stride.end)]
    for end, gain in zip(selection.ends.tolist(), selection.gains.tolist(), strict=True):
        marks.append(("helps" if gain > 0 else "harms", end - config.span_length, end))
    # At least as wide as can be seen, however long the document is.
    return [(kind, WIDTH * start / length, max(WIDTH * (end - start) / length, 3.0)) for kind, start, end in marks]


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
    return {
        "name": history.name,
        "tokens": len(history.tokens),
        "plain_bits": float(history.plain.sum()),
        "selected_bits": float(history.selected.sum()),
        "strides": [
            {
                "first": selection.stride.first,
                "end": selection.stride.end,
                "gain_bits": selection.gain,
                "span_ends": selection.ends.tolist(),
                "predicted": selection.predicted.tolist(),
                "gains_nats": selection.gains.tolist(),
            }
            for selection in history.selections
        ],
        "terms": terms.to_dict("records"),
    }
