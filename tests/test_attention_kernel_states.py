"""The kernel for the attention of and to states, interpreted, against the attention that all platforms share."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from decoders import gradient_over_segments, with_mixer
from test_attention_kernel import mean_square, trace

from meliad_like.kernels.states_tpu import ProjectedKeys, attend_unit_in_kernel
from meliad_like.layers.attention import KeysAndValues, attend_unit, merge_heads, split_heads, unit
from meliad_like.mixers.recurrent_states import RecurrentStates, StateReader
from meliad_like.models.decoder import DecoderConfig

KERNEL = functools.partial(attend_unit_in_kernel, interpret=True)
DECODER = DecoderConfig(
    num_layers=3, model_width=16, num_heads=2, head_size=8, feedforward_width=16, window_length=4, dropout_rate=0.1
)


def reference(query, scale, *parts):
    h = len(scale)
    query = unit(split_heads(query, h))
    query = (query.astype(jnp.float32) * scale[:, None, None]).astype(query.dtype)
    by_head = []
    for key, value, visible, has_unit_length in parts:
        key, value = split_heads(key, h), split_heads(value, h)
        given = False if has_unit_length is None else has_unit_length[..., None, None, None]
        by_head.append(KeysAndValues(jnp.where(given, key, unit(key)), value, visible))
    return merge_heads(attend_unit(query, *by_head))


def draw(seed, dtype="float32"):
    """Arguments of the kernel with one or two rows of queries, and a cotangent of its outputs."""
    generator = np.random.default_rng(seed)
    batch = [(2,), (3, 2)][seed % 2]
    h, t, k = int(generator.integers(1, 4)), int(generator.choice([8, 128, 256])), int(generator.choice([4, 8]))

    def normal(*shape):
        return jnp.asarray(generator.standard_normal(shape), dtype)

    def keys(*flags):
        s = int(generator.integers(1, 20))
        return ProjectedKeys(normal(*batch, s, h * k), normal(*batch, s, h * k), *flags)

    flags = [jnp.asarray(generator.random(batch) < 0.5) for _ in range(2)]
    parts = [[keys()], [keys(*flags), keys()], [keys(None, flags[0]), keys(flags[1]), keys()]][seed % 3]
    return (normal(*batch, t, h * k), jnp.abs(normal(h)).astype("float32"), parts), normal(*batch, t, h * k)


@functools.partial(jax.jit, static_argnums=0)
def outputs_and_gradients(attend, arguments, cotangent):
    query, scale, parts = arguments

    def attended(query, scale, keys_and_values):
        return attend(query, scale, *(ProjectedKeys(*x, *part[2:]) for x, part in zip(keys_and_values, parts)))

    outputs, pull_back = jax.vjp(attended, query, scale, [part[:2] for part in parts])
    return outputs, pull_back(cotangent)


@pytest.mark.parametrize("seed", range(6))
def test_outputs_and_gradients_equal_the_shared_attention(seed):
    actual, expected = (outputs_and_gradients(attend, *draw(seed)) for attend in (KERNEL, reference))
    for x, y in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5)


@pytest.mark.thorough
def test_bfloat16_is_rounded_no_more_than_in_the_shared_attention():
    """On average over several draws, as for the window."""

    def squared_errors(seed):
        rounded = draw(seed, "bfloat16")
        exact = jax.tree.map(lambda x: x.astype(jnp.float32) if x.dtype == jnp.bfloat16 else x, rounded)
        expected = outputs_and_gradients(reference, *exact)
        results = [outputs_and_gradients(attend, *rounded) for attend in (KERNEL, reference)]
        pairs = [list(zip(jax.tree.leaves(one), jax.tree.leaves(expected), strict=True)) for one in results]
        # Outputs, gradients of queries and scale, and, because draws differ in their parts, those of keys and values.
        squares = [[mean_square(x - y) for x, y in each] for each in pairs]
        return [[*each[:3], np.mean(each[3:])] for each in squares]

    errors = np.sqrt(np.mean([squared_errors(seed) for seed in range(3)], axis=0))
    assert (errors[0] < 1.5 * errors[1] + 1e-5).all()


@pytest.mark.exhaustive
def test_a_decoder_with_the_kernel_equals_the_default():
    b, c, w = 2, 3, DECODER.window_length
    tokens = jax.random.randint(jax.random.key(0), (2, b, c * w), 0, 32)
    start = jnp.asarray([[[1, 0, 0], [1, 0, 1]], [[0, 1, 0], [0, 0, 0]]], bool)
    default = dataclasses.replace(DECODER, mask_empty_cache=False)
    default = with_mixer(default, RecurrentStates(num_states=8, cell="dual"), (0, 1))
    default = with_mixer(default, StateReader())

    configs = default, dataclasses.replace(default, attention_kernel="interpreted")
    results = [gradient_over_segments(config, tokens, start) for config in configs]
    for x, y in zip(*map(jax.tree.leaves, results), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("num_states", "kernels"), [(384, 2 + 2 * 3), (320, 2)])
def test_a_training_step_is_lowered_for_tpus_without_the_states_scores(num_states, kernels):
    """There is a kernel for the forward pass and one for the backward pass of the attention to the window, of tokens to
    states, among states, and of states to tokens. Both iterations of the scan call the same function, so that each of
    its kernels appears once. If the number of states is not a multiple of 128, only the window has kernels."""
    program = trace(
        "tpu",
        256,
        "tpu",
        False,
        pattern=("recurrent_states+feedforward",),
        mixers=(RecurrentStates(num_states=num_states),),
    )
    program = program.lower(lowering_platforms=("tpu",)).as_text()
    assert program.count("tpu_custom_call") == kernels
    for scores in (f"3x256x{num_states}x", f"3x{num_states}x{num_states}x", f"3x{num_states}x256x"):
        assert (scores in program) == (num_states == 320)
