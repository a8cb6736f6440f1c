"""The kinds of readers, which turn the documents of a split into batches; each paper has its own kind."""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import numpy as np
from absl import logging

from meliad_like.data.batch import Batch, Reader, empty_batch
from meliad_like.data.schedule import Run, Schedule, permutation
from meliad_like.data.split import Documents
from meliad_like.data.token_store import TokenStore, Totals
from meliad_like.errors import UserError
from meliad_like.registry import Registry, resumable
from meliad_like.validation import check_positive


def label(name: str, leaks_the_future: bool) -> str:
    """A name for tables, files and lines, marked if its results depend on the targets."""
    return f"{name} (leaks the future)" if leaks_the_future else name


@dataclasses.dataclass(eq=False, kw_only=True)
class ScheduledReader(Reader):
    """A reader whose lanes read documents of their own, one after the other, window by window."""

    shuffle: bool = True
    """Whether the order is random (`Schedule.shuffle`); for evaluation `shuffle=False, epochs=1`."""

    def _set_windows(self, targets: np.ndarray, windows: np.ndarray, length: int) -> None:
        """Plans the reading: the numbers of targets and of windows of each document, and the tokens of a window."""
        self._targets, self._windows = targets, windows
        self._windows_in_segment = self.segment_length // length
        self._schedule = self._schedule_of(windows)

    def _schedule_of(self, windows: np.ndarray) -> Schedule:
        return Schedule(windows, self.num_lanes, self.seed, shuffle=self.shuffle, epochs=self.epochs)

    @property
    def num_steps(self) -> int | None:
        return self._schedule.num_steps(self._windows_in_segment)

    def documents_read(self, num_steps: int) -> np.ndarray:
        """The indices of the documents of the first steps, whole or in part."""
        return self._schedule.documents(num_steps * self._windows_in_segment)

    @property
    def steps_in_document(self) -> float:
        """The number of steps that a lane stays in a document, averaged over the steps."""
        return float(np.square(self._windows).sum() / self._windows.sum() / self._windows_in_segment)

    @property
    def padding_share(self) -> float:
        num_steps = self.num_steps
        if num_steps is None or self.epochs is None:
            num_windows = self._windows.sum()
            return 1 - float(self._targets.sum() * self._windows_in_segment / (num_windows * self.segment_length))
        return 1 - float(self.epochs * self._targets.sum() / (num_steps * self.num_lanes * self.segment_length))


@dataclasses.dataclass(eq=False, kw_only=True)
class LanesReader(ScheduledReader):
    """Each lane reads documents one after the other, one segment a step.

    A document of L tokens gives L - 1 inputs and, one further, L - 1 targets. It begins on the next block boundary
    after the document before it, so that at most one block's rest is padding. A document of one token is left out.

    With an overlap, each window (block) repeats the last tokens of the window before it, and only new tokens are
    targets: Adding Recurrence to Pretrained Transformers (Yoshida et al. 2020), section 4.2. Window i of a document has
    the inputs from token i (w - overlap) on, and every token after a document's first is predicted exactly once.
    """

    overlap: int = 0
    """The number of tokens that a window repeats."""
    whole_segments: bool = False
    """Whether a document begins with a segment, not only with a block; the rest of its last one is padding."""
    separate: bool = False
    """Whether each segment is a sequence of its own: no two overlap, and its first window repeats nothing."""

    def __post_init__(self) -> None:
        n, w = self.segment_length, self.window_length
        if n % w:
            raise UserError(f"segment_length={n} must be a multiple of window_length={w}")
        if not 0 <= self.overlap < w:
            raise UserError(f"overlap={self.overlap} must be at least 0 and below window_length={w}")
        # The targets of a separate sequence.
        self._targets_in_sequence = self.overlap + n // w * (w - self.overlap)
        targets = np.maximum(self.documents.lengths - 1, 0)
        if (empty := np.flatnonzero(targets == 0)).size:
            first = self.documents.names[empty[0]]
            logging.warning("left out %d documents of fewer than two tokens, the first is %s", empty.size, first)
        # The first window has w targets, and each later one as many as it has new tokens.
        windows = np.where(targets > 0, 1 + -(-np.maximum(targets - w, 0) // (w - self.overlap)), 0)
        if self.separate:
            windows = -(-targets // self._targets_in_sequence) * (n // w)
        elif self.whole_segments:
            windows = -(-windows // (n // w)) * (n // w)
        self._set_windows(targets, windows, w)

    def batch(self, step: int, lanes: Sequence[int]) -> Batch:
        c, w = self._windows_in_segment, self.window_length
        batch = empty_batch(len(lanes), self.segment_length, w)
        for row, lane in enumerate(lanes):
            for run in self._schedule.runs(lane, step * c, c):
                begin, tokens = self._tokens(run)
                for i in range(run.num_blocks):
                    first, follows = self._window(run.offset + i)
                    length = min(w, int(self._targets[run.document]) - first)
                    repeated = self.overlap if follows else 0
                    if length <= repeated:
                        continue  # the rest of a sequence, or of a segment, that is longer than its document
                    block = run.block - step * c + i
                    places = np.s_[row, block * w : block * w + length]
                    window = tokens[first - begin : first - begin + length + 1]
                    batch.inputs[places], batch.targets[places] = window[:-1], window[1:]
                    counted = self.documents.costs_loss(run.document, first + 1 + repeated, window[1 + repeated :])
                    batch.loss_mask[row, block * w + repeated : block * w + length] = counted
                    batch.start[row, block], batch.document[row, block] = not follows, run.document
                    batch.position[row, block] = first
        return batch

    def _window(self, index: int) -> tuple[int, bool]:
        """The first input of a document's window, and whether the window follows another one."""
        first = 0
        if self.separate:
            sequence, index = divmod(index, self._windows_in_segment)
            first = sequence * self._targets_in_sequence
        return first + index * (self.window_length - self.overlap), index > 0

    def _tokens(self, run: Run) -> tuple[int, np.ndarray]:
        """The position in the document of the first input of a run, and the tokens from there to its last target."""
        first, _ = self._window(run.offset)
        last, _ = self._window(run.offset + run.num_blocks - 1)
        stop = min(last + self.window_length, int(self._targets[run.document])) + 1
        return first, self.documents.tokens(run.document, first, stop)


@dataclasses.dataclass(eq=False, kw_only=True)
class StreamReader(Reader):
    """The documents as one stream of tokens in the store's order, in one contiguous shard for each lane.

    The first input is the end of a document, which none precedes, and then comes the stream: so every token is a target
    once an epoch, the first ones and the ends included. Nothing is reset where documents meet. Shards are equally long;
    the last lanes come to the end of the stream first, and wait. Then a new epoch begins, and the carry is reset.
    """

    end_of_document: int
    """The token from which the stream's first token is predicted."""
    shuffle: bool = False
    """Whether segments are read in a new random order each epoch instead, with a reset before each of them."""

    def __post_init__(self) -> None:
        self._stream = self.documents.concatenated(self.end_of_document)
        self._num_tokens = int(self._stream.lengths[0]) - 1
        self._begins = np.cumsum(self.documents.lengths) - self.documents.lengths
        # The last segment may not be full.
        self._num_segments = -(-self._num_tokens // self.segment_length)
        self.steps_per_epoch = -(-self._num_segments // self.num_lanes)
        # Threads may work on two epochs at once.
        self._order = functools.lru_cache(2)(functools.partial(permutation, self._num_segments, self.seed))

    @property
    def num_steps(self) -> int | None:
        return None if self.epochs is None else self.epochs * self.steps_per_epoch

    @property
    def padding_share(self) -> float:
        return 1 - self._num_tokens / (self.steps_per_epoch * self.num_lanes * self.segment_length)

    def batch(self, step: int, lanes: Sequence[int]) -> Batch:
        n, w = self.segment_length, self.window_length
        batch = empty_batch(len(lanes), n, w)
        epoch, step_of_epoch = divmod(step, self.steps_per_epoch)
        batch.start[:, 0] = self.shuffle or step_of_epoch == 0
        for row, lane in enumerate(lanes):
            segment = lane * self.steps_per_epoch + step_of_epoch
            if self.shuffle:
                segment = step_of_epoch * self.num_lanes + lane
            if segment >= self._num_segments:
                continue
            if self.shuffle:
                segment = int(self._order(epoch)[segment])
            first, last = segment * n, min((segment + 1) * n, self._num_tokens)
            tokens = self._stream.tokens(0, first, last + 1)
            places = np.s_[row, : last - first]
            batch.inputs[places], batch.targets[places] = tokens[:-1], tokens[1:]
            batch.loss_mask[places] = self._stream.costs_loss(0, first + 1, tokens[1:])
            blocks = np.arange(first, last, w)
            document = np.searchsorted(self._begins, blocks, side="right") - 1
            batch.document[row, : len(blocks)] = document
            batch.position[row, : len(blocks)] = blocks - self._begins[document]
        return batch


READERS = Registry("reader", "meliad_like.data.mixture")


@dataclasses.dataclass(frozen=True)
class ReaderConfig:
    """The fields of all readers: the documents, and the number of tokens in a step."""

    store: str = resumable("")
    """Folder of the token store that `python -m meliad_like.prepare` wrote."""
    segment_length: int = 4096
    """The number of tokens that each lane reads in a step; a multiple of the model's window_length. No gradient passes
    from a segment to the one before: in segments of one window, the writing of recurrent states is not trained."""
    tokens_per_step: int = 131072
    """The number of tokens of a step over all lanes and hosts, padding included; a multiple of segment_length."""

    first_tokens_are_targets: ClassVar[bool] = False
    """Whether a document's first token is predicted, too."""

    def __post_init__(self) -> None:
        check_positive(self, ("segment_length", "tokens_per_step"))
        if (tokens := self.tokens_per_step) % self.segment_length:
            raise UserError(f"tokens_per_step={tokens} must be a multiple of segment_length={self.segment_length}")

    @property
    def num_lanes(self) -> int:
        """The number of lanes over all hosts."""
        return self.tokens_per_step // self.segment_length

    @property
    def shares(self) -> tuple[float, ...]:
        """The share of each of the token stores in all targets."""
        return (1.0,)

    def num_targets(self, totals: Totals) -> int:
        """The number of targets in an epoch of a token store; a document's first token may not be one."""
        return totals.tokens - (0 if self.first_tokens_are_targets else totals.documents)

    def num_scored(self, totals: Totals) -> int:
        """The number of these targets that cost loss, in a store where bytes are counted."""
        firsts = 0 if self.first_tokens_are_targets else totals.documents - totals.unscored_firsts
        return totals.tokens - totals.unscored - firsts

    def bytes_per_target(self, totals: Sequence[Totals]) -> float:
        """The ratio of bytes and targets that cost loss, averaged over what is read of token stores with these totals;
        NaN if bytes are not counted (`TokenStore.totals`)."""
        shares = [(share / self.num_targets(each), each) for share, each in zip(self.shares, totals, strict=True)]
        num_bytes = sum(share * each.bytes for share, each in shares)
        return num_bytes / sum(share * self.num_scored(each) for share, each in shares) if num_bytes else math.nan

    def with_stores(self, folders: Sequence[str]) -> "ReaderConfig":
        """The same reader of other token stores: a folder for each of the `shares`."""
        return dataclasses.replace(self, store=folders[0])

    def open_stores(self) -> list[TokenStore]:
        """Opens all token stores that it reads; the first has the run's documents. Raises a UserError if one can't be
        opened, or if they don't go together."""
        return [TokenStore(self.store)]

    def documents(self, stores: Sequence[TokenStore], split: str) -> Documents:
        """The documents of a split of these stores, as a training reads them."""
        return stores[0].split(split)

    def check_model(self, model: Any) -> None:
        """Raises a UserError if it can't read for a model of this config."""
        if (n := self.segment_length) % model.window_length:
            raise UserError(f"segment_length={n} must be a multiple of window_length={model.window_length}")

    def training_overlap(self, overlap: int) -> int:
        """The number of tokens that windows repeat in training, where they repeat `overlap` in evaluations. Raises a
        UserError if the reader does not serve models whose windows overlap."""
        if overlap:
            name = READERS.name_of(self)
            raise UserError(f"windows with overlap={overlap} need RunConfig.data='windows', not {name!r}")
        return 0

    def make(self, store: TokenStore, split: str, overlap: int = 0, **fields: Any) -> Reader:
        """The reader of some documents of a split. Raises a UserError if the documents can't be read in this way.

        Args:
          overlap: tokens that each of the model's windows repeats of the one before.
          fields: the other fields of `Reader`, and `shuffle`.
        """
        overlap = self.training_overlap(overlap)
        return self._reader(store, split, overlap, {**fields, "segment_length": self.segment_length})

    def _reader(self, store: TokenStore, split: str, overlap: int, fields: dict[str, Any]) -> Reader:
        raise NotImplementedError

    def evaluation_reader(
        self, store: TokenStore, split: str, window_length: int
    ) -> Callable[[Documents, int], Reader] | None:
        """The function (documents of a split, number of lanes) -> the reader of an evaluation; None: evaluations read
        documents in order (`LanesReader`)."""
        return None


@READERS.register("lanes")
class LanesReaderConfig(ReaderConfig):
    """Each lane reads whole documents, and is reset when a document begins."""

    def _reader(self, store: TokenStore, split: str, overlap: int, fields: dict[str, Any]) -> Reader:
        return LanesReader(**fields)


@READERS.register("windows")
class WindowsReaderConfig(ReaderConfig):
    """Like lanes, but each segment is a separate sequence, whose windows overlap by the model's `overlap`."""

    train_disjoint: bool = False
    """Whether training windows repeat nothing, whatever overlap the model is evaluated with."""

    def training_overlap(self, overlap: int) -> int:
        return 0 if self.train_disjoint else overlap

    def _reader(self, store: TokenStore, split: str, overlap: int, fields: dict[str, Any]) -> Reader:
        return LanesReader(**fields, overlap=overlap, separate=True)


@READERS.register("stream")
class StreamReaderConfig(ReaderConfig):
    """Each lane reads its own contiguous shard of all documents, and is reset only at the end of an epoch."""

    first_tokens_are_targets = True

    def _reader(self, store: TokenStore, split: str, overlap: int, fields: dict[str, Any]) -> Reader:
        return StreamReader(**fields, end_of_document=store.vocabulary.end_of_document)


@READERS.register("shuffled")
class ShuffledReaderConfig(StreamReaderConfig):
    """Segments of the stream in a random order, with a reset before each segment."""

    def _reader(self, store: TokenStore, split: str, overlap: int, fields: dict[str, Any]) -> Reader:
        return super()._reader(store, split, overlap, {**fields, "shuffle": True})
