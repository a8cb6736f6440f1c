"""The lanes of a carry, each of which is the memory of one text: they are taken, repeated, joined and chosen.

Where the lane axis of an array is, the model says (`Model.carry_axes`).
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from meliad_like.mesh import is_axes
from meliad_like.models.model import Model


@functools.partial(jax.jit, static_argnums=0)
def take_lanes(model: Model, carry: Any, lanes: Int[Array, " j"]) -> Any:
    """A new carry of these lanes, in this order. A lane may be taken several times."""
    return _at_lane_axis(model, lambda axis, x: jnp.take(x, lanes, axis, mode="clip"), carry)


def join_lanes(model: Model, carries: Sequence[Any]) -> Any:
    """A new carry with the lanes of all carries, in their order."""
    return _at_lane_axis(model, lambda axis, *x: jnp.concatenate(x, axis), *carries)


def choose_lanes(model: Model, flags: Bool[Array, " b"], chosen: Any, others: Any) -> Any:
    """The lanes of the carry `chosen` where their flag is true, and those of the carry `others` elsewhere."""

    def choose(axis: int, chosen: Array, others: Array) -> Array:
        return jnp.where(jnp.expand_dims(flags, [i for i in range(chosen.ndim) if i != axis]), chosen, others)

    return _at_lane_axis(model, choose, chosen, others)


def _at_lane_axis(model: Model, function: Callable[..., Array], *carries: Any) -> Any:
    """`function(lane axis, arrays)` of the corresponding arrays of carries."""
    axes = model.carry_axes(carries[0])
    return jax.tree.map(lambda names, *x: function(names.index("lanes"), *x), axes, *carries, is_leaf=is_axes)
