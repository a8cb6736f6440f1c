"""The losses of the tokens of a segment, with the carry for the next segment."""

from typing import Any

import jax
from jaxtyping import PRNGKeyArray

from meliad_like.data.batch import Batch
from meliad_like.layers.losses import TokenLosses, token_losses
from meliad_like.layers.sequence import over_sequence

# Folded into the step's dropout key; must differ from the layer indices, which models fold in.
SOFTMAX = 2**32 - 1


def segment_losses(
    module, batch: Batch, carry: Any, slice_length: int, dropout_key: PRNGKeyArray | None = None
) -> tuple[TokenLosses, Any]:
    """Reads a segment: returns the loss of every target, and the carry for the next segment.

    A module that must not hold the hidden vectors of a whole segment implements this as its method `losses`.
    """
    if hasattr(module, "losses"):
        return module.losses(batch.inputs, batch.targets, carry, batch.start, dropout_key, slice_length=slice_length)

    def losses(tokens, others):
        (inputs, targets), (module, carry, start, dropout_key) = tokens, others
        hidden, carry = module(inputs, carry, start, dropout_key)
        softmax_key = None if dropout_key is None else jax.random.fold_in(dropout_key, SOFTMAX)
        return token_losses(module, hidden, targets, slice_length, softmax_key), carry

    return over_sequence(losses)((batch.inputs, batch.targets), (module, carry, batch.start, dropout_key))
