"""Documents predicted with and without selected spans, in the same pass.

Ancient History Language Models, section 3: windows of k tokens, s targets at a time, the spans selected once for each.
The context is that of the document alone. Every selection, and the plain window beside it, predicts the same targets.
"""

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
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
"""The name of the window without spans."""
VERSION = 2
"""Of the numbers: with another one the same settings meant other numbers, and an evaluation does not go on."""


class StrideReading(NamedTuple):
    """A stride as it was predicted."""

    document: int
    """Index among those that are read; the stride has that in the split."""
    stride: Stride
    nats: dict[str, Float[np.ndarray, " targets"]]
    """The losses of its targets, by the selection's name, and of the plain window as BASELINE. A document's first token
    has none."""
    chosen: dict[str, Int[np.ndarray, " spans"]]
    """Where the selected spans end, in the order of the window; {} where nothing is selected."""
    scores: dict[str, Float[np.ndarray, " spans"]]
    """What the selection gave these."""


@dataclass
class Cost:
    """What a selection took."""

    seconds: float = 0.0
    """In its scores, without compilation."""
    flops: float = 0.0
    """In its scores."""
    num_windows: int = 0
    """Windows that the model read."""


def read_strides(
    windows: TargetLosses,
    documents: Documents,
    selections: Sequence[SpanScorer],
    config: HistoryConfig,
    separator: int | None,
    costs: dict[str, Cost] | None = None,
    only: Sequence[int] | None = None,
) -> Iterator[StrideReading]:
    """Predicts every token of every document once by the plain window and by each selection, stride by stride.

    Args:
        windows: the model, for windows of `config.window_length` with `config.stride` targets.
        documents: a split, or a part of it.
        selections: with different names.
        config, separator: as of `assemble`.
        costs: by name; they are added to.
        only: indices of the documents that are read; None: of all.

    Raises:
        UserError: a selection gave a span NaN.
        ValueError: two selections have the same name, or one did not score every span.
    """
    costs = {} if costs is None else costs
    names = [BASELINE, *(selection.name for selection in selections)]
    if len(set(names)) < len(names):
        raise ValueError(f"selections need different names: {', '.join(names)}")
    waiting: deque[StrideReading] = deque()

    def sequences() -> Iterator[losses.Sequence]:
        for document in range(len(documents.lengths)) if only is None else only:
            length = int(documents.lengths[document])
            tokens = documents.tokens(document, 0, length)
            for stride in strides(length, config, index_in_split(documents, document)):
                reading = StrideReading(document, stride, {}, {}, {})
                windows_of_stride = [assemble(tokens, stride, np.zeros(0, np.int64), config, separator)]
                if stride.selects:
                    for selection in selections:
                        cost = costs.setdefault(selection.name, Cost())
                        ends, scores = _timed(selection, documents.names[document], tokens, stride, config, cost)
                        chosen = select(scores, ends, config)
                        reading.chosen[selection.name] = chosen
                        reading.scores[selection.name] = scores[np.searchsorted(ends, chosen)]
                        windows_of_stride.append(assemble(tokens, stride, chosen, config, separator))
                waiting.append(reading)
                for window in windows_of_stride:
                    yield losses.Sequence(window.ids, window.num_targets)

    read = windows(sequences())
    for plain in read:
        reading = waiting.popleft()
        for name in names:
            # A window without spans is the same for all.
            reading.nats[name] = next(read) if name in reading.chosen else plain
            costs.setdefault(name, Cost()).num_windows += 1
        yield reading


def _timed(
    selection: SpanScorer, name: str, tokens, stride: Stride, config: HistoryConfig, cost: Cost
) -> tuple[np.ndarray, np.ndarray]:
    """As `rank`; adds to the cost."""

    def counted(name: str) -> float:
        return getattr(selection, name, 0.0)

    began, flops, compiling = time.perf_counter(), counted("flops"), counted("compile_seconds")
    ends, scores = rank(selection, name, tokens, stride, config)
    cost.seconds += time.perf_counter() - began - (counted("compile_seconds") - compiling)
    cost.flops += counted("flops") - flops
    return ends, scores


@dataclass
class DocumentSums:
    """One document, as all selections predicted it."""

    num_tokens: int = 0
    """Counted ones."""
    num_tokens_where_selected: int = 0
    """Of these, targets for which spans are selected."""
    nats: dict[str, float] = field(default_factory=dict)
    """Of the counted tokens, by the selection's name."""
    nats_where_selected: dict[str, float] = field(default_factory=dict)
    costs: dict[str, Cost] = field(default_factory=dict)
    num_windows: int = 0
    """That the model read for all of them."""
    seconds: float = 0.0
    """That it took, without compilation."""

    @classmethod
    def from_dict(cls, saved: dict[str, Any]) -> "DocumentSums":
        """From what `dataclasses.asdict` gives."""
        return cls(**{**saved, "costs": {name: Cost(**cost) for name, cost in saved["costs"].items()}})


@dataclass(frozen=True)
class Sums:
    """Of one selection, by document."""

    name: str
    leaks_the_future: bool
    nats: Float[np.ndarray, " documents"]
    """Of all counted tokens, float64."""
    nats_where_selected: Float[np.ndarray, " documents"]
    """Of the targets for which spans are selected."""
    cost: Cost


@dataclass(frozen=True)
class Evaluation:
    """What selections reach on the same documents."""

    config: HistoryConfig
    names: tuple[str, ...]
    """Of the documents."""
    num_tokens: Int[np.ndarray, " documents"]
    """Counted tokens of each."""
    num_tokens_where_selected: Int[np.ndarray, " documents"]
    """Of these, targets for which spans are selected."""
    num_words: Int[np.ndarray, " documents"]
    num_bytes: Int[np.ndarray, " documents"]
    selections: tuple[Sums, ...]
    """The baseline first."""
    flops_per_window: float
    seconds_per_window: float
    """Of the model, without compilation."""
    extra: dict[str, Any] = field(default_factory=dict)
    """What else is to be in the JSON file."""

    def __getitem__(self, name: str) -> Sums:
        return next(sums for sums in self.selections if sums.name == name)


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
    """Sums what `read_strides` finds, document by document.

    Args:
        windows, documents, selections, config, separator: as of `read_strides`.
        on_progress: told how many tokens are read, and how many there are.
        done: by index, documents that are not read again.
        on_document: told of each document that was read.

    Raises:
        UserError: as `read_strides`; or no document has a second token.
    """
    if not np.any(np.asarray(documents.lengths) > 1):
        raise UserError("no document has a second token: there is nothing to predict")
    rows, num_read, total = [], 0, int(np.sum(documents.lengths))
    for index, length in enumerate(documents.lengths):
        row = (done or {}).get(index)
        if row is None:
            row, first = DocumentSums(), num_read
            began, before = windows.seconds, windows.num_sequences
            for reading in read_strides(windows, documents, selections, config, separator, row.costs, [index]):
                _add(row, reading, config)
                if on_progress is not None:
                    on_progress(first + reading.stride.end, total)
            row.seconds, row.num_windows = windows.seconds - began, windows.num_sequences - before
            if on_document is not None:
                on_document(index, row)
        num_read += int(length)
        rows.append(row)

    def by_document(name: str) -> np.ndarray:
        return np.asarray([getattr(row, name) for row in rows])

    def sums(name: str, leaks_the_future: bool) -> Sums:
        costs = [row.costs[name] for row in rows]
        return Sums(
            name,
            leaks_the_future,
            np.asarray([row.nats[name] for row in rows]),
            np.asarray([row.nats_where_selected[name] for row in rows]),
            Cost(*(sum(getattr(cost, field.name) for cost in costs) for field in fields(Cost))),
        )

    return Evaluation(
        config=config,
        names=tuple(documents.names),
        num_tokens=by_document("num_tokens"),
        num_tokens_where_selected=by_document("num_tokens_where_selected"),
        num_words=np.asarray(documents.num_words),
        num_bytes=np.asarray(documents.num_bytes),
        selections=(sums(BASELINE, False), *(sums(s.name, s.leaks_the_future) for s in selections)),
        flops_per_window=windows.flops_per_sequence,
        seconds_per_window=by_document("seconds").sum() / by_document("num_windows").sum(),
    )


def _add(row: DocumentSums, reading: StrideReading, config: HistoryConfig) -> None:
    """Adds a stride to its document."""
    stride, num_targets = reading.stride, len(reading.nats[BASELINE])
    # The released code takes the mean loss of a first window's targets for that of the first token as well.
    first = config.first_token == "released_code" and stride.number == 0 and num_targets > 0
    row.num_tokens += num_targets + first
    row.num_tokens_where_selected += num_targets * stride.selects
    for name, targets in reading.nats.items():
        nats = float(targets.sum(dtype=np.float64))
        row.nats[name] = row.nats.get(name, 0.0) + nats + first * nats / max(num_targets, 1)
        row.nats_where_selected[name] = row.nats_where_selected.get(name, 0.0) + nats * stride.selects
