"""Tables of pandas frames, and numbers as text."""

import math
from collections.abc import Mapping
from typing import Any

import pandas as pd

from meliad_like.tables import Table


def table_of(frame: pd.DataFrame, title: str = "", formats: Mapping[str, str] | None = None) -> Table:
    """A table of the columns of a frame, the first of which names the rows.

    Args:
      frame: columns of numbers and of text. Its index is left out.
      title: title above the table.
      formats: format specifications, such as `,.4f`, of the columns of numbers.
    """
    columns = [
        [number(value, (formats or {}).get(str(name), "")) for value in frame.iloc[:, i]]
        for i, name in enumerate(frame.columns)
    ]
    return Table(title, tuple(map(str, frame.columns)), list(zip(*columns, strict=True)))


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
