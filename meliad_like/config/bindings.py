"""Reads gin syntax into a flat table of bindings that remember the file and line they come from.

Only gin's parser is used, not its global registry. There, a later binding silently replaces an earlier one and a
binding nobody consumes is silently dropped; both have trained the wrong model before anybody noticed.
"""

import enum
import io
import itertools
import tokenize
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from etils import epath
from gin import config_parser

from meliad_like.config.files import find, gin_root, nearest
from meliad_like.errors import UserError, reading

BASE = "base.gin"


class Rank(enum.IntEnum):
    """The precedence of bindings, the highest first."""

    PARAMETER = 0
    PROGRAM = 1
    """A value that a program computes, which nothing needs to read."""
    FILE = 2
    DEFAULT = 3
    """A binding of `base.gin`, which is always read; nothing needs to read the binding."""


@dataclass(frozen=True)
class Binding:
    """A value, and where it was bound (`FILE:LINE`, the name of a row, or the `--gin_param` itself)."""

    value: Any
    origin: str
    rank: Rank = Rank.FILE
    replaced: Any = None
    """The value in a file that a parameter has replaced."""


# From `Class.parameter`, or the bare name of a macro, to its binding.
Bindings = dict[str, Binding]
Values: TypeAlias = Mapping[str, Any] | None


class Placeholder(str):
    """A macro (%NAME) or a reference (@NAME) in a value, with its sign."""

    __repr__ = str.__str__


class _Delegate(config_parser.ParserDelegate):
    # Both return placeholders: gin rewrites exceptions raised here into messages of several lines.
    def configurable_reference(self, scoped_configurable_name: str, evaluate: bool) -> Placeholder:
        return Placeholder(f"@{scoped_configurable_name}")

    def macro(self, macro_name: str) -> Placeholder:
        return Placeholder(f"%{macro_name}")


def collect(gin_files: Sequence[str], gin_params: Sequence[str], values: Values = None) -> Bindings:
    """All bindings of a run, macros replaced by their values.

    Precedence: (1) `--gin_param`, the last one first; (2) `values` by `Class.field`; (3) `--gin_file`s, whose order
    does not matter because two that differ are an error, except that a file wins over those that it includes; (4)
    `base.gin`. A macro that is not bound, or that nothing reads, is an error.
    """
    parameters: Bindings = {}
    for text in gin_params:
        parameters |= _merge(_parse(text, f"--gin_param={text}", Rank.PARAMETER, numbered=False)[0])
    computed = {key: Binding(value, "the scale", Rank.PROGRAM) for key, value in (values or {}).items()}
    base = _merge(_parse((gin_root() / BASE).read_text(), BASE, Rank.DEFAULT)[0])
    files, _ = _read(gin_files, parameters.keys() | computed.keys())
    replacing = {key: replace(parameters[key], replaced=files[key].value) for key in parameters.keys() & files}
    bindings = base | files | parameters | replacing
    read: set[str] = set()
    resolved = {
        key: replace(binding, value=_resolve(binding.value, bindings, read, binding.origin))
        for key, binding in bindings.items()
        if "." in key
    }
    for name, binding in bindings.items():
        # A macro of base.gin may stay unread in files, because size files set macros that only some rows use.
        optional = name in base and name not in parameters
        if "." not in name and name not in read and not optional:
            known = [key for key in base if "." not in key and key != name]
            raise UserError(f"{binding.origin}: nothing reads {name}{'' if name in base else nearest(name, known)}")
    return resolved | {key: binding for key, binding in computed.items() if key not in parameters}


def _read(names: Sequence[str], settled: Set[str], including: tuple[str, ...] = ()) -> tuple[Bindings, set[epath.Path]]:
    """The bindings of files, except those of base.gin, and all files that were read for them.

    `settled`: names about which files may contradict each other, because something else decides.
    """
    tables: dict[epath.Path, Bindings] = {}
    included: set[epath.Path] = set()
    for name in names:
        if name in including:
            raise UserError(f"gin files include each other: {' -> '.join((*including, name))}")
        path, row = find(name)
        path = path.resolve()
        if row:
            path /= name.rpartition("/")[2]
            bindings, includes = _parse("\n".join(row.bindings), name, Rank.FILE, numbered=False)
            includes = [*row.files, *includes]
        elif path == (gin_root() / BASE).resolve():
            continue
        else:
            with reading(name, "text in UTF-8", UnicodeDecodeError):
                bindings, includes = _parse(path.read_text(), name, Rank.FILE)
        inner, inner_files = _read(includes, settled, (*including, name))
        tables[path] = inner | _merge(bindings, settled)
        included |= inner_files
    outermost = (table.items() for path, table in tables.items() if path not in included)
    return _merge(itertools.chain.from_iterable(outermost), settled), included | tables.keys()


def _merge(bindings: Iterable[tuple[str, Binding]], settled: Set[str] = frozenset()) -> Bindings:
    """A table of bindings. Raises a UserError if two of a name that is not `settled` have different values."""
    merged: Bindings = {}
    for key, binding in bindings:
        first = merged.setdefault(key, binding)
        if first.value != binding.value and key not in settled:
            values = " and ".join(f"{each.value!r} in {each.origin}" for each in (first, binding))
            raise UserError(f"{key} is {values}: leave one of them out, or settle it with --gin_param")
    return merged


def statements(text: str, name: str, numbered: bool = True) -> list[Any]:
    """The statements of a gin file or `--gin_param`, as gin's parser has them, with placeholders in their values.

    `numbered`: whether errors name a line in addition to `name`.
    """
    try:
        return list(config_parser.ConfigParser(io.StringIO(text), _Delegate()))
    except (SyntaxError, tokenize.TokenError) as error:
        # Python's message about text without quotes ends with a node of its syntax tree.
        message = str(error.args[0]).splitlines()[0].partition(": <ast.")[0].rstrip(".")
        place = f"{name}:{error.lineno}" if numbered and isinstance(error, SyntaxError) else name
        advice = "expected Class.parameter = value, with text in quotes"
        raise UserError(f"{place}: bad gin syntax: {message}; {advice}") from None


def _parse(text: str, name: str, rank: Rank, numbered: bool = True) -> tuple[list[tuple[str, Binding]], list[str]]:
    """The bindings, and the included files, of one file or `--gin_param`, or of the bindings of a row."""
    bindings, includes = [], []
    for statement in statements(text, name, numbered):
        if isinstance(statement, config_parser.IncludeStatement):
            if rank == Rank.PARAMETER:
                raise UserError(f"{name}: pass it as --gin_file={statement.filename}")
            includes.append(statement.filename)
        elif isinstance(statement, config_parser.BindingStatement):
            origin = f"{name}:{statement.location.line_num}" if numbered else name
            if statement.scope:
                raise UserError(f"{origin}: scopes are not supported: {statement.scope}/{statement.selector}")
            key = f"{statement.selector}.{statement.arg_name}" if statement.arg_name else statement.selector
            bindings.append((key, Binding(statement.value, origin, rank)))
        elif isinstance(statement, config_parser.ImportStatement):
            raise UserError(f"{name}: gin imports are not supported: import {statement.module}")
    return bindings, includes


def _resolve(value: Any, bindings: Bindings, read: set[str], origin: str, inside: tuple[str, ...] = ()) -> Any:
    if isinstance(value, (list, tuple)):
        return type(value)(_resolve(item, bindings, read, origin, inside) for item in value)
    if isinstance(value, dict):
        return {key: _resolve(item, bindings, read, origin, inside) for key, item in value.items()}
    if not isinstance(value, Placeholder):
        return value
    name = value[1:]
    if value.startswith("@"):
        raise UserError(f"{origin}: references are not supported: {value!r}; write the value")
    if name not in bindings or name in inside:
        raise UserError(f"{origin}: {value!r} has no value; bind {name} = ...")
    read.add(name)
    return _resolve(bindings[name].value, bindings, read, origin, (*inside, name))
