"""A single page of HTML with tables, charts and texts, made of a template; its styles and programs are inside.

Documents and names are not trusted. Templates escape all text; data for programs is JSON that can't end its element, or
base64; and a content security policy lets the browser run the page's two programs alone and load nothing.
"""

import base64
import gzip
import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
import pandas as pd
from jaxtyping import Float
from markupsafe import Markup

from meliad_like.studies.units import Units
from meliad_like.tables import signed

PROGRAMS = ("chart.js", "reader.js")
STEPS_PER_BIT = 100
FULL_COLOURS = (0.1, 0.25, 0.5, 1, 2, 4, 8)
"""The choices for the number of bits at which the colours of a text are strongest."""

Values = Sequence[float] | np.ndarray | pd.Series | pd.Index


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
    """A picture with two axes, which the browser draws at the available width (`chart.js`)."""

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


class TextView:
    """The documents' texts, coloured by the difference of two models' losses (`reader.js`)."""

    def __init__(self, first: str, other: str, documents: Sequence[tuple[Units, np.ndarray, np.ndarray]]):
        """`first`, `other`: labels of the models; `documents`: units, and the bits that each model pays for them."""
        self.first, self.other, self.strengths = first, other, FULL_COLOURS
        gains = np.concatenate([other_bits - first_bits for _, first_bits, other_bits in documents])
        usual = max(np.quantile(np.abs(gains), 0.99) / 2, 1e-9)
        self.strength = min(FULL_COLOURS, key=lambda bits: abs(np.log(bits / usual)))
        self.packed = [base64.b64encode(_pack(*document)).decode() for document in documents]


def _pack(units: Units, first_bits: Float[np.ndarray, " units"], other_bits: Float[np.ndarray, " units"]) -> bytes:
    """The text and its losses as `reader.js` unpacks them.

    gzip of the number of units and of bytes (uint32), then of each unit its number of tokens, its number of bytes, and
    the hundredths of a bit that each model paid (uint16, all of one kind together), then the text.
    """
    first, other = (np.clip(np.rint(bits * STEPS_PER_BIT), 0, 2**16 - 1) for bits in (first_bits, other_bits))
    columns = (units.stop - units.first, units.ends - units.starts, first, other)
    head = np.array([len(units.first), len(units.text)], "<u4").tobytes()
    return gzip.compress(head + np.stack(columns).astype("<u2").tobytes() + units.text, mtime=0)


def write_page(path: Path, template: str, room: str = __package__, **values: Any) -> None:
    """Writes the page that a template makes of these values and its title; templates are in a folder of the room."""
    style, *programs = (
        resources.files(__package__).joinpath(name).read_text(encoding="utf-8") for name in ("page.css", *PROGRAMS)
    )
    hashes = [f"'sha256-{base64.b64encode(hashlib.sha256(p.encode()).digest()).decode()}'" for p in (style, *programs)]
    policy = (
        f"default-src 'none'; script-src {' '.join(hashes[1:])}; style-src {hashes[0]}; base-uri 'none'; "
        "form-action 'none'"
    )
    page = _environment(room).get_template(template)
    path.write_text(page.render(style=style, programs=programs, policy=policy, **values), encoding="utf-8")


@cache
def _environment(room: str) -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.ChoiceLoader([jinja2.PackageLoader(room) for room in dict.fromkeys((room, __package__))]),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "fact": _fact,
        "fmt": format,
        "json": _json,
        "quoted": lambda text: repr(text).strip("'"),
        "signed": signed,
        "words": lambda name: name.replace("_", " "),
    }
    return environment


def _fact(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(value) or "none"
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:.4f}" if isinstance(value, float) else str(value)


def _json(chart: Chart) -> Markup:
    # Without "<" it can't end the element or begin another.
    return Markup(json.dumps(_plain(asdict(chart)), separators=(",", ":")).replace("<", "\\u003c"))


def _plain(value: Any) -> Any:
    """The value for JSON, which has no numpy arrays and no NaN; numbers have the digits that can be seen."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | np.ndarray | pd.Series | pd.Index):
        return [_plain(item) for item in value]
    if isinstance(value, float | np.floating):
        return float(f"{value:.6g}") if math.isfinite(value) else None
    return value.item() if isinstance(value, np.generic) else value
