"""What ancient history adds to a run's config, and the config of its own commands."""

import dataclasses
from typing import Any

from meliad_like.config import RunConfig
from meliad_like.data.readers import READERS, Reader, ReaderConfig, ReaderInputs
from meliad_like.errors import UserError
from meliad_like.history.selectors.config import SelectorConfig, SelectorTrainingConfig
from meliad_like.history.spans import HistoryConfig
from meliad_like.models.families import FAMILIES, family_name
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
    """What `python -m meliad_like.history select` has written."""

    folder: str = ""
    """It has a sub-folder for each split."""

    def __post_init__(self):
        if not self.folder:
            raise UserError("selection='file' needs FileSelection.folder, with the selections of each split")


@READERS.register("ancient_history")
@dataclasses.dataclass(frozen=True)
class AncientHistoryReaderConfig(ReaderConfig):
    """Windows that begin with spans of the document's distant past, in training and in evaluation."""

    history: HistoryConfig = dataclasses.field(default_factory=HistoryConfig)
    """Which spans there are, and how they come into a window."""
    selection: Any = kind_field(SELECTIONS, RandomSelection)
    """Which of them are chosen."""

    used_by_evaluations = True

    def check_model(self, model: Any) -> None:
        """
        Raises:
          UserError: lengths don't divide, or the model would not see a window of ancient history as one.
        """
        k, w, n = self.history.window_length, model.window_length, self.segment_length
        if n % k or k % w:
            raise UserError(
                f"segment_length={n} must be a multiple of HistoryConfig.window_length={k}, and that of the model's "
                f"window_length={w}"
            )
        if FAMILIES[family_name(model)].reading_apart(model, k) != model:
            raise UserError(
                f"HistoryConfig.window_length={k} needs a model with window_length={k} and overlap=0, which here sees "
                f"windows of window_length={w}"
            )

    def _make(self, inputs: ReaderInputs) -> Reader:
        from meliad_like.history.reader import make_history_reader

        return make_history_reader(self, inputs)


@dataclasses.dataclass(frozen=True)
class HistorySettings:
    """What the commands of ancient history need beside a checkpoint; it is no part of a run's config."""

    history: HistoryConfig = dataclasses.field(default_factory=HistoryConfig)
    """Which spans there are, and how they come into a window."""
    selector: SelectorConfig = dataclasses.field(default_factory=SelectorConfig)
    """What learns which spans help."""
    selector_training: SelectorTrainingConfig = dataclasses.field(default_factory=SelectorTrainingConfig)
    """How it learns that."""

    @classmethod
    def of(cls, run: RunConfig) -> "HistorySettings":
        """The defaults for a checkpoint: the spans that it was trained with, if it was."""
        reader: Any = run.data
        return cls(reader.history) if isinstance(reader, AncientHistoryReaderConfig) else cls()
