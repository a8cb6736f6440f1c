"""Pictures of a table: our figures, and the paper's, which are of other documents."""

import math
from pathlib import Path

import numpy as np
from jaxtyping import Bool, Float
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from meliad_like.evaluation.pictures import COLOURS
from meliad_like.experiments.results import Results
from meliad_like.experiments.tables import Panel, Row, Table

FRONT = "#222222"


def draw(table: Table, results: Results, path: Path) -> None:
    """Draws our figures and the paper's, on axes of their own where they are of different documents."""
    panels = table.panels
    if not panels[0].x:
        picture = Figure(figsize=(4.2 * len(panels) + 3, 0.32 * len(results.rows) + 1.4), dpi=120, layout="constrained")
        row_of_axes = np.atleast_1d(picture.subplots(1, len(panels), sharey=True))
        row_of_axes[0].invert_yaxis()
        for axes, panel in zip(row_of_axes, panels):
            _draw_by_row(axes, results, panel)
    else:
        picture = Figure(figsize=(4.6 * len(panels) + 0.5, 7), dpi=120, layout="constrained")
        grid = picture.add_gridspec(2, len(panels))
        for column, panel in enumerate(panels):
            if panel.paper:
                _draw_by_figure(picture.add_subplot(grid[0, column]), results, panel, "here")
                _draw_by_figure(picture.add_subplot(grid[1, column]), results, panel, "in the paper")
            else:
                _draw_by_figure(picture.add_subplot(grid[:, column]), results, panel, "here")
    picture.savefig(path)


def on_front(points: Float[np.ndarray, "points 2"]) -> Bool[np.ndarray, " points"]:
    """The Pareto front: points for which no other point is as small in both coordinates, and smaller in one of them."""
    at_most = (points[None] <= points[:, None]).all(axis=-1)
    smaller = (points[None] < points[:, None]).any(axis=-1)
    return np.logical_not((at_most & smaller).any(axis=1))


def _draw_by_figure(axes: Axes, results: Results, panel: Panel, where: str) -> None:
    """Lines over a figure of the rows, and single rows."""
    here = where == "here"
    by_name = {row.name: row for row in results.rows}
    members = {name: [row for row in results.rows if row.series == name] for name in panel.series}
    members |= {name: [by_name[row] for row in rows if row in by_name] for name, rows in panel.lines.items()}
    lines = {
        name: np.array([_point(results, row, panel, here) for row in rows]).reshape(-1, 3)
        for name, rows in members.items()
    }
    for i, (name, line) in enumerate(lines.items()):
        # The legend has no series without rows, and none that the paper gives no figures for.
        if len(line) and (panel.series or np.isfinite(line[:, :2]).all(axis=1).any()):
            x, y, error = line.T
            axes.errorbar(x, y, yerr=error, fmt="o-", color=COLOURS[i % len(COLOURS)], capsize=3, label=name)
    for i, (name, label) in enumerate(panel.points.items()):
        if name in by_name:
            x, y, error = _point(results, by_name[name], panel, here)
            axes.errorbar([x], [y], yerr=[error], fmt="o", color=COLOURS[i], capsize=3, label=label)
    if panel.reference in by_name:
        row = by_name[panel.reference]
        height = results.mean(row, panel.measure) if here else row.paper[panel.paper]
        axes.axhline(height, color="grey", linestyle="--", label=row.label)
    if panel.front:
        points = np.concatenate([line[:, :2] for line in lines.values()] or [np.zeros((0, 2))])
        points = points[np.isfinite(points).all(axis=1)]
        front = points[on_front(points)]
        front = front[np.argsort(front[:, 0])]
        axes.plot(*front.T, "o", color=FRONT, fillstyle="none", markersize=11, linestyle=":", label="Pareto front")
    _label(axes, panel, where)


def _point(results: Results, row: Row, panel: Panel, here: bool) -> tuple[float, float, float]:
    """x, y and the error of y; NaN for what is not known."""
    if not here:
        return panel.paper_x.get(row.name, math.nan), row.paper.get(panel.paper, math.nan), 0.0
    x = results.mean(row, panel.x) / panel.unit
    return x, results.mean(row, panel.measure), _drawn_error(results, row, panel.measure)


def _label(axes: Axes, panel: Panel, where: str) -> None:
    if panel.logarithmic:
        axes.set_xscale("log")
        ticks: list[float] = []
        places = [np.asarray(line.get_xdata()) for line in axes.lines if line.get_linestyle() != "--"]
        for x in sorted(float(x) for line in places for x in line if math.isfinite(x)):
            if not ticks or x > 1.2 * ticks[-1]:
                ticks.append(x)
        axes.set_xticks(ticks, [_short(x) for x in ticks], rotation=30)
        axes.minorticks_off()
    label = panel.x_label or panel.x.replace("_", " ").removeprefix("num ")
    axes.set(xlabel=label, ylabel=panel.measure.replace("_", " "), title=where)
    axes.grid(alpha=0.25)
    if axes.get_legend_handles_labels()[1]:
        axes.legend(frameon=False)


def _draw_by_row(axes: Axes, results: Results, panel: Panel) -> None:
    """One place for each row; the paper's points on an axis of their own at the top, if they can't be compared."""
    places = range(len(results.rows))
    errors = [_drawn_error(results, row, panel.measure) for row in results.rows]
    values = [results.mean(row, panel.measure) for row in results.rows]
    axes.errorbar(values, places, xerr=errors, fmt="o", color=COLOURS[0], capsize=3)
    axes.set_yticks(places, [row.label for row in results.rows])
    axes.grid(alpha=0.25)
    papers = [row.paper.get(panel.paper, math.nan) for row in results.rows]
    label = panel.measure.replace("_", " ")
    if panel.comparable:
        axes.plot(papers, places, "x", color=COLOURS[1])
        axes.set_xlabel(f"{label}, here (dots) and in the paper (crosses)")
        return
    axes.set_xlabel(f"{label}, here (dots)", color=COLOURS[0])
    above = axes.twiny()
    above.plot(papers, places, "x", color=COLOURS[1])
    above.set_xlabel(f"{panel.paper}, in the paper (crosses)", color=COLOURS[1])


def _drawn_error(results: Results, row: Row, measure: str) -> float:
    error = results.error(row, measure)
    return 0.0 if math.isnan(error) else error


def _short(number: float) -> str:
    for unit, name in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= 10 * unit or (number >= unit and name != "k"):
            return f"{number / unit:.3g}{name}"
    return f"{number:,.0f}"
