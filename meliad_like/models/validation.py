"""Checks that the configs of several model families make."""

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
            raise UserError(f"{field}={getattr(config, field)!r} is not one of {', '.join(get_args(choices))}")


def check_positive(config: Any, fields: Sequence[str]) -> None:
    """
    Raises:
      UserError: one of these fields is below 1.
    """
    for field in fields:
        if getattr(config, field) < 1:
            raise UserError(f"{field}={getattr(config, field)} must be at least 1")


def check_rates(config: Any, fields: Sequence[str]) -> None:
    """
    Raises:
      UserError: one of these fields is no dropout rate.
    """
    for field in fields:
        if not 0.0 <= getattr(config, field) < 1.0:
            raise UserError(f"{field}={getattr(config, field)} must be at least 0 and below 1")


def check_layers(config: Any, field: str, num_layers: int) -> None:
    """Makes a tuple of a frozen config's field that names layers; negative numbers count from the end.

    Raises:
      UserError: it names a layer that there is not, or one twice.
    """
    layers = tuple(getattr(config, field))
    object.__setattr__(config, field, layers)
    if not all(-num_layers <= layer < num_layers for layer in layers):
        raise UserError(f"{field}={layers} names a layer that {num_layers} layers lack")
    if len(layer_indices(layers, num_layers)) != len(layers):
        raise UserError(f"{field}={layers} names a layer twice")


def layer_indices(layers: Sequence[int], num_layers: int) -> frozenset[int]:
    """Layers, counted from 0."""
    return frozenset(layer % num_layers for layer in layers)
