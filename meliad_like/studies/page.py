"""A single page of HTML with tables, charts and texts; its styles and programs are inside.

Documents and names are not trusted. All markup consists of elements, whose text is escaped; data for programs is JSON
that can't end its element, or base64; and a content security policy lets the browser run the page's two programs alone
and load nothing.
"""

import base64
import hashlib
import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from importlib import resources
from pathlib import Path
from typing import Any
from xml.etree.ElementTree import Element, tostring

import numpy as np

from meliad_like.tables import Table

PROGRAMS = ("chart.js", "reader.js")


def tag(name: str, /, *children: Element | str, **attributes: str) -> Element:
    """An element. In names of attributes `class_` stands for class, and other underscores stand for hyphens."""
    element = Element(name, {key.rstrip("_").replace("_", "-"): value for key, value in attributes.items()})
    for child in children:
        if isinstance(child, Element):
            element.append(child)
        elif len(element):
            element[-1].tail = (element[-1].tail or "") + child
        else:
            element.text = (element.text or "") + child
    return element


@dataclass(frozen=True)
class Series:
    """One line, row of bars, or band of a chart."""

    name: str
    x: Sequence[float] | np.ndarray
    y: Sequence[float] | np.ndarray
    kind: str = "line"
    """`line`, `bars` (each from its x to the next x; the last x is the end of the last bar), or `band` (from `low` to
    y)."""
    colour: str = "1"
    """`1` to `5`, `muted`, or `sign`: the colour of the first model above zero and of the other below."""
    low: Sequence[float] | np.ndarray = ()


@dataclass(frozen=True)
class Chart:
    """A picture with two axes."""

    title: str
    x_label: str
    y_label: str
    series: Sequence[Series]
    caption: str = ""
    log_x: bool = False
    from_zero: bool = True
    """Whether the vertical axis always includes zero."""
    marks: Sequence[float] | np.ndarray = ()
    """Vertical lines."""
    document: int | None = None
    """The document whose text a click opens at this place."""


def figure(chart: Chart) -> Element:
    """A chart that the browser draws at the available width."""
    attributes = {} if chart.document is None else {"data_document": str(chart.document)}
    caption = [tag("p", chart.caption, class_="note")] if chart.caption else []
    drawing = tag("div", class_="drawing", role="img", aria_label=f"{chart.title}: {chart.y_label} by {chart.x_label}")
    return tag(
        "figure", tag("figcaption", chart.title), drawing, *caption, _json(asdict(chart)), class_="chart", **attributes
    )


def table(header: Sequence[str], rows: Iterable[Sequence[str]], note: str = "") -> Element:
    """A table that scrolls where the page is narrow, with a note below it."""
    notes = [tag("p", note, class_="note")] if note else []
    return tag("div", tag("div", Table("", header, list(rows)).to_html(), class_="scroll"), *notes)


def facts_table(details: Sequence[dict[str, Any]], header: Sequence[str]) -> Element:
    """Facts about models, a column for each; all `details` have the same keys."""

    def shown(value: Any) -> str:
        if isinstance(value, list):
            return ", ".join(value) or "none"
        if isinstance(value, int):
            return f"{value:,}"
        return f"{value:.4f}" if isinstance(value, float) else str(value)

    rows = [(key, *(shown(each[key]) for each in details)) for key in details[0]]
    return tag("div", table(header, rows), class_="facts")


def section(title: str, /, *children: Element, level: int = 2, **attributes: str) -> Element:
    return tag("section", tag(f"h{level}", title), *children, **attributes)


def paragraph(*children: Element | str) -> Element:
    return tag("p", *children)


def document_choice(names: Sequence[str], lengths: Iterable[int]) -> Element:
    """A choice of the document whose part (`data-part`, its index) is shown."""
    titles = [f"{name} ({length:,} tokens)" for name, length in zip(names, lengths, strict=True)]
    if len(titles) == 1:
        return tag("p", titles[0], class_="about")
    options = [tag("option", title, value=str(index)) for index, title in enumerate(titles)]
    return tag("div", tag("label", "document ", tag("select", *options, id="document")), class_="controls")


def document_part(index: int, *children: Element) -> Element:
    """Elements that are shown while this document is chosen."""
    return tag("div", *children, data_part=str(index), **({"hidden": ""} if index else {}))


def blob(name: str, content: bytes) -> Element:
    """Data for a program, found by the id `name`."""
    return tag("script", base64.b64encode(content).decode(), type="application/octet-stream", id=name)


def write_page(path: Path, title: str, lead: Sequence[Element], sections: Sequence[Element]) -> None:
    """Writes the page.

    Args:
      path: of the file.
      title: its heading.
      lead: below the heading.
      sections: with headings of their own.
    """
    style = _read("page.css")
    programs = [_read(name) for name in PROGRAMS]
    policy = "; ".join(
        (
            "default-src 'none'",
            f"script-src {' '.join(map(_hash, programs))}",
            f"style-src {_hash(style)}",
            "base-uri 'none'",
            "form-action 'none'",
        )
    )
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", content=policy, http_equiv="Content-Security-Policy"),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="color-scheme", content="light dark"),
        tag("title", title),
        tag("style", style),
    )
    warning = tag("noscript", paragraph("The pictures and texts of this page need JavaScript; the tables do not."))
    body = tag(
        "body",
        tag("header", tag("h1", title), *lead),
        tag("main", warning, *sections),
        *(tag("script", program) for program in programs),
    )
    page = tostring(tag("html", head, body, lang="en"), encoding="unicode", method="html")
    path.write_text(f"<!doctype html>\n{page}\n", encoding="utf-8")


def _json(value: Any) -> Element:
    text = json.dumps(_plain(value), separators=(",", ":"))
    # Without "<" it can't end the element or begin another.
    return tag("script", text.replace("<", "\\u003c"), type="application/json")


def _plain(value: Any) -> Any:
    """The value for JSON, which has no numpy arrays and no NaN; numbers have the digits that can be seen."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | np.ndarray):
        return [_plain(item) for item in value]
    if isinstance(value, float | np.floating):
        return float(f"{value:.6g}") if math.isfinite(value) else None
    return value.item() if isinstance(value, np.generic) else value


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _read(name: str) -> str:
    return resources.files(__package__).joinpath(name).read_text(encoding="utf-8")
