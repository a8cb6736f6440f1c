"""The tokens that may be written, and the sampling of one of them from logits."""

import dataclasses
from collections.abc import Collection

import jax
import jax.numpy as jnp
import numpy as np
from einops import rearrange
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from meliad_like.errors import UserError
from meliad_like.vocabularies.base import Vocabulary

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
    """The mask of tokens that may be written: those with a text, and end tokens, which may be control tokens. Raises a
    UserError if a token is not in the vocabulary, or none may be written."""
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


def sample(logits: Float[Array, "b v"], keys: PRNGKeyArray, config: SamplingConfig) -> Int[Array, " b"]:
    """Samples one token per lane, with a random key for each: as if the lane were alone.

    Among equally likely tokens, lower ids count as more likely.
    """
    if config.temperature == 0:
        groups = _grouped(logits)
        group = jnp.argmax(jnp.max(groups, axis=-1), axis=-1)
        return group * GROUP + jnp.argmax(_of_group(groups, group), axis=-1)
    logits = logits.astype(jnp.float32) / config.temperature
    if not config.top_k:
        return _sample(_grouped(logits), keys, config.top_p)
    # `top_k` would place 0 before -0.
    logits, tokens = jax.lax.top_k(jnp.where(logits == 0, 0, logits), min(config.top_k, logits.shape[-1]))
    rank = _sample(_grouped(logits), keys, config.top_p)
    return jnp.take_along_axis(tokens, rank[:, None], axis=-1)[:, 0]


def _grouped(logits: Float[Array, "b v"]) -> Float[Array, "b g s"]:
    """The logits in groups, of which the last is padded with -inf.

    In two steps a token is found faster than in one, and a sum over few numbers is exact to more digits.
    """
    padding = (0, 0), (0, -logits.shape[-1] % GROUP)
    return rearrange(jnp.pad(logits, padding, constant_values=-jnp.inf), "b (g s) -> b g s", s=GROUP)


def _sample(logits: Float[Array, "b g s"], keys: PRNGKeyArray, top_p: float) -> Int[Array, " b"]:
    """Samples one of the most likely tokens that together reach the probability `top_p`, without sorting them.

    A token is drawn from all. If the more likely ones reach `top_p` without it, it is rejected, and the next one is
    drawn from these, which include all that may be returned.
    """
    weights = jnp.exp(logits - jnp.max(logits, axis=(1, 2), keepdims=True))
    if top_p == 1:
        return _draw_token(weights, keys)
    limit = top_p * _total(weights)
    ids = jnp.arange(logits[0].size).reshape(logits[0].shape)

    def draw_again(loop):
        attempt, weights, token, rejected = loop
        drawn = _draw_token(weights, jax.vmap(jax.random.fold_in, (0, None))(keys, attempt))
        token = jnp.where(rejected, drawn, token)[:, None, None]
        logit = jnp.take_along_axis(rearrange(logits, "b g s -> b 1 (g s)"), token, axis=-1)
        weights = jnp.where((logits > logit) | ((logits == logit) & (ids < token)), weights, 0)
        return attempt + 1, weights, token[:, 0, 0], _total(weights) >= limit

    loop = (0, weights, jnp.zeros(len(logits), jnp.int32), jnp.ones(len(logits), bool))
    return jax.lax.while_loop(lambda loop: jnp.any(loop[-1]), draw_again, loop)[2]


def _total(weights: Float[Array, "b g s"]) -> Float[Array, " b"]:
    return jnp.sum(jnp.sum(weights, axis=-1), axis=-1)


def _of_group(groups: Float[Array, "b g s"], group: Int[Array, " b"]) -> Float[Array, "b s"]:
    return jnp.take_along_axis(groups, group[:, None, None], axis=1)[:, 0]


def _draw_token(weights: Float[Array, "b g s"], keys: PRNGKeyArray) -> Int[Array, " b"]:
    """Draws a token with a probability proportional to its weight."""
    uniform = jax.vmap(lambda key: jax.random.uniform(key, 2))(keys)
    group = _draw(jnp.sum(weights, axis=-1), uniform[:, 0])
    return group * GROUP + _draw(_of_group(weights, group), uniform[:, 1])


def _draw(weights: Float[Array, "b n"], uniform: Float[Array, " b"]) -> Int[Array, " b"]:
    """The index at which the sum of the weights passes this share of their total; its weight is not 0."""
    sums = jnp.cumsum(weights, axis=-1)
    passed = (sums > uniform[:, None] * sums[:, -1:]) & (weights > 0)
    # Sums are rounded: without an index that passes, it is the last one with a weight.
    last = weights.shape[-1] - 1 - jnp.argmax(weights[:, ::-1] > 0, axis=-1)
    return jnp.where(jnp.any(passed, axis=-1), jnp.argmax(passed, axis=-1), last)
