"""A journal of the finished parts of some work, from which the work is resumed."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from etils import epath

from meliad_like.remote import write_whole
from meliad_like.resumable import check_same, parse_json


class Journal:
    """A file of finished parts of some work, one line of JSON each, after a line that identifies the work."""

    def __init__(self, path: Path, identity: Mapping[str, Any], *, replace: bool = False):
        """Opens the file or creates it. `identity` is everything that determines the results, for JSON.

        Results of other settings are an error, unless `replace` is true.
        """
        self._path = path
        lines, rows = read_json_lines(path)
        first = json.dumps(identity) + "\n"
        if rows and not replace:
            check_same(path, rows[0], identity)
        if not rows or rows[0] != json.loads(first):
            lines, rows = [first], [identity]
        write_whole(path, "".join(lines))
        self.rows: list[Any] = rows[1:]
        """The parts that were finished before."""

    def write(self, row: Any) -> None:
        """Adds a finished part."""
        with self._path.open("a") as file:
            file.write(json.dumps(row) + "\n")


def read_json_lines(path: Path | epath.Path) -> tuple[list[str], list[Any]]:
    """The complete lines of a file, and their values; no lines if the file does not exist.

    A last line without a newline, which a killed process has not completed, is left out. A line that is not JSON is a
    UserError with its number.
    """
    text = path.read_text() if path.exists() else ""
    lines = [line for line in text.splitlines(keepends=True) if line.endswith("\n")]
    return lines, [parse_json(line, f"{path}:{number}") for number, line in enumerate(lines, 1)]
