"""Comparisons with the arrays of reference implementations in golden/."""

import jax
import jax.numpy as jnp
import numpy as np

from meliad_like.config.run import TrainingConfig
from meliad_like.layers.losses import token_losses
from meliad_like.optimization.optimizers import Adafactor, make_optimizer
from meliad_like.optimization.schedules import CosineSchedule, make_schedule
from meliad_like.training.step import init_state, make_train_step


def below(arrays, prefix):
    return {name.removeprefix(prefix): arrays[name] for name in arrays if name.startswith(prefix)}


def assert_gradients(ours, theirs):
    assert set(ours) == set(theirs)
    for name in theirs:
        scale = np.abs(theirs[name]).max()
        np.testing.assert_allclose(ours[name], theirs[name], rtol=1e-4, atol=1e-4 * scale, err_msg=name)


def compared_segments(model, params, segments, slice_length):
    """Compares logits and losses of segments, (batch, arrays of the reference) each; yields arrays, gradient, carry."""

    @jax.jit
    def differentiate(params, carry, batch):
        def loss(params):
            module = model.bind(params)
            hidden, new_carry = module(batch.inputs, carry, batch.start)
            losses = token_losses(module, hidden, batch.targets, slice_length)
            return jnp.sum(losses.nats * batch.loss_mask), (module.logits(hidden), losses.nats, new_carry)

        return jax.value_and_grad(loss, has_aux=True)(params)

    carry = model.bind(params).init_carry(2)
    for batch, seg in segments:
        (loss, (logits, nats, carry)), gradient = differentiate(params, carry, batch)
        np.testing.assert_allclose(logits, seg["logits"], atol=1e-5)
        mask = seg["loss_mask"]
        np.testing.assert_allclose(np.where(mask, nats, 0), np.where(mask, seg["token_losses"], 0), atol=1e-5)
        np.testing.assert_allclose(loss, seg["training_loss"], rtol=1e-5)
        yield seg, gradient, carry


def train_eight_steps(arrays, model, params, segments):
    """Trains with the batches of the three segments in turn, compares losses, and returns the parameters."""
    schedule = make_schedule(CosineSchedule(warmup_steps=4), 20)
    optimizer = make_optimizer(Adafactor(), schedule, model.kinds)
    # The reference begins with states of zero, where no document begins.
    shapes = jax.eval_shape(lambda: init_state(model, optimizer, 2, jax.random.key(0)))
    state = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), shapes)
    state = state._replace(params=params, optimizer_state=optimizer.init(params))
    train_step = jax.jit(make_train_step(model, optimizer, TrainingConfig(num_steps=20)))
    for step in range(8):
        batch = segments[step % 3]
        blocks = batch.start.shape
        state, metrics = train_step(state, batch._replace(document=np.zeros(blocks), position=np.zeros(blocks)))
        np.testing.assert_allclose(metrics.loss * metrics.num_tokens, arrays["train/losses"][step], rtol=1e-5)
    return state.params
