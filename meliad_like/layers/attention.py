"""Attention in blocks of `w` queries by `2w` keys (Block-Recurrent Transformers, section 3 and Appendix A).

A query sees exactly the `w` tokens before it, never itself. In its tile of `2w` keys (the block before, then its own)
the query at offset `t` sees the keys at offsets `s >= t` of the block before and `s < t` of its own: two triangles
that fill one `w` by `w` square. So the scores of a tile are folded into that square, and all that is done score by
score (mask, bias, exponential, their gradients, what is kept for the backward pass) is half as large as the tile. The
square is also a ring: column `s` belongs to the last token before the query whose offset in its block is `s`. That is
how one token at a time is decoded, with a cache of `w` entries.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

MASKED = -1e6
# Logits are never that low; where all keys are masked the output is 0 rather than an average.
LOWEST = -1e3


def unit(x: Float[Array, "... k"]) -> Float[Array, "... k"]:
    """`x` scaled to unit length per head (Henry et al. 2020), statistics in float32."""
    y = x.astype(jnp.float32)
    return (y * jax.lax.rsqrt(jnp.sum(jnp.square(y), axis=-1, keepdims=True) + 1e-6)).astype(x.dtype)


def ring_distance(window: int) -> Int[np.ndarray, "w w"]:
    """Distance from the query at offset `t` to the key in ring column `s`: 1 to w."""
    offset = np.arange(window)
    return (offset[:, None] - offset[None, :] - 1) % window + 1


def ring_square(by_distance: Float[Array, "h w"]) -> Float[Array, "h w w"]:
    """Values by distance (1 to w) laid out on the ring: `square[h, t, s] = by_distance[h, ring_distance[t, s] - 1]`.

    Made of copies and a reshape, so that its transpose is a sum and not a scatter.
    """
    h, w = by_distance.shape
    # Row t, read from column w - 1 down to 0, is by_distance rotated left by t: a copy with a stride of w + 1.
    tiled = jnp.tile(by_distance, (1, w + 1)).reshape(h, w, w + 1)[:, :, :w]
    return tiled[:, :, ::-1]


def weigh(
    scores: Float[Array, "*batch t s"], multiplier: Float[Array, "..."] | None = None
) -> tuple[Float[Array, "*batch t s"], Float[Array, "*batch t 1"]]:
    """The softmax of `scores` over the keys as unnormalised weights (times a dropout `multiplier`) and their sum.

    The caller divides after the product with the values, which is smaller. In float32 throughout. Rows in which
    everything is masked get weights 0.
    """
    highest = jax.lax.stop_gradient(jnp.maximum(jnp.max(scores, axis=-1, keepdims=True), LOWEST))
    weights = jnp.exp(scores - highest)
    total = jnp.sum(weights, axis=-1, keepdims=True) + jnp.exp(LOWEST - highest)
    return weights if multiplier is None else weights * multiplier, total


def attend(
    query: Float[Array, "*batch t h k"],
    key: Float[Array, "*batch s h k"],
    value: Float[Array, "*batch s h k"],
    bias: Float[Array, "..."] | None = None,
    mask: Bool[Array, "..."] | None = None,
) -> Float[Array, "*batch t h k"]:
    """Dense attention. Scales belong in `query`; `bias` and `mask` (True: may look) broadcast to [*batch, h, t, s]."""
    scores = jnp.einsum("...thk,...shk->...hts", query, key, preferred_element_type=jnp.float32)
    if bias is not None:
        scores += bias
    if mask is not None:
        scores = jnp.where(mask, scores, MASKED)
    weights, total = weigh(scores)
    mixed = jnp.einsum("...hts,...shk->...thk", weights.astype(value.dtype), value, preferred_element_type=jnp.float32)
    return (mixed / jnp.moveaxis(total, -3, -2)).astype(value.dtype)


def attend_window(
    query: Float[Array, "b c w h k"],
    key: Float[Array, "b c 2w h k"],
    value: Float[Array, "b c 2w h k"],
    bias: Float[Array, "h w w"],
    previous_valid: Bool[Array, "b c"],
    multiplier: Float[Array, "h w w"] | None = None,
) -> Float[Array, "b c w h k"]:
    """Attention of every block of `w` queries to the `w` tokens before each of them.

    Args:
        query: scaled queries, by block.
        key, value: of the block before and of the block itself.
        bias: scaled bias on the ring, the same for all blocks.
        previous_valid: whether the block before belongs to the same document; if not, it is not seen.
        multiplier: dropout of the weights, shared by lanes and blocks.
    """
    w = query.shape[2]
    own = np.tri(w, k=-1, dtype=bool)
    scores = jnp.einsum("bcthk,bcshk->bchts", query, key, preferred_element_type=jnp.float32)
    scores = jnp.where(own, scores[..., w:], scores[..., :w]) + bias
    scores = jnp.where(own | previous_valid[:, :, None, None, None], scores, MASKED)
    weights, total = weigh(scores, multiplier)
    weights = weights.astype(value.dtype)
    tile = jnp.concatenate([jnp.where(own, 0, weights), jnp.where(own, weights, 0)], axis=-1)
    mixed = jnp.einsum("bchts,bcshk->bcthk", tile, value, preferred_element_type=jnp.float32)
    return (mixed / jnp.moveaxis(total, -3, -2)).astype(value.dtype)
