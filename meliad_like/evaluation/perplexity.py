"""The perplexity of documents: every token of every document is predicted once, in order, with the model's carry.

Targets and bytes: a document of L tokens, the last of which ends it, has L - 1 targets: all tokens but the first, which
has no context. The end of the document is a target too, although it has no bytes. Bits per byte are the bits of all
targets over all bytes of the documents, so they leave out the bits of a document's first token: one byte per
document with a byte vocabulary, with others at most the longest piece.

The numbers depend on the segment length and the number of lanes only for a model with `needs_segments` (with
`whole_segments`, only on the segment length).
"""

import dataclasses
import functools
import itertools
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
import pandas as pd
from jax.sharding import Mesh
from jaxtyping import Bool, Float, Int

from meliad_like.config import RunConfig
from meliad_like.data.batch import AnyArray, Batch, Reader
from meliad_like.data.loading import load_batches
from meliad_like.data.readers import LanesReader
from meliad_like.data.split import Documents, random_subset
from meliad_like.data.token_store import TokenStore
from meliad_like.evaluation.scores import DocumentScore, Evaluation, PositionScore
from meliad_like.mesh import carry_shardings, lane_sharding, lane_shards, replicated
from meliad_like.models.model import Model


class Losses(NamedTuple):
    """The losses of a segment of every lane, as the step returns them."""

    nats: Float[AnyArray, "b n"]
    correct: Bool[AnyArray, "b n"]
    counted: Bool[AnyArray, "b n"]
    document: Int[AnyArray, "b c"]
    position: Int[AnyArray, "b c"]


@dataclasses.dataclass(frozen=True)
class ReadingMode:
    """The way in which an evaluator reads the segments of its lanes."""

    step: Callable[[Model, int, Any, Any, Batch], tuple[Any, Losses]]
    """`step(model, loss_slice, params, carry, batch)` reads a segment of every lane. Returns the carry after it, and
    its losses. `loss_slice` is the number of tokens of a lane whose logits exist at the same time."""
    init_carry: Callable[[Any, int], Any] = lambda module, b: module.init_carry(b)
    """`init_carry(module, b)`, with `model.bind(params)`, returns the carry of `b` lanes before their first token."""


def evaluation_step(model: Model, loss_slice: int, params: Any, carry: Any, batch: Batch) -> tuple[Any, Losses]:
    """Reads a segment. Returns the carry after it, and the loss of every target."""
    losses, carry = model.bind(params).losses(batch.inputs, batch.targets, carry, batch.start, slice_length=loss_slice)
    return carry, Losses(losses.nats, losses.correct, batch.loss_mask, batch.document, batch.position)


SEGMENTS = ReadingMode(evaluation_step)
"""The mode that reads each segment at once."""


class Evaluator:
    """Evaluates a model on a split. It is compiled once for any number of evaluations.

    The losses of all tokens are summed on the host in float64, whatever the lanes, segments or mesh.
    """

    def __init__(
        self,
        model: Model,
        split: Documents,
        mesh: Mesh,
        *,
        name: str,
        segment_length: int,
        max_lanes: int,
        max_tokens: int | None = None,
        loss_slice: int = 1024,
        whole_segments: bool = False,
        reading_mode: ReadingMode = SEGMENTS,
        read: Callable[[Documents, int], Reader] | None = None,
    ):
        """
        Args:
          segment_length: number of tokens that a lane reads in a step; a multiple of the window.
          max_lanes: the largest number of documents read in parallel, rounded up to a multiple that the mesh needs.
          max_tokens: evaluate a random subset of whole documents, always the same, with at most this number of tokens.
          loss_slice: number of tokens of a lane whose logits exist at the same time.
          whole_segments: documents begin at segment boundaries, so that equal positions have equal segments.
          read: (documents, number of lanes) -> a reader of all documents, each once; None: reads them in order.
        """
        self.model = model
        self.name = name
        self.documents = (
            np.arange(len(split.lengths)) if max_tokens is None else random_subset(split.lengths, max_tokens)
        )
        """The indices in the split of the evaluated documents."""
        self._documents_in_split = len(split.lengths)
        self._split = split.subset(self.documents)
        self._window = window = model.config.window_length
        model.config.check_sequence(segment_length, mesh.shape["sequence"])
        self._targets = np.maximum(self._split.lengths - 1, 0)
        self._starts = np.cumsum(self._targets) - self._targets
        self.counted_targets = self._split.counted_targets()
        """The targets of each evaluated document that cost loss (`Documents.counted_targets`)."""
        self._counted = np.concatenate(self.counted_targets)
        blocks = -(-self._targets // window)
        shards = lane_shards(mesh)
        # More lanes would only wait for the longest document.
        useful_lanes = -(-blocks.sum() // max(blocks.max(initial=0), 1))
        num_lanes = max(-(-min(max_lanes, int(useful_lanes)) // shards), 1) * shards
        settings: dict[str, Any] = {"overlap": model.config.overlap, "whole_segments": whole_segments}
        lengths = {"segment_length": segment_length, "window_length": window}
        in_order = functools.partial(LanesReader, **lengths, **settings, shuffle=False, epochs=1)
        self._reader = (read or in_order)(self._split, num_lanes)
        self.num_lanes = self._reader.num_lanes
        self._mesh = mesh
        self._lanes = lane_sharding(mesh, self.num_lanes)

        def init_carry(params):
            return reading_mode.init_carry(model.bind(params), self.num_lanes)

        shapes = jax.eval_shape(init_carry, model.abstract_params)
        carry = carry_shardings(mesh, self.num_lanes, shapes)
        self._init_carry = jax.jit(init_carry, out_shardings=carry)
        # Every host needs the losses of all lanes, which are small compared with the logits.
        self._step = jax.jit(
            functools.partial(reading_mode.step, model, loss_slice),
            donate_argnums=1,
            out_shardings=(carry, replicated(mesh)),
        )
        self._compiled: jax.stages.Compiled | None = None

    def __call__(self, params: Any, on_progress: Callable[[int, int], None] | None = None) -> Evaluation:
        """Evaluates parameters on the evaluator's mesh, sharded in the same way in every call.

        With several processes, all must call it, and all get the same result. `on_progress` is called with the number
        of tokens predicted so far, and of all tokens to predict.
        """
        nats, correct, seconds = self._read(params, on_progress)
        counted = self._counted

        def sums(group: Int[np.ndarray, " targets"], size: int) -> list[dict[Any, Any]]:
            columns = {
                "num_tokens": np.bincount(group[counted], minlength=size),
                "nats": np.bincount(group, nats, size),
                "num_correct": np.bincount(group[correct], minlength=size),
            }
            return pd.DataFrame(columns).to_dict("records")

        document = np.repeat(np.arange(len(self._targets)), self._targets)
        # Bin 0 is a document's first block, 1 the next, 2 the next two, and so on.
        bins = np.frexp((np.arange(len(nats)) - self._starts[document]) // self._window)[1]
        edges = (self._window * (2 ** np.arange(bins.max() + 2) // 2)).tolist()
        texts = zip(self._split.names, self._split.num_bytes.tolist(), self._split.num_words.tolist(), strict=True)
        by_document = zip(sums(document, len(self._targets)), texts, strict=True)
        return Evaluation.of(
            (
                DocumentScore(**row, name=name, num_bytes=size, num_words=words)
                for row, (name, size, words) in by_document
            ),
            split=self.name,
            positions=tuple(
                PositionScore(**row, start=start, stop=stop)
                for row, start, stop in zip(sums(bins, len(edges) - 1), edges, edges[1:])
            ),
            documents_in_split=self._documents_in_split,
            seconds=seconds,
            leaks_the_future=self._reader.leaks_the_future,
        )

    def token_losses(
        self, params: Any, on_progress: Callable[[int, int], None] | None = None
    ) -> list[Float[np.ndarray, " targets"]]:
        """The loss of every target in nats, float32, by document, of which `__call__` returns sums. Number `i` of a
        document is the loss of its token `i + 1`; 0 where a target costs none (`counted_targets`)."""
        return np.split(self._read(params, on_progress)[0], self._starts[1:])

    def _read(
        self, params: Any, on_progress: Callable[[int, int], None] | None
    ) -> tuple[Float[np.ndarray, " targets"], Bool[np.ndarray, " targets"], float]:
        """Reads all documents: the losses of their targets, which were the most likely tokens, and the seconds."""
        total, done = int(self._counted.sum()), 0
        nats, (correct, seen) = np.zeros(len(self._counted), np.float32), np.zeros((2, len(self._counted)), bool)

        def fetch(losses: Losses) -> None:
            nonlocal done
            losses = jax.device_get(losses)
            # Overlapping windows begin at any position.
            first = self._starts[losses.document] + losses.position
            counted = losses.counted
            index = (np.asarray(first)[..., None] + np.arange(self._window)).reshape(counted.shape)[counted]
            nats[index], correct[index], seen[index] = losses.nats[counted], losses.correct[counted], True
            done += len(index)
            if on_progress is not None:
                on_progress(done, total)

        carry = self._init_carry(params)
        previous = None
        with jax.set_mesh(self._mesh), load_batches(self._reader, self._lanes) as batches:
            first = next(batches)
            if self._compiled is None:
                self._compiled = self._step.lower(params, carry, first).compile()
            began = time.perf_counter()
            for batch in itertools.chain([first], batches):
                carry, losses = self._compiled(params, carry, batch)
                # Fetched one step later, so that the devices are already computing the next step.
                if previous is not None:
                    fetch(previous)
                previous = losses
        assert previous is not None
        fetch(previous)
        if done != total or (seen != self._counted).any():
            raise AssertionError("the reader did not deliver every target of every document exactly once")
        return nats, correct, time.perf_counter() - began


def make_evaluator(
    run: RunConfig,
    model: Model,
    store: TokenStore,
    split: str,
    mesh: Mesh,
    *,
    documents: Documents | None = None,
    **options: Any,
) -> Evaluator:
    """An evaluator that reads a split, or `documents` of it, as a run does: with its reader, segment length and lanes.
    `options` are arguments of `Evaluator`."""
    return Evaluator(
        model,
        store.split(split) if documents is None else documents,
        mesh,
        name=split,
        segment_length=run.data.segment_length,
        max_lanes=run.data.num_lanes,
        loss_slice=run.training.loss_slice,
        read=run.data.evaluation_reader(store, split, run.model.window_length),
        **options,
    )
