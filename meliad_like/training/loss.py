"""Cross-entropy by slices of the segment, so that logits for all of it never exist."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from meliad_like.data.batch import Batch
from meliad_like.layers.sequence import num_parts, over_sequence

# Folded into the step's dropout key; models fold in the numbers of their layers.
SOFTMAX = 2**32 - 1


class TokenLosses(NamedTuple):
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
        return TokenLosses(*module.target_scores(hidden, targets, slice_length, dropout_key))
    n = hidden.shape[1]
    length = max(i for i in range(1, min(n, slice_length) + 1) if n % i == 0)

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

    if length == n:
        return losses(hidden, targets)
    slices = [jnp.moveaxis(y.reshape(y.shape[0], n // length, length, *y.shape[2:]), 1, 0) for y in (hidden, targets)]
    # Logits are computed again in the backward pass instead of being kept.
    by_slice = jax.lax.map(lambda y: jax.checkpoint(losses)(*y), tuple(slices))
    return jax.tree.map(lambda y: jnp.moveaxis(y, 0, 1).reshape(targets.shape), by_slice)


def segment_losses(
    module, batch: Batch, carry: Any, slice_length: int, dropout_key: PRNGKeyArray | None = None
) -> tuple[TokenLosses, Any]:
    """The module reads a segment: the loss of every target, and the carry for the next segment.

    A module whose hidden vectors of a segment should not all exist at once has a method `losses` for it.
    """
    if hasattr(module, "losses"):
        return module.losses(batch.inputs, batch.targets, carry, batch.start, dropout_key, slice_length=slice_length)

    def losses(tokens, others):
        (inputs, targets), (module, carry, start, dropout_key) = tokens, others
        hidden, carry = module(inputs, carry, start, dropout_key)
        softmax_key = None if dropout_key is None else jax.random.fold_in(dropout_key, SOFTMAX)
        return token_losses(module, hidden, targets, slice_length, softmax_key), carry

    return over_sequence(losses)((batch.inputs, batch.targets), (module, carry, batch.start, dropout_key))
