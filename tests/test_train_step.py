"""One training step."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from fake_split import FakeSplit

from meliad_like import config
from meliad_like.data.readers import LanesReader
from meliad_like.models.model import Model
from meliad_like.optimization.averages import with_average
from meliad_like.training.step import Objective, Sums, TrainState, init_state, make_step, make_train_step

RUN = config.parse(["size/tiny.gin", "block_recurrent/fixed_skip.gin"], ["DecoderConfig.num_layers = 2"])
MODEL = Model(RUN.model, vocabulary_size=50)
# Unlike Adam or Adafactor it does not hide the size of a gradient; the learning rate is part of its state.
OPTIMIZER = optax.inject_hyperparams(optax.sgd)(learning_rate=0.1)
# Another seed, for the test of dropout, needs no step of its own.
SKIP = {"nonfinite": "skip", "seed": 1}
NUM_LANES = 4
STEPS = {}


def train_step(state, batch, **training):
    """Takes a step; each kind of step is compiled once."""
    kind = tuple(training.items())
    if kind not in STEPS:
        training_config = dataclasses.replace(RUN.training, **training)
        STEPS[kind] = jax.jit(make_train_step(MODEL, OPTIMIZER, training_config))
    return STEPS[kind](state, batch)


@pytest.fixture(scope="module")
def fresh():
    return jax.jit(lambda key: init_state(MODEL, OPTIMIZER, NUM_LANES, key))(jax.random.key(0))


@pytest.fixture(scope="module")
def batches():
    """Documents of very different lengths: the lanes' numbers of targets differ, and documents begin inside."""
    split = FakeSplit(np.array([200, 9, 130, 17, 40, 33, 2, 90]))
    reader = LanesReader(split, NUM_LANES, 64, 16)
    made = [reader.batch(step, range(NUM_LANES)) for step in range(6)]
    return [batch._replace(inputs=batch.inputs % 50, targets=batch.targets % 50) for batch in made]


def assert_equal(actual, expected):
    jax.tree.map(np.testing.assert_array_equal, actual, expected)


def with_nan_in_lane(state, lane):
    """The state with NaN in the carry of a lane."""
    layers = list(state.carry.layers)
    cache, position = layers[1]["sliding_window"], state.carry.position.at[lane].set(16)
    poisoned = cache._replace(value=cache.value.at[lane].set(jnp.nan), position=position)
    layers[1] = {"sliding_window": poisoned}
    return state._replace(carry=state.carry._replace(position=position, layers=layers))


def without_starts(batch):
    return batch._replace(start=np.zeros_like(batch.start))


def test_gradient_accumulation_equals_the_whole_batch(fresh, batches):
    batch = batches[1]
    tokens = batch.loss_mask.sum(axis=1)
    assert tokens.min() < 0.9 * tokens.max()
    state, _ = train_step(fresh, batches[0])
    whole, metrics = train_step(state, batch)
    in_parts, metrics_of_parts = train_step(state, batch, gradient_accumulation=4)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), in_parts, whole)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), metrics_of_parts, metrics)
    assert not np.allclose(whole.params["embedding"], state.params["embedding"], atol=1e-4)


def test_the_step_is_gradient_descent_on_the_sum_over_targets_by_positions_of_the_batch(fresh, batches):
    """The weight of a token does not depend on the amount of padding in the batch."""
    batch = batches[0]
    half = batch._replace(loss_mask=batch.loss_mask & (np.arange(NUM_LANES) < 2)[:, None])
    other_half = batch._replace(loss_mask=batch.loss_mask & (np.arange(NUM_LANES) >= 2)[:, None])

    def movement(batch):
        return jax.tree.map(jnp.subtract, train_step(fresh, batch)[0].params, fresh.params)

    summed = jax.tree.map(jnp.add, movement(half), movement(other_half))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), summed, movement(batch))


@pytest.mark.thorough
def test_the_z_loss_is_not_in_the_metrics(fresh, batches):
    """Its gradient is that of the squared logarithms of the softmax's sums, over the positions of the batch."""
    batch = batches[0]
    (plain, before), (changed, metrics) = train_step(fresh, batch), train_step(fresh, batch, z_loss=0.5)
    assert metrics.loss == before.loss and metrics.gradient_norm != before.gradient_norm

    def squares(params):
        module, dropout_key = MODEL.bind(params), jax.random.fold_in(jax.random.key(RUN.training.seed), 0)
        hidden, _ = module(batch.inputs, fresh.carry, batch.start, dropout_key)
        log_sums = jax.nn.logsumexp(module.logits(hidden), axis=-1)
        return 0.5 * jnp.sum(jnp.where(batch.loss_mask, log_sums, 0) ** 2) / batch.inputs.size

    def check(new, old, gradient):
        np.testing.assert_allclose(new - old, -0.1 * gradient, rtol=1e-4, atol=1e-6)

    jax.tree.map(check, changed.params, plain.params, jax.jit(jax.grad(squares))(fresh.params))


@pytest.mark.thorough
def test_gradients_are_computed_at_the_parameters_that_the_optimizer_moves(fresh, batches):
    """The average is in their place in the state; after one step it is equal to them."""
    optimizer = with_average(OPTIMIZER, decay=0.9)
    step = jax.jit(make_train_step(MODEL, optimizer, RUN.training))
    averaged, plain = fresh._replace(optimizer_state=optimizer.init(fresh.params)), fresh
    for batch in batches[:3]:
        (averaged, _), (plain, _) = step(averaged, batch), train_step(plain, batch)
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6),
            averaged.optimizer_state.trained,
            plain.params,
        )
    assert optax.tree.norm(optax.tree.sub(averaged.params, plain.params)) > 1e-3


def test_tokens_that_do_not_count_change_nothing(fresh, batches):
    """They change neither their step nor the carry."""
    generator = np.random.default_rng(0)
    state = noisy_state = fresh
    for batch in batches:
        noise = generator.integers(0, 50, batch.inputs.shape)
        noisy = batch._replace(
            inputs=np.where(batch.loss_mask, batch.inputs, noise),
            targets=np.where(batch.loss_mask, batch.targets, noise),
        )
        state, metrics = train_step(state, batch)
        noisy_state, noisy_metrics = train_step(noisy_state, noisy)
        assert metrics.loss == noisy_metrics.loss
        assert not batch.loss_mask.all()
    assert_equal(noisy_state.params, state.params)


def test_a_start_inside_a_segment_forgets_what_came_before(fresh, batches):
    start = np.zeros((NUM_LANES, 4), bool)
    start[:, 2] = True
    mask = np.broadcast_to(np.arange(64) >= 32, (NUM_LANES, 64))
    batch = batches[0]._replace(start=start, loss_mask=mask)
    other = batch._replace(inputs=np.where(mask, batch.inputs, 49 - batch.inputs))
    remembering, _ = train_step(fresh, batches[3])
    state, metrics = train_step(fresh, batch)
    other_state, other_metrics = train_step(remembering._replace(params=fresh.params, step=fresh.step), other)
    assert other_metrics.loss == metrics.loss
    assert_equal(other_state.carry, state.carry)
    assert train_step(fresh, without_starts(batch))[1].loss != train_step(fresh, without_starts(other))[1].loss


def test_dropout_is_a_function_of_the_seed_and_the_step(fresh, batches):
    def loss(step, **training):
        return float(train_step(fresh._replace(step=jnp.int32(step)), batches[0], **training)[1].loss)

    assert loss(3) == loss(3)
    assert len({loss(0), loss(1), loss(2), loss(0, **SKIP)}) == 4


def test_stop_leaves_everything_as_it_was_and_takes_no_further_step(fresh, batches):
    state, _ = train_step(fresh, batches[0])
    poisoned = with_nan_in_lane(state, 2)
    halted, metrics = train_step(poisoned, without_starts(batches[1]))
    assert not metrics.finite
    assert metrics.lane_finite.tolist() == [True, True, False, True]
    assert_equal(halted, poisoned._replace(halted=True))

    cured = halted._replace(carry=state.carry)
    still, metrics = train_step(cured, batches[1])
    assert np.isfinite(metrics.loss)
    assert_equal(still, cured)


def test_skip_counts_the_step_and_forgets_what_the_lanes_remembered(fresh, batches):
    state, _ = train_step(fresh, batches[0])
    skipped, metrics = train_step(with_nan_in_lane(state, 2), without_starts(batches[1]), **SKIP)
    assert not metrics.finite
    assert metrics.num_skipped == 1
    assert_equal(
        skipped, state._replace(step=state.step + 1, num_skipped=1, carry=MODEL.bind(state.params).init_carry(4))
    )

    after, metrics = train_step(skipped, batches[2], **SKIP)
    assert metrics.finite
    assert (after.step, after.num_skipped) == (3, 1)
    assert not np.array_equal(after.params["embedding"], skipped.params["embedding"])


def test_a_gradient_that_is_not_finite_is_refused_although_the_loss_is(batches):
    def differentiable(params, carry, batch, dropout_key):
        loss = jnp.sqrt(jnp.sum(jnp.square(params["x"])))
        return loss, (Sums(loss, jnp.int32(0), jnp.int32(1)), carry, jnp.ones((1,), bool))

    objective = Objective(differentiable, lambda batch: 1, lambda params, lanes: (), lambda batch: 0)
    step = jax.jit(make_step(objective, OPTIMIZER, RUN.training))
    params, zero = {"x": jnp.zeros((3,))}, jnp.int32(0)
    state = TrainState(zero, params, OPTIMIZER.init(params), (), zero, jnp.bool_(False))
    halted, metrics = step(state, batches[0])
    assert metrics.loss == 0 and metrics.lane_finite.all() and not metrics.finite
    assert np.isnan(metrics.gradient_norm) and metrics.update_norm == 0
    assert_equal(halted, state._replace(halted=True))
