"""The page of a document that was read with spans of its ancient history: which ones, from where, and their worth."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from xml.etree.ElementTree import Element

import numpy as np

from meliad_like.data.readers import label
from meliad_like.data.vocabulary import Vocabulary
from meliad_like.history.page_readings import BITS, ReadHistory, Selection, Term, find_spans, find_terms
from meliad_like.history.spans import HistoryConfig, SpanScorer
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
from meliad_like.studies.text_view import pack, text_view

SHOWN_SPANS = 10  # of those that were selected most often
WIDTH = 1000  # of a picture's own coordinates
WITH, WITHOUT = "with selected spans", "with the most recent text alone"


def write_history_page(
    folder: Path,
    histories: Sequence[ReadHistory],
    scorer: SpanScorer,
    config: HistoryConfig,
    vocabulary: Vocabulary,
    details: dict[str, Any],
    num_terms: int = 20,
) -> None:
    """Writes `index.html` and `summary.json`.

    Args:
        folder: made if need be.
        histories: documents.
        scorer: what selected the spans.
        config: how windows are put together.
        vocabulary: of the tokens.
        details: what is known of model, selector and documents, for the page's last table.
        num_terms: of each document.
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
    parts += [
        document_part(
            history.index,
            *_overview(history, config),
            *_terms(found, num_terms),
            *_frequent(history, config, vocabulary),
            *_strides(history, config, vocabulary),
        )
        for history, found in zip(histories, terms, strict=True)
    ]
    write_page(
        folder / "index.html",
        f"Ancient history selected by {label(scorer.name, scorer.leaks_the_future)}",
        _lead(histories, scorer, config),
        [
            section("What was selected", *parts),
            text_view(
                WITH,
                WITHOUT,
                np.concatenate([history.plain_by_unit - history.selected_by_unit for history in histories]),
                [pack(history.units, history.selected_by_unit, history.plain_by_unit) for history in histories],
            ),
            section("Model, selection and windows", facts_table([details], ("", "value"))),
        ],
    )


def _lead(histories: Sequence[ReadHistory], scorer: SpanScorer, config: HistoryConfig) -> list[Element]:
    selections = [selection for history in histories for selection in history.selections]
    lead = []
    if scorer.leaks_the_future:
        lead.append(
            tag(
                "p",
                "This selection leaks the future: it reads the very tokens that the spans are to help to predict.",
                class_="warning",
            )
        )
    if not selections:
        return [*lead, paragraph("No document is long enough for spans of its past: nothing was selected.")]
    tokens = sum(len(selection.plain) for selection in selections)
    with_spans, without = (
        sum(float(getattr(selection, name).sum(dtype=np.float64)) for selection in selections) * BITS / tokens
        for name in ("selected", "plain")
    )
    gains = np.concatenate([selection.gains for selection in selections])
    predicted = np.concatenate([selection.predicted for selection in selections])
    agreement = np.corrcoef(gains, predicted)[0, 1] if len(gains) > 1 and gains.std() and predicted.std() else np.nan
    agreed = f", and their correlation with what the selection gave them is {_signed(agreement, 2)}"
    better = float(np.mean([selection.gain > 0 for selection in selections]))
    return [
        *lead,
        paragraph(
            f"{len(selections):,} times a window of {config.window_length:,} tokens gave its first "
            f"{config.history_length:,} to spans of {config.span_length} tokens from anywhere before. The "
            f"{tokens:,} tokens that were predicted so cost ",
            tag("span", f"{with_spans:.4f} bits", class_="first"),
            f" each {WITH}, and ",
            tag("span", f"{without:.4f} bits", class_="other"),
            f" {WITHOUT}: a gain of {_signed(without - with_spans, 4)}. {better:.0%} of the windows were better.",
        ),
        paragraph(
            f"Alone in front of the recent text, {float((gains > 0).mean()):.0%} of the {len(gains):,} selected spans "
            f"help; they are worth {_signed(float(gains.mean()), 2)} nats on average (equation 2)",
            "." if np.isnan(agreement) else f"{agreed}.",
        ),
    ]


def _overview(history: ReadHistory, config: HistoryConfig) -> list[Element]:
    if not history.selections:
        return [paragraph("This document is too short: nothing was selected.")]
    firsts = [selection.stride.first for selection in history.selections]
    chart = Chart(
        title="Gain by stride",
        x_label="token",
        y_label="gain, bits per token",
        series=[
            Series(
                f"better {WITH}|worse",
                # Before the first selection there is nothing to gain.
                [0, *firsts, history.selections[-1].stride.end],
                [0, *(selection.gain_per_token for selection in history.selections)],
                "bars",
                "sign",
            )
        ],
        caption="Of all spans of a stride together. Click or tap to read the text there.",
        document=history.index,
    )
    note = (
        "The document from left to right, a line for each stride. Grey is the window without spans, violet the tokens "
        "that are predicted. A span is blue where it helps alone, and orange where it does not."
    )
    lines = [_line(selection, history, config, y) for y, selection in enumerate(history.selections)]
    picture = _picture(lines, f"where the spans of {len(lines)} strides come from")
    return [
        figure(chart),
        tag("figure", tag("figcaption", "Where the spans come from"), picture, tag("p", note, class_="note")),
    ]


def _line(selection: Selection, history: ReadHistory, config: HistoryConfig, y: int = 0) -> list[Element]:
    """A line of `_picture`: the document, and in it a stride's window, its targets and its spans."""
    stride, length = selection.stride, len(history.tokens)

    def mark(start: int, end: int, kind: str) -> Element:
        # Whatever is chosen can be seen, however long the document is.
        width = max(WIDTH * (end - start) / length, 3.0)
        place = {"x": f"{WIDTH * start / length:.1f}", "y": str(y), "width": f"{width:.1f}", "height": "1"}
        return tag("rect", class_=kind, **place)

    marks = [mark(stride.begin, stride.first, "window"), mark(stride.first, stride.end, "targets")]
    return marks + [
        mark(end - config.span_length, end, "helps" if gain > 0 else "harms")
        for end, gain in zip(selection.ends.tolist(), selection.gains.tolist(), strict=True)
    ]


def _picture(lines: Sequence[list[Element]], description: str) -> Element:
    # Few lines would become fat ones, and many a picture that is higher than the screen.
    height = min(max(6 * len(lines), 14), 480)
    return tag(
        "svg",
        *(mark for line in lines for mark in line),
        viewBox=f"0 0 {WIDTH} {len(lines)}",
        preserveAspectRatio="none",
        height=str(height),
        width="100%",
        class_="past",
        role="img",
        aria_label=description,
    )


def _terms(terms: Sequence[Term], most: int) -> list[Element]:
    helping = [term for term in terms if term.gain > 0][:most]
    if not helping:
        return []

    def rows(chosen: Sequence[Term]) -> list[tuple[str, ...]]:
        return [
            (
                term.text,
                f"{term.num_windows:,}",
                _signed(term.gain_per_token, 4),
                f"{term.num_predicted:,}",
                _signed(term.own_gain, 2),
            )
            for term in chosen
        ]

    header = ("word", "windows", "their gain, bits per token", "predicted there", "gain on the word itself, bits")
    own = sorted((term for term in terms if term.own_gain > 0), key=lambda term: -term.own_gain)[:most]
    first = section(
        "The words with the highest impact",
        table(
            header,
            rows(helping),
            "Words of three letters or more that selected spans brought into windows that did not have them, by what "
            "these windows gained in all. How often each word was itself to be predicted there, and what was gained on "
            "it, are the last two columns.",
        ),
        level=3,
    )
    if not own:
        return [first]
    return [first, section("The words that gained most themselves", table(header, rows(own)), level=3)]


def _frequent(history: ReadHistory, config: HistoryConfig, vocabulary: Vocabulary) -> list[Element]:
    spans = find_spans(history.selections)[:SHOWN_SPANS]
    if not spans:
        return []
    items = [
        tag(
            "li",
            tag(
                "a",
                tag(
                    "div",
                    f"in {span.num_windows:,} window{'s' if span.num_windows > 1 else ''} · worth "
                    f"{_signed(span.mean_gain, 2)} nats on average · tokens {span.end - config.span_length:,} to "
                    f"{span.end - 1:,}",
                    class_="facts",
                ),
                tag("p", _text(history, span.end, config, vocabulary), class_="excerpt"),
                href=f"#{history.index}:{span.end - config.span_length}",
            ),
        )
        for span in spans
    ]
    return [section("The spans that were selected most often", tag("ol", *items, class_="places"), level=3)]


def _strides(history: ReadHistory, config: HistoryConfig, vocabulary: Vocabulary) -> list[Element]:
    if not history.selections:
        return []
    best = max(range(len(history.selections)), key=lambda i: history.selections[i].gain_per_token)
    blocks = []
    for i, selection in enumerate(history.selections):
        stride = selection.stride
        heading = tag(
            "summary",
            f"tokens {stride.first:,} to {stride.end - 1:,}: ",
            tag("span", f"{_signed(selection.gain_per_token, 3)} bits per token", class_=_side(selection.gain)),
            f", {len(selection.ends)} spans" + (" (the largest gain)" if i == best else ""),
        )
        blocks.append(
            tag(
                "details",
                heading,
                _picture([_line(selection, history, config)], "where these spans come from"),
                *_spans(selection, history, config, vocabulary),
                tag("h4", "what is predicted"),
                tag("p", vocabulary.decode(history.tokens[stride.first : stride.end]), class_="passage"),
                **({"open": ""} if i == best else {}),
            )
        )
    return [section("Stride by stride", *blocks, level=3, class_="strides")]


def _spans(selection: Selection, history: ReadHistory, config: HistoryConfig, vocabulary: Vocabulary) -> list[Element]:
    """Spans as the window has them: the last one is next to the recent text."""
    items = []
    for end, predicted, gain in zip(selection.ends.tolist(), selection.predicted, selection.gains, strict=True):
        start = end - config.span_length
        facts = tag(
            "div",
            "worth ",
            tag("span", f"{_signed(float(gain), 2)} nats", class_=_side(gain)),
            f" · the selection gave it {_signed(float(predicted), 2)} · tokens {start:,} to {end - 1:,}, "
            f"{selection.stride.first - end:,} before the first that is predicted",
            class_="facts",
        )
        text = tag("p", _text(history, end, config, vocabulary), class_="excerpt")
        items.append(tag("li", tag("a", facts, text, href=f"#{history.index}:{start}")))
    return [tag("ol", *items, class_="places")]


def _text(history: ReadHistory, end: int, config: HistoryConfig, vocabulary: Vocabulary) -> str:
    return vocabulary.decode(history.tokens[end - config.span_length : end - bool(config.separator)])


def _side(gain: float) -> str:
    return "first" if gain > 0 else "other"


def _signed(value: float, digits: int) -> str:
    return f"{value:+,.{digits}f}".replace("-", "\N{MINUS SIGN}")


def _summary(history: ReadHistory, terms: Sequence[Term]) -> dict[str, Any]:
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
        "terms": [term._asdict() for term in terms],
    }
