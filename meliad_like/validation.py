"""Checks that many configs make. Their messages name a field as a gin file binds it."""

from collections.abc import Sequence
from typing import Any, Literal, get_args, get_origin, get_type_hints

from meliad_like.errors import UserError


def check_choices(config: Any) -> None:
    """
    Raises:
      UserError: a field whose type is a Literal has a value that is none of it.
    """
    for field, choices in get_type_hints(type(config)).items():
        if get_origin(choices) is Literal and getattr(config, field) not in get_args(choices):
            raise UserError(f"{_binding(config, field)} is not one of {', '.join(get_args(choices))}")


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
      UserError: one of these fields is a number of steps that 32 bits, which a state counts its steps in, don't hold.
    """
    for field in fields:
        if (getattr(config, field) or 0) >= 2**31:
            raise UserError(f"{_binding(config, field)} must be below 2**31")


def check_seed(config: Any) -> None:
    """
    Raises:
      UserError: `seed` is not one of 32 bits; of a larger one, JAX uses these alone.
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
