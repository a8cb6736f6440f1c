"""The results of a study as a folder: a CSV file of each table, a PNG file of each chart, a summary, a page of all.

Documents and names are not trusted: the page's template escapes all text, and has no program.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import cycle
from pathlib import Path
from typing import Any, NamedTuple

import jinja2
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, LogLocator

from meliad_like.remote import write_whole
from meliad_like.resumable import write_json
from meliad_like.studies.frames import table_of
from meliad_like.studies.pictures import COLOURS, save
from meliad_like.studies.readings import Selection

TEMPLATE = Path(__file__).with_name("page.html")
MOST_DOTS = 40


class Numbers(NamedTuple):
    """A table, which is written to `name.csv`."""

    name: str
    title: str
    """The heading on the page."""
    frame: pd.DataFrame
    """The columns of the table; the index is left out."""
    formats: Mapping[str, str] = {}
    """Format specifications of columns on the page."""
    note: str = ""
    shown: bool = True
    """Whether the page has it too; tables of single tokens would be too long."""


class Chart(NamedTuple):
    """A drawing of lines, which is written to `name.png`."""

    name: str
    title: str
    lines: pd.DataFrame
    """Values by their places on the horizontal axis, a line for each column. Columns named `low` and `high` are the
    ends of a band."""
    x: str
    """The label of the horizontal axis."""
    y: str
    note: str = ""
    steps: bool = False
    """Whether a value is a bar to the next place; the last place is the end of the last bar."""
    log_x: bool = False
    mark: float | None = None
    """The place of a vertical line."""


@dataclass(frozen=True)
class Study:
    """The results of a study."""

    title: str
    lead: Sequence[str]
    """The paragraphs at the beginning of the page."""
    parts: Sequence[Numbers | Chart]
    selection: Selection
    """The documents that were read."""
    details: Sequence[Mapping[str, Any]]
    """Facts about each model; all have the same keys."""
    summary: Mapping[str, Any] = field(default_factory=dict)
    """Further figures for `summary.json`."""
    remarks: str = ""


def write_study(study: Study, folder: Path) -> None:
    """Writes `index.html`, `summary.json`, and a file for each table and chart into a folder."""
    selection, shown = study.selection, []
    for part in study.parts:
        if isinstance(part, Chart):
            save(draw(part), folder / f"{part.name}.png")
            shown.append(part._asdict() | {"file": f"{part.name}.png"})
            continue
        write_whole(folder / f"{part.name}.csv", part.frame.to_csv(index=False))
        if part.shown:
            table = table_of(part.frame, part.title, part.formats)
            shown.append(table._asdict() | {"note": part.note, "file": f"{part.name}.csv"})
    facts = [(name, *(_fact(model[name]) for model in study.details)) for name in study.details[0]]
    note = f"Documents: {selection.description}."
    shown.append({"title": "What was read", "header": (), "rows": facts, "note": note, "file": "summary.json"})
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    page = environment.from_string(TEMPLATE.read_text("utf-8")).render(study=study, parts=shown)
    write_whole(folder / "index.html", page)
    about = {"title": study.title, "models": study.details, "split": selection.split_name}
    write_json(folder / "summary.json", about | {"store": selection.store.fingerprint, **study.summary})


def _fact(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(value) or "none"
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:.4f}" if isinstance(value, float) else str(value)


def draw(chart: Chart) -> Figure:
    """Draws a chart with its legend."""
    figure = Figure(figsize=(8, 4), dpi=120, layout="constrained")
    axes, lines, places = figure.subplots(), chart.lines, chart.lines.index.to_numpy(float)
    axes.margins(x=0)
    names = lines.columns.drop(["low", "high"], errors="ignore")
    for name, colour in zip(names, cycle(COLOURS)):
        if chart.steps:
            axes.fill_between(places, lines[name], step="post", color=colour, linewidth=0, label=str(name))
        else:
            axes.plot(places, lines[name], ".-" if len(lines) <= MOST_DOTS else "-", color=colour, label=str(name))
    if "low" in lines:
        band = {"color": COLOURS[0], "alpha": 0.25, "linewidth": 0, "label": "90 % interval over documents"}
        axes.fill_between(places, lines["low"], lines["high"], **band)
    if chart.mark is not None:
        axes.axvline(chart.mark, color="grey", linewidth=0.5, linestyle=":")
    if chart.log_x:
        axes.set_xscale("log")
        axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if places.max() < 100 * places.min() else (1,)))
        axes.minorticks_off()
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    axes.set(xlabel=chart.x, ylabel=chart.y)
    axes.grid(axis="y", alpha=0.5)
    axes.spines[:].set_visible(False)
    if len(lines.columns) > 1:
        figure.legend(loc="outside lower center", ncols=2, frameon=False)
    return figure
