"""Every path of attention against a plain softmax in float64, with scales, biases and masks as training may learn them.

Errors are relative to the largest value. Float32 holds scores of 200 to about 1e-5, so the limit there is higher.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from einops import rearrange

from meliad_like.kernels.registry import KERNELS
from meliad_like.kernels.window_tpu import Projected
from meliad_like.layers.attention import KeysAndValues, attend, attend_unit, attend_window, unit
from meliad_like.layers.memory_search import Hits, Lookup, products

B, C, H, W, K = 2, 2, 2, 16, 8
VALID = jnp.array([[False, True], [True, False]])
SCALES = [0.1, 1.0, 6.0, 36.0, 41.0, 50.0, 120.0, 200.0]


def limit(scale):
    return 1e-5 if scale <= 50 else 1e-4


def softmax(query, key, value, bias, mask):
    """[..., t, s] scores in float64; 0 where all keys are masked."""
    query, key, value, bias = (np.asarray(x, np.float64) for x in (query, key, value, bias))
    scores = np.where(mask, query @ np.swapaxes(key, -1, -2) + bias, -np.inf)
    highest = np.max(scores, axis=-1, keepdims=True)
    weights = np.exp(scores - np.where(np.isfinite(highest), highest, 0))
    return weights @ value / np.maximum(np.sum(weights, axis=-1, keepdims=True), 1)


@functools.partial(jax.jit, static_argnums=0)
def gradients(path, query, key, value, bias, *others):
    def total(*arguments):
        return jnp.sum(1e3 * path(*arguments, *others))

    return jax.grad(total, argnums=(0, 1, 2, 3))(query, key, value, bias)


def check_gradients(path, *arguments):
    assert all(np.isfinite(x).all() for x in gradients(path, *arguments))


def normal(seed, *shape):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


def biases(kind):
    """Biases by distance, [h, w], before they are multiplied by the scale."""
    generator = np.random.default_rng(7)
    by_kind = {
        "random": generator.uniform(-20, 20, (H, W)),
        "close": 20 - generator.uniform(0, 0.1, (H, W)),
        "far": np.where(np.arange(W) < W // 2, -20, 20) + generator.uniform(0, 0.01, (H, W)),
        "none": np.zeros((H, W)),
    }
    return jnp.asarray(by_kind[kind], jnp.float32)


def heads(seed, opposed):
    """Queries, keys and values by block, of any length; keys and values with the block before the first."""
    query, key, value = (normal(seed + i, B, C + (i > 0), H, W, K) for i in range(3))
    if opposed:
        query = jnp.broadcast_to(normal(seed + 3, B, 1, H, 1, K), query.shape)
        key = 0.01 * key - query[:, :1]
    return query, key, value


def unit_heads(seed, opposed, scale):
    query, key, value = heads(seed, opposed)
    return unit(query) * scale, unit(key), value


@jax.jit
def window(query, key, value, bias, scale):
    query, key = unit(query) * scale, unit(key)
    return attend_window(query, key[:, 1:], value[:, 1:], key[:, :-1], value[:, :-1], bias, VALID)


@functools.partial(jax.jit, static_argnums=0)
def kernel(name, query, key, value, bias, scale):
    blocks = (rearrange(x, "b c h w k -> b (c w) (h k)") for x in (query, key[:, 1:], value[:, 1:]))
    before = (rearrange(x[:, 0], "b h w k -> b w (h k)") for x in (unit(key), value))
    attend = KERNELS[name].attend
    mixed = attend(Projected(*blocks, *before), jnp.full(H, scale), bias, VALID, dropout_rate=0.0, interpret=True)
    return rearrange(mixed, "b (c w) (h k) -> b c h w k", h=H, w=W)


PATHS = [window, *(functools.partial(kernel, name) for name in ("tpu", "gpu"))]


def window_in_float64(query, key, value, bias, scale):
    query, key = unit(query) * scale, unit(key)
    distance = W + np.arange(W)[:, None] - np.arange(2 * W)
    seen = (distance >= 1) & (distance <= W)
    mask = seen & (np.asarray(VALID)[:, :, None, None, None] | (np.arange(2 * W) >= W))
    key, value = (np.concatenate([x[:, :-1], x[:, 1:]], axis=3) for x in (key, value))
    return softmax(query, key, value, np.asarray(bias)[:, np.clip(distance - 1, 0, W - 1)], mask)


@pytest.mark.parametrize("opposed", [False, True])
@pytest.mark.parametrize("bias", ["random", "close", "far", "none"])
@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("path", PATHS, ids=["window", "tpu", "gpu"])
def test_window(path, scale, bias, opposed):
    arguments = (*heads(0, opposed), biases(bias) * scale)
    actual, expected = path(*arguments, scale), window_in_float64(*arguments, scale)
    np.testing.assert_array_less(np.abs(actual - expected), limit(scale) * np.abs(arguments[2]).max())
    assert not np.any(actual[0, 0, :, 0])

    check_gradients(path, *arguments, scale)


@pytest.mark.parametrize("opposed", [False, True])
@pytest.mark.parametrize("bias", ["random", "close", "far", "none"])
@pytest.mark.parametrize("scale", SCALES)
def test_decoding(scale, bias, opposed):
    """One query of every lane and the ring of keys before it, of which the first three or all are visible."""
    query, key, value = unit_heads(0, opposed, scale)
    query, key, value, bias = query[:, 0, :, :1], key[:, 0], value[:, 0], biases(bias)[:, None] * scale
    mask = (np.arange(W) < np.array([[3], [W]]))[:, None, None]
    actual, expected = attend(query, key, value, bias, mask), softmax(query, key, value, bias, mask)
    np.testing.assert_array_less(np.abs(actual - expected), limit(scale) * np.abs(value).max())
    parts = attend(query, (key[:, :, :5], key[:, :, 5:]), (value[:, :, :5], value[:, :, 5:]), bias, mask)
    np.testing.assert_array_less(np.abs(parts - expected), limit(scale) * np.abs(value).max())

    check_gradients(attend, query, key, value, bias, mask)


@jax.jit
def states(query, keys, values):
    return attend_unit(query, *map(KeysAndValues, keys, values, (None, np.array([True, False]), None)))


@pytest.mark.parametrize("opposed", [False, True])
@pytest.mark.parametrize("scale", SCALES)
def test_states(scale, opposed):
    """Keys in three parts, of which the middle one is visible to one lane and would have the largest scores."""
    query, key, value = unit_heads(3, opposed, scale)
    query = query[:, 0]
    keys, values = [key[:, 0], key[:, 1], key[:, 2, :, :3]], [value[:, 0], value[:, 1], value[:, 2, :, :3]]
    keys[1] = keys[1].at[:, :, :2].set(unit(query[:, :, :2]))

    mask = np.ones((B, 2 * W + 3), bool)
    mask[1, W : 2 * W] = False
    expected = softmax(query, np.concatenate(keys, 2), np.concatenate(values, 2), 0.0, mask[:, None, None])
    difference = np.abs(states(query, keys, values) - expected)
    np.testing.assert_array_less(difference, limit(scale) * np.abs(value).max())
    of_all = jax.jit(jax.grad(lambda *x: jnp.sum(1e3 * states(*x)), argnums=(0, 1, 2)))(query, keys, values)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(of_all))
    assert not np.any(of_all[1][1][1])


@pytest.mark.parametrize("opposed", [False, True])
@pytest.mark.parametrize("scale", SCALES)
def test_memories(scale, opposed):
    query, key, value = unit_heads(5, opposed, scale)
    query, key, value = query[:, 0], key[:, 0], value[:, 0]
    valid = np.broadcast_to(np.arange(W) < np.arange(W)[:, None], (B, H, W, W))
    expected = softmax(query, key, value, 0.0, valid)
    slot = jnp.broadcast_to(jnp.arange(W), valid.shape)
    hits = Hits(slot, jnp.where(valid, products(query, key, slot), -jnp.inf))
    actual = Lookup(W, "exact", mask_empty=True).attend(hits, value)
    np.testing.assert_array_less(np.abs(actual - expected), limit(scale) * np.abs(value).max())
    assert not np.any(actual[:, :, 0])


def test_a_short_vector_gets_less_than_unit_length():
    """The number that is added to squared lengths is that of the reference."""
    length = np.linalg.norm(unit(jnp.array([6e-4, 8e-4])))
    np.testing.assert_allclose(length, np.sqrt(0.5), rtol=1e-5)
