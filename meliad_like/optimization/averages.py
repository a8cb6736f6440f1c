"""An average of the parameters over the steps of a training.

The parameters of the training's state are then the average, so that evaluations, samples and all readers of checkpoints
use it. The parameters that the optimizer moves are in its state.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Int


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Averaged:
    """The state of an optimizer with an average of the parameters."""

    optimizer_state: Any
    trained: Any
    """The parameters that the optimizer moves, a tree like the model's; nothing where it moves none."""
    total: Float[Array, ""]
    """The sum of the weights in the average."""
    count: Int[Array, ""]
    """The number of updates so far."""
    interpolation: float = field(metadata={"static": True})
    """The average's share in the parameters at which gradients are computed."""


def with_average(
    optimizer: optax.GradientTransformation,
    *,
    decay: float = 1.0,
    interpolation: float = 0.0,
    weight: Callable[[Int[Array, ""]], Any] = jnp.ones_like,
    is_trained: Any = True,
) -> optax.GradientTransformation:
    """An optimizer whose parameters are averaged after each update; their initial values don't count.

    Args:
      optimizer: the optimizer that moves the parameters.
      decay: factor on the weights of all earlier parameters, in each update.
      interpolation: see `Averaged`.
      weight: the number of updates before -> the weight of the parameters after this one.
      is_trained: a tree like the parameters, or a prefix of one, that says which the optimizer moves.
    """

    def init(params):
        def copies(is_trained, params):
            return jax.tree.map(jnp.copy, params) if is_trained else optax.MaskedNode()

        trained = jax.tree.map(copies, is_trained, params)
        zero = jnp.zeros((), jnp.int32)
        return Averaged(optimizer.init(params), trained, jnp.zeros(()), zero, interpolation)

    def update(gradient, state: Averaged, params):
        at = gradient_point(params, state)
        updates, optimizer_state = optimizer.update(gradient, state.optimizer_state, at)
        trained = _where_trained(jnp.add, updates, state.trained)
        total = decay * state.total + weight(state.count)
        # A warmup begins with a rate, and so with a weight, of 0.
        share = jnp.where(total > 0, weight(state.count) / total, 0.0)
        changes = _where_trained(
            lambda average, new: share * (new - average), params, trained, otherwise=jnp.zeros_like
        )
        return changes, Averaged(optimizer_state, trained, total, state.count + 1, interpolation)

    return optax.GradientTransformation(init, update)  # type: ignore[arg-type]  # its params are optional


def _where_trained(
    function: Callable[[Array, Array], Any],
    params: Any,
    trained: Any,
    otherwise: Callable[[Array], Any] = lambda _: optax.MaskedNode(),
) -> Any:
    """A function of each parameter, or its update, and `Averaged.trained`; `otherwise` where nothing is trained."""

    def apply(param, new):
        return otherwise(param) if isinstance(new, optax.MaskedNode) else function(param, new)

    return jax.tree.map(apply, params, trained)


def gradient_point(params: Any, optimizer_state: Any) -> Any:
    """The parameters at which a step computes its gradient: the state's parameters, if it has no average."""
    if not isinstance(optimizer_state, Averaged):
        return params
    share = optimizer_state.interpolation

    def point(average, new):
        return new + share * (average - new) if share else new

    return _where_trained(point, params, optimizer_state.trained, otherwise=lambda param: param)


def begin_at(params: Any, optimizer_state: Any) -> Any:
    """The state of an optimizer before its first update, for other parameters than those that it was made with."""
    if not isinstance(optimizer_state, Averaged):
        return optimizer_state

    def place(param, trained):
        # A copy, because a step reuses the memory of its state; on a mesh each device has only a share of it.
        return jax.device_put(jnp.copy(param), trained.sharding)

    return replace(optimizer_state, trained=_where_trained(place, params, optimizer_state.trained))
