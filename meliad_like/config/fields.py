"""Fits plain values (from gin or JSON) to the annotated types of dataclass fields."""

import math
import types
import typing
from dataclasses import fields
from typing import Any, Literal, Union

from meliad_like.errors import UserError


def field_types(config_class: type) -> dict[str, Any]:
    """Names of a dataclass' fields to their evaluated annotations."""
    hints = typing.get_type_hints(config_class)
    return {field.name: hints[field.name] for field in fields(config_class)}


def fit(value: Any, expected: Any, name: str) -> Any:
    """`value` as the type `expected`: lists become tuples, integers floats; nothing else is converted.

    Infinity is refused: gin can't say it, and a saved config would not be read again.

    Raises:
      UserError: the value does not fit; the message starts with `name=value`.
    """
    if isinstance(value, str) and "\0" in value:
        # The system refuses it in paths, each function in its own way.
        raise UserError(f"{name}={value!r} holds the character of number 0")
    try:
        return _fit(value, expected)
    except TypeError:
        raise UserError(f"{name}={value!r} must be {_describe(expected)}") from None
    except OverflowError:
        raise UserError(f"{name}={value!r} must be finite") from None


def _fit(value: Any, expected: Any) -> Any:
    origin, arguments = typing.get_origin(expected), typing.get_args(expected)
    if origin in (Union, types.UnionType):
        for choice in arguments:
            try:
                return _fit(value, choice)
            except TypeError:
                continue
        raise TypeError
    if origin is Literal:
        fits = value in arguments
    elif origin is tuple:
        if not isinstance(value, (list, tuple)):
            raise TypeError
        element_types = arguments[:1] * len(value) if arguments[-1] is Ellipsis else arguments
        if len(element_types) != len(value):
            raise TypeError
        return tuple(map(_fit, value, element_types))
    elif expected is float and type(value) in (int, float):
        if not math.isfinite(value):
            raise OverflowError
        return float(value)
    else:
        # `type(...) is`: True is an int to isinstance, and num_layers=True is a mistake.
        fits = expected is Any or type(value) is (origin or expected)
    if not fits:
        raise TypeError
    return value


def _describe(expected: Any) -> str:
    arguments = typing.get_args(expected)
    if typing.get_origin(expected) is Literal:
        return " or ".join(map(repr, arguments))
    if typing.get_origin(expected) in (Union, types.UnionType):
        return " or ".join(map(_describe, arguments))
    if expected is type(None):
        return "None"
    return expected.__name__ if isinstance(expected, type) and not arguments else str(expected)
