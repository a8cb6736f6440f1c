"""Table 1 of Ancient History Language Models, for any pretrained model and documents: scores, selectors, evaluation.

scores/         gains of spans of training documents (equation 2)
SELECTOR/       a trained selector
evaluation/     the results of all rows on the same documents; those of other rows or settings are replaced
ancient_history.md, .csv and .png

Each command resumes its own work, and finds at once that it is finished.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from meliad_like.config import bound_by, read_changes, with_changes
from meliad_like.data.readers import label
from meliad_like.errors import UserError
from meliad_like.experiments.pictures import COLOURS
from meliad_like.experiments.tables import Row, Settings
from meliad_like.experiments.tables.ancient_history import SCALES, SELECTORS, TABLE, HistoryScale, rows_of
from meliad_like.history import commands
from meliad_like.history.config import HistorySettings
from meliad_like.history.evaluation import BASELINE, among, with_intervals
from meliad_like.history.opening import HistoryRequest
from meliad_like.run.opening import open_checkpoint, open_store, saved_config
from meliad_like.tables import Table as TextTable

FIGURES = {
    "perplexity": "perplexity",
    "change": "change",
    "perplexity_where_selected": "perplexity where selected",
    "change_where_selected": "change there",
    "share_of_oracle": "of the score oracle's gain",
}
"""Figures of `history.evaluation.figures`, which have intervals, and their headers."""
COSTS = {"model_flops": "model, MFLOP a token", "selection_flops": "selection, MFLOP a token"}
SELECTOR_FIGURES = {
    "correlation": "correlation",
    "chosen_gain": "gain of a selected span, nats",
    "random_gain": "of a random one",
    "oracle_gain": "of the best one",
}
"""Figures of a selector's validation, and their headers: predictions against gains, and the gains of spans alone."""
EXPLANATION = (
    "Perplexity is by token; in brackets are {level:.0%} intervals over documents, by bootstrap; changes are against "
    "the original on the same documents. Operations are counted (`layers/flops.py`) per predicted token: the model "
    "reads a window for each stride, and a learned selection reads candidates; the last column before the paper's is "
    "their ratio. Overlaps and random spans cost no operations of a model. What leaks the future reads the tokens that "
    "are to be predicted. The paper's figures are validation perplexities on other documents."
)


@dataclass(frozen=True)
class HistoryExperiment(Settings):
    """The table at a scale, on some documents; the pretrained model predicts, scores, and initialises the selectors."""

    scored_tokens: int | None = None
    document_tokens: int | None = None
    """The limits of the same names in `HistoryScale`; None: those of the scale."""

    @property
    def scale(self) -> HistoryScale:
        limits = dict.fromkeys(("scored_document_tokens", "evaluated_document_tokens"), self.document_tokens)
        changes = limits | {"scored_tokens": self.scored_tokens}
        return replace(SCALES[self.scale_name], **{name: n for name, n in changes.items() if n is not None})

    def make(self) -> int:
        """Scores, trains and evaluates what is not finished yet; returns the exit status of the trainings."""
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
        evaluation = json.loads(path.read_text())
        selections = pd.DataFrame(evaluation["selections"]).set_index("name")
        rows = [row for row in TABLE.rows if row.name in selections.index]
        ends = [figure + end for figure in FIGURES if figure in selections for end in ("", "_low", "_high")]
        frame = selections.loc[[row.name for row in rows], ["leaks_the_future", *ends, *COSTS]]
        papers = pd.DataFrame([row.paper for row in rows], columns=TABLE.paper_columns).add_prefix("paper: ")
        frame = pd.concat([frame.rename_axis("row").reset_index(), papers], axis=1)
        frame.to_csv(folder / f"{TABLE.name}.csv", index=False)
        labels = [label(row.label, leaks) for row, leaks in zip(rows, frame["leaks_the_future"], strict=True)]
        _draw(frame.assign(label=labels).astype(dict.fromkeys(ends, float)), folder / f"{TABLE.name}.png")
        parts = [
            f"# {TABLE.title}",
            _notes(evaluation, self.scale_name),
            f"{_table(frame, labels).to_markdown().rstrip()}\n\n{EXPLANATION.format(level=evaluation['level'])}",
            *_selectors(folder, rows),
        ]
        markdown = "\n\n".join(parts) + "\n"
        (folder / f"{TABLE.name}.md").write_text(markdown)
        return markdown

    def _request(self, selector: str = "") -> HistoryRequest:
        """The pretrained model with the task's documents, and the settings of the commands for a selector or all rows.

        Files and parameters win over the scale and the row.
        """
        saved = saved_config(self.load_dir)
        settings = with_changes(HistorySettings(), {**SELECTORS.get(selector, {}), **self.scale.settings})
        run, settings = read_changes(self.gin_files, self.gin_params)(saved, settings)
        run, store = with_changes(run, {"vocabulary": saved.vocabulary}), run.data.store
        if "ReaderConfig.store" not in bound_by(self.gin_params):
            # The task's documents in another vocabulary than the task's.
            store = f"{store}_{Path(self.load_dir).name}"
        batch_size = self.scale.batch_size
        return HistoryRequest(self.load_dir, changes=lambda *_: (run, settings), store=store, batch_size=batch_size)


def _notes(evaluation: Mapping[str, Any], scale: str) -> str:
    documents, window = evaluation["documents"], evaluation["config"]
    tokens, selected = (sum(d[name] for d in documents) for name in ("num_tokens", "num_tokens_where_selected"))
    return (
        f"Scale {scale}: windows of {window['window_length']:,} tokens, {window['history_length']:,} of them for spans "
        f"of {window['span_length']}, that predict {window['stride']:,} targets{among(window['max_candidates'])}. "
        f"Evaluated on {evaluation['split']}: {tokens:,} tokens of {len(documents):,} documents; spans are selected "
        f"for {selected:,} of them. Evaluated with {evaluation['device']}."
    )


def _table(frame: pd.DataFrame, labels: Sequence[str]) -> TextTable:
    columns: dict[str, Any] = {"model": labels}
    for figure, head in FIGURES.items():
        if figure in frame:
            # The original is what all others are compared with.
            shown = (frame["row"] != BASELINE) | figure.startswith("perplexity")
            columns[head] = np.where(shown, with_intervals(frame, figure), "")
    columns |= {head: frame[name] / 1e6 for name, head in COSTS.items()}
    columns["selection / model"] = frame["selection_flops"] / frame["model_flops"]
    formats = dict.fromkeys(COSTS.values(), ",.4g") | {"selection / model": ".3g"}
    papers = frame.filter(like="paper: ")
    table = pd.concat([pd.DataFrame(columns), papers], axis=1)
    return TextTable.of(table, formats=formats | dict.fromkeys(papers, ".2f"))


def _selectors(folder: Path, rows: Sequence[Row]) -> list[str]:
    """How the training of each selector went: Markdown, or nothing if there was none."""
    lines = []
    for row in rows:
        path = folder / row.name / "metrics.jsonl"
        if path.exists():
            saved = json.loads((folder / row.name / "selector.json").read_text())
            metrics: Any = pd.read_json(path, lines=True)
            validation = metrics[metrics["kind"] == label("validation", saved["leaks_the_future"])]
            best = validation.loc[validation["loss"].idxmin()]
            line = {"selector": label(row.label, saved["leaks_the_future"])}
            line |= {name: saved["trained_on"][f"num_{name}"] for name in ("pairs", "documents")}
            line |= {"steps": metrics["step"].iloc[-1], "best step": best["step"]}
            lines.append(line | {head: best[name] for name, head in SELECTOR_FIGURES.items()})
    formats = dict.fromkeys(("pairs", "documents", "steps", "best step"), ",") | {"correlation": ".2f"}
    formats |= dict.fromkeys(list(SELECTOR_FIGURES.values())[1:], "+.2f")
    title = "## Training of the selectors, at the best step, on documents held out"
    return [TextTable.of(pd.DataFrame(lines), title, formats).to_markdown().rstrip()] if lines else []


def _draw(frame: pd.DataFrame, path: Path) -> None:
    """The change of the perplexity with its interval, by row."""
    rows = frame[frame["row"] != BASELINE]
    picture = Figure(figsize=(9, 0.42 * len(rows) + 1.6), dpi=120, layout="constrained")
    axes = picture.subplots()
    # Without an interval the error is NaN, and nothing is drawn.
    ends = 100 * np.abs([rows["change"] - rows["change_low"], rows["change_high"] - rows["change"]])
    axes.errorbar(100 * rows["change"], range(len(rows)), xerr=ends, fmt="o", color=COLOURS[0], capsize=3)
    axes.set_yticks(range(len(rows)), rows["label"])
    axes.invert_yaxis()
    axes.axvline(0, color="grey", linestyle="--")
    axes.set_xlabel("change of the perplexity, percent")
    axes.grid(alpha=0.25)
    picture.savefig(path)
