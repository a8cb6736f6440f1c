"""Table 1 of Ancient History Language Models as Markdown, CSV and a picture, from an evaluation that is there."""

import csv
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator

from meliad_like.data.readers import label
from meliad_like.errors import UserError
from meliad_like.experiments.pictures import COLOURS
from meliad_like.experiments.tables.ancient_history import NAME, PAPER, HistoryRow
from meliad_like.history.report import among

FIGURES = {
    "perplexity": ("perplexity", "{:.4g}"),
    "change": ("change", "{:+.2%}"),
    "perplexity_where_selected": ("perplexity where selected", "{:.4g}"),
    "change_where_selected": ("change there", "{:+.2%}"),
    "share_of_oracle": ("of the score oracle's gain", "{:.0%}"),
}
"""Of `history.report.figures`, which have intervals: header, and how a number is written."""
COSTS = {
    "model_flops": "model, MFLOP a token",
    "selection_flops": "selection, MFLOP a token",
}


def write_report(folder: Path, rows: Sequence[HistoryRow], scale: str) -> str:
    """Writes the files into the folder of an experiment; returns the Markdown.

    Raises:
      UserError: nothing was evaluated there yet.
    """
    path = folder / "evaluation" / "evaluation.json"
    if not path.exists():
        raise UserError(f"nothing was evaluated yet in {folder}: the same command without --report does that")
    evaluation = json.loads(path.read_text())
    found = {selection["name"]: selection for selection in evaluation["selections"]}
    rows = [row for row in rows if row.name in found]
    lines = [_notes(folder, evaluation, scale), _table(rows, found, evaluation["level"]), *_selectors(folder, rows)]
    markdown = "\n\n".join(["# Table 1: ancient history in the context window", *lines]) + "\n"
    (folder / f"{NAME}.md").write_text(markdown)
    _write_csv(rows, found, folder / f"{NAME}.csv")
    _draw(rows, found, folder / f"{NAME}.png")
    return markdown


def _name(row: HistoryRow, found: Mapping[str, Any]) -> str:
    return label(row.label, found[row.name]["leaks_the_future"])


def _cost(selection: Mapping[str, Any], measure: str) -> float:
    return selection["cost_per_token"][measure] / 1e6


def _notes(folder: Path, evaluation: Mapping[str, Any], scale: str) -> str:
    documents, window = evaluation["documents"], evaluation["config"]
    done = json.loads((folder / "evaluation" / "done.json").read_text())
    tokens, selected = (sum(d[name] for d in documents) for name in ("num_tokens", "num_tokens_where_selected"))
    return (
        f"Scale {scale}: windows of k = {window['window_length']:,} tokens, j = {window['history_length']:,} for spans "
        f"of l = {window['span_length']}, s = {window['stride']:,} targets"
        f"{among(window['max_candidates'])}. Evaluated on {evaluation['split']}: {tokens:,} tokens of "
        f"{len(documents):,} documents; spans are selected for {selected:,} of them. On {done['device']} it took "
        f"{done['seconds']:,.0f} s."
    )


def _table(rows: Sequence[HistoryRow], found: Mapping[str, Any], level: float) -> str:
    header = ["model", *(head for head, _ in FIGURES.values()), *COSTS.values(), "selection / model"]
    header += [f"paper: {name}" for name in PAPER]
    lines = [f"| {' | '.join(header)} |", "|" + "|".join(["---"] + ["---:"] * (len(header) - 1)) + "|"]
    for row in rows:
        selection = found[row.name]
        cells = [_name(row, found)]
        for measure, (_, form) in FIGURES.items():
            # The original is what all others are compared with.
            compared = row.name != "baseline" or measure.startswith("perplexity")
            cells.append(_estimate(selection.get(measure), form) if compared else "")
        costs = [_cost(selection, measure) for measure in COSTS]
        cells += [f"{cost:,.4g}" for cost in costs] + [f"{costs[1] / costs[0]:.3g}"]
        cells += ["" if name not in row.paper else f"{row.paper[name]:.2f}" for name in PAPER]
        lines.append(f"| {' | '.join(cells)} |")
    explained = (
        f"Perplexity is by token; in brackets are {level:.0%} intervals over documents, by bootstrap, and changes are "
        "against the original on the same documents. Operations are counted (`models/flops.py`), for each token that "
        "is predicted: the model reads a window for each stride, and a learned selection reads candidates; the last "
        "column before the paper's is the one over the other. Overlaps and chance cost no operations of a model. What "
        "leaks the future reads the tokens that are to be predicted. The paper's figures are validation perplexities "
        "of other documents."
    )
    return "\n".join(lines) + f"\n\n{explained}"


def _selectors(folder: Path, rows: Sequence[HistoryRow]) -> list[str]:
    lines = []
    for row in rows:
        path = folder / row.name / "metrics.jsonl"
        if row.selector is None or not path.exists():
            continue
        metrics = [json.loads(line) for line in path.read_text().splitlines()]
        saved = json.loads((folder / row.name / "selector.json").read_text())
        kind = label("validation", saved["leaks_the_future"])
        best = min((line for line in metrics if line["kind"] == kind), key=lambda line: line["loss"])
        way = best["oracle_gain"] - best["random_gain"]
        # Where there are no more candidates than places, all are chosen.
        reached = f": {(best['chosen_gain'] - best['random_gain']) / way:.0%} of the way" if way > 1e-9 else ""
        lines.append(
            f"- {label(row.label, saved['leaks_the_future'])}: {saved['trained_on']['num_pairs']:,} pairs of "
            f"{saved['trained_on']['num_documents']:,} documents, the best of {metrics[-1]['step']:,} steps is "
            f"{best['step']:,}. On documents held out its predictions correlate with the gains by "
            f"{best['correlation']:.2f}; a span that it would choose is worth {best['chosen_gain']:+.2f} nats alone, "
            f"one by chance {best['random_gain']:+.2f}, the best ones {best['oracle_gain']:+.2f}{reached}."
        )
    return ["## Training of the selectors", "\n".join(lines)] if lines else []


def _estimate(estimate: Mapping[str, float | None] | None, form: str) -> str:
    if estimate is None or estimate["value"] is None:
        return "-"
    if estimate["low"] is None:
        return form.format(estimate["value"])
    return f"{form.format(estimate['value'])} ({form.format(estimate['low'])} to {form.format(estimate['high'])})"


def _write_csv(rows: Sequence[HistoryRow], found: Mapping[str, Any], path: Path) -> None:
    """One line for each row, numbers as they are; an empty field is a figure that isn't there."""
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        estimates = [f"{name}{end}" for name in FIGURES for end in ("", "_low", "_high")]
        writer.writerow(["row", "leaks_the_future", *estimates, *COSTS, *(f"paper: {name}" for name in PAPER)])
        for row in rows:
            selection = found[row.name]
            numbers = [
                selection.get(name, {}).get(end) if selection.get(name) else None
                for name in FIGURES
                for end in ("value", "low", "high")
            ]
            numbers += [selection["cost_per_token"][name] for name in COSTS]
            numbers += [row.paper.get(name) for name in PAPER]
            writer.writerow([row.name, selection["leaks_the_future"], *("" if n is None else n for n in numbers)])


def _draw(rows: Sequence[HistoryRow], found: Mapping[str, Any], path: Path) -> None:
    """The change of the perplexity with its interval, by row, and by what model and selection cost together."""
    picture = Figure(figsize=(11, 0.42 * len(rows) + 1.6), dpi=120, layout="constrained")
    by_row, by_cost = picture.subplots(1, 2, width_ratios=(3, 2))
    others = [row for row in rows if row.name != "baseline"]
    for place, row in enumerate(others):
        selection = found[row.name]
        value, low, high = (
            100 * (math.nan if selection["change"][end] is None else selection["change"][end])
            for end in ("value", "low", "high")
        )
        error = [[value - low], [high - value]] if math.isfinite(low) else None
        colour = COLOURS[place % len(COLOURS)]
        marker = "s" if selection["leaks_the_future"] else "o"
        by_row.errorbar([value], [place], xerr=error, fmt=marker, color=colour, capsize=3)
        cost = sum(_cost(selection, measure) for measure in COSTS)
        by_cost.errorbar([cost], [value], yerr=error, fmt=marker, color=colour, capsize=3)
    by_row.set_yticks(range(len(others)), [_name(row, found) for row in others])
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
