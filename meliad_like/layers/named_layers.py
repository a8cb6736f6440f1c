"""Layers that a config names by number; negative numbers count from the end."""

from collections.abc import Sequence
from typing import Any

from meliad_like.errors import UserError


def check_layers(config: Any, field: str, num_layers: int) -> None:
    """Checks a frozen config's field that names layers, and makes it a tuple; negative numbers count from the end.

    Raises:
      UserError: a layer does not exist or is named twice.
    """
    name, layers = f"{type(config).__name__}.{field}", tuple(getattr(config, field))
    object.__setattr__(config, field, layers)
    if not all(-num_layers <= layer < num_layers for layer in layers):
        raise UserError(f"{name}={layers} names a layer that {num_layers} layers lack")
    if len(layer_indices(layers, num_layers)) != len(layers):
        raise UserError(f"{name}={layers} names a layer twice")


def layer_indices(layers: Sequence[int], num_layers: int) -> frozenset[int]:
    """The indices of the named layers, counted from 0."""
    return frozenset(layer % num_layers for layer in layers)
