"""A single page of HTML with tables, charts and texts; its styles and programs are inside.

Documents and names are not trusted. All markup consists of elements, whose text is escaped; data for programs is JSON
that can't end its element, or base64; and a content security policy lets the browser run the page's two programs alone
and load nothing.
"""

import base64
import gzip
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
import pandas as pd
from jaxtyping import Float

from meliad_like.studies.units import Units
from meliad_like.tables import Table

Values = Sequence[float] | np.ndarray | pd.Series | pd.Index
PROGRAMS = ("chart.js", "reader.js")
STEPS_PER_BIT = 100
FULL_COLOURS = (0.1, 0.25, 0.5, 1, 2, 4, 8)
"""The choices for the number of bits at which the colours of a text are strongest."""


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


def paragraph(*children: Element | str) -> Element:
    return tag("p", *children)


def note(text: str, class_: str = "note") -> Element:
    """A small paragraph; of the class `about` it is a fact about the page's documents, otherwise an explanation."""
    return tag("p", text, class_=class_)


def section(title: str, /, *children: Element, level: int = 2, **attributes: str) -> Element:
    return tag("section", tag(f"h{level}", title), *children, **attributes)


@dataclass(frozen=True)
class Series:
    """One line, row of bars, or band of a chart."""

    name: str
    x: Values
    y: Values
    kind: str = "line"
    """`line`, `bars` (each from its x to the next x; the last x is the end of the last bar), or `band` (from `low` to
    y)."""
    colour: str = "1"
    """`1` to `5`, `muted`, or `sign`: the colour of the first model above zero and of the other below."""
    low: Values = ()


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
    marks: Values = ()
    """Vertical lines."""
    document: int | None = None
    """The document whose text a click opens at this place."""


def figure(chart: Chart) -> Element:
    """A chart that the browser draws at the available width."""
    data = json.dumps(_plain(asdict(chart)), separators=(",", ":"))
    return tag(
        "figure",
        tag("figcaption", chart.title),
        tag("div", class_="drawing", role="img", aria_label=f"{chart.title}: {chart.y_label} by {chart.x_label}"),
        *([note(chart.caption)] if chart.caption else []),
        # Without "<" it can't end the element or begin another.
        tag("script", data.replace("<", "\\u003c"), type="application/json"),
        class_="chart",
        **({} if chart.document is None else {"data_document": str(chart.document)}),
    )


def _plain(value: Any) -> Any:
    """The value for JSON, which has no numpy arrays and no NaN; numbers have the digits that can be seen."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | np.ndarray | pd.Series | pd.Index):
        return [_plain(item) for item in value]
    if isinstance(value, float | np.floating):
        return float(f"{value:.6g}") if math.isfinite(value) else None
    return value.item() if isinstance(value, np.generic) else value


def table(header: Sequence[str], rows: Iterable[Sequence[str]], explanation: str = "") -> Element:
    """A table that scrolls where the page is narrow, with a note below it."""
    notes = [note(explanation)] if explanation else []
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


def document_choice(names: Sequence[str], lengths: Iterable[int]) -> Element:
    """A choice of the document whose part (`data-part`, its index) is shown."""
    titles = [f"{name} ({length:,} tokens)" for name, length in zip(names, lengths, strict=True)]
    if len(titles) == 1:
        return note(titles[0], "about")
    options = [tag("option", title, value=str(index)) for index, title in enumerate(titles)]
    return tag("div", tag("label", "document ", tag("select", *options, id="document")), class_="controls")


def document_part(index: int, *children: Element) -> Element:
    """Elements that are shown while this document is chosen."""
    return tag("div", *children, data_part=str(index), **({"hidden": ""} if index else {}))


def pack(units: Units, first_bits: Float[np.ndarray, " units"], other_bits: Float[np.ndarray, " units"]) -> bytes:
    """The text and its losses as `reader.js` unpacks them.

    gzip of the number of units and of bytes (uint32), then of each unit its number of tokens, its number of bytes, and
    the hundredths of a bit that each model paid (uint16, all of one kind together), then the text.
    """
    first, other = (np.clip(np.rint(bits * STEPS_PER_BIT), 0, 2**16 - 1) for bits in (first_bits, other_bits))
    columns = (units.stop - units.first, units.ends - units.starts, first, other)
    head = np.array([len(units.first), len(units.text)], "<u4").tobytes()
    return gzip.compress(head + np.stack(columns).astype("<u2").tobytes() + units.text, mtime=0)


def text_view(first: str, other: str, gains: Float[np.ndarray, " units"], packed: Sequence[bytes]) -> Element:
    """The section with the documents' texts, coloured by the difference of two models' losses.

    Args:
      first, other: labels of the models.
      gains: of all units; the default strength of colours follows from them.
      packed: the documents, from `pack`.
    """
    usual = max(np.quantile(np.abs(gains), 0.99) / 2, 1e-9)
    chosen = min(FULL_COLOURS, key=lambda bits: abs(np.log(bits / usual)))
    options = [
        tag("option", f"{bits:g} bits", value=str(bits), **({"selected": ""} if bits == chosen else {}))
        for bits in FULL_COLOURS
    ]
    scale = tag("span", class_="scale")
    controls = (
        tag("button", "← Back", type="button"),
        tag("button", "On →", type="button"),
        tag("input", id="page", type="range", min="0", value="0", aria_label="page"),
        tag("label", "full colour at ", tag("select", *options, id="full")),
    )
    texts = [base64.b64encode(content).decode() for content in packed]
    return section(
        "The text, coloured by the difference",
        paragraph(
            tag("span", other, class_="other"),
            " predicted better ",
            scale,
            " ",
            tag("span", first, class_="first"),
            " did",
        ),
        tag("div", *controls, class_="controls"),
        tag("p", id="where", class_="note"),
        tag("div", id="text"),
        tag("div", "Point at a word, or tap it.", id="unit", aria_live="polite"),
        *(tag("script", text, type="application/octet-stream", id=f"document-{i}") for i, text in enumerate(texts)),
        id="reader",
        data_first=first,
        data_other=other,
    )


def write_page(path: Path, title: str, lead: Sequence[Element], sections: Sequence[Element]) -> None:
    """Writes the page: a heading, what is to be known first, and sections with headings of their own."""
    style, *programs = (
        resources.files(__package__).joinpath(name).read_text(encoding="utf-8") for name in ("page.css", *PROGRAMS)
    )
    policy = (
        f"default-src 'none'; script-src {' '.join(map(_hash, programs))}; style-src {_hash(style)}; base-uri 'none'; "
        "form-action 'none'"
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


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
