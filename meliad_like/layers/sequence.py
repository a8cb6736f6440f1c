"""The tokens of a segment, cut over the mesh axis `sequence`: each device has some blocks, its neighbours those around.

A function that is run by `over_sequence` sees the blocks of one device. A block needs only the window before it, so a
layer gets one window from the device on the left (`from_left`), a recurrent one states as well (`in_turn`), and nothing
else passes along the axis before the segment's end (`of_the_last`). Written by hand (`jax.shard_map`, over this axis
alone) because the compiler would derive other layouts: it gathers the tokens wherever lanes and tokens become one axis,
and wherever the loss goes over a segment slice by slice.

Where nothing is cut, all of these functions return what they are given, and the program is the same without them.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array

AXIS = "sequence"


def num_parts() -> int:
    """Into how many parts the segment is cut that the program is about to read; 1 outside of `over_sequence`."""
    mesh = jax.sharding.get_abstract_mesh()
    return mesh.shape[AXIS] if AXIS in mesh.manual_axes else 1


def over_sequence(function: Callable[..., tuple[Any, Any]]) -> Callable[..., tuple[Any, Any]]:
    """`function(tokens, others) -> (by token, others)` for all devices along the axis.

    `tokens` and the first result are trees of arrays [b, n, ...], of which a device has its part of `n`; of the others
    every device has all.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.shape.get(AXIS, 1) == 1:
        return function
    cut, whole = PartitionSpec(None, AXIS), PartitionSpec()
    return jax.shard_map(function, in_specs=(cut, whole), out_specs=(cut, whole), axis_names={AXIS}, check_vma=False)


def own_blocks(x: Array) -> Array:
    """The device's own part of an array [b, c, ...] that every device has all of."""
    if num_parts() == 1:
        return x
    size = x.shape[1] // num_parts()
    return jax.lax.dynamic_slice_in_dim(x, jax.lax.axis_index(AXIS) * size, size, axis=1)


def is_leftmost() -> Array | bool:
    """Whether the segment begins with this device's blocks."""
    return num_parts() == 1 or jax.lax.axis_index(AXIS) == 0


def from_left(last: tuple[Array, ...], first: tuple[Array, ...]) -> tuple[Array, ...]:
    """What the device on the left calls `last`; on the leftmost `first`.

    Args:
        last, first: arrays of one shape and dtype, which travel as one.
    """
    parts = num_parts()
    if parts == 1:
        return first
    received = jax.lax.ppermute(jnp.stack(last), AXIS, [(i, i + 1) for i in range(parts - 1)])
    return tuple(jnp.where(is_leftmost(), jnp.stack(first), received))


def in_turn(scan: Callable[[Array], tuple[Array, Any]], state: Array) -> tuple[Array, Any]:
    """`scan(state) -> (next state, results)` over the blocks of all devices, one device after the other.

    All devices scan their own blocks as often as there are devices, and hand their state on in between: after as many
    turns as there are devices to the left of one, what it begins with is right. So a state waits for the blocks before
    it, as it must, and no tokens move. The backward pass computes all turns but the last again, so that the memory of
    one is enough.

    Returns:
        The state after the device's own blocks, and their results.
    """
    first = state

    def turn(state, _):
        (state,) = from_left((jax.checkpoint(scan, prevent_cse=False)(state)[0],), (first,))
        return state, None

    if num_parts() > 1:
        state, _ = jax.lax.scan(turn, state, length=num_parts() - 1)
    return scan(state)


def of_the_last(tree: Any) -> Any:
    """What the rightmost device has, on all of them; without a gradient."""
    parts = num_parts()
    if parts == 1:
        return tree
    is_last = jax.lax.axis_index(AXIS) == parts - 1
    # In float32, which holds every bfloat16: XLA crashes on sums of bfloat16 within a `jax.shard_map` on CPUs.
    kept = jax.tree.map(lambda x: jnp.where(is_last, jax.lax.stop_gradient(x).astype(jnp.float32), 0), tree)
    return jax.tree.map(lambda x, whole: whole.astype(x.dtype), tree, jax.lax.psum(kept, AXIS))
