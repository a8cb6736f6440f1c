"""Retention and lightning attention against their parallel form: attention without a softmax, times decays."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from einops import rearrange
from flax import nnx

from meliad_like.mixers.base import LayerContext
from meliad_like.mixers.lightning_attention import LightningAttention
from meliad_like.mixers.retention import Retention
from meliad_like.models.decoder import DecoderConfig

D, H, K, N = 12, 2, 4, 48
SHAPE = DecoderConfig(model_width=D, num_heads=H, head_size=K, window_length=16).shape


def logistic(x):
    return 1 / (1 + np.exp(-x))


def parallel(config, mixer, x):
    """The published equations, with the rotary positions of retention as complex numbers; float64."""
    projections = mixer.query, mixer.key, mixer.value, mixer.gate
    query, key, value, gate = (x @ np.asarray(each.kernel[...], np.float64) for each in projections)
    apart, j = np.arange(N)[:, None] - np.arange(N), np.arange(H)
    if isinstance(config, LightningAttention):
        query, key, value = (y * logistic(y) for y in (query, key, value))
    query, key, value = (rearrange(y, "b n (h k) -> b h n k", h=H) for y in (query, key, value))
    if isinstance(config, LightningAttention):
        gamma = np.exp(-(2.0 ** (-8 * (j + 1) / H)))
        scores = query @ np.swapaxes(key, -1, -2)
    else:
        gamma = 1 - 2.0 ** (-5 - j)
        query, key = (y[..., : K // 2] + 1j * y[..., K // 2 :] for y in (query, key))
        turned = np.exp(1j * apart[..., None] / 10_000 ** (np.arange(K // 2) / (K // 2)))
        scores = np.einsum("bhtk,bhsk,tsk->bhts", query, key.conj(), turned).real / np.sqrt(K)
    y = (scores * np.where(apart >= 0, gamma[:, None, None] ** np.maximum(apart, 0), 0)) @ value
    if isinstance(config, Retention):
        y /= np.sqrt(np.mean(y**2, axis=-1, keepdims=True) + 1e-5)
        return rearrange(y, "b h n p -> b n (h p)") * gate * logistic(gate)
    y = rearrange(y, "b h n p -> b n (h p)")
    return y / np.sqrt(np.mean(y**2, axis=-1, keepdims=True) + 1e-5) * logistic(gate)


@pytest.mark.parametrize("config", [Retention(), LightningAttention()], ids=["retention", "lightning attention"])
def test_segments_equal_the_parallel_form(config):
    """In two segments, of which the second begins at another place."""
    mixer, x = config.build(SHAPE, rngs=nnx.Rngs(0)), np.random.default_rng(0).normal(size=(2, N, D))

    @jax.jit
    def read(x, carry):
        return mixer(x, LayerContext(jnp.full((2, x.shape[1] // 16), 16), {}), carry, None)

    first, carry = read(jnp.asarray(x[:, :16], jnp.float32), mixer.init_carry(2, jnp.float32))
    second, _ = read(jnp.asarray(x[:, 16:], jnp.float32), carry)
    np.testing.assert_allclose(np.concatenate([first, second], axis=1), parallel(config, mixer, x), atol=2e-5)
