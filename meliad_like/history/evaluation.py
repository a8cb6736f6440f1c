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
from jaxtyping import Float, Int

from meliad_like.data.subset import Documents
from meliad_like.errors import UserError
from meliad_like.history import losses
from meliad_like.history.assembly import assemble
from meliad_like.history.losses import TargetLosses
from meliad_like.history.spans import HistoryConfig, SpanScorer, Stride, index_in_split, rank, select, strides

BASELINE = "baseline"
"""Name of the window without spans."""
VERSION = 3
"""Version of the numbers: evaluations of different versions are not comparable, and none resumes another."""


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


@dataclasses.dataclass
class Cost:
    """Cost of one selection."""

    seconds: float = 0.0
    """Time spent on its scores, without compilation."""
    flops: float = 0.0
    """Operations of its scores."""
    num_windows: int = 0
    """Windows that the model read."""


def read_strides(
    windows: TargetLosses,
    documents: Documents,
    selections: Sequence[SpanScorer],
    config: HistoryConfig,
    separator: int | None,
    index: int,
    costs: dict[str, Cost] | None = None,
) -> Iterator[StrideReading]:
    """Predicts every token of a document once with the plain window and with each selection, stride by stride.

    Args:
        windows: the model, for windows of `config.window_length` with `config.stride` targets.
        documents: a split, or a subset of it.
        selections: scorers with different names.
        config, separator: as for `assemble`.
        index: index of the document that is read.
        costs: costs by name, to which this reading is added.

    Raises:
        UserError: a score is not finite.
        ValueError: two selections have the same name, or one did not score every span.
    """
    costs = {} if costs is None else costs
    names = [BASELINE, *(selection.name for selection in selections)]
    if len(set(names)) < len(names):
        raise ValueError(f"selections need different names: {', '.join(names)}")
    waiting: deque[StrideReading] = deque()

    def sequences() -> Iterator[losses.Sequence]:
        length = int(documents.lengths[index])
        tokens = documents.tokens(index, 0, length)
        for stride in strides(length, config, index_in_split(documents, index)):
            reading = StrideReading(stride, {}, {}, {})
            waiting.append(reading)
            chosen = [np.zeros(0, np.int64)]
            for selection in selections if stride.selects else ():
                cost = costs.setdefault(selection.name, Cost())
                ends, scores = _timed(selection, documents.names[index], tokens, stride, config, cost)
                chosen.append(select(scores, ends, config))
                reading.chosen[selection.name] = chosen[-1]
                reading.scores[selection.name] = scores[np.searchsorted(ends, chosen[-1])]
            for spans in chosen:
                window = assemble(tokens, stride, spans, config, separator)
                yield losses.Sequence(window.ids, int(window.scored.sum()))

    read = windows(sequences())
    for plain in read:
        reading = waiting.popleft()
        for name in names:
            # A window without spans is the same for all selections.
            reading.nats[name] = next(read) if name in reading.chosen else plain
            costs.setdefault(name, Cost()).num_windows += 1
        yield reading


def _timed(
    selection: SpanScorer, name: str, tokens: np.ndarray, stride: Stride, config: HistoryConfig, cost: Cost
) -> tuple[np.ndarray, np.ndarray]:
    """The result of `rank`, whose cost is added to `cost`."""

    def counters() -> np.ndarray:
        return np.array([getattr(selection, name, 0.0) for name in ("compile_seconds", "flops")])

    began, before = time.perf_counter(), counters()
    ends, scores = rank(selection, name, tokens, stride, config)
    compiling, flops = counters() - before
    cost.seconds += time.perf_counter() - began - float(compiling)
    cost.flops += float(flops)
    return ends, scores


@dataclasses.dataclass
class DocumentSums:
    """One document, as all selections predicted it; fields of a name are by selection."""

    num_tokens: int = 0
    """Tokens that count."""
    num_tokens_where_selected: int = 0
    """Number of them for which spans are selected."""
    nats: dict[str, float] = dataclasses.field(default_factory=dict)
    """Losses of the tokens that count."""
    nats_where_selected: dict[str, float] = dataclasses.field(default_factory=dict)
    costs: dict[str, Cost] = dataclasses.field(default_factory=dict)
    num_windows: int = 0
    """Windows that the model read for all selections together."""
    seconds: float = 0.0
    """Time that it took, without compilation."""

    def add(self, reading: StrideReading, config: HistoryConfig) -> None:
        """Adds a stride of the document."""
        stride, num_targets = reading.stride, len(reading.nats[BASELINE])
        # The released code counts the first token with the mean loss of the first window's targets.
        first = config.first_token == "released_code" and stride.number == 0 and num_targets > 0
        self.num_tokens += num_targets + first
        self.num_tokens_where_selected += num_targets * stride.selects
        for name, targets in reading.nats.items():
            nats = float(targets.sum(dtype=np.float64))
            self.nats[name] = self.nats.get(name, 0.0) + nats + first * nats / max(num_targets, 1)
            self.nats_where_selected[name] = self.nats_where_selected.get(name, 0.0) + nats * stride.selects

    @classmethod
    def from_dict(cls, saved: dict[str, Any]) -> "DocumentSums":
        """From the result of `dataclasses.asdict`."""
        return cls(**{**saved, "costs": {name: Cost(**cost) for name, cost in saved["costs"].items()}})


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """What selections reach on the same documents."""

    config: HistoryConfig
    names: tuple[str, ...]
    """Names of the documents."""
    num_words: Int[np.ndarray, " documents"]
    num_bytes: Int[np.ndarray, " documents"]
    rows: Sequence[DocumentSums]
    """The sums of each document."""
    selections: dict[str, bool]
    """Names of the selections, the baseline first, and whether they leak the future."""
    flops_per_window: float
    extra: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Further contents of the JSON file."""

    @property
    def num_tokens(self) -> Int[np.ndarray, " documents"]:
        """Tokens of each document that count."""
        return np.asarray([row.num_tokens for row in self.rows])

    @property
    def num_tokens_where_selected(self) -> Int[np.ndarray, " documents"]:
        """Number of them for which spans are selected."""
        return np.asarray([row.num_tokens_where_selected for row in self.rows])

    def nats(self, name: str) -> Float[np.ndarray, " documents"]:
        """Losses of a selection on all tokens that count, float64."""
        return np.asarray([row.nats[name] for row in self.rows])

    def nats_where_selected(self, name: str) -> Float[np.ndarray, " documents"]:
        """Losses of a selection on the targets for which spans are selected."""
        return np.asarray([row.nats_where_selected[name] for row in self.rows])

    def costs(self, name: str) -> dict[str, float]:
        """Operations and seconds per predicted token: of the model that predicts, and of a selection."""
        tokens = self.num_tokens.sum()
        seconds, flops, num_windows = np.sum([dataclasses.astuple(row.costs[name]) for row in self.rows], axis=0)
        per_window = sum(row.seconds for row in self.rows) / sum(row.num_windows for row in self.rows)
        costs = {
            "model_flops": num_windows * self.flops_per_window,
            "selection_flops": flops,
            "model_seconds": num_windows * per_window,
            "selection_seconds": seconds,
        }
        return {name: float(cost / tokens) for name, cost in costs.items()}


def evaluate(
    windows: TargetLosses,
    documents: Documents,
    selections: Sequence[SpanScorer],
    config: HistoryConfig,
    separator: int | None,
    on_progress: Callable[[int, int], None] | None = None,
    *,
    done: Mapping[int, DocumentSums] | None = None,
    on_document: Callable[[int, DocumentSums], None] | None = None,
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
    rows, num_read, total = [], 0, int(np.sum(documents.lengths))
    for index, length in enumerate(documents.lengths):
        row = (done or {}).get(index)
        if row is None:
            row = DocumentSums()
            began, before = windows.seconds, windows.num_sequences
            for reading in read_strides(windows, documents, selections, config, separator, index, row.costs):
                row.add(reading, config)
                if on_progress is not None:
                    on_progress(num_read + reading.stride.end, total)
            row.seconds, row.num_windows = windows.seconds - began, windows.num_sequences - before
            if on_document is not None:
                on_document(index, row)
        num_read += int(length)
        rows.append(row)
    return Evaluation(
        config=config,
        names=tuple(documents.names),
        num_words=np.asarray(documents.num_words),
        num_bytes=np.asarray(documents.num_bytes),
        rows=rows,
        selections={BASELINE: False} | {selection.name: selection.leaks_the_future for selection in selections},
        flops_per_window=windows.flops_per_sequence,
    )
