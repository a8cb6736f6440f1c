"""Matches the arrays of other programs' checkpoints with the tree of our parameters."""

from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from meliad_like.errors import UserError


def fill_parameters(
    template: Any,
    names: Iterable[str],
    name_of: Callable[[str], str],
    read: Callable[[str, str, Any], np.ndarray],
    owner: str,
) -> Any:
    """Fills our parameters, float32, one after the other, so that only one additional array is in memory.

    Args:
      template: tree of the shapes of our parameters.
      names: names of the arrays in the checkpoint; each must be used.
      name_of: path of a parameter of ours, such as `layers/0/key/kernel` -> the name of its array.
      read: (our path, name of the array, our shape) -> the array, laid out as ours.
      owner: the file or folder, for messages.

    Raises:
      UserError: an array is missing, has another shape, or has no place in the model.
    """
    names = frozenset(names)
    left_over = set(names)

    def fill(path: str, leaf: Any) -> jax.Array:
        name = name_of(path)
        if name not in names:
            raise UserError(f"{owner} has no tensor {name}: it is not the model that its config describes")
        left_over.discard(name)
        array = read(path, name, leaf)
        if array.shape != leaf.shape:
            raise UserError(f"{owner}: {name} has shape {array.shape}, its config asks for {leaf.shape}")
        # Copies are made in the background; wait, so that this array is freed before the next is read.
        return jax.block_until_ready(jnp.asarray(np.ascontiguousarray(array, np.float32)))

    leaves, structure = jax.tree.flatten_with_path(template)
    filled: list[Any] = [None] * len(leaves)
    # The largest array comes first, while most memory is free.
    for i in sorted(range(len(leaves)), key=lambda i: -leaves[i][1].size):
        filled[i] = fill(path_name(leaves[i][0]), leaves[i][1])
    if left_over:
        raise UserError(
            f"{owner} has a tensor {min(left_over)} that the model of its config has no place for "
            f"({len(left_over)} such tensors)"
        )
    return jax.tree.unflatten(structure, filled)


def path_name(path: Any) -> str:
    """The name of a parameter of ours: the keys of its path, joined by "/"."""
    return jax.tree_util.keystr(path, simple=True, separator="/")
