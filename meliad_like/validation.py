"""Checks for the fields of configs. Their messages name a field as gin files do."""

from collections.abc import Sequence
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from meliad_like.errors import UserError


def check_choices(config: Any) -> None:
    """
    Raises:
      UserError: a field whose type is a Literal, or a union of Literals and None, has another value.
    """
    for field, annotation in get_type_hints(type(config)).items():
        # A union lists its members; any other annotation is its own only member.
        members = get_args(annotation) if get_origin(annotation) in (Union, UnionType) else (annotation,)
        if not all(get_origin(member) is Literal or member is NoneType for member in members):
            continue
        choices = [choice for member in members for choice in get_args(member) or (None,)]
        if getattr(config, field) not in choices:
            raise UserError(f"{_binding(config, field)} is not one of {', '.join(map(str, choices))}")


def check_positive(config: Any, fields: Sequence[str]) -> None:
    """
    Raises:
      UserError: one of these fields is below 1.
    """
    for field in fields:
        if getattr(config, field) < 1:
            raise UserError(f"{_binding(config, field)} must be at least 1")


def check_not_negative(config: Any, fields: Sequence[str]) -> None:
    """
    Raises:
      UserError: one of these fields is below 0.
    """
    for field in fields:
        if getattr(config, field) < 0:
            raise UserError(f"{_binding(config, field)} must not be negative")


def check_steps(config: Any, fields: Sequence[str]) -> None:
    """
    Raises:
      UserError: one of these fields is a number of steps that exceeds the 32 bits of the step counter.
    """
    for field in fields:
        if (getattr(config, field) or 0) >= 2**31:
            raise UserError(f"{_binding(config, field)} must be below 2**31")


def check_seed(config: Any) -> None:
    """
    Raises:
      UserError: `seed` is not an unsigned integer of 32 bits; JAX ignores the higher bits of a larger one.
    """
    if not 0 <= config.seed < 2**32:
        raise UserError(f"{_binding(config, 'seed')} must not be negative, and below 2**32")


def check_shares(config: Any, fields: Sequence[str]) -> None:
    """
    Raises:
      UserError: one of these fields is below 0 or not below 1.
    """
    for field in fields:
        if not 0.0 <= getattr(config, field) < 1.0:
            raise UserError(f"{_binding(config, field)} must be at least 0 and below 1")


def _binding(config: Any, field: str) -> str:
    return f"{type(config).__name__}.{field}={getattr(config, field)!r}"
