"""Work that is interrupted and resumed: whose work a folder holds, locks, and files that are whole at any moment."""

import fcntl
import json
import shutil
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from etils import epath

from meliad_like.errors import UserError, is_full_disk
from meliad_like.remote import write_whole
from meliad_like.saved_json import read_json_lines

ABSENT = "absent"
MAX_NAMED = 3
"""Differences that a message names."""


def refuse_differences(place: epath.PathLike, differences: Iterable[tuple[str, Any, Any]], way_out: str) -> None:
    """
    Args:
      place: file or folder that holds earlier work.
      differences: of its settings and the present ones: (name, old value, new value).
      way_out: what to do about it.

    Raises:
      UserError: there are differences; names the first ones with both values.
    """
    if not (differences := list(differences)):
        return
    named = "; ".join(f"{name} is {old!r} there, {new!r} here" for name, old, new in differences[:MAX_NAMED])
    more = f" and {len(differences) - MAX_NAMED} more" if len(differences) > MAX_NAMED else ""
    raise UserError(f"{place} belongs to another config: {named}{more}; {way_out}")


def check_same(
    place: epath.PathLike,
    saved: Mapping[str, Any],
    wanted: Mapping[str, Any],
    may_differ: Collection[str] = (),
    way_out: str = "choose another folder, or the same values",
) -> None:
    """Refuses to resume work that was done with other settings.

    Args:
      place: file or folder that holds the work.
      saved, wanted: the settings of that work and the present ones, nested dictionaries of what JSON holds.
      may_differ: dotted names of fields, or of whole groups (`config.training.num_steps`, `config.mesh`), that don't
        change the results.
      way_out: what to do about a difference.

    Raises:
      UserError: as `refuse_differences`.
    """
    # Through JSON, so that a tuple equals the list that it was saved as.
    old, new = (dict(_flat_fields(json.loads(json.dumps(tree)))) for tree in (saved, wanted))
    names = (name for name in {**new, **old} if not any(f"{name}.".startswith(f"{free}.") for free in may_differ))
    pairs = ((name, old.get(name, ABSENT), new.get(name, ABSENT)) for name in names)
    refuse_differences(place, (pair for pair in pairs if pair[1] != pair[2]), way_out)


def _flat_fields(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in tree.items():
        if isinstance(value, Mapping):
            yield from _flat_fields(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def write_json(path: epath.PathLike, content: Any) -> None:
    """Writes JSON of which, at any moment, either all is there or what was there before."""
    write_whole(path, json.dumps(content, indent=2) + "\n")


@contextmanager
def locked(path: Path, busy: str | None = None) -> Iterator[None]:
    """Lets one process of this machine at a time run what is in the `with`.

    Args:
      path: the lock; its folder is made if needed. The system frees it however the process ends.
      busy: a message for other processes, which are refused; None: they wait.

    Raises:
      UserError: `busy`, where another process has the lock.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | (fcntl.LOCK_NB if busy else 0))
        except BlockingIOError:
            raise UserError(busy) from None
        yield


@contextmanager
def whole_folder(folder: Path) -> Iterator[Path]:
    """A new folder beside `folder`, which is renamed to it at the end, and deleted if anything fails.

    Raises:
      UserError: the disk is full.
    """
    incomplete = folder.with_name(f"{folder.name}.incomplete")
    shutil.rmtree(incomplete, ignore_errors=True)  # left by a process that was killed
    incomplete.mkdir()
    try:
        yield incomplete
        incomplete.rename(folder)
    except BaseException as error:
        shutil.rmtree(incomplete, ignore_errors=True)
        if is_full_disk(error):
            raise UserError(f"the disk is full: no room for {folder}") from None
        raise


class Journal:
    """Finished parts of some work, a line of JSON each, in a file whose first line says what decides the results."""

    def __init__(self, path: Path, identity: Mapping[str, Any], *, replace: bool = False):
        """Opens the file, or creates it.

        Args:
          path: its folder is made if needed.
          identity: all that decides the results, for JSON.
          replace: whether the results of other settings are replaced.

        Raises:
          UserError: the file has results of other settings that are not to be replaced, or a line is no JSON.
        """
        self._path = path
        lines, rows = read_json_lines(path)
        first = json.dumps(identity) + "\n"
        if rows and not replace:
            check_same(path, rows[0], identity)
        if not rows or rows[0] != json.loads(first):
            lines, rows = [first], [identity]
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, "".join(lines))
        self.rows: list[Any] = rows[1:]
        """The parts that were finished before."""

    def write(self, row: Any) -> None:
        """Adds a part."""
        with self._path.open("a") as file:
            file.write(json.dumps(row) + "\n")
