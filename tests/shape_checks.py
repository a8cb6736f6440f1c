"""A type checker for jaxtyping's import hook that checks shapes and dtypes of arrays; all other types are pyright's."""

from collections.abc import Callable
from typing import Any, get_args

from beartype import beartype
from jaxtyping import AbstractArray


def has_shape(hint: Any) -> bool:
    """Whether an annotation is of an array, or has one among its members."""
    return (isinstance(hint, type) and issubclass(hint, AbstractArray)) or any(map(has_shape, get_args(hint)))


def check_shapes(function: Callable) -> Callable:
    function.__annotations__ = {name: hint for name, hint in function.__annotations__.items() if has_shape(hint)}
    return beartype(function)
