"""A short causal convolution along the tokens of a document."""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from meliad_like.layers.basic import for_all
from meliad_like.layers.sequence import from_left


def convolve(
    inputs: Float[Array, "b n channels"],
    recent: Float[Array, "b recent channels"],
    filters: Float[Array, "taps channels"],
    start: Bool[Array, "b c"],
) -> Float[Array, "b n channels"]:
    """A causal convolution of every channel, which sees no token of another document; sums and result are float32.

    `recent` are the inputs of the tokens before, one fewer than filters; the last filter is that of the token itself.
    """
    n, length = inputs.shape[1], len(filters)
    padded = jnp.concatenate([recent.astype(inputs.dtype), inputs], axis=1)
    # The number of documents that have begun up to each token: tokens of other documents have other numbers.
    document = jnp.repeat(jnp.cumsum(start, axis=1), n // start.shape[1], axis=1)
    padded_document = jnp.pad(document, ((0, 0), (length - 1, 0)))
    result = jnp.zeros(inputs.shape, jnp.float32)
    for i in range(length):
        same = padded_document[:, i : i + n] == document
        result += jnp.where(same[..., None], padded[:, i : i + n], 0) * for_all(filters[i], inputs.shape)
    return result


def convolve_segment(
    inputs: Float[Array, "b n channels"],
    recent: Float[Array, "b recent channels"],
    filters: Float[Array, "taps channels"],
    start: Bool[Array, "b c"],
) -> tuple[Float[Array, "b n channels"], Float[Array, "b recent channels"]]:
    """`convolve` for a device's tokens of a segment, and the inputs of the last tokens, for the next segment. `recent`
    are the inputs of the last tokens before the whole segment."""
    newest = inputs[:, inputs.shape[1] - recent.shape[1] :].astype(recent.dtype)
    (before,) = from_left((newest,), (recent,))
    return convolve(inputs, before, filters, start), newest


def convolve_token(
    inputs: Float[Array, "b 1 channels"],
    recent: Float[Array, "b recent channels"],
    filters: Float[Array, "taps channels"],
) -> tuple[Float[Array, "b 1 channels"], Float[Array, "b recent channels"]]:
    """As `convolve_segment`, for one token of the same document."""
    window = jnp.concatenate([recent, inputs], axis=1)
    return jnp.sum(window.astype(jnp.float32) * filters, axis=1, keepdims=True), window[:, 1:]
