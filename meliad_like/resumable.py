"""Interrupted work that is resumed: checks of its settings, saved JSON, and locks."""

import fcntl
import json
import reprlib
import shutil
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from etils import epath

from meliad_like.errors import UserError, is_full_disk, reading
from meliad_like.remote import write_whole

ABSENT = "absent"
MAX_NAMED = 3
"""The largest number of differences that a message names."""
SHORTENED = reprlib.Repr()
"""The shortened form of values in messages."""
SHORTENED.maxlist, SHORTENED.maxstring, SHORTENED.maxother = 20, 1000, 1000


def check_same(
    place: epath.PathLike,
    saved: Mapping[str, Any],
    current: Mapping[str, Any],
    may_differ: Collection[str] = (),
    way_out: str = "choose another folder, or the same values",
) -> None:
    """Raises a UserError if the work in `place` was done with other settings. It names the first ones, and a `way_out`.

    Args:
      saved, current: the saved and the current settings, nested dictionaries of values that JSON can represent.
      may_differ: dotted names of fields that don't change the results.
    """
    if differing := describe_differences(saved, current, may_differ):
        raise UserError(f"{place} belongs to another config: {differing}; {way_out}")


def describe_differences(saved: Mapping[str, Any], current: Mapping[str, Any], may_differ: Collection[str] = ()) -> str:
    """The first differences between two nested dictionaries, as text: the names with both values, shortened if long."""
    # Converted to JSON and back, so that a tuple equals the list as which it was saved.
    earlier, later = (dict(_flat_fields(json.loads(json.dumps(tree)))) for tree in (saved, current))
    names = (name for name in {**later, **earlier} if name not in may_differ)
    pairs = ((name, earlier.get(name, ABSENT), later.get(name, ABSENT)) for name in names)
    show = SHORTENED.repr
    differing = [f"{name} is {show(old)} there, {show(new)} here" for name, old, new in pairs if old != new]
    more = f" and {len(differing) - MAX_NAMED} more" if len(differing) > MAX_NAMED else ""
    return "; ".join(differing[:MAX_NAMED]) + more


def _flat_fields(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in tree.items():
        if isinstance(value, Mapping):
            yield from _flat_fields(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def write_json(path: epath.PathLike, content: Any) -> None:
    """Writes a JSON file atomically; its folder is created if needed."""
    write_whole(path, json.dumps(content, indent=2) + "\n")


def read_json(path: Path | epath.Path) -> Any:
    """Parses a JSON file; text that is not JSON is a UserError."""
    return parse_json(path.read_bytes(), str(path))


def read_object(path: Path | epath.Path) -> dict[str, Any]:
    """Parses a JSON file; one that can't be read, or does not hold an object, is a UserError."""
    with reading(path, "JSON file"):
        saved = read_json(path)
    if not isinstance(saved, dict):
        raise UserError(f"{path} is not a JSON object")
    return saved


def parse_json(text: str | bytes, place: str) -> Any:
    """Parses JSON text from `place`; text that is not JSON is a UserError."""
    try:
        return json.loads(text)
    # ValueError: not UTF-8, or not JSON. RecursionError: a million brackets.
    except (ValueError, RecursionError) as error:
        raise UserError(f"{place} is not JSON: {error}") from None


def check_fields(saved: Any, types: Mapping[str, type], place: str) -> None:
    """Raises a UserError if `saved`, read from `place`, is not an object that has these fields with these types."""
    if not isinstance(saved, dict):
        raise UserError(f"{place} is damaged: it holds a {type(saved).__name__}, not an object")
    for name, field_type in types.items():
        if type(saved.get(name)) is not field_type:
            value = repr(saved[name]) if name in saved else "missing"
            raise UserError(f"{place} is damaged: {name} is {value[:80]}, not of the type {field_type.__name__}")


@contextmanager
def locked(path: Path, busy: str | None = None) -> Iterator[None]:
    """A lock file: only one process of this machine at a time runs the body of the `with` statement; others wait, or
    are refused with the message `busy` (a UserError). The lock is released when the process ends."""
    path.parent.mkdir(parents=True, exist_ok=True)
    # With "w" a refused process would erase what the owner has written.
    with path.open("a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | (fcntl.LOCK_NB if busy else 0))
        except BlockingIOError:
            raise UserError(busy) from None
        yield


@contextmanager
def whole_folder(folder: Path) -> Iterator[Path]:
    """A temporary folder, which is renamed to `folder` at the end, and deleted if anything fails."""
    incomplete = folder.with_name(f"{folder.name}.incomplete")
    shutil.rmtree(incomplete, ignore_errors=True)  # It may be left over from a killed process.
    incomplete.mkdir()
    try:
        yield incomplete
        incomplete.rename(folder)
    except BaseException as error:
        shutil.rmtree(incomplete, ignore_errors=True)
        if is_full_disk(error):
            raise UserError(f"the disk is full: no room for {folder}") from None
        raise
