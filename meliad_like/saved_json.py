"""Reading of JSON files that may be damaged."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from etils import epath

from meliad_like.errors import UserError


def read_json(path: Path | epath.Path) -> Any:
    """Parses a JSON file; text that is not JSON is a UserError."""
    return parse_json(path.read_bytes(), str(path))


def parse_json(text: str | bytes, place: str) -> Any:
    """Parses JSON text from `place`; text that is not JSON is a UserError."""
    try:
        return json.loads(text)
    # ValueError: not UTF-8, or not JSON. RecursionError: a million brackets.
    except (ValueError, RecursionError) as error:
        raise UserError(f"{place} is not JSON: {error}") from None


def read_json_lines(path: Path | epath.Path) -> tuple[list[str], list[Any]]:
    """The complete lines of a file, and their values; no lines if the file does not exist.

    A last line without a newline, which a killed process has not completed, is left out. A line that is not JSON is a
    UserError with its number.
    """
    text = path.read_text() if path.exists() else ""
    lines = [line for line in text.splitlines(keepends=True) if line.endswith("\n")]
    return lines, [parse_json(line, f"{path}:{number}") for number, line in enumerate(lines, 1)]


def check_fields(saved: Any, types: Mapping[str, type], place: str) -> None:
    """Raises a UserError if `saved`, read from `place`, is not an object that has these fields with these types."""
    if not isinstance(saved, dict):
        raise UserError(f"{place} is damaged: it holds a {type(saved).__name__}, no object")
    for name, wanted in types.items():
        if type(saved.get(name)) is not wanted:
            found = repr(saved[name]) if name in saved else "missing"
            raise UserError(f"{place} is damaged: {name} is {found[:80]}, not of the type {wanted.__name__}")
