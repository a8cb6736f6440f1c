"""The parts of layers, also for platforms that this machine does not have."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh

from meliad_like.layers.attention import UNIT_EPSILON, KeysAndValues, attend_unit, unit, unit_query
from meliad_like.layers.basic import parameter, product, rematerialise_iteration, scores
from meliad_like.layers.losses import token_losses

ACCELERATORS = {"tpu": "TPU v4", "cuda": "NVIDIA H100 80GB HBM3"}


def value(x, kernel, dtype=None):
    return jnp.sum(jnp.sin(product(x, kernel, dtype)))


@pytest.fixture
def arguments():
    """Arguments with a kernel that has more rows than columns."""
    generator = np.random.default_rng(0)
    return [generator.standard_normal(shape, np.float32) for shape in ((64, 32), (32, 8))]


@pytest.fixture(params=ACCELERATORS)
def accelerator(request):
    """Its name for the compiler, under a mesh of it."""
    kind = AbstractDevice(device_kind=ACCELERATORS[request.param], num_cores=1, platform=request.param)
    with jax.sharding.use_abstract_mesh(AbstractMesh((1,), ("data",), abstract_device=kind)):
        yield request.param


def program(function, platform, *arguments):
    return jax.jit(function).trace(*arguments).lower(lowering_platforms=(platform,)).as_text()


def test_the_order_for_cpus_is_for_cpus_alone(arguments, accelerator):
    gradient = jax.grad(value, argnums=(0, 1))
    assert "optimization_barrier" not in program(gradient, accelerator, *arguments)


def test_gradients_on_a_cpu(arguments):
    gradient = jax.grad(value, argnums=(0, 1))
    assert "optimization_barrier" in program(gradient, "cpu", *arguments)
    expected = jax.grad(lambda x, kernel: jnp.sum(jnp.sin(x @ kernel)), argnums=(0, 1))(*arguments)
    for actual, of_plain_product in zip(gradient(*arguments), expected):
        np.testing.assert_allclose(actual, of_plain_product, rtol=1e-5, atol=1e-5)


def test_forward_mode_on_accelerators(arguments, accelerator):
    def directional(x, kernel):
        return jax.jvp(value, (x, kernel), (x, kernel))

    assert "dot_general" in program(directional, accelerator, *arguments)
    linear = jax.linearize(value, *arguments)[1]
    np.testing.assert_allclose(linear(*arguments), directional(*arguments)[1], rtol=1e-5)


def test_products_are_rounded_and_the_gradient_of_the_kernel_is_not(arguments, accelerator):
    """Forwards and for the gradient of `x`."""
    x, kernel = arguments
    gradient = program(jax.grad(lambda x, k: value(x, k, "bfloat16"), argnums=(0, 1)), accelerator, x, kernel)
    products = [line.partition(" : ")[2] for line in gradient.splitlines() if "dot_general" in line]
    assert sorted(line.count("bf16") for line in products) == [0, 2, 2]


def test_gradients_of_logits_are_rounded_before_their_products(arguments, accelerator):
    """A GPU would multiply float32 numbers at half the speed, and not more exactly than their rounded products."""
    x, table = jnp.asarray(arguments[0], jnp.bfloat16), arguments[1].T
    gradient = jax.grad(lambda x, table: jnp.sum(jnp.sin(scores(x, table))), argnums=(0, 1))
    products = [line for line in program(gradient, accelerator, x, table).splitlines() if "dot_general" in line]
    assert len(products) == 3
    for line in products:
        operands = line.partition(" : ")[2].partition("->")[0]
        assert operands.count("bf16") == 2, line


class Logits(NamedTuple):
    """A model whose hidden vectors are the logits."""

    target_scores: None = None

    def logits(self, hidden):
        return hidden


@pytest.mark.parametrize("slice_length", [4, 12])
def test_the_gradient_of_losses_is_the_difference_of_probabilities(slice_length):
    generator = np.random.default_rng(3)
    logits = 4 * generator.standard_normal((2, 12, 7), np.float32)
    targets, weights = generator.integers(0, 7, (2, 12)), generator.standard_normal((2, 12), np.float32)

    def loss(logits):
        return jnp.sum(weights * token_losses(Logits(), logits, targets, slice_length).nats)

    expected = weights[..., None] * (jax.nn.softmax(logits) - np.eye(7)[targets])
    np.testing.assert_allclose(jax.jit(jax.grad(loss))(logits), expected, rtol=1e-5, atol=1e-6)


def attention_arguments():
    """Queries of 5 vectors, and keys and values of two blocks of 7; 3 lanes, 2 heads of 4 channels."""
    generator = np.random.default_rng(1)
    return [generator.standard_normal((3, 2, n, 4), np.float32) for n in (5, 7, 7, 7, 7)]


VISIBLE = np.array([True, False, True])


def by_attend_unit(scale, query, key, value, before_key, before_value):
    before = KeysAndValues(unit(before_key), before_value, VISIBLE)
    return attend_unit(unit_query(query, scale), before, KeysAndValues(unit(key), value))


def by_softmax(scale, query, key, value, before_key, before_value):
    def plain_unit(x):
        return x / jnp.sqrt(jnp.sum(jnp.square(x), axis=-1, keepdims=True) + UNIT_EPSILON)

    keys = plain_unit(jnp.concatenate([before_key, key], axis=2))
    visible = jnp.repeat(jnp.stack([VISIBLE, np.ones(3, bool)], axis=1), 7, axis=1)[:, None, None]
    scores = jnp.einsum("bhtk,bhsk->bhts", plain_unit(query) * jnp.abs(scale[...])[:, None, None], keys)
    weights = jax.nn.softmax(jnp.where(visible, scores, -jnp.inf))
    return jnp.einsum("bhts,bhsk->bhtk", weights, jnp.concatenate([before_value, value], axis=2))


def scales(*values):
    return parameter(jax.random.key(0), lambda *_: jnp.asarray(values), (2,), ("heads",), "scale")


@pytest.mark.parametrize(("scale", "tolerance"), [(8.0, 1e-5), (40.0, 1e-3)])
def test_attention_of_unit_vectors_and_its_gradients_are_those_of_a_softmax(scale, tolerance):
    def total(attended):
        return jax.value_and_grad(lambda *x: jnp.sum(jnp.sin(3 * attended(*x))), argnums=tuple(range(6)))

    arguments = (scales(-5.0, scale), *attention_arguments())
    for ours, theirs in zip(*(jax.tree.leaves(total(f)(*arguments)) for f in (by_attend_unit, by_softmax))):
        np.testing.assert_allclose(ours, theirs, rtol=tolerance, atol=tolerance)


def test_short_vectors_stay_short():
    """The square of the length counts as 1e-6 more."""
    lengths = np.float32([[1e-5], [1e-3], [1.0]])
    np.testing.assert_allclose(unit(lengths), lengths / np.sqrt(lengths.astype(np.float64) ** 2 + 1e-6), rtol=1e-6)


def test_an_iteration_keeps_less_on_accelerators(accelerator):
    def scanned(scale, query, *others):
        step = rematerialise_iteration(lambda carry, _: (by_attend_unit(scale, carry, *others), None))
        return jnp.sum(jax.lax.scan(step, query, None, length=3)[0])

    def largest_kept():
        jaxpr = jax.make_jaxpr(jax.grad(scanned, argnums=1))(scales(1.0, 2.0), *attention_arguments())
        forward = next(one for one in jaxpr.eqns if one.primitive.name == "scan")
        return max(np.prod(out.aval.shape) for out in forward.outvars)

    queries, weights = 3 * 3 * 2 * 5 * 4, 3 * 3 * 2 * 5 * 7
    assert largest_kept() == queries
    with jax.sharding.use_abstract_mesh(AbstractMesh((), ())):
        assert largest_kept() == weights
