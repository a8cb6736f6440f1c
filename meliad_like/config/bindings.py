"""Reads gin syntax into a flat table of bindings that remember the file and line they come from.

Only gin's parser is used, not its global registry. There, a later binding silently replaces an earlier one and a
binding nobody consumes is silently dropped; both have trained the wrong model before anybody noticed.
"""

import io
import tokenize
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from etils import epath

from gin import config_parser
from meliad_like.config import search
from meliad_like.errors import UserError


@dataclass(frozen=True)
class Binding:
    """A value, and where it was bound (`FILE:LINE`, or the `--gin_param` itself)."""

    value: Any
    origin: str


# From `Class.parameter`, or the bare name of a macro, to its binding.
Bindings = dict[str, Binding]


@dataclass(frozen=True)
class _Macro:
    name: str

    def __repr__(self) -> str:
        return f"%{self.name}"


@dataclass(frozen=True)
class _Reference:
    name: str

    def __repr__(self) -> str:
        return f"@{self.name}"


class _Delegate(config_parser.ParserDelegate):
    # Both return placeholders: gin rewrites exceptions raised here into messages of several lines.
    def configurable_reference(self, scoped_configurable_name: str, evaluate: bool) -> _Reference:
        return _Reference(scoped_configurable_name)

    def macro(self, macro_name: str) -> _Macro:
        return _Macro(macro_name)


def collect(gin_files: Sequence[str], gin_params: Sequence[str]) -> Bindings:
    """All bindings of a run, macros replaced by their values.

    Precedence: (1) `--gin_param`, the last one first; (2) `--gin_file`s, whose order does not matter because two that
    differ are an error; (3) `base.gin`, which is always read.

    Raises:
      UserError: an unknown file, bad syntax, contradicting files, an undefined macro, or a macro that nothing reads.
    """
    base = search.gin_root() / search.BASE
    bindings = _read_file(base, search.BASE)
    base_names = bindings.keys()
    paths = {name: search.find(name) for name in gin_files}
    files = _merge(_read_file(path, name) for name, path in paths.items() if path.resolve() != base.resolve())
    parameters: Bindings = {}
    for text in gin_params:
        parameters |= _read_text(text, f"--gin_param={text}")[0]
    bindings = bindings | files | parameters

    read: set[str] = set()
    resolved = {
        key: Binding(_resolve(binding.value, bindings, read, binding.origin), binding.origin)
        for key, binding in bindings.items()
        if "." in key
    }
    for name, binding in bindings.items():
        # Size files set base.gin's macros for rows that may not be there; nobody passes --gin_param for that.
        optional = name in base_names and name not in parameters
        if "." not in name and name not in read and not optional:
            known = [key for key in base_names if "." not in key]
            raise UserError(f"{binding.origin}: nothing reads {name}{search.nearest(name, known)}")
    return resolved


def _read_file(path: epath.Path, name: str, including: tuple[str, ...] = ()) -> Bindings:
    if name in including:
        raise UserError(f"gin files include each other: {' -> '.join((*including, name))}")
    own, includes = _read_text(path.read_text(), name)
    return _merge(_read_file(search.find(include), include, (*including, name)) for include in includes) | own


def _read_text(text: str, name: str) -> tuple[Bindings, list[str]]:
    """(bindings, included files) of one file or `--gin_param`."""
    bindings: Bindings = {}
    includes = []
    for statement in _statements(text, name):
        if isinstance(statement, config_parser.IncludeStatement):
            includes.append(statement.filename)
        elif isinstance(statement, config_parser.BindingStatement):
            line = statement.location.line_num
            origin = name if name.startswith("--") else f"{name}:{line}"
            if statement.scope:
                raise UserError(f"{origin}: scopes are not supported: {statement.scope}/{statement.selector}")
            key = f"{statement.selector}.{statement.arg_name}" if statement.arg_name else statement.selector
            bindings = _merge([bindings, {key: Binding(statement.value, origin)}])
        elif isinstance(statement, config_parser.ImportStatement):
            raise UserError(f"{name}: gin imports are not supported: import {statement.module}")
    return bindings, includes


def _statements(text: str, name: str) -> Iterator[Any]:
    try:
        yield from config_parser.ConfigParser(io.StringIO(text), _Delegate())
    except (SyntaxError, tokenize.TokenError) as error:
        message = str(error.args[0]).splitlines()[0].rstrip(".")
        place = name if name.startswith("--") or not isinstance(error, SyntaxError) else f"{name}:{error.lineno}"
        raise UserError(f"{place}: bad gin syntax: {message}; expected Class.parameter = value") from None


def _merge(tables: Iterable[Bindings]) -> Bindings:
    merged: Bindings = {}
    for table in tables:
        for key, binding in table.items():
            other = merged.setdefault(key, binding)
            if other.value != binding.value:
                raise UserError(
                    f"{key} is {other.value!r} in {other.origin} and {binding.value!r} in {binding.origin}: "
                    "leave one of them out, or settle it with --gin_param"
                )
    return merged


def _resolve(value: Any, bindings: Bindings, read: set[str], origin: str, inside: tuple[str, ...] = ()) -> Any:
    if isinstance(value, (list, tuple)):
        return type(value)(_resolve(item, bindings, read, origin, inside) for item in value)
    if isinstance(value, dict):
        return {key: _resolve(item, bindings, read, origin, inside) for key, item in value.items()}
    if isinstance(value, _Reference):
        raise UserError(f"{origin}: references are not supported: {value!r}; write the value")
    if not isinstance(value, _Macro):
        return value
    if value.name not in bindings or value.name in inside:
        raise UserError(f"{origin}: {value!r} has no value; bind {value.name} = ...")
    read.add(value.name)
    return _resolve(bindings[value.name].value, bindings, read, origin, (*inside, value.name))
