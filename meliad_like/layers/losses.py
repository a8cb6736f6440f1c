"""Cross-entropy by slices of the segment, so that logits for all of it never exist."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from meliad_like.layers.sequence import num_parts


class TokenLosses(NamedTuple):
    """What the loss and the accuracy of each token are made of."""

    nats: Float[Array, "b n"]
    """Minus the log-probability of each target, float32."""
    correct: Bool[Array, "b n"]
    """Whether no token was more likely than the target."""


def token_losses(
    module,
    hidden: Float[Array, "b n d"],
    targets: Int[Array, "b n"],
    slice_length: int,
    dropout_key: PRNGKeyArray | None = None,
) -> TokenLosses:
    """The loss of every target, whether it counts or not.

    Args:
        module: has `logits(hidden) -> [..., v]`, or `target_scores` where it can do without all of them.
        hidden: one vector a token.
        targets: the tokens that come next.
        slice_length: tokens of a lane whose logits exist at once; if it doesn't divide n, the largest divisor below.
        dropout_key: for training; none to keep everything. Only `target_scores` has any use for it.
    """
    if hasattr(module, "target_scores"):
        return module.target_scores(hidden, targets, slice_length, dropout_key)

    def losses(hidden, targets):
        logits = module.logits(hidden)
        if num_parts() == 1:
            target_logits = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
        else:
            # XLA crashes where a part of a segment would look something up along the vocabulary that `tensor` cuts.
            chosen = jnp.arange(logits.shape[-1]) == targets[..., None]
            target_logits = jnp.sum(jnp.where(chosen, logits, 0), axis=-1)
        nats = jax.nn.logsumexp(logits, axis=-1) - target_logits
        # On a CPU the place of the maximum takes many times as long as the maximum, which logsumexp needs in any case.
        return TokenLosses(nats, target_logits >= jnp.max(logits, axis=-1))

    return in_slices(losses, divisor(hidden.shape[1], slice_length), hidden, targets)


def divisor(n: int, at_most: int) -> int:
    """The largest divisor of `n` that is not above `at_most`."""
    return max(i for i in range(1, min(n, at_most) + 1) if n % i == 0)


def in_slices(function, length: int, *arrays):
    """`function` of slices of `length` along the second axis; what is inside is computed again in the backward pass."""
    b, n = arrays[0].shape[:2]
    if length == n:
        return function(*arrays)
    slices = tuple(jnp.moveaxis(y.reshape(b, n // length, length, *y.shape[2:]), 1, 0) for y in arrays)
    by_slice = jax.lax.map(lambda y: jax.checkpoint(function)(*y), slices)
    return jax.tree.map(lambda y: jnp.moveaxis(y, 0, 1).reshape(b, n, *y.shape[3:]), by_slice)
