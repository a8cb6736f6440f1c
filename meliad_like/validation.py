"""Checks for the fields of configs. Their messages name a field as gin files do."""

from collections.abc import Callable, Sequence
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from meliad_like.errors import UserError


def _check(requirement: str, fits: Callable[[Any], bool]) -> Callable[[Any, Sequence[str]], None]:
    """A function (config, names of fields) that raises a UserError for the first field that does not fit."""

    def check(config: Any, fields: Sequence[str]) -> None:
        for field in fields:
            if not fits(getattr(config, field)):
                raise UserError(f"{_binding(config, field)} {requirement}")

    return check


check_positive = _check("must be at least 1", lambda value: value >= 1)
check_above_zero = _check("must be above 0", lambda value: value is None or value > 0)
check_not_negative = _check("must not be negative", lambda value: value >= 0)
check_shares = _check("must be at least 0 and below 1", lambda value: 0 <= value < 1)
# JAX ignores the higher bits of a larger seed.
check_seeds = _check("must not be negative, and below 2**32", lambda value: 0 <= value < 2**32)


def check_choices(config: Any) -> None:
    """Raises a UserError if a field whose type is a Literal, or a union of Literals and None, has another value."""
    for field, annotation in get_type_hints(type(config)).items():
        # A union lists its members; any other annotation is its own only member.
        members = get_args(annotation) if get_origin(annotation) in (Union, UnionType) else (annotation,)
        if not all(get_origin(member) is Literal or member is NoneType for member in members):
            continue
        choices = [choice for member in members for choice in get_args(member) or (None,)]
        if getattr(config, field) not in choices:
            raise UserError(f"{_binding(config, field)} is not one of {', '.join(map(str, choices))}")


def layer_indices(name: str, layers: Sequence[int] | None, num_layers: int) -> frozenset[int]:
    """The layers that a field names, from 0; None: all. Raises a UserError if one does not exist, or is named twice."""
    if layers is None:
        return frozenset(range(num_layers))
    if not all(-num_layers <= layer < num_layers for layer in layers):
        raise UserError(f"{name}={layers} names a layer that {num_layers} layers lack")
    if len(indices := frozenset(layer % num_layers for layer in layers)) != len(layers):
        raise UserError(f"{name}={layers} names a layer twice")
    return indices


def _binding(config: Any, field: str) -> str:
    return f"{type(config).__name__}.{field}={getattr(config, field)!r}"
