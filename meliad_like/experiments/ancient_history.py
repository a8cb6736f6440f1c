"""Table 1 of Ancient History Language Models, for any pretrained model and documents: scores, selectors, evaluation.

scores/         gains of spans of training documents (equation 2)
SELECTOR/       a trained selector
evaluation/     what all rows reach on the same documents; of other rows, documents or settings, what comes last
ancient_history.md, .csv and .png
"""

import dataclasses
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from meliad_like import config
from meliad_like.config import RunConfig, with_changes
from meliad_like.data.preparation import prepare
from meliad_like.data.token_store import STORE_NAME, TokenStore
from meliad_like.experiments.history_report import write_report
from meliad_like.experiments.jobs import device_name
from meliad_like.experiments.pretrained import fields_of
from meliad_like.experiments.tables.ancient_history import ROWS, SCALES, HistoryRow, HistoryScale, rows_of
from meliad_like.history import commands
from meliad_like.history.config import HistorySettings
from meliad_like.history.evaluation import BASELINE, VERSION
from meliad_like.history.opening import HistoryRequest
from meliad_like.history.selectors.checkpoint import open_selector
from meliad_like.resumable import write_json
from meliad_like.run.opening import saved_config

DONE_NAME = "done.json"


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
    """The pretrained model, which predicts, scores, and is what selectors begin with."""
    chosen: tuple[str, ...] = ()
    """Names of rows; none: all of the scale."""
    split: str = "test"
    """Is evaluated."""
    max_tokens: int | None = None
    """Documents are evaluated as long as they have so many tokens in all; None: all."""
    scored_tokens: int | None = None
    """The same of training documents that are scored; None: as the scale says."""
    document_tokens: int | None = None
    """Of each document that is scored or evaluated, so many tokens from its beginning; None: as the scale says."""

    @property
    def scale(self) -> HistoryScale:
        scale, tokens = SCALES[self.scale_name], self.document_tokens
        if tokens is not None:
            scale = replace(scale, scored_document_tokens=tokens, evaluated_document_tokens=tokens)
        return scale if self.scored_tokens is None else replace(scale, scored_tokens=self.scored_tokens)

    @cached_property
    def rows(self) -> list[HistoryRow]:
        return rows_of(self.scale_name, self.chosen)

    def run(self, row: HistoryRow | None = None) -> tuple[RunConfig, HistorySettings]:
        """The config of a row, and the settings of its commands; None: what all rows have in common.

        Raises:
          UserError: files and parameters make no run, or there is no pretrained model.
        """
        bound = fields_of(Path(self.load_dir)) | dict(self.scale.bindings) | dict((row and row.selector) or {})
        scaled = [f"{name} = {value!r}" for name, value in bound.items()]
        params = ["RunConfig.model = 'pretrained'", *scaled, *self.gin_params]
        run, settings = config.parse_with(self.gin_files, params, HistorySettings)
        if any(param.startswith("ReaderConfig.store") for param in self.gin_params):
            return run, settings
        # The task's documents in another vocabulary than the task's.
        return with_changes(run, {"data.store": f"{run.data.store}_{Path(self.load_dir).name}"}), settings

    def make(self) -> int:
        """Does what is not done yet, and writes the table.

        Returns:
          The exit status: 0, or `preemption.EXIT_STATUS` after SIGTERM while a selector was trained.
        """
        common, _ = self.run()
        if not (Path(common.data.store).expanduser() / STORE_NAME).exists():
            prepare(common.source, common.vocabulary, common.data.store)
        trained = [row for row in self.rows if row.selector is not None]
        if trained:
            self._score()
        for row in trained:
            if status := self._train(row):
                return status
        self._evaluate(trained)
        return 0

    def report(self) -> str:
        """Writes the table of what is there; returns its Markdown.

        Raises:
          UserError: nothing is there.
        """
        return write_report(self.folder, ROWS, self.scale_name)

    def _request(self, run: RunConfig, settings: HistorySettings, split: str, **what: Any) -> HistoryRequest:
        def changes(saved: RunConfig, _: HistorySettings) -> tuple[RunConfig, HistorySettings]:
            return with_changes(saved, {"mesh": run.mesh} | self._model_changes), settings

        return HistoryRequest(
            checkpoint=self.load_dir,
            changes=changes,
            store=run.data.store,
            split=split,
            batch_size=self.scale.batch_size,
            **what,
        )

    def _reading(self, run: RunConfig, settings: HistorySettings) -> dict[str, Any]:
        """Which documents are read, by which model, and how."""
        return {
            "store": TokenStore(run.data.store).fingerprint,
            "load_dir": str(Path(self.load_dir).resolve()),
            "history": dataclasses.asdict(settings.history),
            "model": self._model_changes,
        }

    @cached_property
    def _model_changes(self) -> dict[str, Any]:
        """The model's fields that files and parameters change, such as `activation_dtype`, by their paths."""
        saved = saved_config(self.load_dir)
        changed, _ = config.read_changes(self.gin_files, self.gin_params)(saved, HistorySettings())
        return {path: new for path, (_, new) in config.differences(saved, changed).items() if path.startswith("model.")}

    @property
    def _amounts(self) -> dict[str, int | None]:
        """What is scored."""
        return {"tokens": self.scale.scored_tokens, "document_tokens": self.scale.scored_document_tokens}

    def _score(self) -> None:
        request = self._request(
            *self.run(),
            "train",
            document_tokens=self.scale.scored_document_tokens,
            max_tokens=self.scale.scored_tokens,
        )
        settings = self._reading(*self.run()) | self._amounts
        if not self._done("scores", settings):
            began = time.perf_counter()
            commands.score(request, self.folder / "scores")
            self._finish("scores", settings, began)

    def _training(self, row: HistoryRow) -> dict[str, Any]:
        """What decides a selector."""
        run, settings = self.run(row)
        return dataclasses.asdict(settings) | self._reading(run, settings) | self._amounts

    def _train(self, row: HistoryRow) -> int:
        settings = self._training(row)
        if self._done(row.name, settings):
            return 0
        began = time.perf_counter()
        folder = self.folder / row.name
        status = commands.train(self._request(*self.run(row), "train"), folder, str(self.folder / "scores"))
        if not status:
            self._finish(row.name, settings, began)
        return status

    def _evaluate(self, trained: list[HistoryRow]) -> None:
        request = self._request(
            *self.run(), self.split, document_tokens=self.scale.evaluated_document_tokens, max_tokens=self.max_tokens
        )
        # Another selector may be the best at the same step.
        selectors = {
            row.name: self._training(row) | {"step": open_selector(self.folder / row.name).step} for row in trained
        }
        settings = self._reading(*self.run()) | {
            "version": VERSION,
            "rows": [row.name for row in self.rows],
            "split": self.split,
            "max_tokens": self.max_tokens,
            "document_tokens": self.scale.evaluated_document_tokens,
            "selectors": selectors,
        }
        if self._done("evaluation", settings):
            return
        began = time.perf_counter()
        # The plain window is always there.
        names = [row.name for row in self.rows if row.selector is None and row.name != BASELINE]
        folders = [str(self.folder / row.name) for row in trained]
        commands.evaluate_selections(request, self.folder / "evaluation", names, folders, replace=True)
        self._finish("evaluation", settings, began)

    def _done(self, part: str, settings: Mapping[str, Any]) -> bool:
        path = self.folder / part / DONE_NAME
        # Through JSON, so that a tuple equals the list that it was saved as.
        return path.exists() and json.loads(path.read_text())["settings"] == json.loads(json.dumps(settings))

    def _finish(self, part: str, settings: Mapping[str, Any], began: float) -> None:
        seconds = time.perf_counter() - began
        done = {"settings": settings, "seconds": seconds, "device": device_name()}
        write_json(self.folder / part / DONE_NAME, done)
