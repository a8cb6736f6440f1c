"""Tables of text for the terminal and for Markdown."""

from collections.abc import Sequence
from typing import NamedTuple

from rich.markup import escape
from rich.table import Table as RichTable


class Table(NamedTuple):
    """Rows of text under a header. The first column is text and aligned to the left, the others are numbers."""

    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]

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
