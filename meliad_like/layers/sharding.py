"""The table that maps the logical axes of arrays to the axes of the device mesh."""

from typing import Any

import jax
from jax.sharding import PartitionSpec
from jaxtyping import Array

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
