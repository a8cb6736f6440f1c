"""The reader kind of ancient history in a run's config, and the config of its own commands."""

import dataclasses
from typing import Any

from meliad_like.data.batch import Reader
from meliad_like.data.readers import READERS, ReaderConfig, ReaderInputs
from meliad_like.errors import UserError
from meliad_like.history.selectors.config import SELECTORS, JointSelectorConfig, SelectorTrainingConfig
from meliad_like.history.spans import HistoryConfig, separator_token
from meliad_like.registry import Registry, kind_field

SELECTIONS = Registry("selection of spans")


@SELECTIONS.register("random")
@dataclasses.dataclass(frozen=True)
class RandomSelection:
    """Random spans."""


@SELECTIONS.register("recent")
@dataclasses.dataclass(frozen=True)
class RecentSelection:
    """The last spans before the recent text."""


@SELECTIONS.register("prefix_overlap")
@dataclasses.dataclass(frozen=True)
class PrefixOverlapSelection:
    """The spans that share the most tokens with the necessary prefix."""


@SELECTIONS.register("file")
@dataclasses.dataclass(frozen=True)
class FileSelection:
    """Spans that `python -m meliad_like.history select` has written."""

    folder: str = ""
    """Folder with a sub-folder for each split."""

    def __post_init__(self):
        if not self.folder:
            raise UserError("selection='file' needs FileSelection.folder, with the selections of each split")


@READERS.register("ancient_history")
@dataclasses.dataclass(frozen=True)
class AncientHistoryReaderConfig(ReaderConfig):
    """Windows that begin with spans of the document's distant past, in training and in evaluation."""

    history: HistoryConfig = dataclasses.field(default_factory=HistoryConfig)
    selection: Any = kind_field(SELECTIONS, RandomSelection)
    """Which spans are selected."""

    used_by_evaluations = True

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

    def make(self, inputs: ReaderInputs) -> Reader:
        from meliad_like.history.reader import HistoryReader, make_selection

        separator = separator_token(self.history, inputs.store.vocabulary)
        selection = make_selection(self.selection, self.history, inputs.store, inputs.split)
        return HistoryReader(inputs, self.segment_length, self.history, separator, selection)


@dataclasses.dataclass(frozen=True)
class HistorySettings:
    """The settings of the commands of ancient history, which are not part of a run's config."""

    history: HistoryConfig = dataclasses.field(default_factory=HistoryConfig)
    selector: Any = kind_field(SELECTORS, JointSelectorConfig)
    """The model that learns which spans help."""
    selector_training: SelectorTrainingConfig = dataclasses.field(default_factory=SelectorTrainingConfig)
