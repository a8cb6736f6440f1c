"""The page of documents that were read with spans of their past: which spans, from where, and their gains."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from jaxtyping import Float, Int

from meliad_like.data.readers import label
from meliad_like.evaluation.report import with_progress
from meliad_like.history.evaluation import BASELINE, read_strides
from meliad_like.history.gains import Candidates
from meliad_like.history.opening import Opened
from meliad_like.history.selection import SpanScorer
from meliad_like.history.spans import Stride
from meliad_like.studies.page import text_view, write_page
from meliad_like.studies.units import Units, make_units

BITS = 1 / math.log(2)


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


def write_history_page(folder: Path, opened: Opened, scorer: SpanScorer) -> None:
    """Reads the documents with the spans that a scorer selects, and writes `index.html` and `summary.json`."""
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
    by_word = [(h.units, *(np.add.reduceat(bits, h.units.first) for bits in (h.selected, h.plain))) for h in histories]
    write_page(
        folder,
        "history",
        {"selection": scorer.name, "leaks_the_future": leaks, "documents": [*map(_summary, histories)]},
        Path(__file__).parent / "templates",
        title=f"Ancient history selected by {label(scorer.name, leaks)}",
        leaks=leaks,
        totals=_totals(histories),
        config=config,
        names=[history.name for history in histories],
        lengths=[len(history.tokens) for history in histories],
        documents=[None if history.strides.empty else _part(history, opened) for history in histories],
        view=text_view("with selected spans", "with only the most recent text", by_word),
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


def _part(history: ReadHistory, opened: Opened) -> dict[str, Any]:
    """What the page shows of a document for which spans were selected."""
    config, decode, tokens = opened.layout.config, opened.checkpoint.vocabulary.decode, history.tokens
    spans, strides = history.spans, history.strides
    starts, stops = spans["end"] - config.span_length, spans["end"] - bool(config.separator)
    span_texts = [decode(tokens[start:stop]) for start, stop in zip(starts, stops)]
    texts = [decode(tokens[first:end]) for first, end in zip(strides["first"], strides["end"])]
    gains = strides["gain"] / (strides["end"] - strides["first"])
    # Before the first selection there is nothing to gain.
    along = pd.Series([0.0, *gains, np.nan], [0, *strides["first"], strides["end"].iloc[-1]])
    return {
        "gains": pd.DataFrame({"better": along.clip(lower=0), "worse": along.clip(upper=0)}),
        "strides": strides.assign(gain=gains, best=gains == gains.max(), text=texts),
        # In the order of the window: the last one is next to the recent text.
        "spans": spans.assign(start=starts, text=span_texts),
    }


def _summary(history: ReadHistory) -> dict[str, Any]:
    spans = history.spans.rename(columns={"end": "span_ends", "gain": "gains_nats"}).groupby("number").agg(list)
    strides = history.strides[["number", "first", "end", "gain"]].rename(columns={"gain": "gain_bits"})
    return {
        "name": history.name,
        "tokens": len(history.tokens),
        "plain_bits": float(history.plain.sum()),
        "selected_bits": float(history.selected.sum()),
        "strides": strides.join(spans, on="number").to_dict("records"),
    }
