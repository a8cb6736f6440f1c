"""The tokens that may be written, and the sampling of one of them from logits."""

import dataclasses
from collections.abc import Collection

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from meliad_like.data.vocabulary import Vocabulary
from meliad_like.errors import UserError


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


def sample(logits: Float[Array, "b v"], key: PRNGKeyArray, config: SamplingConfig) -> Int[Array, " b"]:
    """Samples one token per lane. Among equally likely tokens, lower ids count as more likely."""
    if config.temperature == 0:
        return jnp.argmax(logits, axis=-1)
    logits = logits / config.temperature
    if config.top_k == 0 and config.top_p == 1:
        return jax.random.categorical(key, logits)
    # Ranks instead of thresholds, so that ties cannot let more than top_k tokens through.
    sorted_logits, tokens = jax.lax.top_k(logits, min(config.top_k, logits.shape[-1]) or logits.shape[-1])
    probabilities = jax.nn.softmax(sorted_logits, axis=-1)
    more_likely = jnp.cumsum(probabilities, axis=-1) - probabilities
    rank = jax.random.categorical(key, jnp.where(more_likely < config.top_p, sorted_logits, -jnp.inf))
    return jnp.take_along_axis(tokens, rank[:, None], axis=-1)[:, 0]


def sample_lanes(
    logits: Float[Array, "b v"], keys: PRNGKeyArray, config: SamplingConfig, allowed: Bool[Array, " v"]
) -> Int[Array, " b"]:
    """Samples one of the allowed tokens per lane with a random key for each lane: as if the lane were alone."""
    return jax.vmap(lambda logits, key: sample(logits[None], key, config)[0])(mask(logits, allowed), keys)
