"""Functions that the kernels of all platforms share."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array


def sharded_on_mesh(run: Callable, in_specs: tuple, out_specs: PartitionSpec) -> Callable[..., Any]:
    """`run`; under a mesh, each device runs it for its part of the arrays, because the compiler can't divide a kernel
    among devices."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return run
    axis_names = set(mesh.axis_names) - set(mesh.manual_axes)
    return jax.shard_map(run, in_specs=in_specs, out_specs=out_specs, axis_names=axis_names, check_vma=False)


def matrix_product(x: Array, y: Array, contracted: tuple[int, int] = (1, 0), precision: Any = None) -> Array:
    """The product of two matrices, summed over one axis of each, in float32."""
    axes = (contracted[:1], contracted[1:]), ((), ())
    return jax.lax.dot_general(x, y, axes, precision=precision, preferred_element_type=jnp.float32)
