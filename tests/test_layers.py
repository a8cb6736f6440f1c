"""The parts of layers, also for platforms that this machine does not have."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh

from meliad_like.layers.basic import product

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
