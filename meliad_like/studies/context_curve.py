"""Loss by position in the document (Block-Recurrent Transformers, appendix H, Figure 6)."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import numpy as np
import pandas as pd
from jaxtyping import Bool, Float, Int

from meliad_like.studies.page import Chart, Series, write_page
from meliad_like.studies.readings import Chosen, StudyRequest, SubjectLosses, choose, open_compared, read

FIRST_BIN = 32  # tokens, of which there are too few for smaller bins
BINS_PER_OCTAVE = 4
RESAMPLES = 500
FEWEST_DOCUMENTS = 5  # below which no interval is shown


@dataclass(frozen=True)
class Curves:
    """Sums of losses by model, by document and by place, in bins that have tokens."""

    starts: Int[np.ndarray, " bins"]
    stops: Int[np.ndarray, " bins"]
    tokens: Int[np.ndarray, "documents bins"]
    bits: Float[np.ndarray, "models documents bins"]

    @classmethod
    def of(
        cls,
        edges: Int[np.ndarray, " bins+1"],
        places: Sequence[Int[np.ndarray, " targets"]],
        counted: Sequence[Bool[np.ndarray, " targets"]],
        losses: Iterable[Iterable[Float[np.ndarray, " targets"]]],
    ) -> Self:
        """Adds losses in nats, given by model and document, between the edges.

        `places` and `counted` are the targets' places and whether they cost loss, by document.
        """
        chosen = [place[which] for place, which in zip(places, counted, strict=True)]
        tokens = np.stack([np.histogram(place, edges)[0] for place in chosen])

        def by_bin(place, which, nats):
            return np.histogram(place, edges, weights=nats[which].astype(np.float64) / math.log(2))[0]

        bits = np.stack([[*map(by_bin, chosen, counted, model)] for model in losses])
        some = tokens.any(axis=0)
        return cls(edges[:-1][some], edges[1:][some], tokens[:, some], bits[..., some])

    @property
    def local(self) -> Float[np.ndarray, "models bins"]:
        """Bits per token in each bin."""
        return self.bits.sum(axis=1) / self.tokens.sum(axis=0)

    @property
    def cumulative(self) -> Float[np.ndarray, "models bins"]:
        """Bits per token up to the end of each bin, over all documents; short ones count up to their ends."""
        return self.bits.sum(axis=1).cumsum(axis=1) / self.tokens.sum(axis=0).cumsum()

    @property
    def num_documents(self) -> Int[np.ndarray, " bins"]:
        """The number of documents with tokens in each bin."""
        return (self.tokens > 0).sum(axis=0)

    def gains(self, other: int) -> Float[np.ndarray, " bins"]:
        """Bits per token that model 0 saves against another one, over the same tokens."""
        return self.local[other] - self.local[0]

    def interval(self, other: int) -> Float[np.ndarray, "2 bins"]:
        """The 90% interval of the gains when the documents are resampled with replacement (bootstrap)."""
        saved, number = self.bits[other] - self.bits[0], len(self.tokens)
        drawn = np.random.default_rng(0).multinomial(number, np.full(number, 1 / number), RESAMPLES)
        tokens = drawn @ self.tokens
        gains = np.where(tokens > 0, drawn @ saved / np.maximum(tokens, 1), np.nan)
        return np.nanquantile(gains, (0.05, 0.95), axis=0)


def by_position(readings: Sequence[SubjectLosses], first_bin: int = FIRST_BIN) -> Curves:
    """Sums by the position of the predicting token, in bins that grow with it, four to a doubling.

    Position 0 is the document's first token.
    """
    counted = readings[0].counted
    longest = max(map(len, counted))
    octaves = np.arange(0, max(math.log2(longest / first_bin), 0), 1 / BINS_PER_OCTAVE)
    edges = np.unique(np.rint(np.append(0, first_bin * 2**octaves)).astype(int))
    edges = np.append(edges[edges < longest], longest)
    places = [np.arange(len(which)) for which in counted]
    return Curves.of(edges, places, counted, [reading.losses for reading in readings])


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


def _charts(readings: Sequence[SubjectLosses], result: Curves) -> list[Chart]:
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
    return [*charts, Chart("Documents of at least this length", position, "documents", [left], log_x=True)]


def _write_numbers(folder: Path, readings: Sequence[SubjectLosses], chosen: Chosen, result: Curves) -> None:
    arrays = {"starts": result.starts, "stops": result.stops, "tokens": result.tokens, "bits": result.bits}
    np.savez_compressed(folder / "curves.npz", names=np.array(chosen.documents.names), **arrays)
    columns = {"start": result.starts, "stop": result.stops}
    columns |= {"documents": result.num_documents, "tokens": result.tokens.sum(axis=0)}
    for kind, values in (("local", result.local), ("cumulative", result.cumulative)):
        columns |= {f"{kind}: {reading.label}": line for reading, line in zip(readings, values, strict=True)}
    pd.DataFrame(columns).to_csv(folder / "curves.csv", index=False)
