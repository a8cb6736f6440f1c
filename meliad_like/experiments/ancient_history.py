"""Table 1 of Ancient History Language Models, for any pretrained model and documents: scores, selectors, evaluation.

scores/         gains of spans of training documents (equation 2)
SELECTOR/       a trained selector
evaluation/     the results of all rows on the same documents; those of other rows or settings are replaced
ancient_history.md, .csv and .png

Each command resumes its own work, and finds at once that it is finished.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pandas as pd
from matplotlib.figure import Figure

from meliad_like.config import read_changes, with_changes
from meliad_like.data.readers import label
from meliad_like.errors import UserError
from meliad_like.experiments.tables import Row, Settings
from meliad_like.experiments.tables.ancient_history import SCALES, SELECTORS, TABLE, HistoryScale, rows_of
from meliad_like.history import commands
from meliad_like.history.commands import HistoryRequest
from meliad_like.history.evaluation import BASELINE, tables
from meliad_like.history.settings import HistorySettings
from meliad_like.remote import write_whole
from meliad_like.resumable import read_json
from meliad_like.run.opening import open_checkpoint, open_store, saved_config
from meliad_like.studies.frames import table_of
from meliad_like.studies.pictures import COLOURS, save

SELECTOR_FIGURES = {
    "correlation": ("correlation", ".2f"),
    "chosen_gain": ("gain of a selected span, nats", "+.2f"),
    "random_gain": ("of a random one", "+.2f"),
    "oracle_gain": ("of the best one", "+.2f"),
}
"""Figures of a selector's validation, their headers and formats: predictions against gains, gains of spans alone."""
EXPLANATION = (
    "In brackets are intervals over documents, by bootstrap; the baseline is the original. Operations are counted "
    "(`layers/flops.py`) per predicted token: the model reads a window for each stride, and a learned selection reads "
    "candidates. Overlaps and random spans cost no operations of a model. What leaks the future reads the tokens that "
    "are to be predicted."
)


@dataclass(frozen=True)
class HistoryExperiment(Settings):
    """The table at a scale, on some documents; the pretrained model predicts, scores, and initialises the selectors."""

    scored_tokens: int | None = None
    document_tokens: int | None = None
    """The largest number of tokens that are read of a document, when scored or evaluated; None: the scale's limits."""

    @property
    def scale(self) -> HistoryScale:
        limits = dict.fromkeys(("scored_document_tokens", "evaluated_document_tokens"), self.document_tokens)
        changes = limits | {"scored_tokens": self.scored_tokens}
        return replace(SCALES[self.scale_name], **{name: n for name, n in changes.items() if n is not None})

    def make(self) -> int:
        """Scores, trains and evaluates rows that are not finished; returns the exit status of the trainings."""
        rows, scale, scores = rows_of(self.scale_name, self.row_names), self.scale, self.folder / "scores"
        request = self._request()
        opened = open_checkpoint(self.load_dir, changes=lambda _: request.config()[0])
        open_store(opened, self.load_dir, request.store, prepare=True)
        trained = [row.name for row in rows if row.name in SELECTORS]
        if trained:
            amount = {"document_tokens": scale.scored_document_tokens, "max_tokens": scale.scored_tokens}
            commands.score(request._replace(split="train", **amount), scores)
        for name in trained:
            if status := commands.train_selector(self._request(name), self.folder / name, str(scores)):
                return status
        # The plain window is always there.
        names = [row.name for row in rows if row.name not in (*SELECTORS, BASELINE)]
        folders = [str(self.folder / name) for name in trained]
        amount = {"document_tokens": scale.evaluated_document_tokens, "max_tokens": self.max_tokens}
        evaluated = request._replace(split=self.split, **amount)
        commands.evaluate(evaluated, self.folder / "evaluation", names, folders, replace=True)
        return 0

    def report(self) -> str:
        """Writes the table of the results so far; returns its Markdown."""
        folder, path = self.folder, self.folder / "evaluation" / "evaluation.json"
        if not path.exists():
            raise UserError(f"nothing was evaluated yet in {folder}: the same command without --report does that")
        evaluation = read_json(path)
        selections = pd.DataFrame(evaluation["selections"]).set_index("name").rename_axis("row")
        rows = [row for row in TABLE.rows if row.name in selections.index]
        labels = {row.name: row.label for row in rows}
        papers = pd.DataFrame([row.paper for row in rows], list(labels), TABLE.paper_columns)
        frame = selections.loc[list(labels)].drop(columns=["nats", "nats_where_selected"])
        write_whole(folder / f"{TABLE.name}.csv", frame.join(papers.add_prefix("paper: ")).to_csv())
        _draw(frame, labels, folder / f"{TABLE.name}.png")
        in_paper = papers.rename(labels).rename_axis("selection").reset_index()
        title = "validation perplexities in the paper, on other documents"
        window = evaluation["config"]
        texts = [
            f"# {TABLE.title}",
            f"Scale {self.scale_name}: windows of {window['window_length']:,} tokens, {window['history_length']:,} of "
            f"them for spans of {window['span_length']}, that predict {window['stride']:,} targets. Evaluated on "
            f"{evaluation['split']} with {evaluation['device']}.",
            *(table.to_markdown() for table in tables(evaluation, labels)),
            table_of(in_paper, title, dict.fromkeys(papers, ".2f")).to_markdown(),
            EXPLANATION,
            *_selectors(folder, rows),
        ]
        markdown = "\n\n".join(map(str.rstrip, texts)) + "\n"
        write_whole(folder / f"{TABLE.name}.md", markdown)
        return markdown

    def _request(self, selector: str = "") -> HistoryRequest:
        """The pretrained model with the task's documents, and the settings of the commands for a selector or all rows.

        Files and parameters win over the scale and the row.
        """
        saved = saved_config(self.load_dir)
        settings = read_changes(gin_params=SELECTORS.get(selector, ()))(HistorySettings())
        settings = with_changes(settings, self.scale.settings)
        run, settings = read_changes(self.gin_files, self.gin_params)(saved, settings)
        run, store = with_changes(run, {"vocabulary": saved.vocabulary}), self.store(run)
        batch_size = self.scale.batch_size
        return HistoryRequest(self.load_dir, changes=lambda *_: (run, settings), store=store, batch_size=batch_size)


def _selectors(folder: Path, rows: Sequence[Row]) -> list[str]:
    """The report of the training of each selector: Markdown, or nothing if there was none."""
    lines = []
    for row in rows:
        path = folder / row.name / "metrics.jsonl"
        if path.exists():
            saved = read_json(folder / row.name / "selector.json")
            metrics: Any = pd.read_json(path, lines=True)
            validation = metrics[metrics["kind"] == label("validation", saved["leaks_the_future"])]
            best = validation.loc[validation["loss"].idxmin()]
            line = {"selector": label(row.label, saved["leaks_the_future"])}
            line |= {name: saved["trained_on"][f"num_{name}"] for name in ("pairs", "documents")}
            line |= {"steps": metrics["step"].iloc[-1], "best step": best["step"]}
            lines.append(line | {header: best[name] for name, (header, _) in SELECTOR_FIGURES.items()})
    formats = dict.fromkeys(("pairs", "documents", "steps", "best step"), ",") | dict(SELECTOR_FIGURES.values())
    title = "## Training of the selectors, at the best step, on documents held out"
    return [table_of(pd.DataFrame(lines), title, formats).to_markdown().rstrip()] if lines else []


def _draw(frame: pd.DataFrame, labels: Mapping[str, str], path: Path) -> None:
    """The change of the perplexity in percent with its interval, by row."""
    changes = 100 * frame.drop(BASELINE)[["change", "change_low", "change_high"]].astype(float)
    leaks = frame["leaks_the_future"]
    picture = Figure(figsize=(9, 0.42 * len(changes) + 1.6), dpi=120, layout="constrained")
    axes = picture.subplots()
    # Without an interval the error is NaN, and nothing is drawn.
    errors = changes[["change_low", "change_high"]].sub(changes["change"], axis=0).abs().to_numpy().T
    names = [label(labels[name], leaks[name]) for name in changes.index]
    axes.errorbar(changes["change"], names, xerr=errors, fmt="o", color=COLOURS[0], capsize=3)
    axes.invert_yaxis()
    axes.axvline(0, color="grey", linestyle="--")
    axes.set_xlabel("change of the perplexity, percent")
    axes.grid(alpha=0.25)
    save(picture, path)
