"""A type checker for jaxtyping's import hook that checks shapes and dtypes of arrays; all other types are pyright's."""

import functools
import types
from collections.abc import Callable
from typing import Any, get_args

import jaxtyping
from beartype import beartype
from jaxtyping import AbstractArray


def has_shape(hint: Any) -> bool:
    """Whether an annotation is of an array, or has one among its members."""
    return (isinstance(hint, type) and issubclass(hint, AbstractArray)) or any(map(has_shape, get_args(hint)))


def check_shapes(function: Callable) -> Callable:
    function.__annotations__ = {name: hint for name, hint in function.__annotations__.items() if has_shape(hint)}
    return beartype(function)


def install(packages: list[str]) -> None:
    """Checks the annotated shapes in every call of the functions of these packages, which must not be imported yet."""
    jaxtyped = jaxtyping.jaxtyped

    def jaxtyped_if_shapes(function: Any = None, **arguments: Any) -> Any:
        if function is None:
            return functools.partial(jaxtyped_if_shapes, **arguments)
        hints = getattr(function, "__annotations__", {}).values()
        # A call of any other function would take as long, with nothing to check. What is quoted may have a shape.
        if isinstance(function, types.FunctionType) and not any(isinstance(x, str) or has_shape(x) for x in hints):
            return function
        return jaxtyped(function, **arguments)

    jaxtyping.jaxtyped = jaxtyped_if_shapes
    jaxtyping.install_import_hook(packages, "shape_checks.check_shapes")
