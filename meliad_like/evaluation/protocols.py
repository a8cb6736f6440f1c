"""Evaluation protocols, which predict the same tokens with different amounts of context and at different costs.

Shortformer, sections 2 and 5: `segments` are disjoint, and the carry of a model passes from one to the next; `sliding`
windows repeat the tokens before their `stride` new ones, and each begins with an empty carry; `token_by_token` decodes
one token at a time with the whole carry. For a model without a carry the paper's token-by-token figures are those of
`sliding` windows with a stride of 1. Only sliding windows are read in several lanes.
"""

import functools
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Float

from meliad_like.data.batch import Batch
from meliad_like.data.readers import Split
from meliad_like.errors import UserError
from meliad_like.mesh import replicated
from meliad_like.models.losses import segment_losses
from meliad_like.models.model import Model

ProtocolName = Literal["segments", "sliding", "token_by_token"]


@dataclass(frozen=True)
class ProtocolScore:
    """The results of a protocol, and its cost."""

    protocol: str
    num_tokens: int
    """The number of predicted tokens: all but each document's first."""
    nats: float
    """The sum of the tokens' negative log-probabilities, in nats."""
    min_visible: int
    """The smallest number of tokens that a layer attends to for a prediction (`Family.num_visible`)."""
    mean_visible: float
    max_visible: int
    flops: float
    """The number of operations, including padding and repetition."""
    seconds: float
    """The wall time in seconds, without compilation."""

    @property
    def bits_per_token(self) -> float:
        return self.nats / self.num_tokens / math.log(2)

    @property
    def perplexity(self) -> float:
        return math.exp(self.nats / self.num_tokens)

    @property
    def tokens_per_second(self) -> float:
        return self.num_tokens / self.seconds


class Row(NamedTuple):
    """Consecutive inputs of a document that are read at once."""

    document: int
    first: int
    """The position of the first input in its document."""
    length: int
    repeated: int
    """The number of inputs whose targets don't count, because an earlier row has them."""
    fresh: bool
    """Whether the row starts with an empty carry."""


def rows_of(lengths: np.ndarray, protocol: ProtocolName, n: int, stride: int) -> Iterator[Row]:
    """The rows of all documents; every token after a document's first is a target exactly once.

    Args:
        lengths: lengths of the documents, in tokens.
        protocol: the protocol.
        n: the largest number of inputs in a row.
        stride: the number of new tokens that each sliding window scores, with the n - stride tokens before them as
        context. Windows that would begin before their document begin with it; because predictions don't depend
        on later tokens, all such windows are one row.
    """
    for document, num_targets in enumerate(np.maximum(lengths - 1, 0).tolist()):
        if protocol != "sliding":
            for first in range(0, num_targets, n):
                yield Row(document, first, min(n, num_targets - first), 0, first == 0)
            continue
        growing = n - n % stride
        if num_targets:
            yield Row(document, 0, min(growing, num_targets), 0, True)
        for first in range(growing, num_targets, stride):
            begin, last = first + stride - n, min(first + stride, num_targets)
            yield Row(document, begin, last - begin, first - begin, True)


def evaluate(
    model: Model,
    params: Any,
    split: Split,
    protocol: ProtocolName,
    *,
    segment_length: int,
    mesh: Mesh,
    stride: int | None = None,
    num_windows: int = 1,
    loss_slice: int = 1024,
    on_progress: Callable[[int, int], None] | None = None,
) -> ProtocolScore:
    """Predicts every token of every document once.

    Args:
        model: without its parameters.
        params: parameters on the mesh.
        split: the documents; `Concatenated` turns them into one document, without resets.
        protocol: the protocol.
        segment_length: number of tokens read at once, or length of a sliding window; a multiple of the window length.
        mesh: the mesh of the parameters.
        stride: number of new tokens of a sliding window.
        num_windows: number of sliding windows that are read in parallel.
        loss_slice: number of tokens of a lane whose logits exist at the same time.
        on_progress: called with the number of tokens predicted so far, and of all tokens to predict.

    Raises:
        UserError: the lengths don't suit the model, the model's own windows overlap, or there is nothing to predict.
    """
    _check(model, protocol, segment_length, stride)
    n, w = segment_length, model.config.window_length
    lengths = np.asarray(split.lengths, np.int64)
    total = int(np.maximum(lengths - 1, 0).sum())
    if total == 0:
        raise UserError("no document has a token to predict")
    b = num_windows if protocol == "sliding" else 1
    step = functools.partial(_decode if protocol == "token_by_token" else _read, model, loss_slice)
    # There is one lane, so all devices compute the same.
    everywhere = replicated(mesh)
    init = jax.jit(
        lambda params: model.bind(params).init_carry(b, decoding=protocol == "token_by_token"),
        out_shardings=everywhere,
    )
    carry = fresh_carry = init(params)
    compiled = jax.jit(step, out_shardings=everywhere).lower(params, carry, _empty_batch(b, n, w)).compile()
    nats, done, num_read = 0.0, 0, 0
    visible: list[np.ndarray] = []
    began = time.perf_counter()
    rows = list(rows_of(lengths, protocol, n, stride or n))
    for index in range(0, len(rows), b):
        chosen = rows[index : index + b]
        batch = _batch(split, chosen, b, n, w)
        # Decoding has no flag for the beginning of a document.
        carry, losses = compiled(params, fresh_carry if chosen[0].fresh else carry, batch)
        nats += float(np.asarray(losses, np.float64)[batch.loss_mask].sum())
        num_read += batch.inputs.size
        for row in chosen:
            before = 0 if protocol == "sliding" else row.first
            visible.append(model.config.num_visible(before + np.arange(row.repeated, row.length)))
            done += len(visible[-1])
        if on_progress is not None:
            on_progress(done, total)
    assert done == total
    return ProtocolScore(
        protocol=protocol if stride is None else f"{protocol}, stride {stride}",
        num_tokens=total,
        nats=nats,
        min_visible=min(int(part.min()) for part in visible),
        mean_visible=sum(int(part.sum()) for part in visible) / total,
        max_visible=max(int(part.max()) for part in visible),
        # When decoding token by token, overlapping windows read some tokens again when they begin.
        flops=num_read * model.flops_per_prediction["as_counted"],
        seconds=time.perf_counter() - began,
    )


def _check(model: Model, protocol: ProtocolName, n: int, stride: int | None) -> None:
    """
    Raises:
        UserError: the protocol does not suit the lengths or the model.
    """
    w = model.config.window_length
    if n % w:
        raise UserError(f"segment_length={n} must be a multiple of window_length={w}")
    if (protocol == "sliding") != (stride is not None) or not 1 <= (stride or 1) <= n:
        raise UserError(f"protocol={protocol} with stride={stride}: only sliding windows have one, of 1 to {n} tokens")
    if model.config.overlap and protocol != "token_by_token":
        raise UserError(
            f"protocol={protocol} knows nothing of windows that repeat overlap={model.config.overlap} tokens: evaluate "
            "without a protocol, or with PretrainedConfig.overlap = 0"
        )
    if protocol == "token_by_token" and model.config.needs_segments:
        raise UserError("token by token there are no segments, on which what this model remembers depends")


def _read(model: Model, loss_slice: int, params: Any, carry: Any, batch: Batch) -> tuple[Any, Float[Array, "b n"]]:
    losses, carry = segment_losses(model.bind(params), batch, carry, loss_slice)
    return carry, losses.nats


def _decode(model: Model, loss_slice: int, params: Any, carry: Any, batch: Batch) -> tuple[Any, Float[Array, "b n"]]:
    """Does the same as `_read`, one token after the other."""
    module = model.bind(params)

    def one_token(carry, token):
        inputs, target = token
        logits, carry = module.decode_step(inputs, carry)
        target_logits = jnp.take_along_axis(logits, target[:, None], axis=-1)[:, 0]
        return carry, jax.nn.logsumexp(logits, axis=-1) - target_logits

    carry, nats = jax.lax.scan(one_token, carry, (batch.inputs.T, batch.targets.T))
    return carry, nats.T


def _empty_batch(b: int, n: int, w: int) -> Batch:
    tokens, blocks = np.zeros((b, n), np.int32), np.zeros((b, n // w), np.int32)
    return Batch(tokens, tokens.copy(), tokens.astype(bool), blocks.astype(bool), blocks - 1, blocks)


def _batch(split: Split, rows: list[Row], b: int, n: int, w: int) -> Batch:
    batch = _empty_batch(b, n, w)
    for i, row in enumerate(rows):
        tokens = split.tokens(row.document, row.first, row.first + row.length + 1)
        batch.inputs[i, : row.length], batch.targets[i, : row.length] = tokens[:-1], tokens[1:]
        batch.loss_mask[i, row.repeated : row.length] = True
        batch.start[i, 0] = row.fresh
    return batch
