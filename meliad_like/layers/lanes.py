"""The lanes of a carry, each of which is the memory of one text: they are taken, joined and chosen.

A carry is a pytree of arrays with the lane axis first.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int


@jax.jit
def take_lanes(carry: Any, lanes: Int[Array, " j"]) -> Any:
    """A new carry of these lanes, in this order. A lane may be taken several times."""
    return jax.tree.map(lambda x: jnp.take(x, lanes, 0, mode="clip"), carry)


def join_lanes(carries: Sequence[Any]) -> Any:
    """A new carry with the lanes of all carries, in their order."""
    return jax.tree.map(lambda *x: jnp.concatenate(x), *carries)


def choose_lanes(flags: Bool[Array, " b"], flagged: Any, unflagged: Any) -> Any:
    """The lanes of the carry `flagged` where their flag is true, and those of the carry `unflagged` elsewhere."""

    def choose(flagged: Array, unflagged: Array) -> Array:
        if flagged is unflagged:
            return unflagged
        return jnp.where(flags.reshape(-1, *[1] * (flagged.ndim - 1)), flagged, unflagged)

    return jax.tree.map(choose, flagged, unflagged)


def to_undo(carry: Any, num_tokens: int) -> tuple[Any, Any]:
    """The carry to read `num_tokens` tokens with, and what `choose_carry` needs of it.

    A large part of a carry, of which reading changes little, has two methods for it: `to_undo(num_tokens)`, which
    returns such a pair, and `restored(old, undone)`. So no program has a second copy of it.
    """
    parts, structure = jax.tree.flatten(carry, is_leaf=_is_large)
    pairs = [part.to_undo(num_tokens) if _is_large(part) else (part, part) for part in parts]
    return structure.unflatten([part for part, _ in pairs]), [old for _, old in pairs]


def choose_carry(taken: Bool[Array, ""], new: Any, old: Any) -> Any:
    """The carry `new` if it is taken, otherwise the one before, by the second result of `to_undo`."""
    parts, structure = jax.tree.flatten(new, is_leaf=_is_large)
    chosen = [
        part.restored(before, ~taken) if _is_large(part) else jnp.where(taken, part, before)
        for part, before in zip(parts, old, strict=True)
    ]
    return structure.unflatten(chosen)


def _is_large(part: Any) -> bool:
    return hasattr(part, "to_undo")


def at_lanes(flags: Bool[Array, " b"], function: Callable[[Any], Any], carry: Any) -> Any:
    """`function(carry)` for the flagged lanes, and `carry` for the others; not computed without a flagged lane."""
    return jax.lax.cond(
        jnp.any(flags), lambda carry: choose_lanes(flags, function(carry), carry), lambda carry: carry, carry
    )
