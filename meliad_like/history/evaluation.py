"""Documents predicted with and without selected spans, in the same pass.

Ancient History Language Models, section 3: windows of k tokens, s targets at a time, the spans selected once for each.
The context is that of the document alone. Every selection, and the plain window beside it, predicts the same targets.
"""

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int

from meliad_like.evaluation.perplexity import Documents
from meliad_like.history import losses
from meliad_like.history.assembly import assemble
from meliad_like.history.losses import TargetLosses
from meliad_like.history.spans import HistoryConfig, SpanScorer, Stride, candidates, select, strides

BASELINE = "baseline"
"""The name of the window without spans."""


class StrideReading(NamedTuple):
    """A stride as it was predicted."""

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
    """In its scores."""
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
) -> Iterator[StrideReading]:
    """Predicts every token of every document once by the plain window and by each selection, stride by stride.

    Args:
        windows: the model, for windows of `config.window_length` with `config.stride` targets.
        documents: a split, or a part of it.
        selections: with different names.
        config, separator: as of `assemble`.
        costs: by name; they are added to.

    Raises:
        ValueError: a selection scored a span with NaN, or did not score every one.
    """
    costs = {} if costs is None else costs
    waiting: deque[StrideReading] = deque()

    def sequences() -> Iterator[losses.Sequence]:
        for document, length in enumerate(documents.lengths):
            tokens = documents.tokens(document, 0, int(length))
            for stride in strides(int(length), config, document):
                reading = StrideReading(stride, {}, {}, {})
                windows_of_stride = [assemble(tokens, stride, np.zeros(0, np.int64), config, separator)]
                if stride.selects:
                    ends = candidates(stride, config)
                    for selection in selections:
                        scores = _timed(selection, tokens, stride, ends, costs)
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
        for name in (BASELINE, *(selection.name for selection in selections)):
            # A window without spans is the same for all.
            reading.nats[name] = next(read) if name in reading.chosen else plain
            costs.setdefault(name, Cost()).num_windows += 1
        yield reading


def _timed(selection: SpanScorer, tokens, stride: Stride, ends, costs: dict[str, Cost]) -> np.ndarray:
    began, flops = time.perf_counter(), getattr(selection, "flops", 0.0)
    scores = selection.scores(tokens, stride, ends)
    cost = costs.setdefault(selection.name, Cost())
    cost.seconds += time.perf_counter() - began
    cost.flops += getattr(selection, "flops", 0.0) - flops
    if scores.shape != ends.shape:
        raise ValueError(f"{selection.name} gave scores of shape {scores.shape} for {len(ends)} spans")
    return scores


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
    extra: dict = field(default_factory=dict)
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
) -> Evaluation:
    """Sums what `read_strides` finds.

    Args:
        windows, documents, selections, config, separator: as of `read_strides`.
        on_progress: told how many tokens are read, and how many there are.
    """
    shape, total = len(documents.lengths), int(np.sum(documents.lengths))
    everything = {name: np.zeros((2, shape)) for name in (BASELINE, *(selection.name for selection in selections))}
    tokens = np.zeros((2, shape), np.int64)
    costs: dict[str, Cost] = {}
    began, before, done = windows.seconds, windows.num_sequences, 0
    for reading in read_strides(windows, documents, selections, config, separator, costs):
        stride = reading.stride
        # The released code takes the mean of a first window's losses for that of all its tokens.
        extra = config.first_token == "released_code" and stride.number == 0 and stride.num_targets > 1
        for name, nats in reading.nats.items():
            mean = float(nats.mean(dtype=np.float64)) if extra else 0.0
            everything[name][:, stride.document] += np.array([1, stride.selects]) * nats.sum(dtype=np.float64) + [
                mean,
                0,
            ]
        count = len(reading.nats[BASELINE])
        tokens[:, stride.document] += [count + extra, count * stride.selects]
        done += stride.num_targets
        if on_progress is not None:
            on_progress(done, total)
    leaks = {selection.name: selection.leaks_the_future for selection in selections} | {BASELINE: False}
    return Evaluation(
        config=config,
        names=tuple(documents.names),
        num_tokens=tokens[0],
        num_tokens_where_selected=tokens[1],
        num_words=np.asarray(documents.num_words),
        num_bytes=np.asarray(documents.num_bytes),
        selections=tuple(Sums(name, leaks[name], sums[0], sums[1], costs[name]) for name, sums in everything.items()),
        flops_per_window=windows.flops_per_sequence,
        seconds_per_window=(windows.seconds - began) / (windows.num_sequences - before),
    )
