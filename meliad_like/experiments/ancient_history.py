"""Table 1 of Ancient History Language Models, for any pretrained model and documents: scores, selectors, evaluation.

scores/         gains of spans of training documents (equation 2)
SELECTOR/       a trained selector
evaluation/     the results of all rows on the same documents; those of other rows or settings are replaced
ancient_history.md, .csv and .png

Each command resumes its own work, and finds at once that it is finished.
"""

from dataclasses import dataclass, replace
from pathlib import Path

from meliad_like.config import bound_by, read_changes, with_changes
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
    gin_params: tuple[str, ...]
    """The task, and options for all rows, which win over the scale."""
    folder: Path
    load_dir: str
    """The pretrained model, which predicts, scores, and initialises the selectors."""
    chosen: tuple[str, ...] = ()
    """Names of rows; none: all of the scale."""
    split: str = "test"
    max_tokens: int | None = None
    """Largest number of tokens of the split that are evaluated; None: all."""
    scored_tokens: int | None = None
    document_tokens: int | None = None
    """As in `HistoryScale`; None: that of the scale."""

    @property
    def scale(self) -> HistoryScale:
        scale, tokens = SCALES[self.scale_name], self.document_tokens
        if tokens is not None:
            scale = replace(scale, scored_document_tokens=tokens, evaluated_document_tokens=tokens)
        return scale if self.scored_tokens is None else replace(scale, scored_tokens=self.scored_tokens)

    def make(self) -> int:
        """Scores, trains and evaluates what is not finished yet; returns the exit status, as of `commands.train`."""
        rows, scale, scores = rows_of(self.scale_name, self.chosen), self.scale, self.folder / "scores"
        request = self._request()
        opened, _ = open_as(self.load_dir, request.config()[0])
        open_store(opened, self.load_dir, request.store, prepare=True)
        trained = [row for row in rows if row.selector is not None]
        if trained:
            amount = {"document_tokens": scale.scored_document_tokens, "max_tokens": scale.scored_tokens}
            commands.score(request._replace(split="train", **amount), scores)
        for row in trained:
            if status := commands.train(self._request(row), self.folder / row.name, str(scores)):
                return status
        # The plain window is always there.
        names = [row.name for row in rows if row.selector is None and row.name != BASELINE]
        folders = [str(self.folder / row.name) for row in trained]
        amount = {"document_tokens": scale.evaluated_document_tokens, "max_tokens": self.max_tokens}
        evaluated = request._replace(split=self.split, **amount)
        commands.evaluate_selections(evaluated, self.folder / "evaluation", names, folders, replace=True)
        return 0

    def report(self) -> str:
        """Writes the table of the results so far; returns its Markdown."""
        return write_report(self.folder, ROWS, self.scale_name)

    def _request(self, row: HistoryRow | None = None) -> HistoryRequest:
        """The pretrained model with the task's documents, and the settings of the commands for a row or for all rows.

        Files and parameters win over the scale and the row.
        """
        saved = saved_config(self.load_dir)
        settings = with_changes(HistorySettings(), {**((row and row.selector) or {}), **self.scale.settings})
        run, settings = read_changes(self.gin_files, self.gin_params)(saved, settings)
        run, store = with_changes(run, {"vocabulary": saved.vocabulary}), run.data.store
        if "ReaderConfig.store" not in bound_by(self.gin_params):
            # The task's documents in another vocabulary than the task's.
            store = f"{store}_{Path(self.load_dir).name}"
        batch_size = self.scale.batch_size
        return HistoryRequest(self.load_dir, changes=lambda *_: (run, settings), store=store, batch_size=batch_size)
