"""The one table that says which logical axis of an array lies along which axis of the device mesh."""

import jax
from jax.sharding import PartitionSpec
from jaxtyping import Array

MESH_AXES_OF: dict[str | None, str | tuple[str, ...] | None] = {
    "lanes": ("data", "fsdp"),
    "vocabulary": "tensor",
    "heads": "tensor",
    "feedforward": "tensor",
    "model": "fsdp",
    "states": None,
    None: None,
}


def constrain(x: Array, *names: str | None) -> Array:
    """`x`, laid out by these logical axes where the program is compiled for a mesh (`jax.set_mesh`).

    The compiler derives every other layout, but where an array of tokens meets a parameter that is cut along the model
    width, it may gather either of the two. It must be the parameter: there are many more tokens.
    """
    if jax.sharding.get_abstract_mesh().empty:
        return x
    return jax.lax.with_sharding_constraint(x, PartitionSpec(*(MESH_AXES_OF[name] for name in names)))


def platform() -> str:
    """`cpu`, `gpu` or `tpu`: what the program under trace is compiled for.

    That is JAX's default platform, or the platform of the mesh, whose devices may not be there but only planned for.
    """
    device = jax.sharding.get_abstract_mesh().abstract_device
    return jax.default_backend() if device is None else device.platform
