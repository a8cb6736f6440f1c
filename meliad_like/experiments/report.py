"""A table as Markdown, as CSV, and as a picture, with the paper's own figures beside ours."""

import csv
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from meliad_like.experiments.results import RowResult, difference, standard_error
from meliad_like.experiments.tables import Panel, Table

COLOURS = ("#1f5fa8", "#d1662b", "#3a8f5c")
# Measures of every table: header, and how a number is written. What a run measures has a standard error beside it.
COLUMNS: dict[str, tuple[str, str]] = {
    "segment_length": ("segment", "{:,.0f}"),
    "window_length": ("window", "{:,.0f}"),
    "num_states": ("states", "{:,.0f}"),
    "vocabulary_size": ("vocabulary", "{:,.0f}"),
    "parameters": ("parameters", "{:,.0f}"),
    "num_tokens": ("token count", "{:,.0f}"),
    "tokens_per_word": ("scale factor", "{:.4f}"),
    "bits_per_token": ("bits per token", "{:.4f}"),
    "word_perplexity": ("word perplexity", "{:,.2f}"),
    "bits_per_byte": ("bits per byte", "{:.4f}"),
    "difference": ("difference", "{:+.4f}"),
    "step_time": ("step time", "{:.3f}"),
    "milliseconds": ("ms a step", "{:,.1f}"),
    "share_of_peak": ("share of peak", "{:.1%}"),
    "training_flops_per_token": ("MFLOP a token", "{:,.2f}"),
    "memory_bytes": ("memory of a step, MB", "{:,.1f}"),
}
IN_MILLIONS = ("training_flops_per_token", "memory_bytes")
WITH_ERROR = ("bits_per_token", "bits_per_byte", "word_perplexity", "difference")
ONLY_WHERE_ASKED = ("vocabulary_size", "num_tokens", "tokens_per_word", "word_perplexity")


def measures_of(table: Table) -> list[str]:
    return [name for name in COLUMNS if name not in ONLY_WHERE_ASKED or name in table.measures]


def figure(results: Sequence[RowResult], result: RowResult, measure: str) -> tuple[float, float]:
    """Mean and standard error; NaN for what is not known."""
    if measure == "difference":
        if result.row.baseline == result.row.name:
            return math.nan, math.nan
        values = difference(results, result, "bits_per_byte")
        return (float(values.mean()) if values.size else math.nan), standard_error(values)
    mean = result.mean(measure) / (1e6 if measure in IN_MILLIONS else 1)
    return mean, result.error(measure) if measure in WITH_ERROR else math.nan


def notes(results: Sequence[RowResult], scale: str) -> list[str]:
    """Which documents, how long, which seeds, and which machine: what is the same for all runs that are there."""
    runs = [run for result in results for run in result.runs.values()]
    lines = []
    if runs:
        one = runs[0]
        seeds = sorted({int(run["seed"]) for run in runs})
        lines += [
            f"Scale {scale}: {one['num_steps']:,} steps of {one['tokens_per_step']:,} tokens; seeds "
            f"{', '.join(map(str, seeds))}. Evaluated on all of {one['split']}: {one['num_documents']:,} documents, "
            f"{one['num_bytes']:,} bytes.",
            f"Trained on {', '.join(sorted({str(run['device']) for run in runs}))}; a run took "
            f"{min(run['seconds'] for run in runs):,.0f} to {max(run['seconds'] for run in runs):,.0f} s.",
        ]
    if devices := {result.timed["device"] for result in results if result.timed}:
        lines.append(f"Steps were timed in turn on {', '.join(sorted(devices))}.")
    return lines


def to_markdown(table: Table, results: Sequence[RowResult], notes: Sequence[str]) -> str:
    """
    Args:
      table, results: as `gather` gave them.
      notes: said under the title, a line each: which documents, which machine.
    """
    measures = measures_of(table)
    header = ["model", *(COLUMNS[name][0] for name in measures), "runs"]
    header += [f"paper: {name}" for name in table.paper_columns]
    lines = [f"| {' | '.join(header)} |", "|" + "|".join(["---"] + ["---:"] * (len(header) - 1)) + "|"]
    for result in results:
        cells = [result.row.label]
        for measure in measures:
            mean, error = figure(results, result, measure)
            cells.append(_text(mean, COLUMNS[measure][1]) + (f" ± {error:.4f}" if math.isfinite(error) else ""))
        cells.append(str(len(result.runs)))
        paper = (result.row.paper.get(column) for column in table.paper_columns)
        cells += ["" if value is None else f"{value:,.10g}" for value in paper]
        lines.append(f"| {' | '.join(cells)} |")
    pairs = {r.row.name: r.row.baseline for r in results if r.row.baseline != r.row.name}
    labels = {r.row.name: r.row.label for r in results}
    if len(set(pairs.values())) == 1:
        against = labels[next(iter(pairs.values()))]
    else:
        rows_of = {to: [labels[name] for name, other in pairs.items() if other == to] for to in pairs.values()}
        against = "; ".join(f"{labels[to]} ({' / '.join(names)})" for to, names in rows_of.items())
    explained = [
        f"Differences in bits per byte (of runs with the same seed) and step times are relative to: {against}.",
        "± is the standard error of the mean over the runs. What isn't there is -.",
    ]
    return "\n\n".join([f"# {table.title}", *notes, "\n".join(lines), " ".join(explained)]) + "\n"


def write_csv(table: Table, results: Sequence[RowResult], path: Path) -> None:
    """One line for each row, numbers as they are; an empty field is a figure that isn't there."""
    measures = measures_of(table)
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        header = ["row", "model"]
        for measure in measures:
            header += [measure, f"{measure}_error"] if measure in WITH_ERROR else [measure]
        writer.writerow([*header, "runs", *(f"paper: {name}" for name in table.paper_columns)])
        for result in results:
            fields: list[object] = [result.row.name, result.row.label]
            for measure in measures:
                mean, error = figure(results, result, measure)
                numbers = (mean, error) if measure in WITH_ERROR else (mean,)
                fields += [number if math.isfinite(number) else "" for number in numbers]
            fields.append(len(result.runs))
            writer.writerow([*fields, *(result.row.paper.get(column, "") for column in table.paper_columns)])


def draw(table: Table, results: Sequence[RowResult], path: Path) -> None:
    """Ours and the paper's, each with its own axis where the documents decide: they are not the same."""
    panels = table.panels
    if not panels[0].x:
        picture = Figure(figsize=(4.2 * len(panels) + 3, 0.32 * len(results) + 1.4), dpi=120, layout="constrained")
        row_of_axes = np.atleast_1d(picture.subplots(1, len(panels), sharey=True))
        row_of_axes[0].invert_yaxis()
        for axes, panel in zip(row_of_axes, panels):
            _draw_by_row(axes, results, panel)
    else:
        picture = Figure(figsize=(4.6 * len(panels) + 0.5, 7), dpi=120, layout="constrained")
        for (ours, papers), panel in zip(picture.subplots(2, len(panels), squeeze=False).T, panels):
            for axes, where in ((ours, "here"), (papers, "in the paper")):
                for colour, name in zip(COLOURS, panel.series):
                    members = [result for result in results if result.row.series == name]
                    points = [_point(result, panel, where == "here") for result in members]
                    x, y, error = np.array(points).reshape(-1, 3).T
                    axes.errorbar(x, y, yerr=error, fmt="o-", color=colour, capsize=3, label=name)
                _label(axes, panel, where)
    picture.savefig(path)


def _point(result: RowResult, panel: Panel, here: bool) -> tuple[float, float, float]:
    """Place, height and error."""
    if not here:
        return panel.paper_x[result.row.name], result.row.paper[panel.paper], 0.0
    return result.mean(panel.x), result.mean(panel.measure), _drawn_error(result, panel.measure)


def _label(axes: Axes, panel: Panel, where: str) -> None:
    axes.set_xscale("log")
    ticks: list[float] = []
    for x in sorted(float(x) for line in axes.lines for x in np.asarray(line.get_xdata()) if math.isfinite(x)):
        if not ticks or x > 1.2 * ticks[-1]:
            ticks.append(x)
    axes.set_xticks(ticks, [_short(x) for x in ticks], rotation=30)
    axes.minorticks_off()
    label = panel.x.replace("_", " ").removeprefix("num ")
    axes.set(xlabel=label, ylabel=panel.measure.replace("_", " "), title=where)
    axes.grid(alpha=0.25)
    axes.legend(frameon=False)


def _draw_by_row(axes: Axes, results: Sequence[RowResult], panel: Panel) -> None:
    """One place for each row; the paper's points on an axis of their own at the top, if they can't be compared."""
    places = range(len(results))
    errors = [_drawn_error(result, panel.measure) for result in results]
    values = [result.mean(panel.measure) for result in results]
    axes.errorbar(values, places, xerr=errors, fmt="o", color=COLOURS[0], capsize=3)
    axes.set_yticks(places, [result.row.label for result in results])
    axes.grid(alpha=0.25)
    papers = [result.row.paper.get(panel.paper, math.nan) for result in results]
    label = panel.measure.replace("_", " ")
    if panel.comparable:
        axes.plot(papers, places, "x", color=COLOURS[1])
        axes.set_xlabel(f"{label}, here (dots) and in the paper (crosses)")
        return
    axes.set_xlabel(f"{label}, here (dots)", color=COLOURS[0])
    above = axes.twiny()
    above.plot(papers, places, "x", color=COLOURS[1])
    above.set_xlabel(f"{panel.paper}, in the paper (crosses)", color=COLOURS[1])


def _drawn_error(result: RowResult, measure: str) -> float:
    error = result.error(measure)
    return 0.0 if math.isnan(error) else error


def _short(number: float) -> str:
    for unit, name in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= 10 * unit or (number >= unit and name != "k"):
            return f"{number / unit:.3g}{name}"
    return f"{number:,.0f}"


def _text(value: float, form: str) -> str:
    return form.format(value) if math.isfinite(value) else "-"
