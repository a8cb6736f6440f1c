"""Documents predicted with and without selected spans, in the same pass.

Ancient History Language Models, section 3: every window predicts `stride` targets, for which spans are selected once.
The context is that of the document alone. Every selection, and the plain window beside it, predicts the same targets.
"""

import dataclasses
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from jaxtyping import Float, Int

from meliad_like.data.subset import Documents
from meliad_like.errors import UserError
from meliad_like.history.gains import TargetLosses
from meliad_like.history.selection import SpanScorer, rank
from meliad_like.history.spans import HistoryConfig, Stride, Window, index_in_split, select, strides, window

BASELINE = "baseline"
"""Name of the window without spans."""
VERSION = 4
"""Version of the numbers: evaluations of different versions are not comparable, and none resumes another."""
SUMS = (
    "num_tokens",  # that count
    "num_tokens_where_selected",  # the number of them for which spans are selected
    "nats",
    "nats_where_selected",
    "model_flops",  # of the model that predicts
    "selection_flops",
    "model_seconds",  # without compilation
    "selection_seconds",
)
"""The sums over the strides of a document, for each selection."""
Sums = dict[str, dict[str, float]]
"""`SUMS` of one document by the name of the selection."""


class StrideReading(NamedTuple):
    """The predictions for one stride."""

    stride: Stride
    nats: dict[str, Float[np.ndarray, " targets"]]
    """Losses of the targets by name of the selection, those of the plain window as BASELINE. A document's first token
    has none."""
    chosen: dict[str, Int[np.ndarray, " spans"]]
    """Where the selected spans end, in the order of the window; {} where nothing is selected."""
    scores: dict[str, Float[np.ndarray, " spans"]]
    """Scores of these spans."""
    costs: dict[str, tuple[float, float]]
    """Operations and seconds, without compilation, of the scores."""


def read_strides(
    windows: TargetLosses,
    documents: Documents,
    selections: Sequence[SpanScorer],
    config: HistoryConfig,
    separator: int | None,
    index: int,
) -> Iterator[StrideReading]:
    """Predicts every token of a document once with the plain window and with each selection, stride by stride.

    Args:
        windows: the model, for windows of `config.window_length` with `config.stride` targets.
        documents: a split, or a subset of it.
        selections: scorers with different names.
        config, separator: as for `spans.window`.
        index: index of the document that is read.

    Raises:
        UserError: a score is not finite.
        ValueError: two selections have the same name, or one did not score every span.
    """
    names = [BASELINE, *(selection.name for selection in selections)]
    if len(set(names)) < len(names):
        raise ValueError(f"selections need different names: {', '.join(names)}")
    waiting: deque[StrideReading] = deque()

    def to_read() -> Iterator[Window]:
        length = int(documents.lengths[index])
        tokens = documents.tokens(index, 0, length)
        for stride in strides(length, config, index_in_split(documents, index)):
            reading = StrideReading(stride, {}, {}, {}, {})
            waiting.append(reading)
            chosen = [np.zeros(0, np.int64)]
            for selection in selections if stride.selects else ():
                began, before = time.perf_counter(), _counters(selection)
                ends, scores = rank(selection, documents.names[index], tokens, stride, config)
                flops, compiling = _counters(selection) - before
                reading.costs[selection.name] = flops, time.perf_counter() - began - compiling
                chosen.append(select(scores, ends, config))
                reading.chosen[selection.name] = chosen[-1]
                reading.scores[selection.name] = scores[np.searchsorted(ends, chosen[-1])]
            for spans in chosen:
                yield window(tokens, stride, spans, config, separator)

    read = windows(to_read())
    for plain in read:
        reading = waiting.popleft()
        for name in names:
            # A window without spans is the same for all selections.
            reading.nats[name] = next(read) if name in reading.chosen else plain
        yield reading


def _counters(selection: SpanScorer) -> np.ndarray:
    return np.array([getattr(selection, name, 0.0) for name in ("flops", "compile_seconds")])


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """What selections reach on the same documents."""

    config: HistoryConfig
    documents: pd.DataFrame
    """`name`, `num_words` and `num_bytes` of each document."""
    sums: pd.DataFrame
    """`SUMS` by selection and document."""
    selections: dict[str, bool]
    """Names of the selections, the baseline first, and whether they leak the future."""
    extra: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Further contents of the JSON file."""

    def of(self, name: str) -> Any:
        """The sums of a selection: a frame with a line for each document."""
        return self.sums.loc[name]

    def costs(self, name: str) -> pd.Series:
        """Operations and seconds per predicted token: of the model that predicts, and of a selection."""
        totals = self.of(name).sum()
        return totals[["model_flops", "selection_flops", "model_seconds", "selection_seconds"]] / totals["num_tokens"]


def evaluate(
    windows: TargetLosses,
    documents: Documents,
    selections: Sequence[SpanScorer],
    config: HistoryConfig,
    separator: int | None,
    on_progress: Callable[[int, int], None] = lambda done, total: None,
    *,
    done: Mapping[int, Sums] | None = None,
    on_document: Callable[[int, Sums], None] = lambda index, sums: None,
) -> Evaluation:
    """Sums the losses of `read_strides`, document by document.

    Args:
        windows, documents, selections, config, separator: as for `read_strides`.
        on_progress: callback with the numbers of tokens read so far and in all.
        done: sums of documents, by index, that are not read again.
        on_document: callback with the index and the sums of each document that was read.

    Raises:
        UserError: as `read_strides`; or no document has a second token.
    """
    if not np.any(np.asarray(documents.lengths) > 1):
        raise UserError("no document has a second token: there is nothing to predict")
    names = [BASELINE, *(selection.name for selection in selections)]
    ends, by_document = np.cumsum(documents.lengths), dict(done or {})
    for index in sorted(set(range(len(ends))) - set(by_document)):
        sums, num_strides = np.zeros((len(names), len(SUMS))), 0
        began, before = windows.seconds, windows.num_windows
        for reading in read_strides(windows, documents, selections, config, separator, index):
            sums += [_of_stride(reading, name, config) for name in names]
            num_strides += 1
            on_progress(int(ends[index] - documents.lengths[index]) + reading.stride.end, int(ends[-1]))
        seconds = (windows.seconds - began) / max(windows.num_windows - before, 1)
        sums[:, SUMS.index("model_seconds")] = num_strides * seconds
        sums[:, SUMS.index("model_flops")] = num_strides * windows.flops_per_window
        by_document[index] = pd.DataFrame(sums, names, SUMS).to_dict("index")
        on_document(index, by_document[index])
    frames = {index: pd.DataFrame.from_dict(by_document[index], orient="index") for index in range(len(ends))}
    return Evaluation(
        config=config,
        documents=pd.DataFrame(
            {"name": list(documents.names), "num_words": documents.num_words, "num_bytes": documents.num_bytes}
        ),
        sums=pd.concat(frames).swaplevel(),
        selections={BASELINE: False} | {selection.name: selection.leaks_the_future for selection in selections},
    )


def _of_stride(reading: StrideReading, name: str, config: HistoryConfig) -> tuple[float, ...]:
    """What a stride adds to `SUMS` of a selection; the costs of the model are not known yet."""
    targets = reading.nats[name]
    nats, selects = float(targets.sum(dtype=np.float64)), reading.stride.selects
    # The released code counts the first token with the mean loss of the first window's targets.
    first = config.first_token == "released_code" and reading.stride.number == 0 and len(targets) > 0
    flops, seconds = reading.costs.get(name, (0.0, 0.0))
    own_mean = nats / max(len(targets), 1)
    return len(targets) + first, len(targets) * selects, nats + first * own_mean, nats * selects, 0, flops, 0, seconds
