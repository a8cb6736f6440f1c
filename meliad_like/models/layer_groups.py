"""Groups of consecutive layers of the same form, which one `jax.lax.scan` can apply (`DecoderConfig.scan_layers`)."""

import itertools
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp


class Group(NamedTuple):
    """Consecutive layers that are applied by one piece of the program."""

    layers: Any
    """A layer, or if there are several, a layer whose parameters are stacked along a new first axis."""
    size: int


def stacked(trees: Sequence[Any]) -> Any:
    """One tree of the same form, each array with the arrays of `trees` along a new first axis."""
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *trees)


def groups_of(layers: Iterable[Any], scan_layers: bool) -> list[Group]:
    """The layers in order; with `scan_layers`, consecutive ones of the same form are one group.

    Two layers have the same form if their trees have the same settings, names, shapes and dtypes.
    """
    if not scan_layers:
        return [Group(layer, 1) for layer in layers]

    def form(layer):
        leaves, tree = jax.tree.flatten(layer)
        return tree, [(leaf.shape, leaf.dtype) for leaf in leaves]

    alike = [list(same) for _, same in itertools.groupby(layers, form)]
    return [Group(same[0] if len(same) == 1 else stacked(same), len(same)) for same in alike]
