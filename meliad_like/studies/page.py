"""A single page of HTML with tables, charts and texts, made of a template; its style and its program are inside.

Documents and names are not trusted. Templates escape all text; the texts of documents are base64; and a content
security policy lets the browser run the page's one program alone and load nothing.
"""

import base64
import gzip
import hashlib
import io
import json
from collections.abc import Iterable, Mapping
from itertools import cycle
from pathlib import Path
from typing import Any

import jinja2
import matplotlib as mpl
import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, LogLocator

from meliad_like.evaluation.pictures import COLOURS
from meliad_like.studies.units import Units
from meliad_like.tables import signed

HERE = Path(__file__).parent
MOST_DOTS = 40


def write_page(
    folder: Path, name: str, summary: Mapping[str, Any], templates: Path = HERE / "templates", **values: Any
) -> None:
    """Writes `index.html`, which the template of this name makes of these values, and `summary.json`.

    The summary also gets the values `title` and `details`, the facts about each model, and which documents were read.
    """
    summary = {"title": values["title"], "models": values["details"], **summary}
    if (selection := values["selection"]) is not None:
        summary |= {"split": selection.split_name, "store": selection.store.fingerprint}
    (folder / "summary.json").write_text(json.dumps(summary, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
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
        f"default-src 'none'; img-src data:; script-src 'sha256-{program}'; style-src 'sha256-{style}'; "
        "base-uri 'none'; form-action 'none'"
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
    """A drawing, as the address of an image that it contains.

    Args:
        lines: values by their places on the horizontal axis, a line for each column. Columns named `low` and `high` are
            the ends of a band.
        x, y: labels of the axes.
        steps: whether a value is a bar to the next place; the last place is the end of the last bar.
        mark: place of a vertical line.
    """
    figure, places = Figure(figsize=(6.4, 3)), lines.index.to_numpy(float)
    # page.js finds a token by its place between these margins.
    axes = figure.add_axes((0.1, 0.14, 0.88, 0.75))
    axes.margins(x=0)
    for name, colour in zip(lines.columns.drop(["low", "high"], errors="ignore"), cycle(COLOURS)):
        if steps:
            axes.fill_between(places, lines[name], step="post", color=colour, linewidth=0)
        else:
            axes.plot(places, lines[name], ".-" if len(lines) <= MOST_DOTS else "-", color=colour)
    if "low" in lines:
        axes.fill_between(places, lines["low"], lines["high"], color=COLOURS[0], alpha=0.25, linewidth=0)
    if mark is not None:
        axes.axvline(mark, color="grey", linewidth=0.5, linestyle=":")
    if log_x:
        axes.set_xscale("log")
        axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if places.max() < 100 * places.min() else (1,)))
        axes.minorticks_off()
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    axes.set_xlabel(x, loc="right")
    axes.set_title(y, loc="left", fontsize="medium")
    axes.grid(axis="y", alpha=0.5)
    axes.spines[:].set_visible(False)
    file = io.BytesIO()
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": ""}):
        figure.savefig(file, format="svg", transparent=True, metadata={"Date": None})
    return f"data:image/svg+xml;base64,{base64.b64encode(file.getvalue()).decode()}"
