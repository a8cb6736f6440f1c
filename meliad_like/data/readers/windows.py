"""Windows that repeat the last tokens of the window before them, in which only new tokens are predicted.

Adding Recurrence to Pretrained Transformers (Yoshida et al. 2020), section 4.2. With an overlap of 0 windows are
disjoint; with one less than the window every token is predicted from a window of its own.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np

from meliad_like.data.batch import Batch, empty_batch
from meliad_like.data.readers.base import READERS, Reader, ReaderConfig, ReaderInputs, Split, check_tokens
from meliad_like.data.schedule import Schedule
from meliad_like.errors import UserError


@READERS.register("windows")
@dataclasses.dataclass(frozen=True)
class WindowsReaderConfig(ReaderConfig):
    """Like lanes, but each segment is a separate sequence, whose windows repeat the last tokens of the window before
    (the model's `overlap`)."""

    segments_follow: bool = False
    """Whether a lane remembers the segment before, where its next segment continues the same document."""
    train_disjoint: bool = False
    """Training windows repeat nothing, whatever overlap the model is evaluated with."""

    repeats_windows = True

    def training_overlap(self, overlap: int) -> int:
        return 0 if self.train_disjoint else overlap

    def _make(self, inputs: ReaderInputs) -> Reader:
        return WindowsReader(
            inputs.documents,
            inputs.num_lanes,
            self.segment_length,
            inputs.window_length,
            inputs.seed,
            overlap=self.training_overlap(inputs.overlap),
            vocabulary_size=inputs.store.vocabulary.size,
            shuffle=inputs.shuffle,
            epochs=inputs.epochs,
            separate=not self.segments_follow,
        )


class WindowsReader:
    """Each lane reads documents one after the other, window by window.

    Window i of a document has the inputs from token i (w - overlap) on; the targets are one further. Those of the first
    window all count, of later windows the last w - overlap: so every token after a document's first is predicted
    exactly once, and all but those of the first window see at least overlap + 1 tokens.
    """

    def __init__(
        self,
        split: Split,
        num_lanes: int,
        segment_length: int,
        window_length: int,
        seed: int = 0,
        *,
        overlap: int,
        vocabulary_size: int,
        shuffle: bool = True,
        epochs: int | None = None,
        whole_segments: bool = False,
        separate: bool = False,
    ):
        """
        Args:
          split: the documents.
          num_lanes: number of lanes over all hosts.
          segment_length: tokens that each lane reads in a step, those that windows repeat among them.
          window_length: tokens of a window (w).
          seed: with the epoch's number, determines the order of the documents.
          overlap: number of tokens that a window repeats.
          vocabulary_size: token ids must be below it.
          shuffle, epochs: as in `Schedule`; for evaluation `shuffle=False, epochs=1`.
          whole_segments: a document begins with a segment, not only with a window; the rest of its last one is padding.
          separate: each segment is a separate sequence, whose first window repeats nothing: the document is cut into
            sequences without overlap.

        Raises:
          UserError: segment_length is no multiple of window_length, the overlap does not fit, or no document has a
            target.
        """
        if segment_length % window_length:
            raise UserError(f"segment_length={segment_length} must be a multiple of window_length={window_length}")
        if not 0 <= overlap < window_length:
            raise UserError(f"overlap={overlap} must be at least 0 and below window_length={window_length}")
        self.num_lanes = num_lanes
        self.segment_length = segment_length
        self.window_length = window_length
        self.overlap = overlap
        self._stride = window_length - overlap
        self._split = split
        self._vocabulary_size = vocabulary_size
        self._epochs = epochs
        self._separate = separate
        self._targets = np.maximum(np.asarray(split.lengths, np.int64) - 1, 0)
        if separate:
            windows = -(-self._targets // self._targets_in_sequence) * self._windows_in_segment
        else:
            windows = np.where(self._targets > 0, 1 - (window_length - self._targets) // self._stride, 0)
            windows = np.where((self._targets > 0) & (self._targets <= window_length), 1, windows)
        if whole_segments:
            windows = -(-windows // self._windows_in_segment) * self._windows_in_segment
        self._windows = windows
        self._schedule = Schedule(windows, num_lanes, seed, shuffle=shuffle, epochs=epochs)

    @property
    def _windows_in_segment(self) -> int:
        return self.segment_length // self.window_length

    @property
    def _targets_in_sequence(self) -> int:
        """The number of targets of a separate sequence."""
        return self.overlap + self._windows_in_segment * self._stride

    @property
    def num_steps(self) -> int | None:
        """The number of steps until every lane is done; None if reading is endless."""
        return self._schedule.num_steps(self._windows_in_segment)

    @property
    def padding_share(self) -> float:
        """Share of an epoch's positions that have no target, those that windows repeat among them."""
        return 1 - float(self._targets.sum() / (self._windows.sum() * self.window_length))

    def batch(self, step: int, lanes: Sequence[int]) -> Batch:
        """Rows `lanes` of the batch of a step, as numpy arrays; `start` marks windows that follow none.

        Raises:
          UserError: a token id is not below vocabulary_size.
        """
        c, w = self._windows_in_segment, self.window_length
        batch = empty_batch(len(lanes), self.segment_length, w)
        for row, lane in enumerate(lanes):
            for run in self._schedule.runs(lane, step * c, c):
                for i in range(run.num_blocks):
                    place = (row, block := run.block - step * c + i)
                    first, follows = self._window(run.offset + i)
                    length = min(w, int(self._targets[run.document]) - first)
                    repeated = self.overlap if follows else 0
                    if length <= repeated:
                        continue  # the rest of a sequence, or of a segment, that is longer than its document
                    tokens = self._split.tokens(run.document, first, first + length + 1)
                    check_tokens(tokens, self._vocabulary_size, first, self._split.names[run.document])
                    places = np.s_[row, block * w : block * w + length]
                    batch.inputs[places], batch.targets[places] = tokens[:-1], tokens[1:]
                    batch.loss_mask[row, block * w + repeated : block * w + length] = True
                    batch.start[place], batch.document[place], batch.position[place] = not follows, run.document, first
        return batch

    def _window(self, index: int) -> tuple[int, bool]:
        """(first input of a document's window, whether it follows another one)."""
        if not self._separate:
            return index * self._stride, index > 0
        sequence, index = divmod(index, self._windows_in_segment)
        return sequence * self._targets_in_sequence + index * self._stride, index > 0
