"""Cross-entropy by slices of the segment, so that the logits of the whole segment never exist at the same time."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from meliad_like.layers.backend import looks_up_logits_of_targets
from meliad_like.layers.basic import SOFTMAX
from meliad_like.layers.sharding import num_parts


class TokenLosses(NamedTuple):
    """The loss of each token, and whether its prediction was right."""

    nats: Float[Array, "b n"]
    """The negative log-probability of each target in nats, float32."""
    correct: Bool[Array, "b n"]
    """Whether no token was more likely than the target."""
    log_sums: Float[Array, "b n"] | None
    """The logarithm of each softmax's sum, float32; None: the softmax is a product of several."""


@jax.named_scope("loss")
def token_losses(
    module,
    hidden: Float[Array, "b n d"],
    targets: Int[Array, "b n"],
    slice_length: int,
    dropout_key: PRNGKeyArray | None = None,
) -> TokenLosses:
    """The loss of every target, including the targets that the caller masks.

    Args:
        module: a model, with the `logits` and the `target_scores` of a `BaseDecoder`.
        hidden, targets: one vector for each token, and the tokens that come next.
        slice_length: number of tokens of a lane whose logits exist at the same time; rounded down to a divisor of n.
        dropout_key: random key of dropout in training, for `target_scores`.
    """
    if module.target_scores is not None:
        return module.target_scores(hidden, targets, slice_length, dropout_key)

    def losses(hidden, targets):
        logits = module.logits(hidden)
        if num_parts() == 1 and looks_up_logits_of_targets():
            target_logits = logits_of_targets(logits, targets)
        else:
            # XLA crashes on a lookup along the vocabulary, sharded over `tensor`, inside of `over_sequence`.
            target_logits = jnp.sum(jnp.where(_is_target(logits, targets), logits, 0), axis=-1)
        highest = checkpoint_name(jax.lax.stop_gradient(jnp.max(logits, axis=-1)), SOFTMAX)
        total = checkpoint_name(jnp.sum(jnp.exp(logits - highest[..., None]), axis=-1), SOFTMAX)
        # On a CPU argmax takes many times as long as the maximum, which the softmax needs anyway.
        log_sums = jnp.log(total) + highest
        return TokenLosses(log_sums - target_logits, target_logits >= highest, log_sums)

    return in_slices(losses, divisor(hidden.shape[1], slice_length), hidden, targets)


@jax.custom_vjp
def logits_of_targets(logits: Float[Array, "b n v"], targets: Int[Array, "b n"]) -> Float[Array, "b n"]:
    """The logit of each target. Its gradient is a comparison with all tokens, which XLA computes together with the
    softmax's gradient, instead of a scatter. Only the shape of the logits is needed for it."""
    return jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]


logits_of_targets.defvjp(
    lambda logits, targets: (logits_of_targets(logits, targets), (logits, targets)),
    lambda saved, cotangent: (jnp.where(_is_target(*saved), cotangent[..., None], 0), None),
)


def _is_target(logits: Float[Array, "b n v"], targets: Int[Array, "b n"]) -> Bool[Array, "b n v"]:
    return jnp.arange(logits.shape[-1]) == targets[..., None]


def divisor(n: int, at_most: int) -> int:
    """The largest divisor of `n` that is not above `at_most`."""
    return max(i for i in range(1, min(n, at_most) + 1) if n % i == 0)


def in_slices(function, length: int, *arrays):
    """`function` of slices of `length` along the second axis; the backward pass computes each slice again. Values that
    `function` has named `SOFTMAX` are kept, so that the logits are computed again, but not their softmax's sums."""
    b, n = arrays[0].shape[:2]
    if length == n:
        return function(*arrays)
    slices = tuple(jnp.moveaxis(y.reshape(b, n // length, length, *y.shape[2:]), 1, 0) for y in arrays)
    policy = jax.checkpoint_policies.save_only_these_names(SOFTMAX)
    by_slice = jax.lax.map(lambda y: jax.checkpoint(function, policy=policy, prevent_cse=False)(*y), slices)
    return jax.tree.map(lambda y: jnp.moveaxis(y, 0, 1).reshape(b, n, *y.shape[3:]), by_slice)
