"""The tokens that can be sampled, and their frequencies."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meliad_like.errors import UserError
from meliad_like.generation.sampling import SamplingConfig, _most_likely, sample

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


@pytest.mark.parametrize("limit", [1, 7, 50, 0.3, 0.9])
def test_the_most_likely_tokens_are_those_of_a_sort(limit):
    generator = np.random.default_rng(0)
    logits = 0.7 * generator.integers(-3, 4, (40, 50)).astype(np.float32)
    logits[::2, :4], logits[:, 4:8] = -np.inf, -0.0
    amounts = np.ones_like(logits, np.int32) if limit >= 1 else np.asarray(jax.nn.softmax(logits))
    order = np.argsort(-logits, axis=-1, kind="stable")
    sorted_amounts = np.take_along_axis(amounts, order, axis=-1)
    expected = np.zeros_like(logits, bool)
    np.put_along_axis(expected, order, np.cumsum(sorted_amounts, axis=-1) - sorted_amounts < limit, axis=-1)
    np.testing.assert_array_equal(_most_likely(logits, amounts, limit), expected)


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
