"""Tables for the terminal and Markdown, made of text or of a pandas DataFrame."""

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from rich.markup import escape
from rich.table import Table as RichTable

if TYPE_CHECKING:
    # Importing it takes half a second.
    import pandas as pd


class Table(NamedTuple):
    """Rows of text under a header. The first column is text and aligned to the left, the others are numbers."""

    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]

    @classmethod
    def of(cls, frame: "pd.DataFrame", title: str = "", formats: Mapping[str, str] | None = None) -> "Table":
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
        return cls(title, tuple(map(str, frame.columns)), list(zip(*columns, strict=True)))

    def to_rich(self) -> RichTable:
        """The table for a rich console."""
        table = RichTable(title=escape(self.title) or None, title_justify="left")
        for i, name in enumerate(self.header):
            table.add_column(escape(name), justify="right" if i else "left")
        for row in self.rows:
            table.add_row(*map(escape, row))
        return table

    def to_markdown(self) -> str:
        """The table as Markdown, with the title as a paragraph above it."""
        alignment = ("---", *["---:"] * (len(self.header) - 1))
        lines = [f"| {' | '.join(row)} |" for row in (self.header, alignment, *self.rows)]
        return "\n".join([*([self.title, ""] if self.title else []), *lines, ""])


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
