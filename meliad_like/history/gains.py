"""The losses of the last tokens of many windows, by one compiled program, and the gains of spans that follow."""

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int

from meliad_like.history.selection import SpanScorer
from meliad_like.history.spans import Ends, Layout, Scores, Stride, Tokens, Window
from meliad_like.layers.losses import token_losses
from meliad_like.mesh import lane_sharding, lane_shards, replicated
from meliad_like.models.model import Model


class TargetLosses:
    """Reads windows in batches of one compiled shape, and returns the loss of each target.

    Shorter windows are padded at their end, which does not change the losses of a causal model.
    """

    def __init__(
        self,
        model: Model,
        params: Any,
        mesh: Mesh,
        *,
        length: int,
        max_targets: int,
        batch_size: int,
        loss_slice: int = 1024,
    ):
        """Raises a UserError if the model does not read windows of this length.

        Args:
            model, params: of any family; the parameters are on the mesh.
            length, max_targets: tokens of the longest window, and the largest number of its targets.
            batch_size: windows that are read at once; rounded up to a multiple of the mesh's shards.
            loss_slice: tokens on a device whose logits exist at the same time.
        """
        shards = lane_shards(mesh)
        rows = -(-batch_size // shards)
        reading = model.for_separate_sequences(length)
        block = reading.config.window_length
        self._shape = (rows * shards, -(-length // block) * block)
        self._lanes = lane_sharding(mesh, rows * shards)
        self._params, self._mesh = params, mesh
        losses = functools.partial(_losses, reading, max_targets, max(loss_slice // rows, 1))
        self._program = jax.jit(losses, out_shardings=replicated(mesh))
        self.num_windows = 0
        """Windows read so far."""
        # The operations of a token without its logits are those with a vocabulary of size 0.
        hidden = Model(reading.config, 0).flops.forward
        logits = reading.flops.forward - hidden
        self.flops_per_window: float = self._shape[1] * hidden + max_targets * logits
        """Operations (`layers/flops.py`), padding included: all tokens are read, and targets have logits."""

    def __call__(self, windows: Iterable[Window]) -> Iterator[Float[np.ndarray, " targets"]]:
        """The losses of each window's targets in nats, float32; the windows are taken one batch ahead."""
        remaining = iter(windows)
        while batch := list(itertools.islice(remaining, self._shape[0])):
            tokens, lengths = np.zeros(self._shape, np.int32), np.ones(self._shape[0], np.int32)
            for row, window in enumerate(batch):
                lengths[row] = len(window.tokens)
                tokens[row, : lengths[row]] = window.tokens
            with jax.set_mesh(self._mesh):
                nats = np.asarray(self._program(self._params, *jax.device_put((tokens, lengths), self._lanes)))
            self.num_windows += len(batch)
            for row, window in enumerate(batch):
                yield nats[row, nats.shape[1] - window.num_targets :]


def _losses(
    model: Model, num_targets: int, loss_slice: int, params: Any, tokens: Int[Array, "b n"], lengths: Int[Array, " b"]
) -> Float[Array, "b targets"]:
    """Losses of each window's last tokens; the losses of a short window's missing tokens are meaningless."""
    module = model.bind(params)
    b, n = tokens.shape
    start = jnp.zeros((b, n // model.config.window_length), bool).at[:, 0].set(True)
    hidden, _ = module(tokens, module.init_carry(b), start)
    places = lengths[:, None] - num_targets + jnp.arange(num_targets)
    targets = jnp.take_along_axis(tokens, jnp.maximum(places, 0), axis=1)
    predicting = jnp.take_along_axis(hidden, jnp.maximum(places - 1, 0)[..., None], axis=1)
    return token_losses(module, predicting, targets, loss_slice).nats


class Candidates(NamedTuple):
    """Spans of a document that are to be scored for a stride."""

    document: Tokens
    stride: Stride
    ends: Ends


class SpanGains(SpanScorer):
    """The gains of spans in nats, by a frozen model (equation 2 of Ancient History Language Models).

    The model reads `[span][recent text with its targets]`. A gain is the sum of the targets' losses without the span,
    minus the sum with it: the logarithm of the ratio in equation 2. Without the span the model reads the recent text
    alone or, by `HistoryConfig.baseline`, the recent text after the document's own span_length tokens before it. If the
    recent text is all targets, the first one has nothing before it in the bare baseline, and counts in neither sum.

    As a `SpanScorer` it is the score oracle, which selects the spans that alone help most.
    """

    name = "score_oracle"
    leaks_the_future = True
    runs_a_model = True

    def __init__(self, read: Callable[..., TargetLosses], layout: Layout, fingerprint: str = ""):
        """`read`: the model, (length, max_targets) -> `TargetLosses`; `fingerprint`: the model's."""
        config, self._layout, self.fingerprint = layout.config, layout, fingerprint
        self._losses = read(length=config.span_length + config.recent_length, max_targets=config.stride)

    @property
    def flops(self) -> float:
        return self._losses.num_windows * self._losses.flops_per_window

    def scores(self, document: Tokens, stride: Stride, ends: Ends) -> Scores:
        (gains,) = self([Candidates(document, stride, ends)])
        return gains

    def __call__(self, requests: Iterable[Candidates]) -> Iterator[Scores]:
        """The gains of the spans of every request, float32, above 0 where a span helps; read one batch ahead."""
        requests, again = itertools.tee(requests)
        losses = self._losses(window for request in requests for window in self._windows(request))
        for request in again:
            nats = [float(next(losses).sum(dtype=np.float64)) for _ in range(1 + len(request.ends))]
            yield np.asarray(nats[0] - np.asarray(nats[1:]), np.float32)

    def _windows(self, request: Candidates) -> Iterator[Window]:
        """The recent text without a span, and then with each."""
        document, stride, ends = request
        config = self._layout.config
        # A window that begins with its document keeps more tokens than those that a span is scored with.
        recent_start = max(stride.candidates_end, stride.recent_start)
        start = recent_start - (config.span_length if config.baseline == "contiguous" else 0)
        without = np.asarray(document[start : stride.end])
        num_targets = min(stride.num_targets, len(without) - 1)
        yield Window(without, num_targets)
        recent = np.asarray(document[recent_start : stride.end], np.int32)
        for span in self._layout.span_tokens(document, ends):
            yield Window(np.concatenate([span, recent]), num_targets)
