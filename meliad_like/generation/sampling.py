"""The tokens that may be written, and the sampling of one of them from logits."""

import dataclasses
from collections.abc import Collection

import jax
import jax.numpy as jnp
import numpy as np
from einops import rearrange
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from meliad_like.data.vocabulary import Vocabulary
from meliad_like.errors import UserError

GROUP = 64
"""The number of tokens among which a token is drawn, after their group."""


@dataclasses.dataclass(frozen=True)
class SamplingConfig:
    """Sampling settings, applied in this order: temperature, `top_k`, then `top_p` of the remaining tokens."""

    temperature: float = 1.0
    """The divisor of the logits, between 1e-6 and 1e6; 0: always the most likely token."""
    top_k: int = 0
    """Sample from this number of most likely tokens; 0: from all tokens."""
    top_p: float = 1.0
    """Sample from the most likely tokens that together reach this probability (Holtzman et al. 2020); at least one."""

    def __post_init__(self):
        if self.temperature != 0 and not 1e-6 <= self.temperature <= 1e6:
            raise UserError(f"temperature={self.temperature} must be 0, or at least 1e-6 and at most 1e6")
        if self.top_k < 0:
            raise UserError(f"top_k={self.top_k} must be at least 1, or 0 for all tokens")
        if not 0 < self.top_p <= 1:
            raise UserError(f"top_p={self.top_p} must be above 0 and at most 1")


def writable_tokens(
    vocabulary: Vocabulary, end_tokens: Collection[int] = (), forbidden_tokens: Collection[int] = ()
) -> Bool[np.ndarray, " v"]:
    """Which tokens may be written: those that stand for something, and end tokens, which may be control tokens.

    Raises:
      UserError: a token is not in the vocabulary, or none may be written.
    """
    allowed = vocabulary.writable.copy()
    for name, tokens, value in (("end_tokens", end_tokens, True), ("forbidden_tokens", forbidden_tokens, False)):
        for token in tokens:
            if not 0 <= token < vocabulary.size:
                raise UserError(f"{name}: token {token} is not in the vocabulary of {vocabulary.size}")
            allowed[token] = value
    if not allowed.any():
        number = int(vocabulary.writable.sum())
        raise UserError(f"forbidden_tokens has all {number} tokens of the vocabulary: allow one")
    return allowed


def mask(logits: Float[Array, "... v"], allowed: Bool[Array, " v"]) -> Float[Array, "... v"]:
    """The logits, or log-probabilities, of the next token, -inf for those that may not be written."""
    return jnp.where(allowed, logits, -jnp.inf)


def sample(logits: Float[Array, "b v"], keys: PRNGKeyArray, config: SamplingConfig) -> Int[Array, " b"]:
    """Samples one token per lane, with a random key for each: as if the lane were alone.

    Among equally likely tokens, lower ids count as more likely.
    """
    if config.temperature == 0:
        return jnp.argmax(logits, axis=-1)
    logits = logits.astype(jnp.float32) / config.temperature
    weights = jnp.exp(logits - jnp.max(logits, axis=-1, keepdims=True))
    if config.top_k:
        weights = jnp.where(_most_likely(logits, jnp.ones_like(logits, jnp.int32), config.top_k), weights, 0)
    if config.top_p < 1:
        limit = config.top_p * jnp.sum(weights, axis=-1)
        weights = jnp.where(_most_likely(logits, weights, limit), weights, 0)
    # In two steps, because a sum over few numbers is cheap and exact to more digits.
    uniform = jax.vmap(lambda key: jax.random.uniform(key, 2))(keys)
    groups = rearrange(jnp.pad(weights, ((0, 0), (0, -weights.shape[1] % GROUP))), "b (g s) -> b g s", s=GROUP)
    group = _draw(jnp.sum(groups, axis=-1), uniform[:, 0])
    return group * GROUP + _draw(jnp.take_along_axis(groups, group[:, None, None], axis=1)[:, 0], uniform[:, 1])


def _draw(weights: Float[Array, "b n"], uniform: Float[Array, " b"]) -> Int[Array, " b"]:
    """The index at which the sum of the weights passes this share of their total; its weight is not 0."""
    sums = jnp.cumsum(weights, axis=-1)
    passed = (sums > uniform[:, None] * sums[:, -1:]) & (weights > 0)
    # Sums are rounded: without an index that passes, it is the last one with a weight.
    last = weights.shape[-1] - 1 - jnp.argmax(weights[:, ::-1] > 0, axis=-1)
    return jnp.where(jnp.any(passed, axis=-1), jnp.argmax(passed, axis=-1), last)


def _most_likely(logits: Float[Array, "b v"], amounts: Array, limit: Array | int) -> Bool[Array, "b v"]:
    """The most likely tokens, up to the one with which their sum of `amounts` reaches the limit.

    No token is sorted: a bisection finds the last token's logit, among the integers that are ordered as floats are.
    """
    bits = jax.lax.bitcast_convert_type(jnp.where(logits == 0, 0, logits), jnp.int32)
    order = jnp.where(bits < 0, bits ^ 0x7FFFFFFF, bits)

    def above(threshold: Int[Array, " b"]) -> Array:
        return jnp.sum(jnp.where(order > threshold[:, None], amounts, 0), axis=-1)

    def halve(_, bounds):
        low, high = bounds
        middle = (low & high) + ((low ^ high) >> 1)  # their mean, without an overflow
        below_limit = above(middle) < limit
        return jnp.where(below_limit, low, middle + 1), jnp.where(below_limit, middle, high)

    highest = jnp.max(order, axis=-1)
    last, _ = jax.lax.fori_loop(0, 32, halve, (jnp.full_like(highest, jnp.iinfo(jnp.int32).min), highest))
    ties = order == last[:, None]
    of_ties = jnp.where(ties, amounts, 0)
    before = above(last)[:, None] + jnp.cumsum(of_ties, axis=-1) - of_ties
    return (order > last[:, None]) | (ties & (before < jnp.reshape(limit, (-1, 1))))
