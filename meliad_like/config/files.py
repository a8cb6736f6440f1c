"""The files that `--gin_file` and `include` name: gin files, and rows of tables, which stand for gin files.

`block_recurrent/table3/states_128` is the row `states_128` of `block_recurrent/table3.csv`. Its column `files` has what
it includes, separated by spaces, and `bindings` its own, separated by semicolons. Other columns are for `experiments`.
"""

import csv
import difflib
import itertools
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

from etils import epath

from meliad_like.errors import UserError, reading

_PACKAGE = Path(__file__).parent.parent


class Row(NamedTuple):
    """A row of a table."""

    files: tuple[str, ...]
    """Names of the gin files and other rows that it includes."""
    bindings: tuple[str, ...]
    """The bindings of the row, which win over those of its files."""
    cells: Mapping[str, str]
    """The cells of the row that are not empty, by the name of the column."""


def gin_root() -> epath.Path:
    """The folder of the shipped gin files: `gin/` of the checkout, or its copy inside an installed package."""
    installed = _PACKAGE / "gin_files"
    return epath.Path(installed if installed.is_dir() else _PACKAGE.parent / "gin")


def _shipped(suffix: str) -> list[str]:
    root = Path(gin_root())
    return sorted(path.relative_to(root).as_posix() for path in root.rglob(f"*{suffix}"))


def shipped_files() -> list[str]:
    """Names of all shipped gin files, as `--gin_file` takes them."""
    return _shipped(".gin")


def shipped_rows() -> list[str]:
    """Names of all rows of the shipped tables, as `--gin_file` takes them."""
    tables = [name.removesuffix(".csv") for name in _shipped(".csv")]
    return [f"{table}/{row}" for table in tables for row in read_table(table)]


def find(name: str) -> tuple[epath.Path, Row | None]:
    """The gin file called `name` and None, or the file of a table and the row called `name`.

    As given (absolute, or from the current folder), else among the shipped ones. Raises a UserError if there is none.
    """
    if (path := _existing(name)) and path.suffix != ".csv":
        return path, None
    table, _, row = name.rpartition("/")
    if path:
        raise UserError(f"{name} is a table: name one of its rows, {name.removesuffix('.csv')}/ROW")
    if not (path := _existing(f"{table}.csv")):
        in_current_folder = [path.as_posix() for path in Path().glob("*.gin")]
        hint = nearest(name, [*shipped_files(), *shipped_rows(), *in_current_folder])
        raise UserError(f"no gin file or row {name!r}{hint}")
    if row not in (rows := read_table(table)):
        raise UserError(f"{table}.csv has no row {row!r}{nearest(row, rows)}")
    return path, rows[row]


def _existing(name: str) -> epath.Path | None:
    return next((path for path in (epath.Path(name), gin_root() / name) if path.is_file()), None)


def read_table(name: str) -> dict[str, Row]:
    """The rows of a table by their names; `name` is the name of its file without `.csv`."""
    if not (path := _existing(f"{name}.csv")):
        raise UserError(f"no table {name}.csv")
    with reading(path, "text in UTF-8", UnicodeDecodeError):
        lines = csv.DictReader(path.read_text().splitlines())
    rows: dict[str, Row] = {}
    for line in lines:
        row = f"{name}/{line.get('name')}"
        if None in line or None in line.values() or not {"name", "files", "bindings"} <= line.keys():
            raise UserError(f"{row}: a row has as many cells as the header, among them name, files and bindings")
        if line["name"] in rows:
            raise UserError(f"{row}: the table has two rows of this name")
        bindings = tuple(map(str.strip, line["bindings"].split(";"))) if line["bindings"] else ()
        cells = {column: cell for column, cell in line.items() if cell}
        rows[line["name"]] = Row(tuple(line["files"].split()), bindings, cells)
    return rows


def about(name: str) -> str:
    """The first sentence of the comment at the beginning of a gin file; of a row its label."""
    path, row = find(name)
    if row:
        return row.cells["label"]
    comment = itertools.takewhile(lambda line: line.startswith("#"), path.read_text().splitlines())
    text = " ".join(line.removeprefix("#").strip() for line in comment)
    return re.split(r"(?<=\.) (?=[A-Z(])", text, maxsplit=1)[0]


def nearest(name: str, candidates: Iterable[str]) -> str:
    """` (nearest: ...)` to close a message about an unknown name."""
    # Folder and suffix are alike for all gin files, so they would drown the difference between the names themselves.
    by_stem = [candidate for candidate in candidates if Path(candidate).stem == Path(name).stem]
    matches = by_stem or difflib.get_close_matches(name, candidates, n=1, cutoff=0)
    return f" (nearest: {matches[0]})" if matches else ""
