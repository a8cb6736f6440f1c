"""Loss by position in the document (Block-Recurrent Transformers, appendix H, Figure 6)."""

import math
from collections.abc import Sequence

import numpy as np
import pandas as pd

from meliad_like.studies.loss_sums import LossSums
from meliad_like.studies.page import write_page
from meliad_like.studies.readings import ModelLosses, StudyRequest, choose, open_compared, read

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


def curves(sums: LossSums, labels: Sequence[str]) -> pd.DataFrame:
    """A row for each bin: its `start` and `stop`, the numbers of `documents` and `tokens`, and bits per token.

    `local: ...` are those of a model in the bin; `cumulative: ...` up to its end, where short documents have ended.
    """
    tokens, bits = sums.tokens.sum(axis=0), sums.bits.sum(axis=1).cumsum(axis=1)
    columns = {"start": sums.starts, "stop": sums.stops, "documents": (sums.tokens > 0).sum(axis=0), "tokens": tokens}
    columns |= {f"local: {label}": line for label, line in zip(labels, sums.local, strict=True)}
    columns |= {f"cumulative: {label}": line for label, line in zip(labels, bits / tokens.cumsum(), strict=True)}
    return pd.DataFrame(columns)


def run(request: StudyRequest) -> None:
    """Writes the page of the loss by position, `curves.csv`, `curves.npz` and `summary.json`."""
    subjects = open_compared(request)
    selection = choose(subjects, request)
    readings = [read(subject, selection) for subject in subjects]
    sums, labels = by_position(readings), [reading.label for reading in readings]
    table, details = curves(sums, labels), [reading.details() for reading in readings]
    table.to_csv(request.output / "curves.csv", index=False)
    arrays = {"starts": sums.starts, "stops": sums.stops, "tokens": sums.tokens, "bits": sums.bits}
    np.savez_compressed(request.output / "curves.npz", names=np.array(selection.documents.names), **arrays)
    # The axis is logarithmic and has no zero.
    starts = np.maximum(sums.starts, sums.stops[0] / 2)
    centres = np.sqrt(starts * sums.stops)
    write_page(
        request.output,
        "context_curve",
        {},
        title=f"Loss by position: {', '.join(labels)}",
        selection=selection,
        details=details,
        cumulative=table.set_index("stop").filter(like="cumulative: ").set_axis(labels, axis=1),
        local=table.set_index(centres).filter(like="local: ").set_axis(labels, axis=1),
        gains={label: pd.DataFrame(sums.gains(0, i), centres) for i, label in enumerate(labels) if i},
        left=pd.DataFrame({"documents": [*table["documents"], np.nan]}, np.append(starts, sums.stops[-1])),
    )
