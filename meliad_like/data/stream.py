"""Readers of the whole split as one stream of tokens, document after document in the store's order.

The first input is the end of a document, which none precedes, and the inputs after it are the stream: so every token of
every document is a target once an epoch, the first ones and the ends included. Nothing is reset where documents meet.
"""

from collections.abc import Sequence

import numpy as np

from meliad_like.data.batch import Batch
from meliad_like.data.readers import Split, check_tokens


class StreamReader:
    """The stream as one contiguous shard for each lane: what a lane reads next is what comes next.

    Shards are equally long; the last lanes come to the end of the stream first, and wait for the others. Then a new
    epoch begins, and what the lanes remember is reset.
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
          num_lanes: lanes over all hosts.
          segment_length: tokens that each lane reads in a step (n).
          window_length: tokens in a block (w), of which a segment is a multiple.
          seed: decides the order of shuffled segments, with the epoch's number.
          vocabulary_size: token ids must be below it.
          end_of_document: what the stream's first token is predicted from.
          epochs: how often the stream is read; None: without end.
        """
        self.num_lanes = num_lanes
        self.segment_length = segment_length
        self._window_length = window_length
        self._seed = seed
        self._split = split
        self._vocabulary_size = vocabulary_size
        self._end_of_document = end_of_document
        self._epochs = epochs
        self._ends = np.cumsum(np.asarray(split.lengths, np.int64))
        self.steps_per_epoch = -(-self._num_segments // num_lanes)

    @property
    def _num_segments(self) -> int:
        """Segments of the stream, the last of which may not be full."""
        return -(-int(self._ends[-1]) // self.segment_length)

    @property
    def num_steps(self) -> int | None:
        """Steps until the last epoch is read; None where reading has no end."""
        return None if self._epochs is None else self._epochs * self.steps_per_epoch

    @property
    def padding_share(self) -> float:
        """Share of an epoch's positions that have no target."""
        return 1 - int(self._ends[-1]) / (self.steps_per_epoch * self.num_lanes * self.segment_length)

    def batch(self, step: int, lanes: Sequence[int]) -> Batch:
        """Rows `lanes` of the batch of a step, as numpy arrays.

        Raises:
          UserError: a token id is not below vocabulary_size.
        """
        n, w = self.segment_length, self._window_length
        inputs, targets = np.zeros((2, len(lanes), n), np.int32)
        loss_mask = np.zeros(inputs.shape, bool)
        start = np.zeros((len(lanes), n // w), bool)
        document, position = np.full(start.shape, -1, np.int32), np.zeros(start.shape, np.int32)
        epoch, step_of_epoch = divmod(step, self.steps_per_epoch)
        for row, lane in enumerate(lanes):
            segment = self._segment(epoch, step_of_epoch, lane)
            start[row, 0] = self._begins(step_of_epoch)
            if segment >= self._num_segments:
                continue
            first, last = segment * n, min((segment + 1) * n, int(self._ends[-1]))
            tokens = self._tokens(first - 1, last)
            places = np.s_[row, : last - first]
            inputs[places], targets[places], loss_mask[places] = tokens[:-1], tokens[1:], True
            blocks = np.arange(first, last, w)
            document[row, : len(blocks)] = self._document_of(blocks)
            position[row, : len(blocks)] = blocks - self._first_of(document[row, : len(blocks)])
        return Batch(inputs, targets, loss_mask, start, document, position)

    def _segment(self, epoch: int, step: int, lane: int) -> int:
        """Which segment of the stream a lane reads in a step of an epoch."""
        return lane * self.steps_per_epoch + step

    def _begins(self, step: int) -> bool:
        """Whether a lane remembers nothing when it reads this step of an epoch."""
        return step == 0

    def _document_of(self, place: np.ndarray) -> np.ndarray:
        return np.searchsorted(self._ends, place, side="right")

    def _first_of(self, document: np.ndarray) -> np.ndarray:
        return self._ends[document] - np.asarray(self._split.lengths, np.int64)[document]

    def _tokens(self, first: int, last: int) -> np.ndarray:
        """Places [first, last) of the stream; what comes before its beginning is the end of a document."""
        parts = [np.full(1, self._end_of_document, np.int32)] if first < 0 else []
        place = max(first, 0)
        while place < last:
            document = int(self._document_of(np.asarray(place)))
            begin = int(self._first_of(np.asarray(document)))
            stop = min(last, int(self._ends[document]))
            tokens = self._split.tokens(document, place - begin, stop - begin)
            check_tokens(tokens, self._vocabulary_size, place - begin, self._split.names[document])
            parts.append(tokens)
            place = stop
        return np.concatenate(parts)


class ShuffledReader(StreamReader):
    """The stream's segments in an order of chance, another one each epoch, and nothing remembered between them."""

    # The last epoch's number and its order.
    _made: tuple[int, np.ndarray] = (-1, np.empty(0, np.int64))

    def _segment(self, epoch: int, step: int, lane: int) -> int:
        index = step * self.num_lanes + lane
        order = self._order(epoch)
        return int(order[index]) if index < len(order) else len(order)

    def _begins(self, step: int) -> bool:
        return True

    def _order(self, epoch: int) -> np.ndarray:
        # Several threads may make the same one; each goes on with its own.
        made = self._made
        if made[0] != epoch:
            # numpy promises the same raw bits of a bit generator in every version, but not the same permutation.
            keys = np.random.PCG64([self._seed, epoch]).random_raw(self._num_segments)
            made = self._made = (epoch, np.argsort(keys, kind="stable"))
        return made[1]
