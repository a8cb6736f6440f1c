"""Functions that take, join and choose lanes of a carry, each of which is the memory of one text.

A carry is a pytree of arrays with the lane axis first.
"""

from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar, runtime_checkable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

Result = TypeVar("Result")


@jax.jit
def take_lanes(carry: Any, lanes: Int[Array, " j"]) -> Any:
    """A new carry of these lanes, in this order. A lane may be taken several times."""
    return jax.tree.map(lambda x: jnp.take(x, lanes, 0, mode="clip"), carry)


def join_lanes(carries: Sequence[Any]) -> Any:
    """A new carry with the lanes of all carries, in their order."""
    return jax.tree.map(lambda *x: jnp.concatenate(x), *carries)


def choose_lanes(flags: Bool[Array, " b"] | None, flagged: Any, unflagged: Any) -> Any:
    """A carry with the lanes of `flagged` where their flag is true, and the lanes of `unflagged` elsewhere. None: all
    are flagged."""
    if flags is None:
        return flagged

    def choose(flagged: Array, unflagged: Array) -> Array:
        if flagged is unflagged:
            return unflagged
        return jnp.where(flags.reshape(-1, *[1] * (flagged.ndim - 1)), flagged, unflagged)

    return jax.tree.map(choose, flagged, unflagged)


@runtime_checkable
class HasBackup(Protocol):
    """A part of a carry that is too large to copy at every step.

    A step that may be discarded backs up only the blocks that it overwrites.
    """

    def with_backup(self, num_tokens: int) -> tuple[Any, Any]:
        """The part to read `num_tokens` tokens with, and a copy of all that this can change."""
        ...

    def or_backup(self, taken: Bool[Array, ""], backup: Any) -> Any:
        """This part, if the step that has read the tokens is taken, otherwise the part before the step."""
        ...


def with_backup(carry: Any, num_tokens: int) -> tuple[Any, Any]:
    """The carry to read `num_tokens` tokens with, and what `choose_carry` needs to undo this: the carry's parts, or the
    backups of those that have one."""
    parts, structure = jax.tree.flatten(carry, is_leaf=_has_backup)
    pairs = [part.with_backup(num_tokens) if _has_backup(part) else (part, part) for part in parts]
    return structure.unflatten([part for part, _ in pairs]), [backup for _, backup in pairs]


def choose_carry(taken: Bool[Array, ""], carry: Any, backup: Any) -> Any:
    """The carry after a step, if the step is taken, otherwise the one before it."""
    parts, structure = jax.tree.flatten(carry, is_leaf=_has_backup)
    leaves = [
        part.or_backup(taken, before) if _has_backup(part) else jnp.where(taken, part, before)
        for part, before in zip(parts, backup, strict=True)
    ]
    return structure.unflatten(leaves)


def _has_backup(part: Any) -> bool:
    return isinstance(part, HasBackup)


def at_lanes(
    flags: Bool[Array, " b"], function: Callable[[Any], Any], result: Result, carry: Any
) -> tuple[Result, Any]:
    """Changes flagged lanes of a carry to those of `function(carry)`, which is not computed without a flagged lane.

    `result`, which was read of the carry, is returned unchanged. It passes through the branch, so that all that reads
    the carry comes before it changes: otherwise XLA copies the carry, for every token.
    """

    def change(result, carry):
        return jax.lax.optimization_barrier(result), choose_lanes(flags, function(carry), carry)

    return jax.lax.cond(jnp.any(flags), change, lambda *unchanged: unchanged, result, carry)
