"""Tables of pandas frames, and numbers as text."""

import math
from collections.abc import Mapping
from typing import Any

import pandas as pd

from meliad_like.tables import Table


def table_of(frame: pd.DataFrame, title: str = "", formats: Mapping[str, str] | None = None) -> Table:
    """A table of the columns of a frame, the first of which names the rows; its index is left out.

    `formats` are format specifications, such as `,.4f`, of the columns of numbers.
    """
    header = tuple(map(str, frame.columns))
    forms = [(formats or {}).get(name, "") for name in header]
    return Table(title, header, [tuple(map(number, row, forms)) for row in frame.itertuples(index=False, name=None)])


def number(value: Any, form: str = "") -> str:
    """Formats a number; text is returned unchanged, and missing or non-finite values become `-`."""
    if isinstance(value, str):
        return value
    return "-" if value is None or not math.isfinite(value) else format(value, form)


def signed(value: float, digits: int) -> str:
    """Formats a difference with its sign and this number of decimals, with a typographic minus."""
    return number(value, f"+,.{digits}f").replace("-", "\N{MINUS SIGN}")


def with_error(mean: float, error: float, form: str) -> str:
    """Formats a mean and its standard error, which is left out if it is not finite."""
    return number(mean, form) + (f" ± {error:.4f}" if math.isfinite(error) else "")
