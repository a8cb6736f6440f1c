"""The tokens that can be sampled, and their frequencies."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meliad_like.errors import UserError
from meliad_like.generation.sampling import SamplingConfig, sample

# Probabilities 0.1, 0.4, 0.3, 0.2.
LOGITS = np.log([0.1, 0.4, 0.3, 0.2]).astype(np.float32) + 7
DRAWS = 20_000


def shares(**config):
    """How often each token is drawn."""
    draw = jax.jit(sample, static_argnames="config")
    tokens = draw(
        jnp.tile(LOGITS, (DRAWS, 1)), jax.random.split(jax.random.key(0), DRAWS), config=SamplingConfig(**config)
    )
    return np.bincount(tokens, minlength=4) / DRAWS


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, [0.1, 0.4, 0.3, 0.2]),
        ({"temperature": 0.0}, [0, 1, 0, 0]),
        # Squares of the probabilities, over their sum.
        ({"temperature": 0.5}, np.array([1, 16, 9, 4]) / 30),
        ({"top_k": 1}, [0, 1, 0, 0]),
        ({"top_k": 2}, [0, 4 / 7, 3 / 7, 0]),
        ({"top_k": 99}, [0.1, 0.4, 0.3, 0.2]),
        ({"top_p": 0.01}, [0, 1, 0, 0]),
        ({"top_p": 0.39}, [0, 1, 0, 0]),
        ({"top_p": 0.41}, [0, 4 / 7, 3 / 7, 0]),
        ({"top_p": 0.85}, [0, 4 / 9, 3 / 9, 2 / 9]),
        # Of the best three, 0.4 / 0.9 and 0.3 / 0.9 reach 0.7; of all four they do not reach 0.75.
        ({"top_k": 3, "top_p": 0.75}, [0, 4 / 7, 3 / 7, 0]),
        # The temperature comes first: squared, the first token alone has 16/30.
        ({"temperature": 0.5, "top_p": 0.5}, [0, 1, 0, 0]),
    ],
)
def test_shares(config, expected):
    drawn = shares(**config)
    # Four standard deviations of a share are at most 0.014.
    np.testing.assert_allclose(drawn, expected, atol=0.0142)
    np.testing.assert_array_equal(drawn == 0, np.equal(expected, 0))


def test_ties_do_not_widen_top_k():
    tokens = sample(jnp.zeros((200, 5)), jax.random.split(jax.random.key(0), 200), SamplingConfig(top_k=2))
    assert set(np.asarray(tokens).tolist()) == {0, 1}


def test_tokens_that_reach_top_p_exactly_are_enough():
    """Two of four equally likely tokens have half of the probability, without rounding."""
    tokens = sample(jnp.zeros((200, 4)), jax.random.split(jax.random.key(0), 200), SamplingConfig(top_p=0.5))
    assert set(np.asarray(tokens).tolist()) == {0, 1}


@pytest.mark.parametrize("config", [{"top_k": 7}, {"top_p": 0.3}, {"top_p": 0.9}, {"top_k": 90, "top_p": 0.6}, {}])
def test_frequencies_are_those_of_a_sort(config):
    generator = np.random.default_rng(0)
    # Two groups, the second with padding; ties, zeros of both signs, and tokens that may not be written.
    logits = 0.7 * generator.integers(-3, 4, (3, 100)).astype(np.float32)
    logits[::2, :4], logits[:, 4:8] = -np.inf, -0.0
    order = np.argsort(-logits, axis=-1, kind="stable")[:, : config.get("top_k")]
    weights = np.exp(np.take_along_axis(logits, order, axis=-1), dtype=np.float64)
    weights /= weights.sum(axis=-1, keepdims=True)
    weights[np.cumsum(weights, axis=-1) - weights >= config.get("top_p", 1.0)] = 0
    expected = np.zeros(logits.shape)
    np.put_along_axis(expected, order, weights / weights.sum(axis=-1, keepdims=True), axis=-1)
    draws = 10_000
    draw = jax.jit(sample, static_argnames="config")
    keys = jax.random.split(jax.random.key(0), 3 * draws)
    tokens = draw(jnp.repeat(logits, draws, axis=0), keys, config=SamplingConfig(**config)).reshape(3, draws)
    drawn = np.stack([np.bincount(lane, minlength=100) for lane in np.asarray(tokens)])
    assert not drawn[expected == 0].any()
    deviations = (drawn - draws * expected) / np.sqrt(draws * np.maximum(expected * (1 - expected), 1e-9))
    # The largest of 300 normal numbers is below 4.5, and their standard deviation is 1.
    assert np.abs(deviations).max() < 4.5
    assert deviations[(expected > 0) & (expected < 1)].std() == pytest.approx(1, abs=0.2)


def test_a_token_depends_on_its_lane_alone():
    logits, keys = np.random.default_rng(0).normal(size=(9, 70)), jax.random.split(jax.random.key(0), 9)
    draw = jax.jit(sample, static_argnames="config")
    config = SamplingConfig(top_p=0.2)
    alone = [draw(logits[lane : lane + 1], keys[lane : lane + 1], config=config).item() for lane in range(9)]
    assert draw(logits, keys, config=config).tolist() == alone


def test_greedy_takes_the_first_of_the_most_likely_tokens():
    logits = np.random.default_rng(0).integers(-3, 4, (50, 200)).astype(np.float32)
    logits[:3, :150] = -np.inf
    np.testing.assert_array_equal(sample(logits, None, SamplingConfig(temperature=0)), np.argmax(logits, axis=-1))


def test_lanes_have_their_own_logits():
    logits = jnp.log(jnp.eye(3) + 1e-9)
    assert sample(logits, jax.random.split(jax.random.key(0), 3), SamplingConfig(top_k=2)).tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1),
        ("temperature", float("nan")),
        # Of logits over so little infinities are left, and of these the last token, or the first, was drawn.
        ("temperature", 1e-38),
        ("temperature", 1e7),
        ("top_k", -1),
        ("top_p", 0),
        ("top_p", 1.1),
    ],
)
def test_values_out_of_range_are_named(field, value):
    with pytest.raises(UserError, match=f"^{field}={value} must be"):
        SamplingConfig(**{field: value})
