"""The layout of arrays on the device mesh: the table of logical axes, and the blocks of a segment by device.

The mesh axis `sequence` shards the tokens of a segment: each device has consecutive blocks.

A function that is run by `over_sequence` sees the blocks of one device. A block needs only the window before it, so a
layer receives one window from the device on the left (`from_left`), a recurrent layer also its states
(`scan_in_order`), and attention to longer spans the keys and values of all devices (`from_all`); nothing else passes
along the axis before the end of the segment (`from_rightmost`). This is a manual `jax.shard_map` over this axis alone,
because the compiler would derive other layouts: it gathers the tokens wherever lanes and tokens become one axis, and
wherever the loss is computed slice by slice.

Without sharding along the axis, all of these functions are identities, and the compiled program is unchanged.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array

AXIS = "sequence"

MESH_AXES_OF: dict[str | None, Any] = {
    "lanes": ("data", "fsdp"),
    "vocabulary": "tensor",
    "heads": "tensor",
    "feedforward": "tensor",
    "model": "fsdp",
    "states": None,
    "matrices": "data",
    "any": PartitionSpec.UNCONSTRAINED,
    None: None,
}


def constrain(x: Array, *names: str | None) -> Array:
    """`x` with a sharding constraint by these logical axes, if the program is compiled for a mesh (`jax.set_mesh`). The
    compiler chooses the sharding of axes named `any`.

    The compiler derives every other layout, but where an array of tokens meets a parameter that is sharded along the
    model width, it could gather either of the two. It must gather the parameter, which is much smaller.
    """
    if jax.sharding.get_abstract_mesh().empty:
        return x
    return jax.lax.with_sharding_constraint(x, PartitionSpec(*(MESH_AXES_OF[name] for name in names)))


def num_parts() -> int:
    """The number of devices over which the current segment is sharded; 1 outside of `over_sequence`."""
    mesh = jax.sharding.get_abstract_mesh()
    return mesh.shape[AXIS] if AXIS in mesh.manual_axes else 1


def over_sequence(function: Callable[..., tuple[Any, Any]]) -> Callable[..., tuple[Any, Any]]:
    """`function(by token, replicated) -> (by token, replicated)` for all devices along the axis. What is by token are
    trees of arrays [b, n, ...], sharded along `n`."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.shape.get(AXIS, 1) == 1:
        return function
    cut, whole = PartitionSpec(None, AXIS), PartitionSpec()
    return jax.shard_map(function, in_specs=(cut, whole), out_specs=(cut, whole), axis_names={AXIS}, check_vma=False)


def own_blocks(x: Array, axis: int = 1, before: int = 0) -> Array:
    """The device's own part of a replicated array along an axis, and the `before` entries before it, which the array
    has in addition to those of all devices."""
    if num_parts() == 1:
        return x
    size = (x.shape[axis] - before) // num_parts()
    return jax.lax.dynamic_slice_in_dim(x, jax.lax.axis_index(AXIS) * size, before + size, axis)


def from_all(x: Array, axis: int) -> Array:
    """The parts of all devices along an axis, from left to right."""
    if num_parts() == 1:
        return x
    # As in `from_rightmost`: the gradient is a sum over devices.
    y = x.astype(jnp.float32) if x.dtype == jnp.bfloat16 else x
    return jax.lax.all_gather(y, AXIS, axis=axis, tiled=True).astype(x.dtype)


def from_left(last: tuple[Array, ...], first: tuple[Array, ...]) -> tuple[Array, ...]:
    """The value of `last` on the device to the left; on the leftmost device, `first`. The arrays of both have the same
    shape and dtype, and are sent as one array."""
    parts = num_parts()
    if parts == 1:
        return first
    received = jax.lax.ppermute(jnp.stack(last), AXIS, [(i, i + 1) for i in range(parts - 1)])
    return tuple(jnp.where(jax.lax.axis_index(AXIS) == 0, jnp.stack(first), received))


def scan_in_order(scan: Callable[[Any], tuple[Any, Any]], state: Any) -> tuple[Any, Any]:
    """`scan(state) -> (next state, results)` over the blocks of all devices, one device after the other.

    All devices scan their own blocks once per device of the axis, and send their state to the right after each scan.
    After `i` rounds the device with index `i` starts from the right state, so its next results are the right ones.
    No tokens are moved. The backward pass computes all rounds but the last again.
    """
    first = state

    def one_round(state, _):
        last, _ = jax.checkpoint(scan, prevent_cse=False)(state)
        return jax.tree.map(lambda *x: from_left(*((y,) for y in x))[0], last, first), None

    if num_parts() > 1:
        state, _ = jax.lax.scan(one_round, state, length=num_parts() - 1)
    return scan(state)


def from_rightmost(tree: Any) -> Any:
    """The value of the rightmost device, copied to all devices; without a gradient."""
    parts = num_parts()
    if parts == 1:
        return tree
    is_last = jax.lax.axis_index(AXIS) == parts - 1

    def keep(x):
        # Summed in float32, because XLA crashes on sums of bfloat16 within a `jax.shard_map` on CPUs.
        x = x.astype(jnp.float32) if x.dtype == jnp.bfloat16 else x
        return jnp.where(is_last, jax.lax.stop_gradient(x), 0)

    return jax.tree.map(lambda x, whole: whole.astype(x.dtype), tree, jax.lax.psum(jax.tree.map(keep, tree), AXIS))
