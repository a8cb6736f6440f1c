"""Reads prompts of any lengths, and continues them token by token at a constant cost."""

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, UInt32

from meliad_like.errors import UserError
from meliad_like.generation.reading import (
    NO_TOKEN,
    WITHOUT_COPIES,
    GenerationState,
    RequestedResults,
    TextReader,
    longest_text,
)
from meliad_like.generation.sampling import SamplingConfig, sample, writable_tokens
from meliad_like.models.model import Model
from meliad_like.vocabularies.base import Vocabulary

CHUNKS = (8, 64)
"""The numbers of tokens of the first chunk and of the longest, by default: the first ones are soon there, and later
ones rarely wait for the host."""


class Generator(TextReader):
    """Reads and continues a batch of documents with fixed parameters.

    A text depends neither on the other texts of its batch nor on how calls divide it.
    """

    def __init__(
        self,
        model: Model,
        params: Any,
        *,
        segment_length: int,
        vocabulary: Vocabulary,
        sampling: SamplingConfig,
        stop_at_end: bool = True,
        chunk: int | None = None,
    ):
        """
        Args:
          segment_length: number of tokens of a prompt that are read at once, a multiple of the window length.
          vocabulary: its additional ids and other tokens that stand for nothing are never written.
          stop_at_end: whether generation stops after the end of the document; if not, it is never sampled, because a
            model has never read it in training, except where it ends lines too.
          chunk: number of tokens generated between two returns to the host; None: 8, and each time twice as many, up to
            64.

        Raises:
          UserError: the model's carry depends on where segments begin, and generated text has no segments.
        """
        if reason := model.config.traits.needs_segments:
            raise UserError(
                f"what this model remembers depends on where segments end ({reason}), and text that is written has no "
                "segments: use it for evaluation"
            )
        super().__init__(model, params, segment_length)
        self._first_chunk, self._chunk = CHUNKS if chunk is None else (chunk, chunk)
        ends = vocabulary.end_tokens
        self._ends = ends if stop_at_end else ()
        ends_lines = vocabulary.end_is_text or bool(vocabulary.decode_bytes(ends))
        allowed = writable_tokens(vocabulary, forbidden_tokens=() if stop_at_end or ends_lines else ends)
        self._write_tokens = functools.partial(
            _write_tokens, model, params, allowed, sampling=sampling, ends=self._ends, chunk=self._chunk
        )

    def begin(self, *seeds: int) -> GenerationState:
        """The states before the first tokens of documents, one for each random seed."""
        carry, key = _begin(self._model, self._params, np.asarray(seeds, np.uint32))
        nothing = np.zeros(len(seeds), int)
        return GenerationState(carry, nothing.astype(np.int32) + NO_TOKEN, key, nothing, nothing > 0)

    def score(
        self, state: GenerationState, texts: Sequence[Int[np.ndarray, " n"]]
    ) -> tuple[list[tuple[Float[np.ndarray, " n"], Bool[np.ndarray, " n"]]], GenerationState]:
        """Reads texts: returns for each the loss of its tokens in nats, and whether they are the most likely ones, NaN
        and false where no token precedes; and the states after the texts."""
        results, state = self.look(state, texts, RequestedResults(losses=True))
        scores = []
        for one, text in zip(results, texts, strict=True):
            nats, correct = one.get("nats", np.zeros(0, np.float32)), one.get("correct", np.zeros(0, bool))
            missing = len(text) - len(nats), 0
            scores.append((np.pad(nats, missing, constant_values=np.nan), np.pad(correct, missing)))
        return scores, state

    def write(self, state: GenerationState, num_tokens: int) -> Iterator[tuple[list[list[int]], GenerationState]]:
        """Generates up to `num_tokens` tokens of each text in chunks; the last may be the end of the document.

        Each chunk comes with the states after it, which are valid until the next chunk is requested. Where a text
        ends, the chunk ends for all, and later states of this text have no meaning.
        """
        check_prompts(state)
        if num_tokens < 0:
            raise UserError(f"tokens={num_tokens} must be at least 0")
        chunk = self._first_chunk
        while num_tokens > 0 and not state.ended.all():
            is_active = ~state.ended
            arguments = (state.carry, state.token, state.key, is_active, min(num_tokens, chunk))
            longest = longest_text(self._model, state.num_read[is_active] + chunk)
            carry, key, written, count = self._write_tokens(*arguments, longest=longest)
            written = np.asarray(written)[:, : int(count)]
            num_tokens -= written.shape[1]
            chunk = min(2 * chunk, self._chunk)
            ended = ~is_active | np.isin(written[:, -1], self._ends)
            state = GenerationState(carry, written[:, -1], key, state.num_read + written.shape[1], ended)
            yield [tokens.tolist() if live else [] for tokens, live in zip(written, is_active, strict=True)], state

    def continuation(self, prompt: Int[np.ndarray, " n"], num_tokens: int, seed: int = 0) -> list[int]:
        """Up to `num_tokens` tokens that continue one prompt, which begins a document."""
        chunks = self.write(self.read(self.begin(seed), [prompt]), num_tokens)
        return [token for [written], _ in chunks for token in written]


def check_prompts(state: GenerationState) -> None:
    """Raises a UserError if a text can't be continued."""
    for number, (token, ended) in enumerate(zip(state.token, state.ended, strict=True)):
        name = "the {}" if len(state.token) == 1 else f"{{}} {number} of the batch"
        if token == NO_TOKEN:
            raise UserError(f"there is nothing to continue: {name.format('prompt')} is empty")
        if ended:
            raise UserError(
                f"{name.format('document')} has ended, there is nothing to write: give a prompt to continue with"
            )


# Compiled once per model, for any number of generators.


@functools.partial(jax.jit, static_argnums=0, keep_unused=True)
def _begin(model: Model, params, seeds: UInt32[Array, " b"]):
    # All is made on the devices of the parameters, also where it does not depend on them: with a key elsewhere, writing
    # would be compiled twice.
    module = model.bind(params)
    carry = module.begin_decoding(module.init_carry(len(seeds)))
    return carry, jax.random.key_data(jax.vmap(jax.random.key)(seeds))


@functools.partial(
    jax.jit,
    static_argnums=0,
    static_argnames=("sampling", "ends", "chunk", "longest"),
    donate_argnums=3,
    compiler_options=WITHOUT_COPIES,
)
def _write_tokens(
    model: Model,
    params,
    allowed: Bool[Array, " v"],
    carry,
    token: Int[Array, " b"],
    key: UInt32[Array, "b ..."],
    is_active: Bool[Array, " b"],
    count,
    *,
    sampling: SamplingConfig,
    ends: tuple[int, ...],
    chunk: int,
    longest: int | None,
):
    """Generates up to `count` allowed tokens after `token`, until an active lane ends with one of the tokens `ends`.

    Lanes that have ended before are not left out, because a smaller batch would be compiled again; what they write is
    ignored. Returns carry, keys, tokens [b, chunk], and the number generated.
    """
    module = model.bind(params)

    def unfinished(loop):
        i, _, token, _, _ = loop
        if not ends:
            return i < count
        return (i < count) & ((i == 0) | ~jnp.any(is_active & jnp.isin(token, np.array(ends))))

    def write_token(loop):
        i, carry, token, key, written = loop
        logits, carry = module.decode_step(token, carry, longest)
        keys = jax.vmap(jax.random.split)(jax.random.wrap_key_data(key))
        token = sample(jnp.where(allowed, logits, -jnp.inf), keys[:, 1], sampling)
        return i + 1, carry, token, jax.random.key_data(keys[:, 0]), written.at[:, i].set(token)

    loop = (0, carry, token, key, jnp.zeros((len(token), chunk), jnp.int32))
    count, carry, _, key, written = jax.lax.while_loop(unfinished, write_token, loop)
    return carry, key, written, count
