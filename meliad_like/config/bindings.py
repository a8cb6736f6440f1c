"""Reads gin syntax into a flat table of bindings that remember the file and line they come from.

Only gin's parser is used, not its global registry. There, a later binding silently replaces an earlier one and a
binding nobody consumes is silently dropped; both have trained the wrong model before anybody noticed.
"""

import difflib
import enum
import io
import itertools
import re
import tokenize
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from etils import epath
from gin import config_parser

from meliad_like.errors import UserError

BASE = "base.gin"
_PACKAGE = Path(__file__).parent.parent


def gin_root() -> epath.Path:
    """The folder of the shipped gin files: `gin/` of the checkout, or its copy inside an installed package."""
    for folder in (_PACKAGE.parent / "gin", _PACKAGE / "gin_files"):
        if (folder / BASE).is_file():
            return epath.Path(folder)
    raise UserError(f"there is no {BASE} next to {_PACKAGE}: the installation of meliad_like lacks its gin files")


def shipped_files() -> list[str]:
    """Names of all shipped gin files, as `--gin_file` takes them."""
    root = Path(gin_root())
    return sorted(path.relative_to(root).as_posix() for path in root.rglob("*.gin"))


def about(name: str) -> str:
    """The first sentence of the comment at the beginning of a gin file."""
    lines = find_file(name).read_text().splitlines()
    comment = itertools.takewhile(lambda line: line.startswith("#"), lines)
    text = " ".join(line.removeprefix("#").strip() for line in comment)
    return re.split(r"(?<=\.) (?=[A-Z(])", text, maxsplit=1)[0]


def find_file(name: str) -> epath.Path:
    """The gin file called `name`: as given (absolute, or from the current folder), else among the shipped ones."""
    for path in (epath.Path(name), gin_root() / name):
        if path.is_file():
            return path
    in_current_folder = [path.as_posix() for path in Path().glob("*.gin")]
    raise UserError(f"no gin file {name!r}{nearest(name, shipped_files() + in_current_folder)}")


def nearest(name: str, candidates: list[str]) -> str:
    """` (nearest: ...)` to close a message about an unknown name."""
    # Folder and suffix are alike for all gin files, so they would drown the difference between the names themselves.
    match = difflib.get_close_matches(name, candidates, n=1, cutoff=0)
    by_stem = [candidate for candidate in candidates if Path(candidate).stem == Path(name).stem]
    return f" (nearest: {(by_stem or match)[0]})" if by_stem or match else ""


class Rank(enum.IntEnum):
    """The precedence of bindings, the highest first."""

    PARAMETER = 0
    FILE = 1
    DEFAULT = 2
    """A binding of `base.gin`, which is always read."""


@dataclass(frozen=True)
class Binding:
    """A value, and where it was bound (`FILE:LINE`, or the `--gin_param` itself)."""

    value: Any
    origin: str
    rank: Rank = Rank.FILE
    must_be_read: bool = True
    """Whether it is an error if nothing reads it."""
    replaced: Any = None
    """The value in a file that a parameter has replaced."""


# From `Class.parameter`, or the bare name of a macro, to its binding.
Bindings = dict[str, Binding]


class _Placeholder(str):
    """A macro (%NAME) or a reference (@NAME) in a value, with its sign."""

    __repr__ = str.__str__


class _Delegate(config_parser.ParserDelegate):
    # Both return placeholders: gin rewrites exceptions raised here into messages of several lines.
    def configurable_reference(self, scoped_configurable_name: str, evaluate: bool) -> _Placeholder:
        return _Placeholder(f"@{scoped_configurable_name}")

    def macro(self, macro_name: str) -> _Placeholder:
        return _Placeholder(f"%{macro_name}")


def collect(gin_files: Sequence[str], gin_params: Sequence[str], values: Mapping[str, Any] | None = None) -> Bindings:
    """All bindings of a run, macros replaced by their values.

    Precedence: (1) `--gin_param`, the last one first; (2) `values` by `Class.field`, which nothing needs to read; (3)
    `--gin_file`s, whose order does not matter because two that differ are an error, except that a file wins over those
    that it includes; (4) `base.gin`, which is always read. A macro that is not bound, or that nothing reads, is an
    error.
    """
    parameters: Bindings = {}
    for text in gin_params:
        parameters |= _merge(_parse(text, f"--gin_param={text}", Rank.PARAMETER)[0])
    computed = {key: Binding(value, "the scale", must_be_read=False) for key, value in (values or {}).items()}
    base = _merge(_parse((gin_root() / BASE).read_text(), BASE, Rank.DEFAULT)[0])
    files = _Files({*parameters, *computed})
    paths = {name: find_file(name) for name in gin_files}
    tables = {path.resolve(): files.read(path, name) for name, path in paths.items()}
    of_files = files.merge(table for path, table in tables.items() if path not in files.included)
    replacing = {key: replace(parameters[key], replaced=of_files[key].value) for key in parameters.keys() & of_files}
    bindings = base | of_files | parameters | replacing

    read: set[str] = set()
    resolved = {
        key: replace(binding, value=_resolve(binding.value, bindings, read, binding.origin))
        for key, binding in bindings.items()
        if "." in key
    }
    for name, binding in bindings.items():
        # Size files set base.gin's macros for rows that may not be there; nobody passes --gin_param for that.
        optional = name in base and name not in parameters
        if "." not in name and name not in read and not optional:
            known = [key for key in base if "." not in key]
            hint = "" if name in base else nearest(name, known)
            raise UserError(f"{binding.origin}: nothing reads {name}{hint}")
    return resolved | {key: binding for key, binding in computed.items() if key not in parameters}


class _Files:
    """Reads gin files, and the files that they include."""

    def __init__(self, settled: Set[str]):
        """`settled`: the names about which files may contradict each other, because something else decides."""
        self._settled = settled
        self.included: set[epath.Path] = set()
        """The files that another one has included."""

    def read(self, path: epath.Path, name: str, including: tuple[str, ...] = ()) -> Bindings:
        """Bindings of a file over those of the files that it includes; none of base.gin, which is read anyway."""
        if path.resolve() == (gin_root() / BASE).resolve():
            return {}
        if name in including:
            raise UserError(f"gin files include each other: {' -> '.join((*including, name))}")
        try:
            text = path.read_text()
        except UnicodeDecodeError as error:
            raise UserError(f"{name} is not UTF-8: {error}") from None
        bindings, includes = _parse(text, name, Rank.FILE)
        paths = {include: find_file(include) for include in includes}
        self.included.update(path.resolve() for path in paths.values())
        inner = self.merge(self.read(path, include, (*including, name)) for include, path in paths.items())
        return inner | _merge(bindings, self._settled)

    def merge(self, tables: Iterable[Bindings]) -> Bindings:
        """The bindings of several files. Raises a UserError if they contradict each other."""
        return _merge([item for table in tables for item in table.items()], self._settled)


def _merge(bindings: Iterable[tuple[str, Binding]], settled: Set[str] = frozenset()) -> Bindings:
    """A table of bindings. Raises a UserError if two of a name that is not `settled` have different values."""
    merged: Bindings = {}
    for key, binding in bindings:
        first = merged.setdefault(key, binding)
        if first.value != binding.value and key not in settled:
            raise UserError(
                f"{key} is {first.value!r} in {first.origin} and {binding.value!r} in {binding.origin}: "
                "leave one of them out, or settle it with --gin_param"
            )
    return merged


def _parse(text: str, name: str, rank: Rank) -> tuple[list[tuple[str, Binding]], list[str]]:
    """(bindings, included files) of one file or `--gin_param`."""
    bindings, includes = [], []
    for statement in _statements(text, name):
        if isinstance(statement, config_parser.IncludeStatement):
            if rank == Rank.PARAMETER:
                raise UserError(f"{name}: pass it as --gin_file={statement.filename}")
            includes.append(statement.filename)
        elif isinstance(statement, config_parser.BindingStatement):
            origin = name if rank == Rank.PARAMETER else f"{name}:{statement.location.line_num}"
            if statement.scope:
                raise UserError(f"{origin}: scopes are not supported: {statement.scope}/{statement.selector}")
            key = f"{statement.selector}.{statement.arg_name}" if statement.arg_name else statement.selector
            bindings.append((key, Binding(statement.value, origin, rank)))
        elif isinstance(statement, config_parser.ImportStatement):
            raise UserError(f"{name}: gin imports are not supported: import {statement.module}")
    return bindings, includes


def _statements(text: str, name: str) -> Iterator[Any]:
    try:
        yield from config_parser.ConfigParser(io.StringIO(text), _Delegate())
    except (SyntaxError, tokenize.TokenError) as error:
        # Python's message about text without quotes ends with a node of its syntax tree.
        message = str(error.args[0]).splitlines()[0].partition(": <ast.")[0].rstrip(".")
        place = name if name.startswith("--") or not isinstance(error, SyntaxError) else f"{name}:{error.lineno}"
        raise UserError(
            f"{place}: bad gin syntax: {message}; expected Class.parameter = value, with text in quotes"
        ) from None


def _resolve(value: Any, bindings: Bindings, read: set[str], origin: str, inside: tuple[str, ...] = ()) -> Any:
    if isinstance(value, (list, tuple)):
        return type(value)(_resolve(item, bindings, read, origin, inside) for item in value)
    if isinstance(value, dict):
        return {key: _resolve(item, bindings, read, origin, inside) for key, item in value.items()}
    if not isinstance(value, _Placeholder):
        return value
    name = value[1:]
    if value.startswith("@"):
        raise UserError(f"{origin}: references are not supported: {value!r}; write the value")
    if name not in bindings or name in inside:
        raise UserError(f"{origin}: {value!r} has no value; bind {name} = ...")
    read.add(name)
    return _resolve(bindings[name].value, bindings, read, origin, (*inside, name))
