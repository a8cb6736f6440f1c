"""The reader for models with a carry: each lane reads documents of its own in order."""

import dataclasses
from collections.abc import Sequence

import numpy as np
from absl import logging

from meliad_like.data.batch import Batch, empty_batch
from meliad_like.data.readers.base import READERS, Reader, ReaderConfig, ReaderInputs, Split, check_tokens
from meliad_like.data.schedule import Run, Schedule
from meliad_like.errors import UserError


@READERS.register("lanes")
@dataclasses.dataclass(frozen=True)
class LanesReaderConfig(ReaderConfig):
    """Each lane reads whole documents, and is reset when a document begins."""

    def _make(self, inputs: ReaderInputs) -> Reader:
        return LanesReader(
            inputs.documents,
            inputs.num_lanes,
            self.segment_length,
            inputs.window_length,
            inputs.seed,
            vocabulary_size=inputs.store.vocabulary.size,
            shuffle=inputs.shuffle,
            epochs=inputs.epochs,
        )


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
          num_lanes: number of lanes over all hosts.
          segment_length: tokens that each lane reads in a step (n).
          window_length: tokens in a block (w).
          seed: with the epoch's number, determines the order of the documents.
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
        """The number of steps until every lane is done; None if reading is endless."""
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
