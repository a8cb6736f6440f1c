"""The state of a training, as one tree."""

from typing import Any, NamedTuple

import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Int, PRNGKeyArray

from meliad_like.models.model import Model


class TrainState(NamedTuple):
    """The parameters, the optimizer state and the carry of every lane.

    There is no random key and no data position in it: both are functions of the seed and the step.
    """

    step: Int[Array, ""]
    """The number of steps done, including skipped steps."""
    params: Any
    optimizer_state: Any
    carry: Any
    num_skipped: Int[Array, ""]
    """The number of skipped steps, whose loss or gradient was not finite (`nonfinite="skip"`)."""
    halted: Bool[Array, ""]
    """Set by a step with a non-finite loss or gradient under `nonfinite="stop"`; later steps change nothing."""


def init_state(model: Model, optimizer: optax.GradientTransformation, num_lanes: int, key: PRNGKeyArray) -> TrainState:
    """The state before the first step; `jax.eval_shape` of it gives the shapes."""
    params = model.init(key)
    return TrainState(
        step=jnp.zeros((), jnp.int32),
        params=params,
        optimizer_state=optimizer.init(params),
        carry=model.bind(params).init_carry(num_lanes),
        num_skipped=jnp.zeros((), jnp.int32),
        halted=jnp.zeros((), bool),
    )
