"""Loss by position in the document (Block-Recurrent Transformers, appendix H, Figure 6)."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
from jaxtyping import Float, Int

from meliad_like.studies.page import Chart, Series, write_page
from meliad_like.studies.readings import Chosen, Reading, StudyRequest, choose, open_compared, read

FIRST_BIN = 32  # tokens, of which there are too few for smaller bins
BINS_PER_OCTAVE = 4
RESAMPLES = 500
FEWEST_DOCUMENTS = 5  # below which no interval is shown


@dataclass(frozen=True)
class Curves:
    """Sums by document and by position of the predicting token; position 0 is the document's first token."""

    edges: Int[np.ndarray, " bins+1"]
    tokens: Int[np.ndarray, "documents bins"]
    bits: Float[np.ndarray, "models documents bins"]

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


def curves(losses: Sequence[Sequence[Float[np.ndarray, " targets"]]], first_bin: int = FIRST_BIN) -> Curves:
    """Sums of losses in nats, by model and document, in bins that grow with the position, four to a doubling."""
    longest = max(map(len, losses[0]))
    octaves = np.arange(0, max(math.log2(longest / first_bin), 0), 1 / BINS_PER_OCTAVE)
    edges = np.unique(np.rint(np.append(0, first_bin * 2**octaves)).astype(int))
    edges = np.append(edges[edges < longest], longest)

    def by_bin(values: np.ndarray) -> np.ndarray:
        return np.histogram(np.arange(len(values)), edges, weights=values)[0]

    tokens = np.stack([by_bin(np.ones(len(nats))) for nats in losses[0]]).astype(int)
    bits = np.stack([[by_bin(nats.astype(np.float64) / math.log(2)) for nats in model] for model in losses])
    return Curves(edges, tokens, bits)


def run(request: StudyRequest) -> None:
    """Writes the page of the loss by position."""
    subjects = open_compared(request)
    chosen = choose(subjects, request)
    readings = [read(subject, chosen) for subject in subjects]
    result, details = curves([reading.losses for reading in readings]), [reading.details() for reading in readings]
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


def _charts(readings: Sequence[Reading], result: Curves) -> list[Chart]:
    # The axis is logarithmic and has no zero.
    edges = np.maximum(result.edges, result.edges[1] / 2)
    centres = np.sqrt(edges[:-1] * edges[1:])
    position = "position in the document, tokens"

    def chart(title: str, x: np.ndarray, x_label: str, lines: np.ndarray, caption: str) -> Chart:
        series = [Series(r.label, x, y, colour=str(i % 5 + 1)) for i, (r, y) in enumerate(zip(readings, lines))]
        return Chart(title, x_label, "bits per token", series, caption, log_x=True, from_zero=False)

    charts = [
        chart(
            "Cumulative",
            result.edges[1:],
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
    left = Series("", edges, result.num_documents, "bars", "muted")
    return [*charts, Chart("Documents of at least this length", position, "documents", [left], log_x=True)]


def _write_numbers(folder: Path, readings: Sequence[Reading], chosen: Chosen, result: Curves) -> None:
    arrays = {"edges": result.edges, "tokens": result.tokens, "bits": result.bits}
    np.savez_compressed(folder / "curves.npz", names=np.array(chosen.documents.names), **arrays)
    columns = {"start": result.edges[:-1], "stop": result.edges[1:]}
    columns |= {"documents": result.num_documents, "tokens": result.tokens.sum(axis=0)}
    for kind, values in (("local", result.local), ("cumulative", result.cumulative)):
        columns |= {f"{kind}: {reading.label}": line for reading, line in zip(readings, values, strict=True)}
    pd.DataFrame(columns).to_csv(folder / "curves.csv", index=False)
