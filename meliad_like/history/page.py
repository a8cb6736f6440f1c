"""The page of a document that was read with spans of its ancient history: which spans, from where, and their worth."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from xml.etree.ElementTree import Element

import numpy as np
import pandas as pd

from meliad_like.data.readers import label
from meliad_like.data.vocabulary import Vocabulary
from meliad_like.history.page_readings import BITS, ReadHistory, Selection, find_spans, find_terms
from meliad_like.history.selection import SpanScorer
from meliad_like.history.spans import HistoryConfig
from meliad_like.studies.page import (
    Chart,
    Series,
    document_choice,
    document_part,
    facts_table,
    figure,
    pack,
    paragraph,
    section,
    table,
    tag,
    text_view,
    write_page,
)
from meliad_like.tables import signed

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
    parts = [document_choice([history.name for history in histories], [len(history.tokens) for history in histories])]
    for history, found in zip(histories, terms, strict=True):
        shown = [paragraph("This document is too short: nothing was selected.")]
        if history.selections:
            part = _DocumentPart(history, config, vocabulary)
            shown = [*part.overview(), *term_tables(found, num_terms), part.frequent_spans(), part.strides()]
        parts.append(document_part(history.index, *shown))
    texts = [pack(history.units, *history.bits_by_unit) for history in histories]
    gains = np.concatenate([history.gain_by_unit for history in histories])
    write_page(
        folder / "index.html",
        f"Ancient history selected by {label(scorer.name, scorer.leaks_the_future)}",
        _lead(histories, scorer, config),
        [
            section("What was selected", *parts),
            text_view(WITH, WITHOUT, gains, texts),
            section("Model, selection and windows", facts_table([details], ("", "value"))),
        ],
    )


def _lead(histories: Sequence[ReadHistory], scorer: SpanScorer, config: HistoryConfig) -> list[Element]:
    lead = []
    if scorer.leaks_the_future:
        warning = "This selection leaks the future: it reads the very tokens that the spans help to predict."
        lead.append(tag("p", warning, class_="warning"))
    selections = [selection for history in histories for selection in history.selections]
    if not selections:
        return [*lead, paragraph("No document is long enough for spans of its past: nothing was selected.")]
    selected, plain, gains, predicted = (
        np.concatenate([getattr(selection, name) for selection in selections]).astype(np.float64)
        for name in ("selected", "plain", "gains", "predicted")
    )
    with_spans, without = selected.mean() * BITS, plain.mean() * BITS
    better = np.mean([selection.gain > 0 for selection in selections])
    correlation = ""
    if gains.std() and predicted.std():
        correlation = f"; their correlation with the scores is {signed(np.corrcoef(gains, predicted)[0, 1], 2)}"
    return [
        *lead,
        paragraph(
            f"In {len(selections):,} windows of {config.window_length:,} tokens, the first {config.history_length:,} "
            f"were given to spans of {config.span_length} tokens from anywhere before. The {len(plain):,} tokens that "
            "these windows predict cost ",
            tag("span", f"{with_spans:.4f} bits", class_="first"),
            f" each {WITH}, and ",
            tag("span", f"{without:.4f} bits", class_="other"),
            f" {WITHOUT}: a gain of {signed(without - with_spans, 4)}. {better:.0%} of the windows were better.",
        ),
        paragraph(
            f"Alone before the recent text, {(gains > 0).mean():.0%} of the {len(gains):,} selected spans help; they "
            f"are worth {signed(gains.mean(), 2)} nats on average (equation 2){correlation}."
        ),
    ]


class _DocumentPart:
    """What the page shows of one document for which spans were selected."""

    def __init__(self, history: ReadHistory, config: HistoryConfig, vocabulary: Vocabulary):
        self._history, self._config, self._vocabulary = history, config, vocabulary

    def overview(self) -> list[Element]:
        """The gain by stride, and where the spans come from."""
        selections = self._history.selections
        # Before the first selection there is nothing to gain.
        places = [0, *(selection.stride.first for selection in selections), selections[-1].stride.end]
        gains = [0, *(selection.gain_per_token for selection in selections)]
        chart = Chart(
            title="Gain by stride",
            x_label="token",
            y_label="gain, bits per token",
            series=[Series(f"better {WITH}|worse", places, gains, "bars", "sign")],
            caption="Gain of all spans of a stride together. Click or tap to read the text there.",
            document=self._history.index,
        )
        note = (
            "The document from left to right, a line for each stride. The window without spans is grey, the tokens "
            "that are predicted violet. A span is blue where it helps alone, and orange where it does not."
        )
        lines = [self._line(selection, y) for y, selection in enumerate(selections)]
        picture = _picture(lines, f"where the spans of {len(lines)} strides come from")
        caption = tag("figcaption", "Where the spans come from")
        return [figure(chart), tag("figure", caption, picture, tag("p", note, class_="note"))]

    def _line(self, selection: Selection, y: int = 0) -> list[Element]:
        """A line of `_picture`: the document with a stride's window, its targets and its spans."""
        stride, length = selection.stride, len(self._history.tokens)

        def mark(start: int, end: int, kind: str) -> Element:
            # At least as wide as can be seen, however long the document is.
            width = max(WIDTH * (end - start) / length, 3.0)
            place = {"x": f"{WIDTH * start / length:.1f}", "y": str(y), "width": f"{width:.1f}", "height": "1"}
            return tag("rect", class_=kind, **place)

        marks = [mark(stride.begin, stride.first, "window"), mark(stride.first, stride.end, "targets")]
        return marks + [
            mark(end - self._config.span_length, end, "helps" if gain > 0 else "harms")
            for end, gain in zip(selection.ends.tolist(), selection.gains.tolist(), strict=True)
        ]

    def frequent_spans(self) -> Element:
        """The spans that were selected most often."""
        spans: Any = find_spans(self._history.selections)[:SHOWN_SPANS]
        items = [
            self._span(
                span.end,
                f"in {span.num_windows:,} window{'s' if span.num_windows > 1 else ''} · worth "
                f"{signed(span.mean_gain, 2)} nats on average · tokens {span.end - self._config.span_length:,} to "
                f"{span.end - 1:,}",
            )
            for span in spans.itertuples()
        ]
        return section("The spans that were selected most often", tag("ol", *items, class_="places"), level=3)

    def strides(self) -> Element:
        """Every stride with its spans and its targets; the one with the largest gain is open."""
        selections = self._history.selections
        best = max(selections, key=lambda selection: selection.gain_per_token)
        blocks = []
        for selection in selections:
            stride = selection.stride
            heading = tag(
                "summary",
                f"tokens {stride.first:,} to {stride.end - 1:,}: ",
                tag("span", f"{signed(selection.gain_per_token, 3)} bits per token", class_=_side(selection.gain)),
                f", {len(selection.ends)} spans" + (" (the largest gain)" if selection is best else ""),
            )
            blocks.append(
                tag(
                    "details",
                    heading,
                    _picture([self._line(selection)], "where these spans come from"),
                    tag("ol", *self._spans(selection), class_="places"),
                    tag("h4", "what is predicted"),
                    tag(
                        "p", self._vocabulary.decode(self._history.tokens[stride.first : stride.end]), class_="passage"
                    ),
                    **({"open": ""} if selection is best else {}),
                )
            )
        return section("Stride by stride", *blocks, level=3, class_="strides")

    def _spans(self, selection: Selection) -> list[Element]:
        """Spans in the order of the window: the last one is next to the recent text."""
        return [
            self._span(
                end,
                "worth ",
                tag("span", f"{signed(float(gain), 2)} nats", class_=_side(gain)),
                f" · its score is {signed(float(predicted), 2)} · tokens {end - self._config.span_length:,} to "
                f"{end - 1:,}, {selection.stride.first - end:,} before the first that is predicted",
            )
            for end, predicted, gain in zip(selection.ends.tolist(), selection.predicted, selection.gains, strict=True)
        ]

    def _span(self, end: int, *facts: Element | str) -> Element:
        start = end - self._config.span_length
        text = self._vocabulary.decode(self._history.tokens[start : end - bool(self._config.separator)])
        link = f"#{self._history.index}:{start}"
        return tag("li", tag("a", tag("div", *facts, class_="facts"), tag("p", text, class_="excerpt"), href=link))


def _picture(lines: Sequence[list[Element]], description: str) -> Element:
    return tag(
        "svg",
        *(mark for line in lines for mark in line),
        viewBox=f"0 0 {WIDTH} {len(lines)}",
        preserveAspectRatio="none",
        # Lines must not become too thick, nor the picture higher than the screen.
        height=str(min(max(6 * len(lines), 14), 480)),
        width="100%",
        class_="past",
        role="img",
        aria_label=description,
    )


def term_tables(terms: pd.DataFrame, most: int) -> list[Element]:
    """The words with the highest impact, and those that gained most themselves; at most `most` of each."""
    header = ("word", "windows", "their gain, bits per token", "predicted there", "gain on the word itself, bits")
    note = (
        "Words of three letters or more that selected spans brought into windows that did not have them, ordered by "
        "the gain of these windows in all. The last two columns tell how often the word itself was predicted there, "
        "and the gain on these occurrences."
    )
    parts = []
    for title, measure, below in (
        ("The words with the highest impact", "gain", note),
        ("The words that gained most themselves", "own_gain", ""),
    ):
        chosen: Any = terms[terms[measure] > 0].nlargest(most, measure)
        rows = [
            (
                t.text,
                f"{t.num_windows:,}",
                signed(t.gain / t.num_targets, 4),
                f"{t.num_predicted:,}",
                signed(t.own_gain, 2),
            )
            for t in chosen.itertuples()
        ]
        if rows:
            parts.append(section(title, table(header, rows, below), level=3))
    return parts


def _side(gain: float) -> str:
    return "first" if gain > 0 else "other"


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
