"""Functions that the kernels of all platforms share."""

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import PartitionSpec
from jaxtyping import Array

from meliad_like.layers.losses import divisor
from meliad_like.layers.sharding import MESH_AXES_OF

VMEM_LIMIT = 100 * 2**20
"""The TPU's own memory that a kernel may use, in bytes. The compiler's default is too little for windows of 1024."""
LANES, HEADS = MESH_AXES_OF["lanes"], MESH_AXES_OF["heads"]
"""The axes of the mesh that divide lanes, and heads or channels."""

Ref = Any
"""A reference to an array, or to a part of it, that a kernel reads or writes; outside of the kernel, the array."""
Interpret = bool | pltpu.InterpretParams
"""Whether a kernel for TPUs is interpreted, on any platform, instead of compiled; and how."""


def tpu_params(*semantics: str) -> pltpu.CompilerParams:
    """The parameters of a TPU's compiler. `semantics`: "parallel" or "arbitrary" for each axis of the grid."""
    return pltpu.CompilerParams(dimension_semantics=semantics, vmem_limit_bytes=VMEM_LIMIT)


def differentiable(forward: Callable[..., Any], backward: Callable[..., Any]) -> Callable[..., Any]:
    """The function (static, *inputs) -> outputs with these two passes, as for `jax.custom_vjp`. `static` is hashable,
    and the passes' first argument."""

    @functools.wraps(forward)
    def run(static, *inputs):
        return forward(static, *inputs)[0]

    function = jax.custom_vjp(run, nondiff_argnums=(0,))
    function.defvjp(forward, backward)
    return function


class Grid(NamedTuple):
    """The grid of a kernel's programs, and the parts of arrays that these see, by the letters of the arrays' axes."""

    programs: dict[str, int]
    """The number of programs along each axis of the grid. Where arrays have the axis, each program has a part of it."""
    sizes: dict[str, Any]
    """The size of a part along each axis; None: one place, for which the part has no axis."""
    places: dict[str, str | Callable[[dict[str, Any]], Any]]
    """For the other axes that have parts: the axis of the grid, or the function of a program's place in it, that is the
    number of its part."""

    def part(self, axes: str, **sizes: int) -> pl.BlockSpec:
        """The part of an array with these axes, such as "bhnk". `sizes`: those of this array alone."""
        of_part = self.sizes | sizes

        def index_map(*at):
            program = dict(zip(self.programs, at))
            places = (self.places.get(axis, axis) for axis in axes)
            return tuple(program.get(x, 0) if isinstance(x, str) else x(program) for x in places)

        return pl.BlockSpec(tuple(of_part[axis] for axis in axes), index_map)

    def call(
        self,
        kernel: Callable[..., None],
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
            read, written: pairs of an array, or a tree of them with None for those that are missing, and its axes or
                block specs; of `written`, only shapes and dtypes are used.
            name: the name in profiles; None: that of the function.
        """

        def spec(x, axes):
            if x is None:
                return None
            return self.part(axes) if isinstance(axes, str) else axes

        def specs(arrays, axes):
            return jax.tree.map(spec, arrays, axes, is_leaf=lambda x: x is None)

        inputs, read_axes = zip(*read)
        outputs, written_axes = zip(*written)
        return pl.pallas_call(
            kernel,
            grid=tuple(self.programs.values()),
            in_specs=specs(inputs, read_axes),
            out_shape=jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), list(outputs)),
            out_specs=list(specs(outputs, written_axes)),
            scratch_shapes=scratch,
            compiler_params=params,
            interpret=interpret,
            name=name,
        )(*inputs)


def largest_part(size: int, most: int, unit: int) -> int:
    """The largest divisor of a size that is at most `most` and, if the size is one, a multiple of `unit`."""
    unit = unit if size % unit == 0 else 1
    return unit * divisor(size // unit, max(most // unit, 1))


def sharded_on_mesh(run: Callable, in_specs: tuple, out_specs: Any) -> Callable[..., Any]:
    """`run`; under a mesh, each device runs it for its part of the arrays, because the compiler can't divide a kernel
    among devices."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return run
    axis_names = set(mesh.axis_names) - set(mesh.manual_axes)
    return jax.shard_map(run, in_specs=in_specs, out_specs=out_specs, axis_names=axis_names, check_vma=False)


def sharded_vectors(channels: int) -> PartitionSpec:
    """How vectors of channels [b, n, channels] are sharded; channels only if their number can be divided."""
    divided = channels % jax.sharding.get_abstract_mesh().shape.get(HEADS, 1) == 0
    return PartitionSpec(LANES, None, HEADS if divided else None)


def matrix_product(x: Array, y: Array, contracted: tuple[int, int] = (1, 0), precision: Any = None) -> Array:
    """The product of two matrices, summed over one axis of each, in float32."""
    axes = (contracted[:1], contracted[1:]), ((), ())
    return jax.lax.dot_general(x, y, axes, precision=precision, preferred_element_type=jnp.float32)


def row_and_column(rows: int, columns: int | None = None) -> tuple[Array, Array]:
    """The row and the column of each entry of a matrix; without `columns`, of a square one."""
    shape = rows, rows if columns is None else columns
    row, column = (jax.lax.broadcasted_iota(jnp.int32, shape, axis) for axis in (0, 1))
    return row, column
