"""An average of the parameters over the steps of a training.

The parameters of the training's state are then the average, so that evaluations, samples and all readers of checkpoints
use it. The parameters that the optimizer moves are in its state.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float


class Averaged(NamedTuple):
    """The state of an optimizer with an average of the parameters."""

    optimizer_state: Any
    trained: Any
    """The parameters that the optimizer moves, a tree like the model's; nothing where it moves none."""
    total: Float[Array, ""]
    """The sum of the weights in the average."""


def with_average(
    optimizer: optax.GradientTransformation, decay: float, is_trained: Any = True
) -> optax.GradientTransformation:
    """An optimizer whose parameters are averaged after each update; their initial values don't count.

    Args:
      optimizer: the optimizer that moves the parameters.
      decay: factor on the weights of all earlier parameters, in each update.
      is_trained: a tree like the parameters, or a prefix of one, that says which the optimizer moves.
    """

    def init(params):
        def copies(is_trained, params):
            return jax.tree.map(jnp.copy, params) if is_trained else optax.MaskedNode()

        return Averaged(optimizer.init(params), jax.tree.map(copies, is_trained, params), jnp.zeros(()))

    def update(gradient, state: Averaged, params):
        at = gradient_point(params, state)
        updates, optimizer_state = optimizer.update(gradient, state.optimizer_state, at)
        trained = _where_trained(jnp.add, updates, state.trained)
        total = decay * state.total + 1
        share = 1 / total
        changes = _where_trained(lambda average, new: share * (new - average), params, trained, jnp.zeros_like)
        return changes, Averaged(optimizer_state, trained, total)

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
    return _where_trained(lambda _, new: new, params, optimizer_state.trained, otherwise=lambda param: param)


def begin_at(params: Any, optimizer_state: Any) -> Any:
    """The state of an optimizer before its first update, for other parameters than those that it was made with."""
    if not isinstance(optimizer_state, Averaged):
        return optimizer_state

    def place(param, trained):
        # A copy, because a step reuses the memory of its state; on a mesh each device has only a share of it.
        return jax.device_put(jnp.copy(param), trained.sharding)

    return optimizer_state._replace(trained=_where_trained(place, params, optimizer_state.trained))
