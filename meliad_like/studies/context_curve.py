"""Loss by position in the document (Block-Recurrent Transformers, appendix H, Figure 6)."""

import math
from collections.abc import Sequence

import numpy as np
import pandas as pd

from meliad_like.studies.loss_sums import LossSums
from meliad_like.studies.page import Chart, Numbers, Study
from meliad_like.studies.readings import ModelLosses, StudyRequest, choose, open_compared, read

FIRST_BIN = 32  # tokens, of which there are too few for smaller bins
BINS_PER_OCTAVE = 4


def by_position(readings: Sequence[ModelLosses], first_bin: int = FIRST_BIN) -> LossSums:
    """Sums by the position of the predicting token (0: a document's first), in bins that grow, four to a doubling."""
    counted = readings[0].counted
    longest = max(map(len, counted))
    octaves = np.arange(0, max(math.log2(longest / first_bin), 0), 1 / BINS_PER_OCTAVE)
    edges = np.unique(np.rint(np.append(0, first_bin * 2**octaves)).astype(int))
    edges = np.append(edges[edges < longest], longest)
    places = [np.arange(len(which)) for which in counted]
    return LossSums.by_bin(edges, places, counted, [reading.losses for reading in readings])


def curves(sums: LossSums, labels: Sequence[str]) -> pd.DataFrame:
    """A row for each bin: its `start` and `stop`, the numbers of `documents` and `tokens`, and each model's bits per
    token: `local: ...` in the bin, `cumulative: ...` up to its end, where short documents have ended."""
    tokens, bits = sums.tokens.sum(axis=0), sums.bits.sum(axis=1).cumsum(axis=1)
    columns = {"start": sums.starts, "stop": sums.stops, "documents": (sums.tokens > 0).sum(axis=0), "tokens": tokens}
    columns |= {f"local: {label}": line for label, line in zip(labels, sums.local, strict=True)}
    columns |= {f"cumulative: {label}": line for label, line in zip(labels, bits / tokens.cumsum(), strict=True)}
    return pd.DataFrame(columns)


def run(request: StudyRequest, *, other: Sequence[str] = (), other_step: int | None = None) -> Study:
    """The loss by position of one model or several."""
    models = open_compared(request, other, other_step)
    selection = choose(models, request)
    readings = [read(studied, selection) for studied in models]
    sums, labels, names = by_position(readings), [studied.label for studied in models], selection.documents.names
    table = curves(sums, labels)
    by_document = {"document": np.repeat(names, len(sums.starts)), "start": np.tile(sums.starts, len(names))}
    by_document["tokens"] = sums.tokens.reshape(-1)
    by_document |= {f"bits: {label}": bits.reshape(-1) for label, bits in zip(labels, sums.bits, strict=True)}
    # The axis is logarithmic and has no zero.
    starts = np.maximum(sums.starts, sums.stops[0] / 2)
    centres = np.sqrt(starts * sums.stops)
    means = "; ".join(f"{label} {reading.bits_per_token:.4f}" for label, reading in zip(labels, readings, strict=True))
    place, bits = "position in the document, tokens", "bits per token"
    gains = [
        Chart(
            f"gain_{i}", f"What {labels[0]} saves against {label}", pd.DataFrame(sums.gains(0, i), centres), place,
            f"gain, {bits}",
            "Over the same tokens, so that it does not matter which documents are left; above zero "
            "the first is better. Intervals are a bootstrap over the documents; fewer than five documents have none.",
            log_x=True,
        )
        for i, label in enumerate(labels) if i
    ]  # fmt: skip
    left = pd.DataFrame({"documents": [*table["documents"], np.nan]}, np.append(starts, sums.stops[-1]))
    return Study(
        title=f"Loss by position: {', '.join(labels)}",
        lead=[f"Bits per token over all tokens: {means}."],
        parts=[
            Chart(
                "cumulative", "Bits per token up to a position",
                table.set_index("stop").filter(like="cumulative: ").set_axis(labels, axis=1), "tokens read", bits,
                "Mean over all tokens up to there, of all documents; short ones count up to their ends.", log_x=True,
            ),
            Chart(
                "local", "Bits per token around a position",
                table.set_index(centres).filter(like="local: ").set_axis(labels, axis=1), place, bits,
                "At later positions only longer documents are left, so that a curve may rise or fall with them.",
                log_x=True,
            ),
            *gains,
            Chart("left", "Documents with predicted tokens there", left, place, "documents", steps=True, log_x=True),
            Numbers("curves", "The curves", table, shown=False),
            Numbers("sums", "Sums by document", pd.DataFrame(by_document).query("tokens > 0"), shown=False),
        ],
        selection=selection,
        details=[reading.details() for reading in readings],
        remarks=
        "Position 0 is a document's first token, which is read and not predicted; a loss counts where the token "
        "stands that predicts.",
    )  # fmt: skip
