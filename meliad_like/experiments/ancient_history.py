"""Table 1 of Ancient History Language Models, for any pretrained model and documents: scores, selectors, evaluation.

scores/         gains of spans of training documents (equation 2)
SELECTOR/       a trained selector
evaluation/     the results of all rows on the same documents; those of other rows or settings are replaced
ancient_history.md, .csv and .png

Each command resumes its own work, and finds at once that it is finished.
"""

from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from meliad_like.config import RunConfig, bound_by, read_changes, with_changes
from meliad_like.experiments.history_report import write_report
from meliad_like.experiments.tables.ancient_history import ROWS, SCALES, HistoryRow, HistoryScale, rows_of
from meliad_like.history import commands
from meliad_like.history.config import HistorySettings
from meliad_like.history.evaluation import BASELINE
from meliad_like.history.opening import HistoryRequest
from meliad_like.run.opening import open_as, open_store, saved_config


@dataclass(frozen=True)
class HistoryExperiment:
    """The table at a scale, on some documents, in a folder."""

    scale_name: str
    gin_files: tuple[str, ...]
    """The task, and options for all rows."""
    gin_params: tuple[str, ...]
    """For all rows, and never scaled."""
    folder: Path
    load_dir: str
    """The pretrained model, which predicts, scores, and initialises the selectors."""
    chosen: tuple[str, ...] = ()
    """Names of rows; none: all of the scale."""
    split: str = "test"
    """The split that is evaluated."""
    max_tokens: int | None = None
    """Largest number of tokens that are evaluated; None: all."""
    scored_tokens: int | None = None
    """Largest number of tokens of training documents that are scored; None: that of the scale."""
    document_tokens: int | None = None
    """Tokens that are read of each document, from its beginning; None: that of the scale."""

    @property
    def scale(self) -> HistoryScale:
        scale, tokens = SCALES[self.scale_name], self.document_tokens
        if tokens is not None:
            scale = replace(scale, scored_document_tokens=tokens, evaluated_document_tokens=tokens)
        return scale if self.scored_tokens is None else replace(scale, scored_tokens=self.scored_tokens)

    @cached_property
    def rows(self) -> list[HistoryRow]:
        return rows_of(self.scale_name, self.chosen)

    def config(self, row: HistoryRow | None = None) -> tuple[RunConfig, HistorySettings]:
        """The config of the pretrained model with the task's documents, and the settings of the commands for a row.

        Files and parameters win over the scale and the row; None: what all rows share.

        Raises:
          UserError: a binding is wrong, or there is no pretrained model.
        """
        saved = saved_config(self.load_dir)
        settings = with_changes(HistorySettings(), {**((row and row.selector) or {}), **self.scale.settings})
        run, settings = read_changes(self.gin_files, self.gin_params)(saved, settings)
        changes = {"vocabulary": saved.vocabulary}
        if "ReaderConfig.store" not in bound_by(self.gin_params):
            # The task's documents in another vocabulary than the task's.
            changes["data.store"] = f"{run.data.store}_{Path(self.load_dir).name}"
        return with_changes(run, changes), settings

    def make(self) -> int:
        """Scores, trains and evaluates what is not finished yet.

        Returns:
          The exit status: 0, or `preemption.EXIT_STATUS` after SIGTERM or Ctrl-C while a selector was trained.
        """
        run, _ = self.config()
        opened, _ = open_as(self.load_dir, run)
        open_store(opened, self.load_dir, run.data.store, prepare=True)
        trained, scores = [row for row in self.rows if row.selector is not None], self.folder / "scores"
        if trained:
            amount = {"document_tokens": self.scale.scored_document_tokens, "max_tokens": self.scale.scored_tokens}
            commands.score(self._request("train", **amount), scores)
        for row in trained:
            if status := commands.train(self._request("train", row), self.folder / row.name, str(scores)):
                return status
        # The plain window is always there.
        names = [row.name for row in self.rows if row.selector is None and row.name != BASELINE]
        folders = [str(self.folder / row.name) for row in trained]
        amount = {"document_tokens": self.scale.evaluated_document_tokens, "max_tokens": self.max_tokens}
        request = self._request(self.split, **amount)
        commands.evaluate_selections(request, self.folder / "evaluation", names, folders, replace=True)
        return 0

    def report(self) -> str:
        """Writes the table of the results so far; returns its Markdown.

        Raises:
          UserError: there are none.
        """
        return write_report(self.folder, ROWS, self.scale_name)

    def _request(self, split: str, row: HistoryRow | None = None, **amount: int | None) -> HistoryRequest:
        """The request of a command for a row; None: for all rows."""
        run, settings = self.config(row)
        return HistoryRequest(
            checkpoint=self.load_dir,
            changes=lambda *_: (run, settings),
            store=run.data.store,
            split=split,
            batch_size=self.scale.batch_size,
            **amount,
        )
