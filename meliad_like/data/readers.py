"""Readers turn the documents of a split into batches; what differs between the papers is the reader."""

import dataclasses
from collections.abc import Sequence
from typing import Literal, Protocol

import numpy as np
from absl import logging

from meliad_like.data.batch import Batch, empty_batch
from meliad_like.data.schedule import Run, Schedule
from meliad_like.errors import UserError
from meliad_like.registry import resumable
from meliad_like.validation import check_choices, check_positive

ReaderKind = Literal["lanes", "stream", "shuffled", "windows", "ancient_history"]
SpanSelection = Literal["random", "recent", "prefix_overlap", "file"]


@dataclasses.dataclass(frozen=True)
class ReaderConfig:
    """Which documents are read, how many tokens a step, and how far ahead of the step."""

    kind: ReaderKind = "lanes"
    """`lanes`: each lane reads whole documents, and forgets one when the next begins. `stream`: each lane reads its own
    contiguous shard of all documents, and forgets at the end of an epoch alone. `shuffled`: segments of that stream in
    an order of chance, nothing remembered. `windows`: like lanes, but each segment is a sequence of its own, whose
    windows repeat the last tokens of those before them (the model's `overlap`), unless `segments_follow`.
    `ancient_history`: windows that begin with spans of the document's distant past (`HistoryConfig`)."""
    selection: SpanSelection = "random"
    """`ancient_history`: which spans. By chance, the last ones, those that share the most tokens with the necessary
    prefix, or what `python -m meliad_like.history select` has written to a `file`."""
    selections: str = ""
    """`ancient_history`: folder of such files, one in a sub-folder for each split."""
    segments_follow: bool = False
    """`windows`: whether a lane goes on remembering where its next segment goes on with the same document."""
    train_disjoint: bool = False
    """`windows`: training windows repeat nothing, whatever overlap the model is evaluated with."""
    store: str = resumable("")
    """Folder of the token store that `python -m meliad_like.prepare` wrote."""
    segment_length: int = 4096
    """Tokens that each lane reads in a step; a multiple of the model's window_length."""
    tokens_per_step: int = 131072
    """Tokens of a step over all lanes and hosts, padding included; a multiple of segment_length."""
    num_threads: int = resumable(2)
    """Threads of each host that make batches in the background."""
    batches_ahead: int = resumable(4)
    """Batches that wait in the host's memory, at most."""
    device_batches_ahead: int = resumable(2)
    """Batches that wait in the devices' memory, at most."""

    def __post_init__(self):
        check_choices(self)
        waiting = ("num_threads", "batches_ahead", "device_batches_ahead")
        check_positive(self, ("segment_length", "tokens_per_step", *waiting))
        if (self.selection == "file") != bool(self.selections):
            raise UserError(
                f"ReaderConfig.selection={self.selection!r} with ReaderConfig.selections={self.selections!r}: only "
                "selection='file' has a folder of selections, and needs one"
            )
        if self.tokens_per_step % self.segment_length:
            raise UserError(
                f"tokens_per_step={self.tokens_per_step} must be a multiple of segment_length={self.segment_length}"
            )

    @property
    def num_lanes(self) -> int:
        """Lanes over all hosts."""
        return self.tokens_per_step // self.segment_length


class Split(Protocol):
    """The documents of one split of a token store."""

    @property
    def lengths(self) -> np.ndarray:
        """int64[documents]: tokens of each document, its end included."""
        ...

    @property
    def names(self) -> Sequence[str]: ...

    def tokens(self, document: int, start: int, stop: int) -> np.ndarray:
        """int32[stop - start]: these tokens of a document."""
        ...


class Reader(Protocol):
    """Batches by step. The batch of a step is a pure function of the reader's arguments and the step."""

    @property
    def num_lanes(self) -> int:
        """Lanes over all hosts."""
        ...

    @property
    def num_steps(self) -> int | None:
        """Steps until every document is read; None where reading has no end."""
        ...

    @property
    def padding_share(self) -> float:
        """Share of the positions that have no target."""
        ...

    def batch(self, step: int, lanes: Sequence[int]) -> Batch:
        """Rows `lanes` of the batch of a step (numpy), in this order. Called from several threads at once."""
        ...


def leaks_the_future(reader: Reader) -> bool:
    """Whether what a reader puts into windows was chosen by what reads the targets; few readers choose anything."""
    return getattr(reader, "leaks_the_future", False)


def label(name: str, leaks_the_future: bool) -> str:
    """A name for tables, files and lines; it says so where what it names was made by reading the targets."""
    return f"{name} (leaks the future)" if leaks_the_future else name


class LanesReader:
    """Each lane reads documents one after the other, one segment a step.

    A document of L tokens gives L - 1 inputs and, one further, L - 1 targets. It begins on the next block boundary
    after the document before it, so that at most one block's rest is padding. Documents of fewer than two tokens have
    no target and are left out, with a warning.
    """

    def __init__(
        self,
        split: Split,
        num_lanes: int,
        segment_length: int,
        window_length: int,
        seed: int = 0,
        *,
        vocabulary_size: int,
        shuffle: bool = True,
        epochs: int | None = None,
        whole_segments: bool = False,
    ):
        """
        Args:
          split: the documents.
          num_lanes: lanes over all hosts.
          segment_length: tokens that each lane reads in a step (n).
          window_length: tokens in a block (w).
          seed: decides the order of the documents, with the epoch's number.
          vocabulary_size: token ids must be below it.
          shuffle, epochs: as in `Schedule`; for evaluation `shuffle=False, epochs=1`.
          whole_segments: a document begins with a segment, not only with a block; the rest of its last one is padding.

        Raises:
          UserError: segment_length is no multiple of window_length, or no document has a target.
        """
        if segment_length % window_length:
            raise UserError(f"segment_length={segment_length} must be a multiple of window_length={window_length}")
        self.num_lanes = num_lanes
        self.segment_length = segment_length
        self.window_length = window_length
        self._split = split
        self._vocabulary_size = vocabulary_size
        self._epochs = epochs
        self._targets = np.maximum(np.asarray(split.lengths, np.int64) - 1, 0)
        unit = segment_length if whole_segments else window_length
        self._document_blocks = -(-self._targets // unit) * (unit // window_length)
        if (empty := np.flatnonzero(self._targets == 0)).size:
            logging.warning(
                "left out %d documents of fewer than two tokens, the first is %s", empty.size, split.names[empty[0]]
            )
        self._schedule = Schedule(self._document_blocks, num_lanes, seed, shuffle=shuffle, epochs=epochs)

    @property
    def num_steps(self) -> int | None:
        """Steps until every lane is done; None where reading has no end."""
        return self._schedule.num_steps(self.segment_length // self.window_length)

    @property
    def padding_share(self) -> float:
        """Share of the positions that have no target: over an epoch, or over all steps, idle lanes included."""
        num_steps = self.num_steps
        if num_steps is None or self._epochs is None:
            return 1 - float(self._targets.sum() / (self._document_blocks.sum() * self.window_length))
        return 1 - float(self._epochs * self._targets.sum() / (num_steps * self.num_lanes * self.segment_length))

    def batch(self, step: int, lanes: Sequence[int]) -> Batch:
        """Rows `lanes` of the batch of a step, as numpy arrays.

        Raises:
          UserError: a token id is not below vocabulary_size.
        """
        num_blocks = self.segment_length // self.window_length
        batch = empty_batch(len(lanes), self.segment_length, self.window_length)
        for row, lane in enumerate(lanes):
            for run in self._schedule.runs(lane, step * num_blocks, num_blocks):
                tokens = self._tokens(run)
                first_block = run.block - step * num_blocks
                blocks = np.s_[row, first_block : first_block + run.num_blocks]
                first = first_block * self.window_length
                places = np.s_[row, first : first + len(tokens) - 1]
                batch.inputs[places] = tokens[:-1]
                batch.targets[places] = tokens[1:]
                batch.loss_mask[places] = True
                batch.start[row, first_block] = run.offset == 0
                batch.document[blocks] = run.document
                batch.position[blocks] = np.arange(run.offset, run.offset + run.num_blocks) * self.window_length
        return batch

    def _tokens(self, run: Run) -> np.ndarray:
        """The run's inputs, and the last one's target."""
        first = run.offset * self.window_length
        last = min(first + run.num_blocks * self.window_length, int(self._targets[run.document]))
        tokens = self._split.tokens(run.document, first, last + 1)
        check_tokens(tokens, self._vocabulary_size, first, self._split.names[run.document])
        return tokens


def check_tokens(tokens: np.ndarray, vocabulary_size: int, first: int, document: str) -> None:
    """
    Raises:
      UserError: one of these tokens, the first of which is at position `first` of its document, is out of range.
    """
    if tokens.max() >= vocabulary_size or tokens.min() < 0:
        place = int(np.flatnonzero((tokens >= vocabulary_size) | (tokens < 0))[0])
        raise UserError(
            f"token {tokens[place]} at position {first + place} of document {document} "
            f"is not in the vocabulary of {vocabulary_size}: prepare the token store again"
        )
