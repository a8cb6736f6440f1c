"""A table as Markdown, as CSV, and as a picture, with the paper's own figures beside ours."""

import csv
import math
from collections.abc import Callable, Sequence
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
        against = "; ".join(f"{labels[name]} to {labels[baseline]}" for name, baseline in pairs.items())
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
    """Ours above (or on the left), the paper's below it, each with its own axis: the documents are not the same."""
    by_row = not table.panels[0].x
    if by_row:
        size = (4.2 * len(table.panels) + 3, 0.32 * len(results) + 1.4)
        figure_ = Figure(figsize=size, dpi=120, layout="constrained")
        for axes, panel in zip(np.atleast_1d(figure_.subplots(1, len(table.panels), sharey=True)), table.panels):
            _draw_by_row(axes, results, panel)
    else:
        figure_ = Figure(figsize=(4.6 * len(table.panels) + 0.5, 7), dpi=120, layout="constrained")
        grid = figure_.subplots(2, len(table.panels), squeeze=False)
        for (ours, paper), panel in zip(grid.T, table.panels):
            _draw_series(ours, results, panel, lambda result, p: (result.mean(p.x), result.mean(p.measure)), "here")
            _draw_series(
                paper,
                results,
                panel,
                lambda result, p: (p.paper_x[result.row.name], result.row.paper[p.paper]),
                "in the paper",
            )
    figure_.savefig(path)


def _draw_by_row(axes: Axes, results: Sequence[RowResult], panel: Panel) -> None:
    """One place for each row; the paper's points on an axis of their own, at the top."""
    places = range(len(results))
    errors = [0 if math.isnan(error := result.error(panel.measure)) else error for result in results]
    values = [result.mean(panel.measure) for result in results]
    axes.errorbar(values, places, xerr=errors, fmt="o", color=COLOURS[0], capsize=3)
    axes.set_xlabel(f"{panel.measure.replace('_', ' ')}, here (dots)", color=COLOURS[0])
    axes.set_yticks(places, [result.row.label for result in results])
    axes.invert_yaxis()
    axes.grid(alpha=0.25)
    above = axes.twiny()
    papers = [result.row.paper.get(panel.paper, math.nan) for result in results]
    above.plot(papers, places, "x", color=COLOURS[1])
    above.set_xlabel(f"{panel.paper}, paper (crosses)", color=COLOURS[1])


def _draw_series(
    axes: Axes,
    results: Sequence[RowResult],
    panel: Panel,
    point: Callable[[RowResult, Panel], tuple[float, float]],
    where: str,
) -> None:
    for colour, name in zip(COLOURS, panel.series):
        members = [result for result in results if result.row.series == name]
        x, y = np.array([point(result, panel) for result in members]).T
        axes.plot(x, y, "o-", color=colour, label=name)
    axes.set_xscale("log", base=2)
    label = panel.x.replace("_", " ").removeprefix("num ")
    axes.set(xlabel=label, ylabel=panel.measure.replace("_", " "), title=where)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}" if value < 1e6 else f"{value / 1e6:,.0f}M")
    axes.grid(alpha=0.25)
    axes.legend(frameon=False)


def _text(value: float, form: str) -> str:
    return form.format(value) if math.isfinite(value) else "-"
