"""The kernels for TPUs and GPUs, interpreted, against the attention that all platforms share."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from decoders import gradient_over_segments
from einops import rearrange
from jax.sharding import AbstractDevice, AbstractMesh

from meliad_like.errors import UserError
from meliad_like.kernels.registry import KERNELS
from meliad_like.kernels.window_gpu_programs import Tiling, Tilings
from meliad_like.kernels.window_tpu import Projected
from meliad_like.layers.attention import attend_window, unit
from meliad_like.layers.basic import kept_by_dropout, multiplier_of
from meliad_like.mixers.positions import Rotary
from meliad_like.models.decoder import DecoderConfig
from meliad_like.models.model import Model

RATE = 0.3
"""The rate of dropout, where there is any."""


def draw(seed):
    """The arguments of the attention, and the number of queries in a row."""
    generator = np.random.default_rng(seed)
    b, c, h = generator.integers(1, 4, 3)
    rows = int(generator.choice([4, 8, 16]))
    w, k = rows * int(generator.integers(1, 5)), int(generator.choice([4, 8]))

    def normal(*shape):
        return jnp.asarray(generator.standard_normal(shape), jnp.float32)

    arguments = {
        "projected": Projected(*(normal(b, n, h * k) for n in (c * w, c * w, c * w, w, w))),
        "scale": normal(h),
        "bias": normal(h, w),
    }
    valid = jnp.asarray(generator.random((b, c)) < 0.6)
    kept = kept_by_dropout(jax.random.key(seed), RATE, (h, w, w)) if seed % 2 else None
    return arguments, valid, kept, normal(b, c * w, h * k), rows, bool(seed % 3)


def reference(projected, scale, bias, valid, kept, *, mask_previous):
    h, w = bias.shape
    query, key, value, before_key, before_value = (
        rearrange(x, "b (c w) (h k) -> b c h w k", h=h, w=w) for x in projected
    )
    query, key = (unit(query).astype(jnp.float32) * scale[:, None, None]).astype(query.dtype), unit(key)
    previous = [
        jnp.concatenate([before, x[:, :-1]], axis=1) for before, x in ((before_key, key), (before_value, value))
    ]
    if not mask_previous:
        previous = [jnp.where(valid[:, :, None, None, None], x, 0) for x in previous]
        valid = jnp.ones_like(valid)
    mixed = attend_window(query, key, value, *previous, bias, valid, multiplier_of(kept, RATE))
    return rearrange(mixed, "b c h w k -> b (c w) (h k)")


@functools.partial(jax.jit, static_argnums=0)
def outputs_and_gradients(attend, arguments, valid, kept, cotangent):
    def attended(arguments):
        scale = jnp.abs(arguments["scale"])
        return attend(arguments["projected"], scale, arguments["bias"] * scale[:, None], valid, kept)

    outputs, pull_back = jax.vjp(attended, arguments)
    return outputs, pull_back(cotangent)[0]


@functools.cache
def kernel_and_reference(name, rows, mask_previous):
    kernel = functools.partial(KERNELS[name].attend, rows=rows, dropout_rate=RATE, interpret=True)
    return [functools.partial(attend, mask_previous=mask_previous) for attend in (kernel, reference)]


@pytest.mark.parametrize("name", ["tpu", "gpu"])
# With dropout or without, and with or without a mask of the block before.
@pytest.mark.parametrize(
    "seed", [0, 1, 3, 4, *(pytest.param(n, marks=pytest.mark.exhaustive) for n in (2, *range(5, 40)))]
)
def test_outputs_and_gradients_equal_the_shared_attention(name, seed):
    *inputs, rows, mask_previous = draw(seed)
    attends = kernel_and_reference(name, rows, mask_previous)
    actual, expected = (outputs_and_gradients(attend, *inputs) for attend in attends)
    for x, y in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("seed", [6, 33, *(pytest.param(n, marks=pytest.mark.exhaustive) for n in range(7, 33))])
@pytest.mark.thorough
def test_a_window_may_be_wider_than_the_kernel(seed):
    """The outputs also with a bias so large that only the scores' differences from the largest are exact."""
    arguments, *inputs, rows, mask_previous = draw(seed)
    # Keys so short that their unit length is not 1, and their gradients are large.
    arguments["projected"] = arguments["projected"]._replace(key=1e-3 * arguments["projected"].key)
    kernel, reference = kernel_and_reference("tpu", rows, mask_previous)
    attends = functools.partial(kernel, widest=rows), reference
    actual, expected = (outputs_and_gradients(attend, arguments, *inputs) for attend in attends)
    for x, y in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5 * max(1, np.abs(y).max()))
    # With scales of 1, so that nobody rounds a product with them before others.
    large = arguments | {"bias": 1e4 * arguments["bias"], "scale": jnp.ones_like(arguments["scale"])}
    actual, expected = (outputs_and_gradients(attend, large, *inputs)[0] for attend in attends)
    np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("seed", "queries", "keys"), [(1, 2, 4), (8, 4, 2), (1, 64, 32)])
def test_tiles_of_the_kernel_for_gpus_need_not_be_squares(seed, queries, keys):
    """And no larger than their largest divisors that the window has."""
    *inputs, rows, mask_previous = draw(seed)
    tiling = Tiling(queries, keys)
    kernel, reference = kernel_and_reference("gpu", rows, mask_previous)
    attends = functools.partial(kernel, tilings=Tilings()._replace(forward=tiling, of_keys=tiling)), reference
    actual, expected = (outputs_and_gradients(attend, *inputs) for attend in attends)
    for x, y in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5)


def mean_square(x):
    return float(jnp.mean(jnp.square(x)))


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("name", "options"), [pytest.param("tpu", {"widest": 8}, marks=pytest.mark.exhaustive), ("gpu", {})]
)
def test_bfloat16_is_rounded_no_more_than_in_the_shared_attention(name, options):
    """On average over several draws: in the smallest arrays of one draw, single numbers decide."""

    def squared_errors(seed):
        arguments, valid, kept, cotangent, rows, _ = draw(seed)
        rounded = arguments | {"projected": Projected(*(x.astype(jnp.bfloat16) for x in arguments["projected"]))}
        cotangent = cotangent.astype(jnp.bfloat16)
        exact = jax.tree.map(lambda x: x.astype(jnp.float32), (rounded, cotangent))
        kernel, reference = kernel_and_reference(name, rows, True)
        attends = functools.partial(kernel, **options), reference
        expected = outputs_and_gradients(reference, exact[0], valid, kept, exact[1])
        results = [outputs_and_gradients(attend, rounded, valid, kept, cotangent) for attend in attends]
        return [[mean_square(x - y) for x, y in zip(*map(jax.tree.leaves, (one, expected)))] for one in results]

    errors = np.sqrt(np.mean([squared_errors(seed) for seed in (1, 3, 5, 7)], axis=0))
    assert (errors[0] < 1.5 * errors[1] + 1e-5).all()


@pytest.mark.parametrize("mask_empty_cache", [True, False])
def test_a_decoder_with_the_kernel_equals_the_default(mask_empty_cache):
    generator, (b, c, w) = np.random.default_rng(0), (2, 3, 4)
    tokens = jnp.asarray(generator.integers(0, 32, (2, b, c * w)), jnp.int32)
    start = jnp.asarray(generator.random((2, b, c)) < 0.3)
    default = DecoderConfig(
        num_layers=1,
        model_width=16,
        num_heads=2,
        head_size=8,
        feedforward_width=16,
        window_length=w,
        dropout_rate=0.1,
        mask_empty_cache=mask_empty_cache,
    )

    configs = default, dataclasses.replace(default, attention_kernel="interpreted")
    results = [gradient_over_segments(config, tokens, start) for config in configs]
    for x, y in zip(*map(jax.tree.leaves, results), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-4)


def test_positions_that_change_keys_are_refused():
    config = DecoderConfig(num_layers=1, window_length=4, position=Rotary(), attention_kernel="interpreted")
    model = Model(config, 32)

    def read(params):
        module = model.bind(params)
        return module(jnp.zeros((1, 4), jnp.int32), module.init_carry(1), jnp.zeros((1, 1), bool))

    with pytest.raises(
        UserError, match="needs a DecoderConfig.position that is none or a bias, not cpu, .* and Rotary"
    ):
        jax.eval_shape(read, model.abstract_params)


def trace(kernel, window_length, platform, dropout, **options):
    """The program of a loss and its gradient for one device of a platform."""
    config = DecoderConfig(
        num_layers=1,
        model_width=16,
        num_heads=3,
        head_size=128,
        feedforward_width=16,
        window_length=window_length,
        dropout_rate=0.1,
        attention_kernel=kernel,
        **options,
    )
    model = Model(config, 32)

    def loss(params, tokens, key):
        module = model.bind(params)
        hidden, _ = module(tokens, module.init_carry(2), jnp.zeros((2, 2), bool), key)
        return jnp.sum(hidden)

    kind = AbstractDevice(device_kind="any", num_cores=1, platform=platform)
    mesh = AbstractMesh((1,) * 4, ("data", "fsdp", "tensor", "sequence"), abstract_device=kind)
    tokens, key = jnp.zeros((2, 2 * window_length), jnp.int32), jax.random.key(0)
    with jax.sharding.use_abstract_mesh(mesh):
        return jax.jit(jax.grad(loss)).trace(model.abstract_params, tokens, key if dropout else None)


@pytest.mark.parametrize("dropout", [False, True])
def test_a_training_step_is_lowered_for_tpus_without_scores_in_memory(dropout):
    program = trace("tpu", 256, "tpu", dropout).lower(lowering_platforms=("tpu",)).as_text()
    assert program.count("tpu_custom_call") == 2
    # With dropout, what it keeps [h, w, w] is there.
    assert ("256x256x" in program) == dropout and "x3x256x256x" not in program


@pytest.mark.parametrize("dropout", [False, True])
def test_a_training_step_for_gpus_has_no_scores_in_memory(dropout):
    program = str(trace("gpu", 256, "gpu", dropout).jaxpr)
    # With the gradients of the block before, which the compiler leaves out where nobody asks for them.
    assert program.count("pallas_call[") == 4
    assert ("3,256,256]" in program) == dropout and ",3,256,256]" not in program


@pytest.mark.parametrize(
    "kernel, window_length, platform", [("tpu", 256, "cpu"), ("tpu", 192, "tpu"), ("gpu", 96, "gpu")]
)
def test_what_the_kernel_is_not_for(kernel, window_length, platform):
    message = f"not {platform}, window_length={window_length}, head_size=128 and T5: set it to 'none'"
    with pytest.raises(UserError, match=message):
        trace(kernel, window_length, platform, dropout=False)
