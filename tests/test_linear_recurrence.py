"""Linear recurrences in chunks and token by token, against a plain loop in numpy."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meliad_like.errors import UserError
from meliad_like.kernels.convolution_tpu import convolve_in_kernel
from meliad_like.layers import linear_recurrence
from meliad_like.layers.linear_recurrence import Rule, convolve, inverse_of_unit_triangular, read_chunks, read_token
from meliad_like.mixers.mamba2 import Mamba2

B, G, R, K, P = 2, 2, 2, 4, 3
H = G * R
# Longer than the rows of a chunk whose decays are multiplied one by one.
BLOCK, N = 32, 96
# Decays by head or by channel, with corrections or without; Mamba-2's rule has steps.
KINDS = {"mamba": (1, False), "delta": (1, True), "kimi": (K, True), "by channel": (K, False)}
of_each_kind = pytest.mark.parametrize("kind", KINDS)
on_each_platform = pytest.mark.parametrize(
    ("kind", "on_accelerator"), [*((kind, False) for kind in KINDS), ("delta", True), ("kimi", True)]
)
STARTS = {"one document": [], "documents": [(0, 1), (1, 0), (1, 2)]}


def rule_of(kind, seed=0):
    decays, corrected = KINDS[kind]
    generator = np.random.default_rng(seed)
    query, key = generator.normal(size=(2, B, G, N, K))
    query, key = (x / np.linalg.norm(x, axis=-1, keepdims=True) for x in (query, key))
    value, log_decay = generator.normal(size=(B, H, N, P)), np.log(generator.uniform(0.3, 1, (B, H, N, decays)))
    strength = generator.uniform(0, 1, (B, H, N, 1)) if corrected else None
    step = generator.uniform(0.5, 2, (B, H, N, 1)) if kind == "mamba" else None
    return jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), Rule(query, key, value, log_decay, strength, step))


def plain_loop(rule, matrix, start):
    """S_t = S_{t-1} Diag(alpha_t) + u_t k_t^T, and S_t q_t, float64."""
    query, key, value, log_decay, strength, step = (x if x is None else np.asarray(x, np.float64) for x in rule)
    value = value if step is None else value * step
    matrix, read = np.array(matrix, np.float64), np.zeros(value.shape)
    for b, h in np.ndindex(B, H):
        for t in range(N):
            if t % BLOCK == 0 and start[b, t // BLOCK]:
                matrix[b, h] = 0
            q, k, update = query[b, h // R, t], key[b, h // R, t], value[b, h, t]
            matrix[b, h] *= np.exp(log_decay[b, h, t])
            if strength is not None:
                update = strength[b, h, t] * (update - matrix[b, h] @ k)
            matrix[b, h] += np.outer(update, k)
            read[b, h, t] = matrix[b, h] @ q
    return matrix, read


def by_token(rule, matrix):
    def step(matrix, token):
        return read_token(matrix, token)

    matrix, read = jax.lax.scan(step, matrix, jax.tree.map(lambda x: jnp.moveaxis(x, 2, 0), rule))
    return matrix, jnp.moveaxis(read, 0, 2)


def first_states():
    return jax.random.normal(jax.random.key(1), (B, H, P, K))


def starts(name):
    start = np.zeros((B, N // BLOCK), bool)
    for place in STARTS[name]:
        start[place] = True
    return start


@of_each_kind
@pytest.mark.parametrize("chunk", [1, 2, 32])
@pytest.mark.parametrize("documents", STARTS)
def test_chunks_equal_the_plain_loop(kind, chunk, documents):
    rule, start = rule_of(kind), starts(documents)
    results = jax.jit(read_chunks, static_argnums=3)(rule, first_states(), start, chunk)
    for ours, theirs in zip(results, plain_loop(rule, first_states(), start), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-5)


@of_each_kind
def test_token_by_token_equals_the_plain_loop(kind):
    results = jax.jit(by_token)(rule_of(kind), first_states())
    for ours, theirs in zip(results, plain_loop(rule_of(kind), first_states(), starts("one document")), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-5)


def extreme(kind):
    """Decays of 1, of almost 1 and of 0, in channels or heads; strengths of 0 and 1; all keys of a group are equal."""
    rule = rule_of(kind)
    choices = np.array([0, -1e-8, -60, -300, -0.1])
    log_decay = choices[np.random.default_rng(1).integers(len(choices), size=rule.log_decay.shape)]
    strength = rule.strength if rule.strength is None else jnp.round(rule.strength)
    return rule._replace(
        key=jnp.broadcast_to(rule.key[:, :, :1], rule.key.shape),
        log_decay=jnp.asarray(log_decay, jnp.float32),
        strength=strength,
    )


@on_each_platform
@pytest.mark.parametrize("make", [rule_of, extreme])
def test_chunks_and_tokens_have_the_same_gradients(monkeypatch, kind, make, on_accelerator):
    monkeypatch.setattr(linear_recurrence, "fills_whole_triangles", lambda: on_accelerator)
    rule, start = make(kind), starts("one document")

    @functools.partial(jax.jit, static_argnums=2)
    @functools.partial(jax.grad, argnums=(0, 1))
    def differentiate(rule, matrix, chunk):
        matrix, read = read_chunks(rule, matrix, start, chunk) if chunk else by_token(rule, matrix)
        return jnp.sum(jnp.sin(read)) + jnp.sum(jnp.sin(matrix))

    ours, theirs = (jax.tree.leaves(differentiate(rule, first_states(), chunk)) for chunk in (BLOCK, 0))
    for a, b in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=2e-5 * np.abs(b).max())


def gradient_of_rates(rates, steps, rule, chunk, dtype):
    """The gradient of Mamba-2's rates, whose product with a token's step is its decay; a chunk of 0: token by token."""

    def loss(rates):
        parts = (jnp.asarray(x, dtype) for x in (rule.query, rule.key, rule.value))
        changed = Rule(*parts, -rates[:, None, None] * steps, None)
        start, matrix = starts("one document"), jnp.zeros((B, H, P, K), dtype)
        matrix, read = read_chunks(changed, matrix, start, chunk) if chunk else by_token(changed, matrix)
        return jnp.sum(jnp.sin(read)) + jnp.sum(matrix)

    return np.asarray(jax.jit(jax.grad(loss))(jnp.asarray(rates, dtype)), np.float64)


@pytest.mark.parametrize("seed", range(3))
def test_gradients_of_rates_are_exact_where_some_tokens_forget_all(seed):
    """Steps near 30 among ordinary ones: a difference of sums over a chunk would lose the gradient's digits there."""
    generator = np.random.default_rng(seed)
    steps, rates = generator.uniform(0.001, 0.1, (B, H, N, 1)), np.linspace(1, 16, H)
    steps[:, :, ::7] = generator.uniform(25, 35, steps[:, :, ::7].shape)
    steps, rates, rule = steps.astype(np.float32), rates.astype(np.float32), rule_of("mamba", seed)
    with jax.enable_x64(True):
        exact = gradient_of_rates(rates, np.asarray(steps, np.float64), rule, 0, np.float64)
    for chunk in (0, 1, 8, 32):
        ours = gradient_of_rates(rates, steps, rule, chunk, np.float32)
        assert np.linalg.norm(ours - exact) <= 3e-6 * np.linalg.norm(exact), chunk
        np.testing.assert_allclose(ours, exact, rtol=1e-5, err_msg=str(chunk))


@on_each_platform
def test_extreme_decays_equal_the_plain_loop(monkeypatch, kind, on_accelerator):
    monkeypatch.setattr(linear_recurrence, "fills_whole_triangles", lambda: on_accelerator)
    start = starts("documents")
    results = jax.jit(lambda *x: read_chunks(*x, BLOCK))(extreme(kind), first_states(), start)
    for ours, theirs in zip(results, plain_loop(extreme(kind), first_states(), start), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=3e-5 * np.abs(theirs).max())


@pytest.mark.parametrize("on_accelerator", [False, True])
@pytest.mark.parametrize("strength", [0.5, 1.0])
def test_the_system_of_a_long_chunk_is_inverted_exactly(monkeypatch, strength, on_accelerator):
    """64 keys of four channels are as alike as the keys of a text that repeats itself."""
    monkeypatch.setattr(linear_recurrence, "fills_whole_triangles", lambda: on_accelerator)
    key = np.random.default_rng(0).normal(size=(3, 64, K))
    key /= np.linalg.norm(key, axis=-1, keepdims=True)
    system = np.tril(strength * key @ np.swapaxes(key, 1, 2), -1) + np.eye(64)
    # Not one function for both cases: jax keeps what it has traced.
    inverse = jax.jit(lambda system: inverse_of_unit_triangular(system))(system.astype(np.float32))
    np.testing.assert_allclose(inverse, np.linalg.inv(system), atol=1e-5)
    assert inverse_of_unit_triangular(jnp.ones((1, 1, 1))) == 1


def test_equal_decays_of_all_channels_are_a_decay_of_the_head():
    rule, start = rule_of("delta"), starts("documents")
    by_channel = rule._replace(log_decay=jnp.broadcast_to(rule.log_decay, (*rule.log_decay.shape[:3], K)))
    read = jax.jit(read_chunks, static_argnums=3)
    for a, b in zip(*(read(x, first_states(), start, BLOCK) for x in (rule, by_channel)), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)


@pytest.mark.parametrize("convolve", [convolve, functools.partial(convolve_in_kernel, interpret=True)])
def test_the_convolution_sees_no_other_document(convolve):
    inputs, filters = np.arange(1.0, 9).reshape(1, 8, 1), np.array([[1000.0], [100.0], [10.0]])
    recent, start = np.array([[[-1.0], [-2.0]]]), np.array([[False, True]])
    # The second document begins with the fifth token.
    expected = [-1000 - 200 + 10, -2000 + 100 + 20, 1000 + 200 + 30, 2000 + 300 + 40, 50, 500 + 60, 5000 + 600 + 70]
    result = convolve(jnp.asarray(inputs), jnp.asarray(recent), jnp.asarray(filters), start)
    np.testing.assert_allclose(result[0, :, 0], [*expected, 6000 + 700 + 80])


def test_a_chunk_is_a_power_of_two():
    for length in (0, 48):
        with pytest.raises(UserError, match=f"Mamba2.chunk_length={length} must be a power of two"):
            Mamba2(chunk_length=length)
