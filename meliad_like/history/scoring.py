"""What spans are worth: equation 2 of Ancient History Language Models, for many of them at once."""

import itertools
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np
from jax.sharding import Mesh
from jaxtyping import Float, Int

from meliad_like.history.losses import Sequence, TargetLosses
from meliad_like.history.spans import HistoryConfig, Stride, span_tokens
from meliad_like.models.model import Model


class Request(NamedTuple):
    """Spans of a document that shall be scored for a stride."""

    document: Int[np.ndarray, " tokens"]
    stride: Stride
    ends: Int[np.ndarray, " m"]


class SpanGains:
    """The gains of spans in nats, by a frozen model.

    The model reads `[span][recent text, targets among it]`; the recent text is the last k - j tokens, or in a
    document's last stride of fewer targets what its window keeps of them. A gain is the sum of the targets' losses
    without the span, less that with it: the logarithm of the ratio in equation 2. What is read without the span is, by
    `HistoryConfig.baseline`, the recent text alone, or with the document's own l tokens before it. If the recent text
    is all targets, the first has nothing before it in the bare baseline, and is left out of both sums.
    """

    def __init__(
        self,
        model: Model,
        params: Any,
        mesh: Mesh,
        config: HistoryConfig,
        separator: int | None,
        *,
        batch_size: int,
        loss_slice: int = 1024,
    ):
        """
        Args:
            model, params, mesh, batch_size, loss_slice: as of `TargetLosses`.
            config: which spans there are, and what is read with them.
            separator: the token that ends each span; None: its own.
        """
        self._config = config
        self._separator = separator
        self._losses = TargetLosses(
            model,
            params,
            mesh,
            length=config.scored_length,
            max_targets=config.stride,
            batch_size=batch_size,
            loss_slice=loss_slice,
        )

    @property
    def flops(self) -> float:
        """Operations of all calls so far."""
        return self._losses.flops

    @property
    def seconds(self) -> float:
        """Of all calls so far, without compilation."""
        return self._losses.seconds

    def __call__(self, requests: Iterable[Request]) -> Iterator[Float[np.ndarray, " m"]]:
        """The gain of every span of every request, float32, in their order; above 0 where a span helps.

        Batches go over the borders of requests, which are asked for a batch ahead.
        """
        requests, again = itertools.tee(requests)
        losses = self._losses(sequence for request in requests for sequence in self._sequences(request))
        for request in again:
            nats = [float(next(losses).sum(dtype=np.float64)) for _ in range(1 + len(request.ends))]
            yield np.asarray(nats[0] - np.asarray(nats[1:]), np.float32)

    def _sequences(self, request: Request) -> Iterator[Sequence]:
        """Without a span, and then with each."""
        document, stride, ends = request
        contiguous = self._config.baseline == "contiguous"
        # A window that begins with its document keeps more than the k - j tokens that a span is scored with.
        recent_start = max(stride.candidates_end, stride.recent_start)
        start = recent_start - (self._config.span_length if contiguous else 0)
        assert start >= 0, "a stride with candidates has a span before its recent text"
        without = np.asarray(document[start : stride.end])
        num_targets = min(stride.num_targets, len(without) - 1)
        yield Sequence(without, num_targets)
        recent = np.asarray(document[recent_start : stride.end], np.int32)
        for span in span_tokens(document, ends, self._config, self._separator):
            yield Sequence(np.concatenate([span, recent]), num_targets)
