"""The state of a training, and one step: a pure function of the state and a batch."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from meliad_like.config.run import TrainingConfig
from meliad_like.data.batch import Batch
from meliad_like.errors import UserError
from meliad_like.layers.backend import sums_shares_of_gradients, takes_norm_of_updates_first
from meliad_like.layers.lanes import choose_carry, with_backup
from meliad_like.mesh import ONE_COPY, ParameterShardings
from meliad_like.models.model import Model
from meliad_like.optimization.averages import begin_at, gradient_point


class TrainState(NamedTuple):
    """The parameters, the optimizer state and the carry of every lane.

    There is no random key and no data position in it: both are functions of the seed and the step.
    """

    step: Int[Array, ""]
    """The number of steps done, including skipped steps."""
    params: Any
    """The evaluated parameters; the optimizer may compute gradients at others (`optimization/averages.py`)."""
    optimizer_state: Any
    carry: Any
    num_skipped: Int[Array, ""]
    """The number of skipped steps, whose loss or gradient was not finite (`nonfinite="skip"`)."""
    halted: Bool[Array, ""]
    """Whether a step under `nonfinite="stop"` had a non-finite loss or gradient; later steps change nothing."""

    def starting_with(self, params: Any) -> "TrainState":
        """The state before the first step with other parameters, which an average of the parameters begins with too."""
        return self._replace(params=params, optimizer_state=begin_at(params, self.optimizer_state))


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


class StepMetrics(NamedTuple):
    """The metrics of one step over all lanes."""

    loss: Float[Array, ""]
    """The loss, in nats per token."""
    accuracy: Float[Array, ""]
    num_tokens: Int[Array, ""]
    """The number of targets that counted."""
    gradient_norm: Float[Array, ""]
    update_norm: Float[Array, ""]
    """The norm of the change of the parameters; 0 for a step that is not taken."""
    parameter_norm: Float[Array, ""]
    finite: Bool[Array, ""]
    """Whether loss and gradient were finite, on a CPU also the update."""
    num_skipped: Int[Array, ""]
    """The number of steps skipped so far."""
    lane_finite: Bool[Array, " b"]
    """The lanes whose losses were all finite."""


class Sums(NamedTuple):
    """Sums over the losses of a batch that count."""

    loss: Float[Array, ""]
    correct: Int[Array, ""]
    """The number of targets that were the most likely token; 0 for an objective without accuracy."""
    num_tokens: Int[Array, ""]
    """The number of losses that count."""


class Objective(NamedTuple):
    """The function that a step minimises: the sum of a batch's losses, divided by a constant number."""

    differentiable: Callable[[Any, Any, Any, PRNGKeyArray], tuple[Array, tuple[Sums, Any, Bool[Array, " b"]]]]
    """The function (params, carry, batch, dropout key) -> the sum of the losses, and a tuple of their `Sums`, the new
    carry, and whether the losses of each lane are finite."""
    size: Callable[[Any], int]
    """The divisor of the sum over a whole batch."""
    init_carry: Callable[[Any, int], Any]
    """The function (params, number of lanes) -> the carry of the lanes before their first batch."""
    num_tokens: Callable[[Any], int]
    """The number of tokens of each lane that a batch adds to the carry."""


def language_model(model: Model, loss_slice: int, z_loss: float = 0.0) -> Objective:
    """The objective of a language model: the sum of the losses that count, over the number of positions in a batch.
    `z_loss` is the factor of the z-loss (`TrainingConfig.z_loss`), which the loss in the metrics does not include.

    A token has the same weight in every step, as in the reference, whose objective is the sum. For an optimizer with
    momentum, the mean over the tokens would be another objective when the amount of padding varies.
    """

    def differentiable(params, carry, batch: Batch, dropout_key):
        losses, carry = model.bind(params).losses(
            batch.inputs, batch.targets, carry, batch.start, dropout_key, slice_length=loss_slice
        )
        nats = jnp.where(batch.loss_mask, losses.nats, 0.0)
        sums = Sums(jnp.sum(nats), jnp.sum(losses.correct & batch.loss_mask), jnp.sum(batch.loss_mask))
        objective = sums.loss
        if z_loss:
            if losses.log_sums is None:
                raise UserError("TrainingConfig.z_loss needs a model with one softmax: this one's is adaptive")
            objective += z_loss * jnp.sum(jnp.where(batch.loss_mask, losses.log_sums, 0.0) ** 2)
        return objective, (sums, carry, jnp.all(jnp.isfinite(nats), axis=1))

    return Objective(
        differentiable,
        lambda batch: batch.inputs.size,
        lambda params, lanes: model.bind(params).init_carry(lanes),
        lambda batch: batch.inputs.shape[1],
    )


def make_train_step(
    model: Model,
    optimizer: optax.GradientTransformation,
    config: TrainingConfig,
    shardings: ParameterShardings = ONE_COPY,
    trained: Any = True,
) -> Callable[[TrainState, Batch], tuple[TrainState, StepMetrics]]:
    """The training step of a language model, as a function to be jitted."""
    return make_step(language_model(model, config.loss_slice, config.z_loss), optimizer, config, shardings, trained)


def make_step(
    objective: Objective,
    optimizer: optax.GradientTransformation,
    config: TrainingConfig,
    shardings: ParameterShardings = ONE_COPY,
    trained: Any = True,
) -> Callable[[TrainState, Any], tuple[TrainState, StepMetrics]]:
    """The training step of any objective, as a function to be jitted; the first axis of all arrays is the lane.

    `trained`, a tree like the parameters or a prefix of one, says which are trained; the others have gradients of 0 and
    keep every bit. If there are copies of the parameters (`shardings.has_copies`), each of them updates its share.
    """
    key = jax.random.key(config.seed)

    def where_trained(new, old):
        return jax.tree.map(lambda is_trained, new, old: new if is_trained else old, trained, new, old)

    def differentiable(params, *rest):
        return objective.differentiable(where_trained(params, jax.lax.stop_gradient(params)), *rest)

    differentiate = _accumulated(jax.grad(differentiable, has_aux=True), config.gradient_accumulation)

    def train_step(state: TrainState, batch: Any) -> tuple[TrainState, StepMetrics]:
        # --- The gradient, at all parameters ---
        dropout_key = jax.random.fold_in(key, state.step)
        point = shardings.gather(gradient_point(state.params, state.optimizer_state))
        carry, backup = with_backup(state.carry, objective.num_tokens(batch))
        gradient, (sums, carry, lane_finite) = differentiate(point, carry, batch, dropout_key)

        # --- The update, of this copy's share of the parameters ---
        with jax.named_scope("optimizer"):
            # With accumulation a loop adds up all gradients: see `ParameterShardings.gradients`.
            scatter = sums_shares_of_gradients() and config.gradient_accumulation == 1
            gradient = shardings.reduce(gradient, scatter)
            old_params = shardings.share(state.params)
            gradient = jax.tree.map(lambda g: g / objective.size(batch), gradient)
            updates, optimizer_state = optimizer.update(gradient, state.optimizer_state, old_params)
            gradient_norm, update_norm = optax.tree.norm(gradient), optax.tree.norm(updates)

        # --- The new state, which is the old one if something is not finite ---
        finite = jnp.isfinite(sums.loss) & jnp.isfinite(gradient_norm)
        if takes_norm_of_updates_first():
            finite &= jnp.isfinite(update_norm)
        taken = finite & ~state.halted

        def choose(new, old):
            return jax.tree.map(lambda new, old: jnp.where(taken, new, old), new, old)

        with jax.named_scope("optimizer"):
            new_params = where_trained(optax.apply_updates(old_params, updates), old_params)
            params = shardings.share(choose(new_params, old_params))
            optimizer_state = choose(optimizer_state, state.optimizer_state)
            if not takes_norm_of_updates_first():
                update_norm = optax.tree.norm(jax.tree.map(jnp.subtract, params, old_params))
            parameter_norm = optax.tree.norm(params)
        if config.nonfinite == "skip":
            # The carry may also be non-finite.
            carry = choose(carry, objective.init_carry(params, lane_finite.shape[0]))
            step, num_skipped, halted = state.step + 1, state.num_skipped + ~finite, state.halted
        else:
            carry = choose_carry(taken, carry, backup)
            step, num_skipped, halted = state.step + taken, state.num_skipped, ~taken
        new_state = TrainState(step, params, optimizer_state, carry, num_skipped, halted)
        metrics = StepMetrics(
            loss=sums.loss / jnp.maximum(sums.num_tokens, 1),
            accuracy=sums.correct / jnp.maximum(sums.num_tokens, 1),
            num_tokens=sums.num_tokens,
            gradient_norm=gradient_norm,
            update_norm=jnp.where(taken, update_norm, 0.0),
            parameter_norm=parameter_norm,
            finite=finite,
            num_skipped=new_state.num_skipped,
            lane_finite=lane_finite,
        )
        return new_state, metrics

    return train_step


def _accumulated(differentiate: Callable[..., tuple[Any, Any]], parts: int) -> Callable[..., tuple[Any, Any]]:
    """Gradient accumulation: the gradient of an objective, computed for one part of the lanes after the other."""
    if parts == 1:
        return differentiate

    # Lane i * parts + j is in part j: every device keeps its own lanes.
    def split(x):
        return jnp.moveaxis(x.reshape(x.shape[0] // parts, parts, *x.shape[1:]), 1, 0)

    def merge(x):
        return jnp.moveaxis(x, 0, 1).reshape(-1, *x.shape[2:])

    def accumulate(params, carry, batch, dropout_key):
        def one_part(total, part):
            carry, batch = part
            gradient, (sums, carry, lane_finite) = differentiate(params, carry, batch, dropout_key)
            return jax.tree.map(jnp.add, total, (gradient, sums)), (carry, lane_finite)

        shapes = jax.eval_shape(differentiate, params, carry, batch, dropout_key)
        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), (shapes[0], shapes[1][0]))
        (gradient, sums), (carry, lane_finite) = jax.lax.scan(one_part, zeros, jax.tree.map(split, (carry, batch)))
        return gradient, (sums, *jax.tree.map(merge, (carry, lane_finite)))

    return accumulate
