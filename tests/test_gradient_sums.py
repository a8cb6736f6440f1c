"""Gradients of parameters that are sums of many small terms: with bfloat16 activations they are float32 sums.

A bfloat16 sum of equal terms stops to grow after about 256 of them.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from meliad_like.families.shortformer import AdaptiveVocabulary, ShortformerConfig
from meliad_like.layers.attention import unit_query
from meliad_like.layers.basic import Linear, parameter
from meliad_like.mixers.recurrent_states import FixedGate
from meliad_like.models.decoder import DecoderConfig

COUNT, SMALL = 4096, 0.01
HALF = jnp.bfloat16


def rngs():
    return nnx.Rngs(params=jax.random.key(0))


def gradient(module, apply):
    """The gradient of the module's parameters if each number of `apply(module)` has a gradient of `SMALL`."""
    graphdef, params = nnx.split(module, nnx.Param)

    @jax.jit
    def pulled(params):
        y, pull_back = jax.vjp(lambda params: apply(nnx.merge(graphdef, params)), params)
        assert y.dtype == HALF
        return pull_back(jnp.full_like(y, SMALL))[0]

    return pulled(params)


def check(array, count=COUNT, factor=1.0):
    np.testing.assert_allclose(array, count * SMALL * factor, rtol=0.01)


def test_embedding_of_a_decoder():
    config = DecoderConfig(
        num_layers=1, model_width=8, num_heads=1, head_size=8, window_length=8, activation_dtype="bfloat16"
    )
    model = config.build(5, rngs=rngs())
    tokens = jnp.full((4, COUNT // 4), 3)
    of_table = gradient(model, lambda model: model.embed(tokens, None, None)).embedding[...]
    check(of_table[3])
    assert not np.any(of_table[:3])


@pytest.mark.parametrize("cutoffs", [(), (3,)])
def test_adaptive_embedding(cutoffs):
    config = ShortformerConfig(model_width=8, cutoffs=cutoffs, band_factor=2, softmax_dropout_rate=0.0)
    vocabulary = AdaptiveVocabulary(config, 8, rngs=rngs())
    if (projection := vocabulary.bands[0].projection) is not None:
        projection[...] = jnp.eye(8)
    of_bands = gradient(vocabulary, lambda module: module.embed(jnp.full(COUNT, 2), HALF)).bands
    check(of_bands[0].embedding[2])


def test_bias_of_a_linear_map():
    linear = Linear(4, 3, (None, None), rngs=rngs(), bias_initializer=jax.nn.initializers.zeros)
    check(gradient(linear, lambda module: module(jnp.ones((2, COUNT // 2, 4), HALF))).bias)


def test_bias_of_a_gate():
    gate = FixedGate(4, 3, "heads", (2.0, 8.0), rngs=rngs())
    share = np.asarray(jax.nn.sigmoid(gate.bias[...]))
    state, update = jnp.ones((2, COUNT // 2, 3), HALF), jnp.zeros((2, COUNT // 2, 3), HALF)
    check(gradient(gate, lambda module: module(state, state, update)).bias, factor=share * (1 - share))


def test_scale_of_queries():
    class Scale(nnx.Module):
        def __init__(self):
            self.scale = parameter(jax.random.key(0), jax.nn.initializers.ones, (2,), ("heads",), "scale")

    query = jnp.zeros((4, 2, COUNT // 4, 8), HALF).at[..., 0].set(1)
    check(gradient(Scale(), lambda module: unit_query(query, module.scale)[..., 0]).scale)
