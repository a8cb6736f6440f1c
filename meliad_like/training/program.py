"""The model and its training step on a mesh: everything that depends only on the config and the devices."""

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh
from jaxtyping import PRNGKeyArray

from meliad_like.config import RunConfig
from meliad_like.data.batch import empty_batch
from meliad_like.mesh import (
    ParameterShardings,
    carry_shardings,
    lane_sharding,
    optimizer_state_shardings,
    replicated,
    training_shardings,
)
from meliad_like.models.model import Model
from meliad_like.optimization.optimizers import make_optimizer, trained_parameters
from meliad_like.optimization.schedules import make_schedule
from meliad_like.training.step import TrainState, init_state, make_train_step


class TrainingProgram(NamedTuple):
    """A model and its training step, divided among the devices of a mesh; nothing is compiled yet."""

    model: Any
    """The trained model, such as a `Model`."""
    mesh: Mesh
    abstract_state: TrainState
    """The shapes of the state, with their shardings on this mesh."""
    initialise: Callable[[], TrainState]
    train_step: jax.stages.Wrapped
    """The jitted function (state, batch) -> (state, metrics), to which the state's buffers are donated."""
    abstract_batch: Any
    """The shapes of the batch of a step, over all hosts, with their shardings."""

    def compile_step(self, options: Mapping[str, Any] | None = None) -> jax.stages.Compiled:
        """The step compiled (with options of XLA) for these shapes and shardings; it rejects all others."""
        with jax.set_mesh(self.mesh):
            return self.train_step.lower(self.abstract_state, self.abstract_batch).compile(options)


def make_program(run: RunConfig, vocabulary_size: int, mesh: Mesh) -> TrainingProgram:
    """Lays out one stage's model, its optimizer and its lanes on a mesh. It needs no documents and compiles nothing."""
    num_lanes = run.data.num_lanes
    run.model.check_sequence(run.data.segment_length, mesh.shape["sequence"])
    model = Model(run.model, vocabulary_size)
    lane_sharding(mesh, num_lanes, run.training.gradient_accumulation)  # Raises an error if they don't divide.
    schedule = make_schedule(run.schedule, run.training.num_steps)
    optimizer = make_optimizer(run.optimizer, schedule, model.kinds, model.rate_factors)
    trained = trained_parameters(run.optimizer, model.kinds, model.rate_factors)
    return lay_out(
        model,
        mesh,
        model.axes,
        lambda key: init_state(model, optimizer, num_lanes, key),
        run.training.seed,
        functools.partial(make_train_step, model, optimizer, run.training, trained=trained),
        empty_batch(num_lanes, run.data.segment_length, run.model.window_length),
        num_lanes,
    )


def num_trained(run: RunConfig, model: Model) -> int:
    """The number of parameters that a run trains (`OptimizerConfig.trained`)."""
    trained = trained_parameters(run.optimizer, model.kinds, model.rate_factors)
    sizes = jax.tree.map(lambda is_trained, leaf: leaf.size if is_trained else 0, trained, model.abstract_params)
    return sum(jax.tree.leaves(sizes))


def lay_out(
    model: Any,
    mesh: Mesh,
    axes: Any,
    init: Callable[[PRNGKeyArray], TrainState],
    seed: int,
    make_step: Callable[[ParameterShardings], Callable[[TrainState, Any], tuple[TrainState, Any]]],
    batch: Any,
    num_lanes: int,
) -> TrainingProgram:
    """Lays out any training on a mesh. It compiles nothing.

    Args:
      model: the trained model.
      axes: a tree like the parameters, with the logical axes of each.
      init: key of `seed` -> the state before the first step.
      make_step: shardings of the parameters -> the step, (state, batch) -> (state, metrics), as of `training.step`.
      batch: an example of the batch of a step, over all hosts, whose arrays have `num_lanes` rows.
    """
    lanes = lane_sharding(mesh, num_lanes)

    # The seed is an argument, so that one compiled program serves all seeds and is found in a compilation cache.
    def initialise(key_data) -> TrainState:
        return init(jax.random.wrap_key_data(key_data))

    key_data = np.asarray(jax.random.key_data(jax.random.key(seed)))
    shapes = jax.eval_shape(initialise, key_data)
    params = training_shardings(mesh, axes, shapes.params)
    shardings = TrainState(
        step=replicated(mesh),
        params=params.whole,
        optimizer_state=optimizer_state_shardings(mesh, shapes.optimizer_state, shapes.params, params.shares),
        carry=carry_shardings(mesh, num_lanes, shapes.carry),
        num_skipped=replicated(mesh),
        halted=replicated(mesh),
    )
    abstract_state = jax.tree.map(lambda x, sharding: x.update(sharding=sharding), shapes, shardings)
    return TrainingProgram(
        model=model,
        mesh=mesh,
        abstract_state=abstract_state,
        initialise=functools.partial(jax.jit(initialise, out_shardings=shardings), key_data),
        train_step=jax.jit(
            make_step(params),
            donate_argnums=0,
            in_shardings=(shardings, lanes),
            out_shardings=(shardings, replicated(mesh)),
        ),
        abstract_batch=jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=lanes), batch),
    )
