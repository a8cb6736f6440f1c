"""Windows with spans of the past as batches for training and evaluation of any model: the reader and its config."""

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

from meliad_like.data.batch import Batch, Reader, empty_batch
from meliad_like.data.readers import READERS, ReaderConfig, ScheduledReader
from meliad_like.data.split import Documents
from meliad_like.data.token_store import TokenStore
from meliad_like.errors import UserError
from meliad_like.history.selection import Ranking, choose
from meliad_like.history.settings import HistoryConfig
from meliad_like.history.spans import Ends, Layout, Stride, Tokens, Window, num_strides, stride_of, whole_documents
from meliad_like.resumable import check_same
from meliad_like.validation import check_choices

Selection = Callable[[str, Tokens, Stride], Ends]
"""(name of the document, its tokens up to stride.end, a stride that selects) -> the spans, in the window's order. A
pure function, called from several threads at once."""


@dataclasses.dataclass(eq=False, kw_only=True)
class HistoryReader(ScheduledReader):
    """Each lane reads documents one after the other, window by window, and a segment is a number of whole windows.

    A window is a sequence of its own, as `history.evaluation` reads it. The targets of a document's first window are
    all its tokens but the first, those of later windows are those of one stride.
    """

    layout: Layout
    selection: Selection
    leaks_the_future: bool = False
    """Whether the selection reads the targets."""

    def __post_init__(self) -> None:
        config, lengths = self.layout.config, self.documents.lengths
        self._first_strides = config.window_length // config.stride
        """Strides whose targets are all in a document's first window."""
        targets = np.maximum(lengths - 1, 0)
        later = num_strides(lengths, config) - self._first_strides
        self._set_windows(targets, np.where(targets > 0, 1 + np.maximum(later, 0), 0), config.window_length)
        # Batches that are prepared ahead may already be in a lane's next document.
        self._document = whole_documents(self.documents, most=2 * self.num_lanes)

    def batch(self, step: int, lanes: Sequence[int]) -> Batch:
        """The rows `lanes` of the batch of a step, as arrays of numpy; `position` is as in the window without spans."""
        length, block, count = self.layout.config.window_length, self.window_length, self._windows_in_segment
        batch = empty_batch(len(lanes), self.segment_length, block)
        for row, lane in enumerate(lanes):
            for run in self._schedule.runs(lane, step * count, count):
                for i in range(run.num_blocks):
                    stride, (ids, num_targets) = self._window(run.document, run.offset + i)
                    first = (run.block - step * count + i) * length
                    last = first + len(ids) - 1
                    batch.inputs[row, first : last + 1] = ids
                    batch.targets[row, first:last] = ids[1:]
                    begin = min(stride.end, int(self.documents.lengths[run.document])) - num_targets
                    counted = self.documents.costs_loss(run.document, begin, ids[len(ids) - num_targets :])
                    batch.loss_mask[row, last - num_targets : last] = counted
                    blocks = np.s_[row, first // block : (first + length) // block]
                    batch.start[row, first // block] = True
                    batch.document[blocks] = run.document
                    batch.position[blocks] = stride.begin + np.arange(0, length, block)
        return batch

    def _window(self, document: int, index: int) -> tuple[Stride, Window]:
        """A document's window, and the last stride whose targets it has."""
        length, config = int(self.documents.lengths[document]), self.layout.config
        number = min(self._first_strides + index, num_strides(length, config)) - 1
        stride = stride_of(number, length, config, int(self.documents.indices[document]))
        tokens, ends = self._document(document)[: stride.end], np.zeros(0, np.int64)
        if stride.selects:
            ends = self.selection(self.documents.names[document], tokens, stride)
        window = self.layout.window(tokens, stride, ends)
        return stride, window if index else window._replace(num_targets=len(tokens) - 1)


def make_selection(
    config: HistoryConfig, selection: str, selections: str, store: TokenStore, split: str
) -> tuple[Selection, bool]:
    """The selection by the fields of `AncientHistoryReaderConfig`, and whether it leaks the future."""
    if selection != "file":
        scorer = Ranking(selection, config)
        return lambda name, document, stride: choose(scorer, name, document, stride, config), False
    # It takes long to import, and every command that looks up a kind imports this module.
    from meliad_like.history.stride_store import StoreInfo, StrideStore

    folder = Path(selections).expanduser() / split
    saved = StrideStore(folder)
    saved.check_complete()
    origin = {"maker": saved.info.maker, "leaks_the_future": saved.info.leaks_the_future}
    info = StoreInfo.of(store.split(split), store, split, what="selections", config=config, **origin)
    check_same(folder, saved.info.identity, info.identity)
    ends = {(stride.document, stride.number): row for stride, row in zip(saved.strides, saved.numbers, strict=True)}
    select = lambda _, document, stride: np.array(ends[stride.document, stride.number], np.int64)  # noqa: E731
    return select, saved.info.leaks_the_future


@READERS.register("ancient_history")
class AncientHistoryReaderConfig(ReaderConfig):
    """Windows that begin with spans of the document's distant past, in training and in evaluation."""

    history: HistoryConfig = dataclasses.field(default_factory=HistoryConfig)
    selection: Literal["random", "recent", "prefix_overlap", "file"] = "random"
    """The spans that are selected: random ones, the last ones before the recent text, those that share the most tokens
    with the necessary prefix, or (`file`) those that `python -m meliad_like.history select` has written."""
    selections: str = ""
    """The folder for `file`, with a sub-folder of selections for each split."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choices(self)
        if (self.selection == "file") != bool(self.selections):
            problem = f"selection={self.selection!r} does not fit selections={self.selections!r}"
            way_out = "'file', and nothing else, needs the folder with the selections of each split"
            raise UserError(f"AncientHistoryReaderConfig.{problem}: {way_out}")

    def check_model(self, model: Any) -> None:
        """Raises a UserError if lengths don't divide, or the model would not read a window as one sequence."""
        window, block, segment = self.history.window_length, model.window_length, self.segment_length
        name = f"HistoryConfig.window_length={window}"
        if segment % window or window % block:
            multiples = f"{name}, and that of the model's window_length={block}"
            raise UserError(f"segment_length={segment} must be a multiple of {multiples}")
        if model.for_separate_sequences(window) != model:
            needed = f"a model with window_length={window} and overlap=0"
            raise UserError(f"{name} needs {needed}, and this one reads windows of window_length={block}")

    def evaluation_reader(
        self, store: TokenStore, split: str, window_length: int
    ) -> Callable[[Documents, int], Reader]:
        fields = {"window_length": window_length, "shuffle": False, "epochs": 1}
        return lambda documents, num_lanes: self.make(store, split, documents=documents, num_lanes=num_lanes, **fields)

    def _reader(self, store: TokenStore, split: str, overlap: int, fields: dict[str, Any]) -> Reader:
        select, leaks = make_selection(self.history, self.selection, self.selections, store, split)
        layout = Layout.of(self.history, store.vocabulary)
        return HistoryReader(**fields, layout=layout, selection=select, leaks_the_future=leaks)
