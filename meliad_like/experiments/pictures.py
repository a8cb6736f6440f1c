"""Pictures of a table: our figures, and the paper's, which are of other documents."""

import math
from pathlib import Path

import numpy as np
from jaxtyping import Bool, Float
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter

from meliad_like.evaluation.pictures import COLOURS
from meliad_like.experiments.report import Results
from meliad_like.experiments.tables import Panel


def draw(results: Results, path: Path) -> None:
    """Draws our figures and the paper's, on axes of their own where they are of different documents."""
    panels = results.table.panels
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
            places = {"here": grid[0, column], "in the paper": grid[1, column]}
            for where, place in places.items() if panel.paper else [("here", grid[:, column])]:
                _draw_by_figure(picture.add_subplot(place), results, panel, where)
    picture.savefig(path)


def on_front(points: Float[np.ndarray, "points 2"]) -> Bool[np.ndarray, " points"]:
    """The Pareto front: points for which no other point is as small in both coordinates, and smaller in one of them."""
    at_most = (points[None] <= points[:, None]).all(axis=-1)
    smaller = (points[None] < points[:, None]).any(axis=-1)
    return np.logical_not((at_most & smaller).any(axis=1))


def _draw_by_figure(axes: Axes, results: Results, panel: Panel, where: str) -> None:
    """Lines over a figure of the rows."""
    by_name = {row.name: row for row in results.rows}

    def point(name: str, paper_x: float = math.nan) -> tuple[float, float, float]:
        """x, y and the error of y; NaN for what is not known, which is not drawn."""
        if where != "here":
            return paper_x, by_name[name].paper.get(panel.paper, math.nan), 0.0
        return results.mean(name, panel.x), results.mean(name, panel.measure), results.error(name, panel.measure)

    points = np.zeros((0, 2))
    for i, (name, rows) in enumerate(panel.lines.items()):
        line = np.array([point(row, x) for row, x in rows.items() if row in by_name]).reshape(-1, 3)
        known = np.isfinite(line[:, :2]).all(axis=1)
        # The legend has no lines without figures.
        if known.any():
            x, y, error = line.T
            axes.errorbar(x, y, yerr=error, fmt="o-", color=COLOURS[i % len(COLOURS)], capsize=3, label=name)
            points = np.concatenate([points, line[known, :2]])
    if panel.reference in by_name:
        label = by_name[panel.reference].label
        axes.axhline(point(panel.reference)[1], color="grey", linestyle="--", label=label)
    if panel.front:
        x, y = np.array(sorted(points[on_front(points)].tolist())).reshape(-1, 2).T
        axes.plot(x, y, "o:", color="#222222", fillstyle="none", markersize=11, label="Pareto front")
    if panel.logarithmic:
        axes.set_xscale("log")
        ticks: list[float] = []
        for tick in sorted(points[:, 0].tolist()):
            if not ticks or tick > 1.2 * ticks[-1]:
                ticks.append(tick)
        axes.set_xticks(ticks, [_short(tick) for tick in ticks], rotation=30)
        axes.minorticks_off()
    label = panel.x_label or panel.x.replace("_", " ").removeprefix("num ")
    axes.set(xlabel=label, ylabel=panel.measure.replace("_", " "), title=where)
    axes.grid(alpha=0.25)
    if axes.get_legend_handles_labels()[1]:
        axes.legend(frameon=False)


def _draw_by_row(axes: Axes, results: Results, panel: Panel) -> None:
    """One place for each row; the paper's points on an axis of their own at the top, if they can't be compared."""
    places, names = range(len(results.rows)), [row.name for row in results.rows]
    values, errors = results.means.loc[names, panel.measure], results.errors.loc[names, panel.measure]
    axes.errorbar(values, places, xerr=errors, fmt="o", color=COLOURS[0], capsize=3)
    axes.set_yticks(places, [row.label for row in results.rows])
    axes.grid(alpha=0.25)
    papers, label = [row.paper.get(panel.paper, math.nan) for row in results.rows], panel.measure.replace("_", " ")
    if panel.comparable:
        axes.plot(papers, places, "x", color=COLOURS[1])
        axes.set_xlabel(f"{label}, here (dots) and in the paper (crosses)")
        return
    axes.set_xlabel(f"{label}, here (dots)", color=COLOURS[0])
    above = axes.twiny()
    above.plot(papers, places, "x", color=COLOURS[1])
    above.set_xlabel(f"{panel.paper}, in the paper (crosses)", color=COLOURS[1])


def _short(number: float) -> str:
    return EngFormatter(sep="")(float(f"{number:.3g}")) if number >= 10_000 else f"{number:,.0f}"
