"""Evaluation protocols, which predict the same tokens with different amounts of context and at different costs.

Shortformer, sections 2 and 5: `segments` are disjoint, and the carry of a model passes from one to the next; `sliding`
windows repeat the tokens before their `stride` new ones, and each begins with an empty carry; `token_by_token` decodes
one token at a time with the whole carry. For a model without a carry the paper's token-by-token figures are those of
`sliding` windows with a stride of 1. Only sliding windows are read in several lanes.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd
from jax.sharding import Mesh

from meliad_like.data.batch import Batch, empty_batch
from meliad_like.data.readers import LanesReader
from meliad_like.data.split import Documents
from meliad_like.errors import UserError
from meliad_like.evaluation.perplexity import SEGMENTS, Evaluator, Losses, ReadingMode
from meliad_like.evaluation.report import with_progress
from meliad_like.evaluation.scores import Score
from meliad_like.layers.lanes import choose_lanes
from meliad_like.mesh import lane_shards
from meliad_like.models.model import Model
from meliad_like.studies.page import Numbers, Study
from meliad_like.studies.readings import StudyRequest, choose, open_studied

ProtocolName = Literal["segments", "sliding", "token_by_token"]
COLUMNS = {
    "protocol": ("protocol", ""),
    "tokens": ("num_tokens", ","),
    "bits per token": ("bits_per_token", ".4f"),
    "perplexity": ("perplexity", ".4f"),
    "fewest visible": ("min_visible", ""),
    "mean visible": ("mean_visible", ",.1f"),
    "most visible": ("max_visible", ""),
    "FLOPs per token": ("flops_per_token", ".3g"),
    "tokens per second": ("tokens_per_second", ",.0f"),
}
"""The field of `ProtocolScore` of each column, and the format of its numbers."""


def decoding_step(model: Model, _: int, params: Any, carry: Any, batch: Batch) -> tuple[Any, Losses]:
    """Does the same as `evaluation_step`, one token after the other; documents begin with a segment."""
    module = model.bind(params)
    fresh, begins = module.begin_decoding(module.init_carry(len(batch.start))), batch.start[:, 0]
    carry = choose_lanes(begins, fresh, carry)

    def one_token(carry, token):
        inputs, target = token
        logits, carry = module.decode_step(inputs, carry)
        target_logits = jnp.take_along_axis(logits, target[:, None], axis=-1)[:, 0]
        return carry, (jax.nn.logsumexp(logits, axis=-1) - target_logits, jnp.argmax(logits, axis=-1) == target)

    carry, (nats, correct) = jax.lax.scan(one_token, carry, (batch.inputs.T, batch.targets.T))
    return carry, Losses(nats.T, correct.T, batch.loss_mask, batch.document, batch.position)


TOKEN_BY_TOKEN = ReadingMode(decoding_step, lambda module, b: module.begin_decoding(module.init_carry(b)))
"""The mode that reads token by token, as text is written; documents must begin at segment boundaries."""


@dataclass(frozen=True)
class ProtocolScore(Score):
    """The results of a protocol, and its cost. The predicted tokens are all but each document's first."""

    protocol: str
    min_visible: int
    """The smallest number of tokens that a layer attends to for a prediction (`ModelTraits.num_visible`)."""
    mean_visible: float
    max_visible: int
    flops: float
    """The number of operations, including padding and repetition."""
    seconds: float
    """The wall time in seconds, without compilation."""

    @property
    def flops_per_token(self) -> float:
        return self.flops / self.num_tokens

    @property
    def tokens_per_second(self) -> float:
        return self.num_tokens / self.seconds


class Window(NamedTuple):
    """Consecutive inputs of a document that are read at once."""

    document: int
    first: int
    """The position of the first input in its document."""
    length: int
    repeated: int
    """The number of inputs whose targets don't count, because an earlier window has them."""


def sliding_windows(lengths: np.ndarray, n: int, stride: int) -> Iterator[Window]:
    """The windows, of at most `n` inputs, of documents of these `lengths`; each target is in one of them.

    Each window scores `stride` new tokens, with the n - stride tokens before them as context. Windows that would begin
    before their document begin with it; because predictions don't depend on later tokens, all such windows are one.
    """
    growing = n - n % stride
    for document, num_targets in enumerate(np.maximum(lengths - 1, 0).tolist()):
        if num_targets:
            yield Window(document, 0, min(growing, num_targets), 0)
        for first in range(growing, num_targets, stride):
            begin, last = first + stride - n, min(first + stride, num_targets)
            yield Window(document, begin, last - begin, first - begin)


class SlidingReader(NamedTuple):
    """Reads sliding windows, each with an empty carry."""

    documents: Documents
    windows: Sequence[Window]
    num_lanes: int
    segment_length: int
    window_length: int
    leaks_the_future = False

    @property
    def num_steps(self) -> int:
        return -(-len(self.windows) // self.num_lanes)

    def batch(self, step: int, lanes: Sequence[int]) -> Batch:
        """Rows `lanes` of the batch of a step: one window in each."""
        n, w = self.segment_length, self.window_length
        batch = empty_batch(len(lanes), n, w)
        for row, index in enumerate(step * self.num_lanes + lane for lane in lanes):
            if index < len(self.windows):
                document, first, length, repeated = self.windows[index]
                tokens = self.documents.tokens(document, first, first + length + 1)
                batch.inputs[row, :length], batch.targets[row, :length] = tokens[:-1], tokens[1:]
                counted = self.documents.costs_loss(document, first + 1 + repeated, tokens[1 + repeated :])
                batch.loss_mask[row, repeated:length] = counted
                batch.start[row, 0], batch.document[row] = True, document
                batch.position[row] = first + np.arange(0, n, w)
        return batch


def evaluate(
    model: Model,
    params: Any,
    split: Documents,
    protocol: ProtocolName,
    *,
    segment_length: int,
    mesh: Mesh,
    stride: int | None = None,
    num_windows: int = 1,
    loss_slice: int = 1024,
    on_progress: Callable[[int, int], None] | None = None,
) -> ProtocolScore:
    """Predicts every token of every document once (`Documents.concatenated` turns them into one, without resets).

    Args:
        segment_length: number of tokens read at once, or length of a sliding window; a multiple of the window length.
        stride: number of new tokens of a sliding window.
        num_windows: number of sliding windows that are read in parallel, rounded up to what the mesh needs.
    """
    n, w = segment_length, model.config.window_length
    if n % w:
        raise UserError(f"segment_length={n} must be a multiple of window_length={w}")
    if (protocol == "sliding") != (stride is not None) or not 1 <= (stride or 1) <= n:
        raise UserError(f"protocol={protocol} with stride={stride}: only sliding windows have one, of 1 to {n} tokens")
    if model.config.overlap and protocol != "token_by_token":
        raise UserError(
            f"protocol={protocol} knows nothing of windows that repeat overlap={model.config.overlap} tokens: "
            "evaluate without a protocol, or with PretrainedConfig.overlap = 0"
        )
    if protocol == "token_by_token" and (reason := model.config.traits.needs_segments):
        raise UserError(f"token by token there are no segments, on which what this model remembers depends ({reason})")
    sizes = {"segment_length": n, "window_length": w}
    if stride is None:
        targets = np.maximum(np.asarray(split.lengths, np.int64) - 1, 0)
        read = partial(LanesReader, **sizes, shuffle=False, epochs=1, whole_segments=True)
        context = np.concatenate([np.arange(count) for count in targets])
        num_read = int((-(-targets // n)).sum())
    else:
        windows = list(sliding_windows(np.asarray(split.lengths), n, stride))
        num_lanes = -(-num_windows // lane_shards(mesh)) * lane_shards(mesh)
        read = lambda documents, _: SlidingReader(documents, windows, num_lanes, **sizes)  # noqa: E731
        context = np.concatenate([np.arange(window.repeated, window.length) for window in windows])
        num_read = len(windows)
    reading_mode = TOKEN_BY_TOKEN if protocol == "token_by_token" else SEGMENTS
    options = {"segment_length": n, "loss_slice": loss_slice, "reading_mode": reading_mode, "read": read}
    evaluation = Evaluator(model, split, mesh, name=protocol, max_lanes=1, **options)(params, on_progress)
    visible = model.config.traits.num_visible(context)
    return ProtocolScore(
        **{name: getattr(evaluation, name) for name in ("num_tokens", "nats", "num_correct", "seconds")},
        protocol=protocol if stride is None else f"{protocol}, stride {stride}",
        min_visible=int(visible.min()),
        mean_visible=float(visible.mean()),
        max_visible=int(visible.max()),
        # When decoding token by token, overlapping windows read some tokens again when they begin.
        flops=num_read * n * model.flops_per_prediction["as_counted"],
    )


def run(
    request: StudyRequest,
    *,
    protocol: Sequence[ProtocolName],
    stride: int | None = None,
    windows: int = 1,
    concatenated: bool = True,
) -> Study:
    """Compares protocols on the same tokens."""
    if "sliding" not in protocol and (stride is not None or windows != 1):
        raise UserError("--stride and --windows have no effect without --protocol=sliding: leave them out")
    studied = open_studied(request.checkpoint, request.gin_param, request.step)
    selection, opened = choose([studied], request), studied.opened
    documents = selection.documents
    if concatenated:
        documents = documents.concatenated(opened.vocabulary.end_of_document)
    sizes = {"segment_length": opened.run.data.segment_length, "loss_slice": opened.run.training.loss_slice}

    def score(name: ProtocolName) -> ProtocolScore:
        windowed = {"stride": stride, "num_windows": windows} if name == "sliding" else {}
        work = partial(evaluate, opened.model, opened.params, documents, name, mesh=opened.mesh, **sizes, **windowed)
        return with_progress(name, lambda progress: work(on_progress=progress))

    scores = [score(name) for name in protocol]
    frame = pd.DataFrame({header: [getattr(each, name) for each in scores] for header, (name, _) in COLUMNS.items()})
    formats = {header: form for header, (_, form) in COLUMNS.items()}
    note = "Visible are the tokens that a layer attends to for a prediction."
    return Study(
        title=f"Protocols of evaluation: {studied.label}",
        lead=[],
        parts=[Numbers("protocols", "By protocol", frame, formats, note)],
        selection=selection,
        details=[studied.details()],
    )
