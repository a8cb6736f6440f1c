"""A single page of HTML with tables, charts and texts, made of a template; its style and its program are inside.

Documents and names are not trusted. Templates escape all text; the texts of documents are base64; and a content
security policy lets the browser run the page's one program alone and load nothing.
"""

import base64
import gzip
import hashlib
import io
import json
import re
from collections.abc import Iterable
from itertools import cycle
from pathlib import Path
from typing import Any

import jinja2
import matplotlib as mpl
import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, LogLocator, StrMethodFormatter

from meliad_like.evaluation.pictures import COLOURS
from meliad_like.studies.units import Units
from meliad_like.tables import signed

HERE = Path(__file__).parent
VARIABLES = {"#000000": "--muted", "#b0b0b0": "--line"} | {c: f"--c{i}" for i, c in enumerate(COLOURS, start=1)}
"""The variables of `page.css` that replace the colours of matplotlib, so that a chart follows the browser's theme."""
MOST_DOTS = 40


def write_page(folder: Path, name: str, templates: Path = HERE / "templates", **values: Any) -> None:
    """Writes `index.html`, which the template of this name makes of these values."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader([templates, HERE / "templates"]),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.globals["chart"] = chart
    environment.filters |= {"fact": _fact, "fmt": format, "quoted": repr, "signed": signed}
    texts = [(HERE / file).read_text("utf-8") for file in ("page.css", "page.js")]
    style, program = (base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in texts)
    policy = (
        f"default-src 'none'; script-src 'sha256-{program}'; style-src 'sha256-{style}'; base-uri 'none'; "
        "form-action 'none'"
    )
    page = environment.get_template(f"{name}.html").render(style=texts[0], program=texts[1], policy=policy, **values)
    (folder / "index.html").write_text(page, encoding="utf-8")


def _fact(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(value) or "none"
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:.4f}" if isinstance(value, float) else str(value)


def text_view(first: str, other: str, documents: Iterable[tuple[Units, Any, Any]]) -> dict[str, Any]:
    """The documents' texts, coloured by the difference of two models' losses, for the macro `text_view`.

    `first`, `other`: labels of the models; `documents`: units, and the bits that each model pays for them.
    """
    packed, gains = [], []
    for units, first_bits, other_bits in documents:
        columns = (units.first, units.distances(), first_bits.round(2), other_bits.round(2))
        rows = list(zip(units.texts, *(column.tolist() for column in columns), strict=True))
        packed.append(base64.b64encode(gzip.compress(json.dumps(rows).encode(), mtime=0)).decode())
        gains.append(np.abs(other_bits - first_bits))
    # Half of what only one unit in a hundred exceeds.
    full = max(float(np.quantile(np.concatenate(gains), 0.99)) / 2, 0.01)
    return {"first": first, "other": other, "full": full, "documents": packed}


def chart(
    lines: pd.DataFrame, x: str, y: str, steps: bool = False, log_x: bool = False, mark: float | None = None
) -> str:
    """A drawing as SVG, in the colours of the page.

    Args:
        lines: values by their places on the horizontal axis, a line for each column. Columns named `low` and `high` are
            the ends of a band.
        x, y: labels of the axes.
        steps: whether a value is a bar to the next place; the last place is the end of the last bar.
        mark: place of a vertical line.
    """
    figure = Figure(figsize=(6.4, 3))
    # page.js finds a token by its place between these margins.
    axes = figure.add_axes((0.1, 0.14, 0.88, 0.75))
    places = lines.index.to_numpy(float)
    for name, colour in zip(lines.columns.drop(["low", "high"], errors="ignore"), cycle(COLOURS)):
        if steps:
            axes.stairs(lines[name][:-1], places, fill=True, color=colour)
        else:
            marker = "o" if len(lines) <= MOST_DOTS else ""
            axes.plot(places, lines[name], color=colour, marker=marker, markersize=3)
    if "low" in lines:
        axes.fill_between(places, lines["low"], lines["high"], color=COLOURS[0], alpha=0.25, linewidth=0)
    low, high = places.min(initial=np.inf), places.max(initial=-np.inf)
    if low < high:
        axes.set_xlim(low, high)
    if mark is not None and low < mark < high:
        axes.axvline(mark, color="#000000", linewidth=0.5, linestyle=":")
    if log_x:
        axes.set_xscale("log")
        axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if high < 100 * low else (1,)))
        axes.xaxis.set_minor_locator(LogLocator(subs=()))
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    axes.yaxis.set_major_formatter(StrMethodFormatter("{x:,.6g}"))
    axes.set_xlabel(x, loc="right")
    axes.set_title(y, loc="left")
    axes.grid(axis="y")
    axes.set_axisbelow(True)
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    return _svg(figure)


def _svg(figure: Figure) -> str:
    """The figure as an element of a page whose policy forbids styles inside."""
    file = io.StringIO()
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": ""}):
        figure.savefig(file, format="svg", transparent=True)
    svg = file.getvalue()
    svg = re.sub(r"<(metadata|style).*?</\1>", "", svg[svg.index("<svg") :], flags=re.DOTALL)
    # The browser finds no clip path in a part of the page that is hidden.
    svg = re.sub(r' clip-path="[^"]*"', "", svg)
    svg = re.sub(r' style="([^"]*)"', lambda style: re.sub(r"([\w-]+): ([^;]*);?", r' \1="\2"', style[1]), svg)
    for colour, variable in VARIABLES.items():
        svg = svg.replace(colour, f"var({variable})")
    return svg
