"""The reader of the whole split as one stream of tokens, document after document in the store's order.

The first input is the end of a document, which none precedes, and the inputs after it are the stream: so every token of
every document is a target once an epoch, the first ones and the ends included. Nothing is reset where documents meet.
"""

import dataclasses
import functools
from collections.abc import Sequence

import numpy as np

from meliad_like.data.batch import Batch, Reader, empty_batch
from meliad_like.data.schedule import permutation
from meliad_like.data.subset import Concatenated


@dataclasses.dataclass(eq=False, kw_only=True)
class StreamReader(Reader):
    """The stream as one contiguous shard for each lane, whose segments continue each other.

    Shards are equally long; the last lanes come to the end of the stream first, and wait for the others. Then a new
    epoch begins, and the lanes' carry is reset.
    """

    end_of_document: int
    """What the stream's first token is predicted from."""
    shuffle: bool = False
    """Whether segments are read in a new random order each epoch instead, with a reset before each of them."""

    def __post_init__(self) -> None:
        self._stream = Concatenated(self.documents, self.vocabulary_size, self.end_of_document)
        self._num_tokens = int(self._stream.ends[-1])
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
            segment = (
                step_of_epoch * self.num_lanes + lane if self.shuffle else lane * self.steps_per_epoch + step_of_epoch
            )
            if segment >= self._num_segments:
                continue
            if self.shuffle:
                segment = int(self._order(epoch)[segment])
            first, last = segment * n, min((segment + 1) * n, self._num_tokens)
            tokens = self._stream.tokens(0, first, last + 1)
            places = np.s_[row, : last - first]
            batch.inputs[places], batch.targets[places], batch.loss_mask[places] = tokens[:-1], tokens[1:], True
            blocks = np.arange(first, last, w)
            batch.document[row, : len(blocks)], batch.position[row, : len(blocks)] = self._stream.place(blocks)
        return batch
