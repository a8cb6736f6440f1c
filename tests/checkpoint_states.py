"""Small training states, and folders of checkpoints of them."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from meliad_like.training.checkpoints import Checkpoints


class State(NamedTuple):
    step: Any
    params: Any
    optimizer_state: Any
    carry: Any
    key: Any


class Moments(NamedTuple):
    count: Any
    v: Any


def make_state(step: int = 1) -> State:
    generator = np.random.default_rng(step)
    kernel = jnp.asarray(generator.normal(size=(16, 8)), jnp.float32)
    return State(
        step=jnp.int32(step),
        params={"layer": {"kernel": kernel}, "scale": jnp.ones(8) / 3},
        optimizer_state=((), Moments(jnp.int32(step), {"kernel": kernel.astype(jnp.bfloat16)})),
        carry=[jnp.asarray(generator.normal(size=(8, 4)), jnp.float32), jnp.arange(8) % 3 == 0],
        key=jnp.asarray([step, 2**32 - 1], jnp.uint32),
    )


def abstract(tree):
    return jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=a.sharding), tree)


def assert_same_bits(actual, expected):
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected)):
        assert a.dtype == b.dtype
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


def save_all(folder, steps, **options) -> None:
    with Checkpoints(folder, **options) as checkpoints:
        for step in steps:
            checkpoints.save(step, make_state(step), {"step": step})
