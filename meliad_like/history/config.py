"""The reader of ancient history as a kind that a run's config can name."""

import dataclasses
from collections.abc import Callable
from typing import Any, Literal

from meliad_like.data.batch import Reader
from meliad_like.data.readers import READERS, ReaderConfig
from meliad_like.data.split import Documents
from meliad_like.data.token_store import TokenStore
from meliad_like.errors import UserError
from meliad_like.history.settings import HistoryConfig
from meliad_like.validation import check_choices


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
            raise UserError(
                f"AncientHistoryReaderConfig.selection={self.selection!r} does not fit selections={self.selections!r}: "
                "'file', and nothing else, needs the folder with the selections of each split"
            )

    def check_model(self, model: Any) -> None:
        """
        Raises:
          UserError: the lengths don't divide, or the model would not read a window of ancient history as one sequence.
        """
        window, block, segment = self.history.window_length, model.window_length, self.segment_length
        if segment % window or window % block:
            raise UserError(
                f"segment_length={segment} must be a multiple of HistoryConfig.window_length={window}, and that of the "
                f"model's window_length={block}"
            )
        if model.for_separate_sequences(window) != model:
            raise UserError(
                f"HistoryConfig.window_length={window} needs a model with window_length={window} and overlap=0, and "
                f"this one reads windows of window_length={block}"
            )

    def evaluation_reader(
        self, store: TokenStore, split: str, window_length: int
    ) -> Callable[[Documents, int], Reader]:
        fields = {"window_length": window_length, "shuffle": False, "epochs": 1}
        return lambda documents, num_lanes: self.make(store, split, documents=documents, num_lanes=num_lanes, **fields)

    def _reader(self, store: TokenStore, split: str, overlap: int, fields: dict[str, Any]) -> Reader:
        from meliad_like.history.reader import HistoryReader, make_selection
        from meliad_like.history.spans import Layout

        select, leaks = make_selection(self.history, self.selection, self.selections, store, split)
        layout = Layout.of(self.history, store.vocabulary)
        return HistoryReader(**fields, layout=layout, selection=select, leaks_the_future=leaks)
