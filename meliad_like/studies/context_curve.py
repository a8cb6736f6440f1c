"""Loss by position in the document (Block-Recurrent Transformers, appendix H, Figure 6)."""

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd

from meliad_like.studies.loss_sums import FEWEST_DOCUMENTS, RESAMPLES, LossSums
from meliad_like.studies.page import Chart, Series, write_page
from meliad_like.studies.readings import Chosen, ModelLosses, StudyRequest, choose, open_compared, read

FIRST_BIN = 32  # tokens, of which there are too few for smaller bins
BINS_PER_OCTAVE = 4


def by_position(readings: Sequence[ModelLosses], first_bin: int = FIRST_BIN) -> LossSums:
    """Sums by the position of the predicting token, in bins whose width grows with it, four to a doubling.

    Position 0 is the document's first token.
    """
    counted = readings[0].counted
    longest = max(map(len, counted))
    octaves = np.arange(0, max(math.log2(longest / first_bin), 0), 1 / BINS_PER_OCTAVE)
    edges = np.unique(np.rint(np.append(0, first_bin * 2**octaves)).astype(int))
    edges = np.append(edges[edges < longest], longest)
    places = [np.arange(len(which)) for which in counted]
    return LossSums.by_bin(edges, places, counted, [reading.losses for reading in readings])


def run(request: StudyRequest) -> None:
    """Writes the page of the loss by position."""
    subjects = open_compared(request)
    chosen = choose(subjects, request)
    readings = [read(subject, chosen) for subject in subjects]
    result, details = by_position(readings), [reading.details() for reading in readings]
    _write_numbers(request.output, readings, chosen, result)
    chosen.write_summary(request.output, {"models": details})
    write_page(
        request.output / "index.html",
        "context_curve.html",
        title=f"Loss by position: {', '.join(reading.label for reading in readings)}",
        readings=readings,
        chosen=chosen,
        charts=_charts(readings, result),
        details=details,
        models=[f"model {i + 1}" for i in range(len(readings))],
    )


def _charts(readings: Sequence[ModelLosses], result: LossSums) -> list[Chart]:
    # The axis is logarithmic and has no zero.
    starts = np.maximum(result.starts, result.stops[0] / 2)
    centres = np.sqrt(starts * result.stops)
    position = "position in the document, tokens"

    def chart(title: str, x: np.ndarray, x_label: str, lines: np.ndarray, caption: str) -> Chart:
        series = [Series(r.label, x, y, colour=str(i % 5 + 1)) for i, (r, y) in enumerate(zip(readings, lines))]
        return Chart(title, x_label, "bits per token", series, caption, log_x=True, from_zero=False)

    charts = [
        chart(
            "Cumulative",
            result.stops,
            "tokens read",
            result.cumulative,
            "Mean over all tokens up to there, of all documents; short ones count up to their ends.",
        ),
        chart(
            "Local",
            centres,
            position,
            result.local,
            "Mean over the tokens around there. At later positions only longer documents are left, so that a curve may "
            "rise or fall with them.",
        ),
    ]
    for other in range(1, len(readings)):
        title = f"What {readings[0].label} saves against {readings[other].label}"
        series = [Series("mean", centres, result.gains(other))]
        caption = (
            "Over the same tokens, so that it does not matter which documents are left; above zero the first is better."
        )
        if len(result.tokens) >= FEWEST_DOCUMENTS:
            low, high = result.interval(other)
            series.append(Series("90% interval over documents", centres, high, "band", "muted", low))
            caption += f" The interval is a bootstrap over the documents ({RESAMPLES} resamples)."
        charts.append(Chart(title, position, "gain, bits per token", series, caption, log_x=True))
    left = Series("", np.append(starts, result.stops[-1]), result.num_documents, "bars", "muted")
    return [*charts, Chart("Documents with predicted tokens there", position, "documents", [left], log_x=True)]


def _write_numbers(folder: Path, readings: Sequence[ModelLosses], chosen: Chosen, result: LossSums) -> None:
    arrays = {"starts": result.starts, "stops": result.stops, "tokens": result.tokens, "bits": result.bits}
    np.savez_compressed(folder / "curves.npz", names=np.array(chosen.documents.names), **arrays)
    columns = {"start": result.starts, "stop": result.stops}
    columns |= {"documents": result.num_documents, "tokens": result.tokens.sum(axis=0)}
    for kind, values in (("local", result.local), ("cumulative", result.cumulative)):
        columns |= {f"{kind}: {reading.label}": line for reading, line in zip(readings, values, strict=True)}
    pd.DataFrame(columns).to_csv(folder / "curves.csv", index=False)
