"""Beam search: the most likely continuations of texts."""

import dataclasses
import functools
from collections.abc import Collection
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from meliad_like.errors import UserError
from meliad_like.generation.reading import GenerationState, longest_text
from meliad_like.generation.sampling import writable_tokens
from meliad_like.layers.lanes import choose_lanes, take_lanes
from meliad_like.models.model import Model
from meliad_like.vocabularies.base import Vocabulary


@dataclasses.dataclass(frozen=True)
class BeamConfig:
    """The settings of a beam search."""

    width: int = 4
    """The number of hypotheses that are kept in each step. With 1 it is greedy: the most likely token each time."""
    length_penalty: float = 0.0
    """The exponent `alpha` of the normalisation by length in `normalised`; 0: the score is the log-probability."""
    end_tokens: Collection[int] = ()
    """A hypothesis ends with the first of these tokens."""
    forbidden_tokens: Collection[int] = ()
    """Tokens that no hypothesis contains. The probabilities of the other tokens stay as the model gives them."""

    def __post_init__(self):
        if self.width < 1:
            raise UserError(f"width={self.width} must be at least 1")
        if not 0 <= self.length_penalty < np.inf:
            raise UserError(f"length_penalty={self.length_penalty} must be at least 0")


class Beams(NamedTuple):
    """The hypotheses of `b` texts, those with the best score first."""

    tokens: Int[Array, "b width n"]
    length: Int[Array, "b width"]
    """The number of tokens of each hypothesis."""
    log_probability: Float[Array, "b width"]
    """The sum of the log-probabilities of the tokens; -inf: there are fewer hypotheses than the width."""
    score: Float[Array, "b width"]
    ended: Bool[Array, "b width"]
    """Whether the last token is an end token."""


def normalised(
    log_probability: Float[Array, "..."], length: Int[Array, "..."], length_penalty: Float[Array, ""]
) -> Float[Array, "..."]:
    """`log_probability / ((5 + length) / 6) ** length_penalty` (Wu et al. 2016, equation 14, without coverage)."""
    return log_probability / ((5 + length) / 6) ** length_penalty


def beam_search(
    model: Model, params: Any, vocabulary: Vocabulary, state: GenerationState, num_tokens: int, config: BeamConfig
) -> tuple[Beams, GenerationState]:
    """Searches for the best continuations of up to `num_tokens` tokens.

    In each step every hypothesis that has not ended is extended by every token that may be written, and the `width`
    best of all are kept by their score; those that have ended compete with the others, unchanged. The search stops when
    all have ended.

    Args:
      state: the states of the texts that are continued, which stay as they are.

    Returns:
      The hypotheses, as arrays of numpy, and their states: `width` lanes for each text. No state is `ended`.
    """
    allowed = writable_tokens(vocabulary, config.end_tokens, config.forbidden_tokens)
    if num_tokens < 1:
        raise UserError(f"tokens={num_tokens} must be at least 1")
    ends = np.isin(np.arange(vocabulary.size), list(config.end_tokens))
    texts = (state.carry, state.token, ends, allowed, np.float32(config.length_penalty))
    longest = longest_text(model, state.num_read + num_tokens)
    carry, beams = _search(model, params, *texts, width=config.width, num_tokens=num_tokens, longest=longest)
    beams = Beams(*map(np.asarray, beams))
    last = np.take_along_axis(beams.tokens, beams.length[..., None] - 1, axis=-1).reshape(-1)
    num_read = np.repeat(state.num_read, config.width) + beams.length.reshape(-1)
    key = jnp.repeat(state.key, config.width, axis=0)
    return beams, GenerationState(carry, last, key, num_read, np.zeros(len(last), bool))


@functools.partial(jax.jit, static_argnums=0, static_argnames=("width", "num_tokens", "longest"))
def _search(
    model: Model,
    params,
    carry,
    token: Int[Array, " b"],
    ends: Bool[Array, " v"],
    allowed: Bool[Array, " v"],
    length_penalty: Float[Array, ""],
    *,
    width: int,
    num_tokens: int,
    longest: int | None,
):
    """The carry of all hypotheses, [b * width] lanes, and the `Beams`."""
    module, b = model.bind(params), len(token)
    lanes = jnp.repeat(jnp.arange(b), width)
    # The first step begins with one hypothesis; the others would be its copies.
    first = jnp.where(jnp.arange(width) == 0, 0.0, -jnp.inf) + jnp.zeros((b, 1))
    nothing = jnp.zeros((b, width), jnp.int32)
    beams = Beams(jnp.zeros((b, width, num_tokens), jnp.int32), nothing, first, first, nothing > 0)

    def unfinished(loop):
        step, _, _, beams = loop
        return (step < num_tokens) & jnp.any(~beams.ended & (beams.log_probability > -jnp.inf))

    def extend(loop):
        step, carry, token, beams = loop
        logits, next_carry = module.decode_step(token, carry, longest)
        carry = choose_lanes(beams.ended.reshape(-1), carry, next_carry)
        parent, token, beams = _best(beams, logits.reshape(b, width, -1), step, ends, allowed, length_penalty)
        # Each hypothesis continues with the memory of the one that it extends.
        carry = take_lanes(carry, (parent + width * jnp.arange(b)[:, None]).reshape(-1))
        return step + 1, carry, token.reshape(-1), beams

    loop = (0, take_lanes(carry, lanes), token[lanes], beams)
    _, carry, _, beams = jax.lax.while_loop(unfinished, extend, loop)
    return carry, beams


def _best(
    beams: Beams,
    logits: Float[Array, "b width v"],
    step: Int[Array, ""],
    ends: Bool[Array, " v"],
    allowed: Bool[Array, " v"],
    length_penalty: Float[Array, ""],
) -> tuple[Int[Array, "b width"], Int[Array, "b width"], Beams]:
    """The best extended hypotheses: the places of those that they extend, their last tokens, and the hypotheses."""
    width, v = logits.shape[1:]
    extended = jnp.where(allowed, jax.nn.log_softmax(logits), -jnp.inf)
    # A hypothesis that has ended is one candidate, itself, in the place of its extension by token 0.
    unchanged = jnp.where(jnp.arange(v) == 0, 0.0, -jnp.inf)
    added = jnp.where(beams.ended[..., None], unchanged, extended)
    totals = (beams.log_probability[..., None] + added).reshape(len(logits), -1)
    length = jnp.where(beams.ended, beams.length, step + 1)
    scores = normalised(totals, jnp.repeat(length, v, axis=1), length_penalty)
    score, candidate = jax.lax.top_k(scores, width)
    parent = candidate // v
    was_ended, length, tokens = (
        jnp.take_along_axis(x, parent.reshape(*parent.shape, *[1] * (x.ndim - 2)), axis=1)
        for x in (beams.ended, length, beams.tokens)
    )
    token = jnp.where(was_ended, 0, candidate % v)
    total = jnp.take_along_axis(totals, candidate, axis=1)
    tokens = tokens.at[:, :, step].set(token)
    return parent, token, Beams(tokens, length, total, score, was_ended | ends[token])
