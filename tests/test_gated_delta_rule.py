"""The gated delta rule in chunks and token by token, against a plain loop in numpy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meliad_like.layers.convolution import convolve
from meliad_like.mixers.gated_delta_rule import Rule, inverse_of_unit_triangular, read_chunks, update

B, H, N, K = 2, 3, 24, 4
BLOCK = 8


@pytest.fixture(scope="module")
def rule():
    generator = np.random.default_rng(0)
    query, key, value = generator.normal(size=(3, B, H, N, K))
    query, key = (x / np.linalg.norm(x, axis=-1, keepdims=True) for x in (query, key))
    log_decay, strength = np.log(generator.uniform(0.3, 1, (B, H, N))), generator.uniform(0, 1, (B, H, N))
    return Rule(*(jnp.asarray(x, jnp.float32) for x in (query, key, value, log_decay, strength)))


def plain_loop(rule, matrix, start):
    """Equation 10 as it is printed: S_t = S_{t-1} alpha (I - beta k k^T) + beta v k^T, read by S_t q."""
    query, key, value, log_decay, strength = (np.asarray(x, np.float64) for x in rule)
    matrix, read = np.array(matrix, np.float64), np.zeros(value.shape)
    for b, h in np.ndindex(B, H):
        for t in range(N):
            if t % BLOCK == 0 and start[b, t // BLOCK]:
                matrix[b, h] = 0
            k, v, beta = key[b, h, t], value[b, h, t], strength[b, h, t]
            forget = np.exp(log_decay[b, h, t]) * (np.eye(K) - beta * np.outer(k, k))
            matrix[b, h] = matrix[b, h] @ forget + beta * np.outer(v, k)
            read[b, h, t] = matrix[b, h] @ query[b, h, t]
    return matrix, read


@pytest.mark.parametrize("chunk", [1, 2, 8])
@pytest.mark.parametrize("starts", [[], [(0, 1), (1, 0), (1, 2)]])
def test_chunks_equal_the_plain_loop(rule, chunk, starts):
    start = np.zeros((B, N // BLOCK), bool)
    for place in starts:
        start[place] = True
    matrix = jax.random.normal(jax.random.key(1), (B, H, K, K))
    found = jax.jit(read_chunks, static_argnums=3)(rule, matrix, start, chunk)
    for ours, theirs in zip(found, plain_loop(rule, matrix, start), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-5)


@pytest.mark.parametrize("strength", [0.5, 1.0])
def test_the_system_of_a_long_chunk_is_inverted_exactly(strength):
    """64 keys of four channels are as alike as the keys of a text that repeats itself."""
    key = np.random.default_rng(0).normal(size=(3, 64, K))
    key /= np.linalg.norm(key, axis=-1, keepdims=True)
    system = np.tril(strength * key @ np.swapaxes(key, 1, 2), -1) + np.eye(64)
    found = jax.jit(inverse_of_unit_triangular)(system.astype(np.float32))
    np.testing.assert_allclose(found, np.linalg.inv(system), atol=1e-5)


def test_token_by_token_equals_the_plain_loop(rule):
    matrix = expected = jax.random.normal(jax.random.key(1), (B, H, K, K))
    expected, read = plain_loop(rule, matrix, np.zeros((B, N // BLOCK), bool))
    for t in range(N):
        token = jax.tree.map(lambda x, t=t: x[:, :, t], rule)
        matrix = update(matrix, token)
        found = jnp.einsum("bhpk,bhk->bhp", matrix, token.query)
        np.testing.assert_allclose(found, read[:, :, t], atol=1e-5)
    np.testing.assert_allclose(matrix, expected, atol=1e-5)


def test_chunks_and_tokens_have_the_same_gradients(rule):
    start, matrix = np.zeros((B, N // BLOCK), bool), jnp.zeros((B, H, K, K))

    def by_chunk(rule):
        return jnp.sum(read_chunks(rule, matrix, start, BLOCK)[1] ** 2)

    def by_token(rule):
        def step(matrix, token):
            matrix = update(matrix, token)
            return matrix, jnp.einsum("bhpk,bhk->bhp", matrix, token.query)

        return jnp.sum(jax.lax.scan(step, matrix, jax.tree.map(lambda x: jnp.moveaxis(x, 2, 0), rule))[1] ** 2)

    for ours, theirs in zip(jax.jit(jax.grad(by_chunk))(rule), jax.jit(jax.grad(by_token))(rule), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-4)


def test_the_convolution_sees_no_other_document():
    inputs, filters = np.arange(1.0, 9).reshape(1, 8, 1), np.array([[1000.0], [100.0], [10.0]])
    recent, start = np.array([[[-1.0], [-2.0]]]), np.array([[False, True]])
    # The second document begins with the fifth token.
    expected = [-1000 - 200 + 10, -2000 + 100 + 20, 1000 + 200 + 30, 2000 + 300 + 40, 50, 500 + 60, 5000 + 600 + 70]
    found = convolve(jnp.asarray(inputs), jnp.asarray(recent), jnp.asarray(filters), start)
    np.testing.assert_allclose(found[0, :, 0], [*expected, 6000 + 700 + 80])
