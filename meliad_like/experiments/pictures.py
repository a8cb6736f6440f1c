"""Pictures of a table: our figures, and below them the paper's, which are of other documents."""

import math
from pathlib import Path

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, LogLocator

from meliad_like.experiments.report import Results
from meliad_like.experiments.tables import Panel
from meliad_like.studies.pictures import COLOURS, save


def draw(results: Results, path: Path) -> None:
    """Draws a column for each panel; where no panel has the paper's figures, ours alone."""
    panels, names = results.table.panels, [row.name for row in results.rows]
    num_rows = 1 + any(panel.paper for panel in panels)
    height = num_rows * (3.5 if panels[0].x else 0.25 * len(names) + 1)
    picture = Figure(figsize=(5 * len(panels) + 1, height), dpi=120, layout="constrained")
    columns = picture.subplots(num_rows, len(panels), squeeze=False).T
    for panel, (ours, *papers) in zip(panels, columns, strict=True):
        means, errors = results.means.loc[names], results.errors.loc[names, panel.measure]
        x = means[panel.x] if panel.x else None
        _draw_panel(ours, panel, results, x, means[panel.measure], errors)
        ours.set(title="here")
        if panel.paper:
            figures = pd.Series([row.paper.get(panel.paper, math.nan) for row in results.rows], names)
            _draw_panel(papers[0], panel, results, None, figures, figures * 0)
            papers[0].set(title=f"in the paper: {panel.paper}")
        elif papers:
            papers[0].remove()
    save(picture, path)


def _draw_panel(
    axes: Axes, panel: Panel, results: Results, x: pd.Series | None, y: pd.Series, errors: pd.Series
) -> None:
    """Draws figures by row, or over `x`; without it over the paper's. What is NaN is not drawn."""
    measure = panel.measure.replace("_", " ")
    axes.grid(alpha=0.25)
    if not panel.x:
        axes.errorbar(y, range(len(y)), xerr=errors, fmt="o", color=COLOURS[0], capsize=3)
        axes.set_yticks(range(len(y)), [row.label for row in results.rows])
        axes.set(xlabel=measure, ylim=(len(y) - 0.5, -0.5))
        return
    for i, (label, places) in enumerate(panel.lines.items()):
        line = pd.DataFrame({"paper": places}).join(pd.DataFrame({"x": x, "y": y, "error": errors}), how="inner")
        line["x"] = line["paper"] if x is None else line["x"]
        # The legend has no lines without figures.
        if not line[["x", "y"]].dropna().empty:
            style = {"fmt": "o-", "color": COLOURS[i % len(COLOURS)], "capsize": 3}
            axes.errorbar(line["x"], line["y"], yerr=line["error"], label=label, **style)
    if panel.reference in y:
        label = results.table.row(panel.reference).label
        axes.axhline(y[panel.reference], color="grey", linestyle="--", label=label)
    if panel.logarithmic:
        axes.set_xscale("log")
        axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.minorticks_off()
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    axes.set(xlabel=panel.x_label or panel.x.replace("_", " ").removeprefix("num "), ylabel=measure)
    if axes.get_legend_handles_labels()[1]:
        axes.legend(frameon=False)
