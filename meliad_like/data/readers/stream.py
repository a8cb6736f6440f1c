"""Readers of the whole split as one stream of tokens, document after document in the store's order.

The first input is the end of a document, which none precedes, and the inputs after it are the stream: so every token of
every document is a target once an epoch, the first ones and the ends included. Nothing is reset where documents meet.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np

from meliad_like.data.batch import Batch, empty_batch
from meliad_like.data.readers.base import READERS, Reader, ReaderConfig, ReaderInputs, Split, check_tokens
from meliad_like.data.schedule import permutation
from meliad_like.data.subset import Documents


class Concatenated:
    """A split's documents as the only one of a split: first the end of a document, then their tokens."""

    def __init__(self, split: Documents, vocabulary_size: int, end_of_document: int):
        """Tokens must be below vocabulary_size; the first is end_of_document."""
        self._split = split
        self._vocabulary_size = vocabulary_size
        self._end_of_document = end_of_document
        self.ends = np.cumsum(np.asarray(split.lengths, np.int64))
        """Where documents end, counted without the first token."""
        self.lengths = self.ends[-1:] + 1
        self.num_bytes, self.num_words = (np.sum(x, keepdims=True) for x in (split.num_bytes, split.num_words))
        self.names = ["all documents, one after the other"]

    def tokens(self, document: int, start: int, stop: int) -> np.ndarray:
        """int32[stop - start]: tokens from `start` on; there is one document, 0.

        Raises:
          UserError: a token id is not below vocabulary_size.
        """
        parts = [np.full(1, self._end_of_document, np.int32)] if start == 0 else []
        place, last = max(start - 1, 0), stop - 1
        while place < last:
            index, offset = (int(x) for x in self.place(np.asarray(place)))
            end = min(last, int(self.ends[index]))
            tokens = self._split.tokens(index, offset, offset + end - place)
            check_tokens(tokens, self._vocabulary_size, offset, self._split.names[index])
            parts.append(tokens)
            place = end
        return np.concatenate(parts)

    def place(self, place: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(document, position in it) of tokens, counted without the first one."""
        document = np.searchsorted(self.ends, place, side="right")
        return document, place - (self.ends[document] - np.asarray(self._split.lengths, np.int64)[document])


class StreamReader:
    """The stream as one contiguous shard for each lane, whose segments continue each other.

    Shards are equally long; the last lanes come to the end of the stream first, and wait for the others. Then a new
    epoch begins, and the lanes' carry is reset.
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
        end_of_document: int,
        epochs: int | None = None,
    ):
        """
        Args:
          split: the documents.
          num_lanes: number of lanes over all hosts.
          segment_length: tokens that each lane reads in a step (n).
          window_length: tokens in a block (w), of which a segment is a multiple.
          seed: with the epoch's number, determines the order of shuffled segments.
          vocabulary_size: token ids must be below it.
          end_of_document: what the stream's first token is predicted from.
          epochs: how often the stream is read; None: endlessly.
        """
        self.num_lanes = num_lanes
        self.segment_length = segment_length
        self._window_length = window_length
        self._seed = seed
        self._epochs = epochs
        self._stream = Concatenated(split, vocabulary_size, end_of_document)
        self._num_tokens = int(self._stream.ends[-1])
        self.steps_per_epoch = -(-self._num_segments // num_lanes)

    @property
    def _num_segments(self) -> int:
        """Segments of the stream, the last of which may not be full."""
        return -(-self._num_tokens // self.segment_length)

    @property
    def num_steps(self) -> int | None:
        """The number of steps until the last epoch is read; None if reading is endless."""
        return None if self._epochs is None else self._epochs * self.steps_per_epoch

    @property
    def padding_share(self) -> float:
        """Share of an epoch's positions that have no target."""
        return 1 - self._num_tokens / (self.steps_per_epoch * self.num_lanes * self.segment_length)

    def batch(self, step: int, lanes: Sequence[int]) -> Batch:
        """Rows `lanes` of the batch of a step, as numpy arrays.

        Raises:
          UserError: a token id is not below vocabulary_size.
        """
        n, w = self.segment_length, self._window_length
        batch = empty_batch(len(lanes), n, w)
        epoch, step_of_epoch = divmod(step, self.steps_per_epoch)
        for row, lane in enumerate(lanes):
            segment = self._segment(epoch, step_of_epoch, lane)
            batch.start[row, 0] = self._begins(step_of_epoch)
            if segment >= self._num_segments:
                continue
            first, last = segment * n, min((segment + 1) * n, self._num_tokens)
            tokens = self._stream.tokens(0, first, last + 1)
            places = np.s_[row, : last - first]
            batch.inputs[places], batch.targets[places], batch.loss_mask[places] = tokens[:-1], tokens[1:], True
            blocks = np.arange(first, last, w)
            batch.document[row, : len(blocks)], batch.position[row, : len(blocks)] = self._stream.place(blocks)
        return batch

    def _segment(self, epoch: int, step: int, lane: int) -> int:
        """The segment of the stream that a lane reads in a step of an epoch."""
        return lane * self.steps_per_epoch + step

    def _begins(self, step: int) -> bool:
        """Whether a lane's carry is reset at this step of an epoch."""
        return step == 0


class ShuffledReader(StreamReader):
    """The segments of the stream in a new random order each epoch, with a reset before each segment."""

    # The last epoch's number and its order.
    _made: tuple[int, np.ndarray] = (-1, np.empty(0, np.int64))

    def _segment(self, epoch: int, step: int, lane: int) -> int:
        index = step * self.num_lanes + lane
        order = self._order(epoch)
        return int(order[index]) if index < len(order) else len(order)

    def _begins(self, step: int) -> bool:
        return True

    def _order(self, epoch: int) -> np.ndarray:
        # Several threads may compute the same order; each uses its own copy.
        made = self._made
        if made[0] != epoch:
            made = self._made = (epoch, permutation(self._num_segments, self._seed, epoch))
        return made[1]


@READERS.register("stream")
@dataclasses.dataclass(frozen=True)
class StreamReaderConfig(ReaderConfig):
    """Each lane reads its own contiguous shard of all documents, and is reset only at the end of an epoch."""

    first_tokens_are_targets = True

    def _make(self, inputs: ReaderInputs) -> Reader:
        return _make(StreamReader, self, inputs)


@READERS.register("shuffled")
@dataclasses.dataclass(frozen=True)
class ShuffledReaderConfig(ReaderConfig):
    """Segments of the stream in a random order, with a reset before each segment."""

    first_tokens_are_targets = True

    def _make(self, inputs: ReaderInputs) -> Reader:
        return _make(ShuffledReader, self, inputs)


def _make(reader: type[StreamReader], config: ReaderConfig, inputs: ReaderInputs) -> Reader:
    return reader(
        inputs.documents,
        inputs.num_lanes,
        config.segment_length,
        inputs.window_length,
        inputs.seed,
        vocabulary_size=inputs.store.vocabulary.size,
        end_of_document=inputs.store.vocabulary.end_of_document,
        epochs=inputs.epochs,
    )
