"""Attention in blocks of `w` queries by `2w` keys (Block-Recurrent Transformers, section 3 and Appendix A).

A query sees exactly the `w` tokens before it, never itself. In its tile of `2w` keys (the block before, then its own)
the query at offset `t` sees the keys at offsets `s >= t` of the block before and `s < t` of its own: two triangles
that fill one `w` by `w` square. So the scores of a tile are folded into that square, and every elementwise operation
(mask, bias, exponential, their gradients, the residuals of the backward pass) is half as large as the tile. The
square is also a ring: column `s` belongs to the last token before the query whose offset in its block is `s`. That is
how tokens are decoded, with a cache of `w` entries.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from einops import rearrange
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Float, Int

from meliad_like.layers.basic import SOFTMAX, UNIT, for_all, times_column

MASKED = -np.inf
"""The score of a masked key, whose weight is exactly 0."""
LOWEST = float(np.finfo(np.float32).min)
"""The number that is subtracted from scores that are all masked: it is finite, so that all weights are 0."""
UNIT_EPSILON = 1e-6
"""The epsilon of `unit`: it is added to a squared length before its inverse square root is taken."""


class KeysAndValues(NamedTuple):
    """Keys of unit length and values that are visible to all queries of a lane, or to none."""

    key: Float[Array, "*batch h s k"]
    value: Float[Array, "*batch h s k"]
    visible: Bool[Array, "*batch"] | None = None
    """Whether they are visible; None: always."""


@jax.custom_jvp
def unit(x: Float[Array, "... k"]) -> Float[Array, "... k"]:
    """`x` scaled to unit length per head (Henry et al. 2020); the length is computed in float32.

    Its derivative is computed from the result, which attention keeps anyway.
    """
    return unit_and_factor(x)[0]


def unit_and_factor(x: Float[Array, "... k"]) -> tuple[Float[Array, "... k"], Float[Array, "... 1"]]:
    """`unit`, and the float32 factor that makes each vector unit length."""
    y = x.astype(jnp.float32)
    factor = jax.lax.rsqrt(jnp.sum(jnp.square(y), axis=-1, keepdims=True) + UNIT_EPSILON)
    return (y * factor).astype(x.dtype), factor


@unit.defjvp
def _unit_jvp(primals, tangents):
    y, factor = (checkpoint_name(part, UNIT) for part in unit_and_factor(*primals))
    along, tangent = y.astype(jnp.float32), tangents[0].astype(jnp.float32)
    tangent -= times_column(along, jnp.sum(along * tangent, axis=-1, keepdims=True))
    return y, (factor * tangent).astype(y.dtype)


def unit_query(x: Float[Array, "*batch h t k"], scale: nnx.Param) -> Float[Array, "*batch h t k"]:
    """Queries of unit length times the scale of their head, for `attend_unit`."""
    return scaled(unit(x), scale)


def split_heads(x: Float[Array, "*batch n i"], num_heads: int) -> Float[Array, "*batch h n k"]:
    """Cuts the last axis into heads."""
    return rearrange(x, "... n (h k) -> ... h n k", h=num_heads)


def merge_heads(*mixed: Float[Array, "*batch h n k"]) -> Float[Array, "*batch n i"]:
    """The heads of one or several attention results, concatenated along the last axis."""
    return jnp.concatenate([rearrange(y, "... h n k -> ... n (h k)") for y in mixed], axis=-1)


def scaled(query: Float[Array, "*batch h t k"], scale: nnx.Param) -> Float[Array, "*batch h t k"]:
    """Queries times the absolute value of the learned attention scale of their head. The product is computed in float32
    and then rounded, so that the scale's gradient is a float32 sum."""
    return (query.astype(jnp.float32) * jnp.abs(scale[...])[:, None, None]).astype(query.dtype)


def ring_square(by_distance: Float[Array, "h w"]) -> Float[Array, "h w w"]:
    """Values by distance (1 to w) laid out on the ring: `square[h, t, s] = by_distance[h, (t - s - 1) % w]`. It
    consists of copies and a reshape, so that its gradient is a sum and not a scatter."""
    h, w = by_distance.shape
    # Row t, read from column w - 1 down to 0, is by_distance rotated left by t: a copy with a stride of w + 1.
    tiled = jnp.tile(by_distance, (1, w + 1)).reshape(h, w, w + 1)[:, :, :w]
    return tiled[:, :, ::-1]


def with_tokens(cached: Array, new: Array, places: Int[Array, "b n"], counts: Int[Array, " b"], *, axis: int) -> Array:
    """`cached` with the first `counts` new tokens of each lane in these places along `axis`."""
    lanes, is_read = jnp.arange(places.shape[0])[:, None], np.arange(places.shape[1]) < counts[:, None]
    # What would be written behind the last place is dropped.
    index = lanes, *[slice(None)] * (axis - 1), jnp.where(is_read, places, cached.shape[axis])
    return cached.at[index].set(jnp.moveaxis(new, axis, 1).astype(cached.dtype), mode="drop")


def _largest(scores: Float[Array, "*batch s"]) -> Float[Array, "*batch 1"]:
    """The largest score of each query, without a gradient; `LOWEST` if all are masked."""
    return jnp.maximum(jnp.max(jax.lax.stop_gradient(scores), axis=-1, keepdims=True), LOWEST)


def largest_bias(bias: Float[Array, "..."], mask: Bool[Array, "..."] | None) -> Float[Array, "..."]:
    """The largest bias that each query sees. It is subtracted, which changes no weight of a softmax: so scores that
    compete for the largest weights differ by more than float32 rounds them to, at any scale."""
    return _largest(bias if mask is None else jnp.where(mask, bias, MASKED))


def weigh(
    scores: Float[Array, "*batch t s"], dtype: Any, multiplier: Float[Array, "..."] | None = None
) -> tuple[Float[Array, "*batch t s"], Float[Array, "*batch t 1"]]:
    """The softmax of `scores` over the keys as unnormalised weights (times a dropout `multiplier`) and their sum.

    The largest weight is 1 before dropout, so that the sum is at least 1; a query whose keys are all masked has weights
    and a sum of 0. The caller divides by the sum (`average`) after the product with the values, which is a smaller
    array. All computations are float32; only the weights are rounded to `dtype`, the dtype of the values.
    """
    weights, total = _exponential(scores - checkpoint_name(_largest(scores), SOFTMAX), dtype)
    if multiplier is not None:
        weights = (weights * multiplier).astype(dtype)
    return weights, checkpoint_name(total, SOFTMAX)


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def _exponential(x: Float[Array, "*batch s"], dtype: Any) -> tuple[Float[Array, "*batch s"], Float[Array, "*batch 1"]]:
    """The exponential, rounded to `dtype`, and the float32 sum of the rounded values. The derivative is computed
    from them, so that the backward pass keeps no second array in float32."""
    y = jnp.exp(x).astype(dtype)
    return y, jnp.sum(y, axis=-1, keepdims=True, dtype=jnp.float32)


@_exponential.defjvp
def _exponential_jvp(dtype, primals, tangents):
    y, total = _exponential(*primals, dtype)
    tangent = y.astype(jnp.float32) * tangents[0]
    return (y, total), (tangent.astype(dtype), jnp.sum(tangent, axis=-1, keepdims=True))


@functools.partial(jax.custom_jvp, nondiff_argnums=(2,))
def average(mixed: Float[Array, "*batch k"], total: Float[Array, "*batch 1"], dtype: Any) -> Float[Array, "*batch k"]:
    """The sum of weighted values over the sum of their weights, rounded to `dtype`; 0 if all weights are 0.

    Any other sum is at least 1, because the largest weight of a softmax, before it is divided, is 1. The derivative is
    computed from the rounded result, so that the backward pass does not keep `mixed`.
    """
    return (mixed / jnp.maximum(total, 1)).astype(dtype)


@average.defjvp
def _average_jvp(dtype, primals, tangents):
    y = average(*primals, dtype)
    tangent = tangents[0] - times_column(y.astype(jnp.float32), tangents[1])
    return y, (tangent / jnp.maximum(primals[1], 1)).astype(dtype)


def attend(
    query: Float[Array, "*batch h t k"],
    key: Float[Array, "*batch h s k"] | tuple[Float[Array, "*batch h _ k"], ...],
    value: Float[Array, "*batch h s k"] | tuple[Float[Array, "*batch h _ k"], ...],
    bias: Float[Array, "..."] | None = None,
    mask: Bool[Array, "..."] | None = None,
    multiplier: Float[Array, "..."] | None = None,
) -> Float[Array, "*batch h t k"]:
    """Dense attention. The attention scale must already be part of `query`.

    `bias`, `mask` (True: visible) and `multiplier` (dropout of the weights) broadcast to [*batch, h, t, s]. Keys and
    values may be in several arrays, so that within a scan those that stay the same are not copied in every iteration.
    """
    keys, values = (x if isinstance(x, tuple) else (x,) for x in (key, value))
    products = [jnp.einsum("...htk,...hsk->...hts", query, x, preferred_element_type=jnp.float32) for x in keys]
    scores = jnp.concatenate(products, axis=-1)
    if bias is not None:
        scores += for_all(bias, scores.shape) - largest_bias(bias, mask)
    if mask is not None:
        scores = jnp.where(mask, scores, MASKED)
    weights, total = weigh(scores, values[0].dtype, multiplier)
    parts = jnp.split(weights, np.cumsum([x.shape[-2] for x in values])[:-1], axis=-1)
    mixed = [
        jnp.einsum("...hts,...hsk->...htk", *pair, preferred_element_type=jnp.float32) for pair in zip(parts, values)
    ]
    return average(functools.reduce(jnp.add, mixed), total, values[0].dtype)


def attend_unit(query: Float[Array, "*batch h t k"], *parts: KeysAndValues) -> Float[Array, "*batch h t k"]:
    """Attention of results of `unit_query` to keys in parts, of which at least one is visible; no part is copied."""
    scores = [
        jnp.einsum("...htk,...hsk->...hts", query, part.key, preferred_element_type=jnp.float32) for part in parts
    ]
    visible = [True if part.visible is None else part.visible[..., None, None, None] for part in parts]
    largest = functools.reduce(jnp.maximum, [jnp.where(*x, MASKED) for x in zip(visible, map(_largest, scores))])
    largest = checkpoint_name(largest, SOFTMAX)
    mixed, total = jnp.zeros((), jnp.float32), jnp.zeros((), jnp.float32)
    for part, part_scores, shown in zip(parts, scores, visible):
        weights, part_total = _exponential(part_scores - jnp.where(shown, largest, -MASKED), query.dtype)
        mixed += jnp.einsum("...hts,...hsk->...htk", weights, part.value, preferred_element_type=jnp.float32)
        total += part_total
    return average(mixed, checkpoint_name(total, SOFTMAX), query.dtype)


def attend_window(
    query: Float[Array, "b c h w k"],
    key: Float[Array, "b c h w k"],
    value: Float[Array, "b c h w k"],
    previous_key: Float[Array, "b c h w k"],
    previous_value: Float[Array, "b c h w k"],
    bias: Float[Array, "h w"],
    previous_valid: Bool[Array, "b c"],
    multiplier: Float[Array, "h w w"] | None = None,
) -> Float[Array, "b c h w k"]:
    """Attention of every block of `w` queries to the `w` tokens before each of them.

    Args:
        query: queries of unit length times the attention scale; keys have unit length.
        previous_key, previous_value: the keys and values of the block before each block.
        bias: scaled bias at the distances 1 to w.
        previous_valid: whether the block before belongs to the same document; if not, it is masked.
        multiplier: dropout of the weights, shared by lanes and blocks.
    """
    b, c, h, w = query.shape[:-1]
    within_block, by_column = np.tri(w, k=-1, dtype=bool), ring_square(bias)
    # As in `attend`; a query sees either all distances or those within its block.
    valid = previous_valid[:, :, None, None, None]
    largest = jnp.where(valid, _largest(bias)[:, None], _largest(jnp.where(within_block, by_column, MASKED)))
    bias = for_all(by_column, (b, c, h, w, w)) - largest
    blocks = (previous_key, previous_value), (key, value)
    return attend_folded(query, *blocks, within_block, within_block | valid, bias, multiplier)


def attend_folded(
    query: Float[Array, "*batch h t k"],
    old: tuple[Float[Array, "*batch h w k"], Float[Array, "*batch h w k"]],
    new: tuple[Float[Array, "*batch h w k"], Float[Array, "*batch h w k"]],
    is_new: Bool[Array, "..."] | Bool[np.ndarray, "..."],
    seen: Bool[Array, "..."],
    bias: Float[Array, "..."],
    multiplier: Float[Array, "..."] | None = None,
) -> Float[Array, "*batch h t k"]:
    """Attention to a ring of `w` columns, each of which has an old key with its value and a new one. A query sees the
    new ones where `is_new`, elsewhere the old ones. Columns that are not `seen` are masked. `bias` must be that minus
    `largest_bias`."""

    def scores_with(key):
        return jnp.einsum("...htk,...hsk->...hts", query, key, preferred_element_type=jnp.float32)

    def mix(weights, value):
        return jnp.einsum("...hts,...hsk->...htk", weights, value, preferred_element_type=jnp.float32)

    (old_key, old_value), (new_key, new_value) = old, new
    # The two halves of the tile are separate products: on a CPU this is faster than concatenated keys of length 2w.
    scores = jnp.where(is_new, scores_with(new_key), scores_with(old_key))
    weights, total = weigh(jnp.where(seen, scores + bias, MASKED), new_value.dtype, multiplier)
    mixed = mix(jnp.where(is_new, 0, weights), old_value) + mix(jnp.where(is_new, weights, 0), new_value)
    return average(mixed, total, new_value.dtype)
