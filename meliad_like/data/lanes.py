"""The reader of documents in lanes: each lane reads documents of its own in order, window by window."""

import dataclasses
from collections.abc import Sequence

import numpy as np
from absl import logging

from meliad_like.data.batch import Batch, Reader, check_tokens, empty_batch
from meliad_like.data.schedule import Run, Schedule
from meliad_like.errors import UserError


@dataclasses.dataclass(eq=False, kw_only=True)
class LanesReader(Reader):
    """Each lane reads documents one after the other, one segment a step.

    A document of L tokens gives L - 1 inputs and, one further, L - 1 targets. It begins on the next block boundary
    after the document before it, so that at most one block's rest is padding. Documents of fewer than two tokens have
    no target and are left out, with a warning.

    With an overlap, each window (block) repeats the last tokens of the window before it, and only new tokens are
    targets: Adding Recurrence to Pretrained Transformers (Yoshida et al. 2020), section 4.2. Window i of a document has
    the inputs from token i (w - overlap) on. So every token after a document's first is still predicted exactly once,
    and all but those of the first window see at least overlap + 1 tokens.
    """

    overlap: int = 0
    """The number of tokens that a window repeats."""
    shuffle: bool = True
    """As in `Schedule`; for evaluation `shuffle=False, epochs=1`."""
    whole_segments: bool = False
    """Whether a document begins with a segment, not only with a block; the rest of its last one is padding."""
    separate: bool = False
    """Whether each segment is a separate sequence, whose first window repeats nothing: the document is cut into
    sequences without overlap."""

    def __post_init__(self) -> None:
        if self.segment_length % self.window_length:
            raise UserError(
                f"segment_length={self.segment_length} must be a multiple of window_length={self.window_length}"
            )
        if not 0 <= self.overlap < self.window_length:
            raise UserError(f"overlap={self.overlap} must be at least 0 and below window_length={self.window_length}")
        self._windows_in_segment = self.segment_length // self.window_length
        self._targets = np.maximum(np.asarray(self.documents.lengths, np.int64) - 1, 0)
        if (empty := np.flatnonzero(self._targets == 0)).size:
            logging.warning(
                "left out %d documents of fewer than two tokens, the first is %s",
                empty.size,
                self.documents.names[empty[0]],
            )
        # The first window has w targets, and each later one as many as it has new tokens.
        later = np.maximum(self._targets - self.window_length, 0)
        self._windows = np.where(self._targets > 0, 1 + -(-later // (self.window_length - self.overlap)), 0)
        if self.separate:
            self._windows = -(-self._targets // self._targets_in_sequence) * self._windows_in_segment
        elif self.whole_segments:
            self._windows = -(-self._windows // self._windows_in_segment) * self._windows_in_segment
        self._schedule = Schedule(self._windows, self.num_lanes, self.seed, shuffle=self.shuffle, epochs=self.epochs)

    @property
    def _targets_in_sequence(self) -> int:
        """The number of targets of a separate sequence."""
        return self.overlap + self._windows_in_segment * (self.window_length - self.overlap)

    @property
    def num_steps(self) -> int | None:
        return self._schedule.num_steps(self._windows_in_segment)

    @property
    def padding_share(self) -> float:
        num_steps = self.num_steps
        if num_steps is None or self.epochs is None:
            return 1 - float(self._targets.sum() / (self._windows.sum() * self.window_length))
        return 1 - float(self.epochs * self._targets.sum() / (num_steps * self.num_lanes * self.segment_length))

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
                    batch.loss_mask[row, block * w + repeated : block * w + length] = True
                    batch.start[row, block], batch.document[row, block] = not follows, run.document
                    batch.position[row, block] = first
        return batch

    def _window(self, index: int) -> tuple[int, bool]:
        """(first input of a document's window, whether it follows another one)."""
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
        tokens = self.documents.tokens(run.document, first, stop)
        check_tokens(tokens, self.vocabulary_size, first, self.documents.names[run.document])
        return first, tokens
