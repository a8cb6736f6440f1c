"""Functions that the kernels of all platforms share."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import PartitionSpec
from jaxtyping import Array

VMEM_LIMIT = 100 * 2**20
"""The TPU's own memory that a kernel may use, in bytes. The compiler's default is too little for windows of 1024."""


def call_kernel(
    kernel: Callable[..., None],
    grid: tuple[int, ...],
    read: Iterable[tuple[Any, Any]],
    written: Iterable[tuple[Any, Any]],
    params: Any,
    scratch: Sequence[Any] = (),
    *,
    interpret: Any,
    name: str | None = None,
) -> list[Any]:
    """Runs a kernel, a function of the references to arrays that it reads, arrays that it writes, and scratch.

    Args:
        read, written: pairs of an array, or a tree of them, and its block specs; of `written`, only shapes and dtypes
            are used.
        name: the name in profiles; None: that of the function.
    """
    inputs, in_specs = zip(*read)
    outputs, out_specs = zip(*written)
    return pl.pallas_call(
        kernel,
        grid=grid,
        in_specs=in_specs,
        out_shape=jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), list(outputs)),
        out_specs=list(out_specs),
        scratch_shapes=scratch,
        compiler_params=params,
        interpret=interpret,
        name=name,
    )(*inputs)


def tpu_params(*semantics: str) -> pltpu.CompilerParams:
    """The parameters of a TPU's compiler. `semantics`: "parallel" or "arbitrary" for each axis of the grid."""
    return pltpu.CompilerParams(dimension_semantics=semantics, vmem_limit_bytes=VMEM_LIMIT)


class Specs(NamedTuple):
    """The parts of arrays that the programs of a grid see, by the letters of the arrays' axes."""

    grid: dict[str, int]
    """The number of programs along each axis of the grid. Where arrays have the axis, each program has a part of it."""
    sizes: dict[str, int | None]
    """The size of a part along each axis; None: one place, for which the part has no axis."""
    places: dict[str, Callable[[dict[str, Any]], Any]]
    """For the other axes that have parts: the function of a program's place in the grid -> the number of its part."""

    def __call__(self, axes: str) -> pl.BlockSpec:
        """The part of an array with these axes, such as "bhnk"."""

        def index_map(*at):
            program = dict(zip(self.grid, at))
            return tuple(self.places[x](program) if x in self.places else program.get(x, 0) for x in axes)

        return pl.BlockSpec(tuple(self.sizes[axis] for axis in axes), index_map)


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
