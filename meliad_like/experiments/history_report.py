"""Table 1 of Ancient History Language Models as Markdown, CSV and a picture, from an evaluation."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator

from meliad_like.data.readers import label
from meliad_like.errors import UserError
from meliad_like.experiments.pictures import COLOURS
from meliad_like.experiments.tables.ancient_history import NAME, PAPER, HistoryRow
from meliad_like.history.report import Estimate, among
from meliad_like.tables import Table

FIGURES = {
    "perplexity": ("perplexity", ".4g"),
    "change": ("change", "+.2%"),
    "perplexity_where_selected": ("perplexity where selected", ".4g"),
    "change_where_selected": ("change there", "+.2%"),
    "share_of_oracle": ("of the score oracle's gain", ".0%"),
}
"""Figures of `history.report.figures`, which have intervals: their headers, and format specifications."""
COSTS = {"model_flops": "model, MFLOP a token", "selection_flops": "selection, MFLOP a token"}
EXPLANATION = (
    "Perplexity is by token; in brackets are {level:.0%} intervals over documents, by bootstrap; changes are against "
    "the original on the same documents. Operations are counted (`layers/flops.py`) per predicted token: the model "
    "reads a window for each stride, and a learned selection reads candidates; the last column before the paper's is "
    "their ratio. Overlaps and random spans cost no operations of a model. What leaks the future reads the tokens that "
    "are to be predicted. The paper's figures are validation perplexities on other documents."
)


def write_report(folder: Path, rows: Sequence[HistoryRow], scale: str) -> str:
    """Writes the files into the folder of an experiment; returns the Markdown.

    Raises:
      UserError: nothing has been evaluated there.
    """
    path = folder / "evaluation" / "evaluation.json"
    if not path.exists():
        raise UserError(f"nothing was evaluated yet in {folder}: the same command without --report does that")
    evaluation = json.loads(path.read_text())
    found = {selection["name"]: selection for selection in evaluation["selections"]}
    rows = [row for row in rows if row.name in found]
    table = _table(rows, found).to_markdown().rstrip()
    parts = [
        "# Table 1: ancient history in the context window",
        _notes(evaluation, scale),
        f"{table}\n\n{EXPLANATION.format(level=evaluation['level'])}",
        *_selectors(folder, rows),
    ]
    markdown = "\n\n".join(parts) + "\n"
    (folder / f"{NAME}.md").write_text(markdown)
    _frame(rows, found).to_csv(folder / f"{NAME}.csv", index=False)
    _draw(rows, found, folder / f"{NAME}.png")
    return markdown


def _notes(evaluation: Mapping[str, Any], scale: str) -> str:
    documents, window = evaluation["documents"], evaluation["config"]
    tokens, selected = (sum(d[name] for d in documents) for name in ("num_tokens", "num_tokens_where_selected"))
    return (
        f"Scale {scale}: windows of {window['window_length']:,} tokens, {window['history_length']:,} of them for spans "
        f"of {window['span_length']}, that predict {window['stride']:,} targets{among(window['max_candidates'])}. "
        f"Evaluated on {evaluation['split']}: {tokens:,} tokens of {len(documents):,} documents; spans are selected "
        f"for {selected:,} of them. Evaluated with {evaluation['device']}."
    )


def _costs(selection: Mapping[str, Any]) -> list[float]:
    return [selection["cost_per_token"][name] / 1e6 for name in COSTS]


def _estimate(selection: Mapping[str, Any], name: str) -> Estimate:
    """A figure of a selection; NaN where there is none."""
    saved = selection.get(name) or {}
    return Estimate(*(float("nan") if saved.get(end) is None else saved[end] for end in ("value", "low", "high")))


def _table(rows: Sequence[HistoryRow], found: Mapping[str, Any]) -> Table:
    header = ["model", *(head for head, _ in FIGURES.values()), *COSTS.values(), "selection / model"]
    lines = []
    for row in rows:
        selection = found[row.name]
        # The original is what all others are compared with.
        figures = [
            _estimate(selection, name).to_text(form) if row.name != "baseline" or name.startswith("perplexity") else ""
            for name, (_, form) in FIGURES.items()
        ]
        model, select = _costs(selection)
        paper = [f"{row.paper[name]:.2f}" if name in row.paper else "" for name in PAPER]
        costs = [f"{model:,.4g}", f"{select:,.4g}", f"{select / model:.3g}"]
        lines.append([label(row.label, selection["leaks_the_future"]), *figures, *costs, *paper])
    return Table("", [*header, *(f"paper: {name}" for name in PAPER)], lines)


def _frame(rows: Sequence[HistoryRow], found: Mapping[str, Any]) -> pd.DataFrame:
    """One line for each row, with numbers."""
    lines = []
    for row in rows:
        selection = found[row.name]
        line: dict[str, Any] = {"row": row.name, "leaks_the_future": selection["leaks_the_future"]}
        for name in FIGURES:
            estimate = _estimate(selection, name)
            line |= {name: estimate.value, f"{name}_low": estimate.low, f"{name}_high": estimate.high}
        line |= {name: selection["cost_per_token"][name] for name in COSTS}
        lines.append(line | {f"paper: {name}": row.paper.get(name) for name in PAPER})
    return pd.DataFrame(lines)


def _selectors(folder: Path, rows: Sequence[HistoryRow]) -> list[str]:
    """How the training of each selector went."""
    lines = []
    for row in rows:
        path = folder / row.name / "metrics.jsonl"
        if row.selector is None or not path.exists():
            continue
        metrics = [json.loads(line) for line in path.read_text().splitlines()]
        saved = json.loads((folder / row.name / "selector.json").read_text())
        kind = label("validation", saved["leaks_the_future"])
        best = min((line for line in metrics if line["kind"] == kind), key=lambda line: line["loss"])
        possible = best["oracle_gain"] - best["random_gain"]
        # Where there are no more candidates than places, all are chosen.
        share = (best["chosen_gain"] - best["random_gain"]) / possible if possible > 1e-9 else None
        lines.append(
            f"- {label(row.label, saved['leaks_the_future'])}: {saved['trained_on']['num_pairs']:,} pairs of "
            f"{saved['trained_on']['num_documents']:,} documents, the best of {metrics[-1]['step']:,} steps is "
            f"{best['step']:,}. On documents held out its predictions correlate with the gains by "
            f"{best['correlation']:.2f}; a span that it would choose is worth {best['chosen_gain']:+.2f} nats alone, "
            f"a random one {best['random_gain']:+.2f}, the best ones {best['oracle_gain']:+.2f}"
            f"{'' if share is None else f': {share:.0%} of the way'}."
        )
    return ["## Training of the selectors", "\n".join(lines)] if lines else []


def _draw(rows: Sequence[HistoryRow], found: Mapping[str, Any], path: Path) -> None:
    """The change of the perplexity with its interval, by row, and by the cost of model and selection together."""
    picture = Figure(figsize=(11, 0.42 * len(rows) + 1.6), dpi=120, layout="constrained")
    by_row, by_cost = picture.subplots(1, 2, width_ratios=(3, 2))
    others = [row for row in rows if row.name != "baseline"]
    for place, row in enumerate(others):
        selection, change = found[row.name], _estimate(found[row.name], "change")
        # Without an interval the error is NaN, and nothing is drawn.
        error = [[100 * (change.value - change.low)], [100 * (change.high - change.value)]]
        marker, colour = "s" if selection["leaks_the_future"] else "o", COLOURS[place % len(COLOURS)]
        style = {"fmt": marker, "color": colour, "capsize": 3}
        by_row.errorbar([100 * change.value], [place], xerr=error, **style)
        by_cost.errorbar([sum(_costs(selection))], [100 * change.value], yerr=error, **style)
    by_row.set_yticks(range(len(others)), [label(row.label, found[row.name]["leaks_the_future"]) for row in others])
    by_row.invert_yaxis()
    for axes in (by_row, by_cost):
        axes.grid(alpha=0.25)
    by_row.axvline(0, color="grey", linestyle="--")
    by_cost.axhline(0, color="grey", linestyle="--")
    by_row.set_xlabel("change of the perplexity, percent (squares leak the future)")
    by_cost.set(xlabel="model and selection, MFLOP a token", ylabel="change, percent", xscale="log")
    by_cost.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    by_cost.xaxis.set_major_formatter("{x:,.0f}")
    by_cost.minorticks_off()
    picture.savefig(path)
