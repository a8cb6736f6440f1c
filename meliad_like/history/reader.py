"""Windows with spans of the past as batches for training and evaluation of any model.

A window is a sequence of its own, as `history.evaluation` reads it. A document's first window is whole, and its targets
are all its tokens but the first; the targets of later windows are those of one stride.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int

from meliad_like.data.batch import Batch, Reader, check_tokens, empty_batch
from meliad_like.data.readers import ReaderInputs
from meliad_like.data.schedule import Schedule
from meliad_like.data.token_store import TokenStore
from meliad_like.errors import UserError
from meliad_like.history.config import SELECTIONS, FileSelection
from meliad_like.history.selection import Ranking, rank
from meliad_like.history.spans import (
    HistoryConfig,
    Stride,
    Window,
    index_in_split,
    num_strides,
    select,
    stride_of,
    whole_documents,
    window,
)
from meliad_like.history.stride_store import INFO_NAME, StrideStore, info_of
from meliad_like.resumable import check_same

Selection = Callable[[str, Int[np.ndarray, " tokens"], Stride], Int[np.ndarray, " spans"]]
"""(name of the document, its tokens up to stride.end, a stride that selects) -> where the spans end, in the window's
order. If it reads the targets, it has an attribute `leaks_the_future`, which is true."""


class HistoryReader(Reader):
    """Each lane reads documents one after the other, window by window, with no context before a window."""

    def __init__(
        self,
        inputs: ReaderInputs,
        segment_length: int,
        config: HistoryConfig,
        separator: int | None,
        selection: Selection,
    ):
        """
        Args:
            segment_length: tokens that each lane reads in a step, a number of whole windows.
            selection: a pure function, called from several threads at once.
        """
        self.num_lanes, self.segment_length, self._block = inputs.num_lanes, segment_length, inputs.window_length
        self._split, self._vocabulary_size = inputs.documents, inputs.store.vocabulary.size
        self._config, self._separator, self._selection = config, separator, selection
        self.leaks_the_future: bool = getattr(selection, "leaks_the_future", False)
        """Whether spans are selected by reading the targets."""
        self._windows_in_segment = segment_length // config.window_length
        self._first_strides = config.window_length // config.stride
        """Strides whose targets are all in a document's first window."""
        lengths = np.asarray(inputs.documents.lengths, np.int64)
        self._targets = np.maximum(lengths - 1, 0)
        later = num_strides(lengths, config) - self._first_strides
        self._windows = np.where(self._targets > 0, 1 + np.maximum(later, 0), 0)
        self._schedule = Schedule(
            self._windows, inputs.num_lanes, inputs.seed, shuffle=inputs.shuffle, epochs=inputs.epochs
        )
        # Batches that are prepared ahead may already be in a lane's next document.
        self._document = whole_documents(inputs.documents, most=2 * inputs.num_lanes)

    @property
    def num_steps(self) -> int | None:
        """Steps until every lane is done; None where reading has no end."""
        return self._schedule.num_steps(self._windows_in_segment)

    @property
    def padding_share(self) -> float:
        """Share of an epoch's positions that have no target, those of spans and of repeated text included."""
        return 1 - float(self._targets.sum() / (self._windows.sum() * self._config.window_length))

    def batch(self, step: int, lanes: Sequence[int]) -> Batch:
        """Rows `lanes` of the batch of a step, as numpy arrays; `position` is that of the window without spans."""
        length, block, count = self._config.window_length, self._block, self._windows_in_segment
        batch = empty_batch(len(lanes), self.segment_length, block)
        for row, lane in enumerate(lanes):
            for run in self._schedule.runs(lane, step * count, count):
                for i in range(run.num_blocks):
                    stride, (ids, num_targets) = self._window(run.document, run.offset + i)
                    first = (run.block - step * count + i) * length
                    last = first + len(ids) - 1
                    check_tokens(ids, self._vocabulary_size, stride.begin, self._split.names[run.document])
                    batch.inputs[row, first : last + 1] = ids
                    batch.targets[row, first:last] = ids[1:]
                    batch.loss_mask[row, last - num_targets : last] = True
                    blocks = np.s_[row, first // block : (first + length) // block]
                    batch.start[row, first // block] = True
                    batch.document[blocks] = run.document
                    batch.position[blocks] = stride.begin + np.arange(0, length, block)
        return batch

    def _window(self, document: int, index: int) -> tuple[Stride, Window]:
        """A document's window, and the last stride whose targets it has."""
        length = int(self._split.lengths[document])
        number = min(self._first_strides + index, num_strides(length, self._config)) - 1
        stride = stride_of(number, length, self._config, index_in_split(self._split, document))
        tokens, ends = self._document(document)[: stride.end], np.zeros(0, np.int64)
        if stride.selects:
            ends = self._selection(self._split.names[document], tokens, stride)
        found = window(tokens, stride, ends, self._config, self._separator)
        return stride, found if index else found._replace(num_targets=len(tokens) - 1)


def make_selection(kind: Any, config: HistoryConfig, store: TokenStore, split: str) -> Selection:
    """The selection of a registered kind (`SELECTIONS`), for the documents of a split."""
    if isinstance(kind, FileSelection):
        return _FromFile(Path(kind.folder).expanduser() / split, config, store, split)
    scorer = Ranking(SELECTIONS.name_of(kind), config)

    def choose(name: str, document: np.ndarray, stride: Stride) -> np.ndarray:
        ends, scores = rank(scorer, name, document, stride, config)
        return select(scores, ends, config)

    return choose


class _FromFile:
    """A `Selection` that `python -m meliad_like.history select` has made."""

    def __init__(self, folder: Path, config: HistoryConfig, store: TokenStore, split: str):
        if not (folder / INFO_NAME).exists():
            raise UserError(
                f"there are no selections at {folder}: make them with python -m meliad_like.history select "
                f"--split={split} --output={folder}"
            )
        self._selections = StrideStore(folder)
        self._selections.check_complete()
        found = self._selections.info
        wanted = info_of(store.split(split), store, split, config, "selections", found.maker)
        check_same(folder, found.identity, wanted.identity)
        self.leaks_the_future = found.leaks_the_future

    def __call__(self, name: str, document: np.ndarray, stride: Stride) -> np.ndarray:
        # The strides that select follow each other in a document.
        first = np.searchsorted(self._selections.strides[:, 0], stride.document)
        return np.array(self._selections.numbers[first + stride.number - self._selections.strides[first, 1]], np.int64)
