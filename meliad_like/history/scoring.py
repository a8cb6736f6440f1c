"""What spans are worth: equation 2 of Ancient History Language Models, for many spans at once."""

import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int

from meliad_like.history.losses import Sequence, TargetLosses
from meliad_like.history.spans import HistoryConfig, Stride, span_tokens


class Candidates(NamedTuple):
    """Spans of a document that are to be scored for a stride."""

    document: Int[np.ndarray, " tokens"]
    stride: Stride
    ends: Int[np.ndarray, " m"]


class SpanGains:
    """The gains of spans in nats, by a frozen model.

    The model reads `[span][recent text with its targets]`. A gain is the sum of the targets' losses without the span,
    minus the sum with it: the logarithm of the ratio in equation 2. Without the span the model reads the recent text
    alone or, by `HistoryConfig.baseline`, the recent text after the document's own span_length tokens before it. If the
    recent text is all targets, the first one has nothing before it in the bare baseline, and counts in neither sum.
    """

    def __init__(self, read: Callable[..., TargetLosses], config: HistoryConfig, separator: int | None):
        """
        Args:
            read: the model: (length, max_targets) -> `TargetLosses`.
            config: which spans there are, and what is read with them.
            separator: the token that ends each span; None: the span's own.
        """
        self._config, self._separator = config, separator
        self.losses = read(length=config.span_length + config.recent_length, max_targets=config.stride)
        """The model's readings so far, with their costs."""

    def __call__(self, requests: Iterable[Candidates]) -> Iterator[Float[np.ndarray, " m"]]:
        """The gain of every span of every request, float32, in their order; above 0 where a span helps.

        A batch may hold spans of several requests, which are therefore read one batch ahead.
        """
        requests, again = itertools.tee(requests)
        losses = self.losses(sequence for request in requests for sequence in self._sequences(request))
        for request in again:
            nats = [float(next(losses).sum(dtype=np.float64)) for _ in range(1 + len(request.ends))]
            yield np.asarray(nats[0] - np.asarray(nats[1:]), np.float32)

    def _sequences(self, request: Candidates) -> Iterator[Sequence]:
        """The recent text without a span, and then with each."""
        document, stride, ends = request
        # A window that begins with its document keeps more tokens than those that a span is scored with.
        recent_start = max(stride.candidates_end, stride.recent_start)
        start = recent_start - (self._config.span_length if self._config.baseline == "contiguous" else 0)
        without = np.asarray(document[start : stride.end])
        num_targets = min(stride.num_targets, len(without) - 1)
        yield Sequence(without, num_targets)
        recent = np.asarray(document[recent_start : stride.end], np.int32)
        for span in span_tokens(document, ends, self._config, self._separator):
            yield Sequence(np.concatenate([span, recent]), num_targets)
