"""Reads a prompt of any length, and continues it token by token at a constant cost; the carry can be saved."""

import dataclasses
import functools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray, UInt32

from meliad_like.errors import DAMAGED_NPZ, UserError
from meliad_like.layers.losses import token_losses
from meliad_like.models.model import Model
from meliad_like.remote import replacing
from meliad_like.resumable import check_same
from meliad_like.training.checkpoints import named_arrays

LOSS_SLICE = 256
"""The number of tokens whose logits exist at the same time."""


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
    before = jnp.cumsum(probabilities, axis=-1) - probabilities
    rank = jax.random.categorical(key, jnp.where(before < config.top_p, sorted_logits, -jnp.inf))
    return jnp.take_along_axis(tokens, rank[:, None], axis=-1)[:, 0]


class Reading(NamedTuple):
    """The state of a generator in a document. Each use consumes it: the buffers of its carry are donated."""

    carry: Any
    """The model's carry after the tokens before `token`; one lane."""
    token: int | None
    """The last token, which has not been read yet; None before the first token."""
    key: jax.Array
    """Data of the random key for the next tokens."""
    num_read: int
    """The number of tokens that the carry has read."""
    ended: bool = False
    """Whether `token` is an end of document that the model has generated. A prompt can be continued even after an
    end-of-document token, which in vocabularies of whole words also ends lines."""


class Generator:
    """Reads and continues one document with fixed parameters. The text does not depend on how calls divide it."""

    def __init__(
        self,
        model: Model,
        params: Any,
        *,
        segment_length: int,
        end_of_document: int | None,
        sampling: SamplingConfig,
        stop_at_end: bool = True,
        chunk: int = 8,
    ):
        """
        Args:
          segment_length: number of tokens of a prompt that are read at once, a multiple of the window length.
          end_of_document: the token that ends a document; None if there is no such token.
          stop_at_end: whether generation stops after that token; if not, it is never sampled, because a model has
            never read it in training.
          chunk: number of tokens generated between two returns to the host.

        Raises:
          UserError: the model's carry depends on where segments begin, and generated text has no segments.
        """
        if model.config.needs_segments:
            raise UserError(
                "what this model remembers depends on where segments end (clear_states, or a memory with "
                "update='segment'), and text that is written has no segments: use it for evaluation"
            )
        self._model, self._params = model, params
        self._segment_length, self._window_length = segment_length, model.config.window_length
        self._end_of_document, self._chunk = end_of_document, chunk
        fixed = {"sampling": sampling, "end_of_document": end_of_document, "stop_at_end": stop_at_end, "chunk": chunk}
        self._write_tokens = functools.partial(_write_tokens, model, params, **fixed)

    def begin(self, seed: int) -> Reading:
        """The state before the first token of a document."""
        carry, key = _begin(self._model, self._params, seed)
        return Reading(carry, None, key, 0)

    def read(self, reading: Reading, tokens: np.ndarray) -> Reading:
        """Reads `tokens` (int32[n], any n): whole segments, then whole blocks, then one by one."""
        return self._read(reading, tokens, score=False)[1]

    def score(self, reading: Reading, tokens: np.ndarray) -> tuple[Float[np.ndarray, " n"], Reading]:
        """Reads `tokens` as `read` does: also returns the loss of each in nats; NaN if no token precedes it."""
        nats, reading_after = self._read(reading, tokens, score=True)
        return np.pad(nats, (len(tokens) - len(nats), 0), constant_values=np.nan), reading_after

    def _read(self, reading: Reading, tokens: np.ndarray, score: bool) -> tuple[Float[np.ndarray, " n"], Reading]:
        """Reads `tokens`: returns, if asked to score, the losses of those that follow a token, and the state."""
        losses: list[Any] = []
        if len(tokens) == 0:
            return np.zeros(0, np.float32), reading
        size = self._model.vocabulary_size
        if wrong := [token for token in tokens if not 0 <= token < size]:
            raise UserError(f"token {wrong[0]} is not in the vocabulary of {size}")
        # A generated end of document is dropped when the text is continued.
        pending = [] if reading.token is None or reading.ended else [reading.token]
        tokens = np.concatenate([pending, tokens]).astype(np.int32)
        carry, num_read, place = reading.carry, reading.num_read, 0
        w = self._window_length
        while (remaining := len(tokens) - 1 - place) > 0:
            into_block = num_read % w
            is_whole = into_block == 0 and remaining >= w
            if is_whole:
                count = self._segment_length if remaining >= self._segment_length else w
            else:
                count = min(remaining, w - into_block)
            unread, targets = tokens[None, place : place + count], tokens[None, place + 1 : place + count + 1]
            if is_whole:
                start = np.zeros((1, count // w), bool)
                start[0, 0] = num_read == 0
                carry, nats = _read_blocks(self._model, self._params, carry, unread, start, targets if score else None)
            else:
                unread, targets = (np.pad(x, ((0, 0), (0, w - count))) for x in (unread, targets))
                carry, nats = _read_tokens(self._model, self._params, carry, unread, count, targets if score else None)
            if nats is not None:
                losses.append(nats[:, :count])
            place, num_read = place + count, num_read + count
        nats = np.concatenate([np.zeros((1, 0), np.float32), *losses], axis=1)[0]
        return nats, Reading(carry, int(tokens[-1]), reading.key, num_read)

    def write(self, reading: Reading, num_tokens: int) -> Iterator[tuple[list[int], Reading]]:
        """Generates up to `num_tokens` tokens in chunks; the last token may be the end of the document.

        Each chunk comes with the state after it, which is valid until the next chunk is requested.
        """
        if reading.token is None:
            raise UserError("there is nothing to continue: the prompt is empty")
        if reading.ended:
            raise UserError("the document has ended, there is nothing to write: give a prompt to continue with")
        while num_tokens > 0 and not reading.ended:
            token = np.array([reading.token], np.int32)
            count = min(num_tokens, self._chunk)
            carry, key, written, count = self._write_tokens(reading.carry, token, reading.key, count)
            tokens = np.asarray(written)[: int(count)].tolist()
            num_tokens -= len(tokens)
            ended = tokens[-1] == self._end_of_document
            reading = Reading(carry, tokens[-1], key, reading.num_read + len(tokens), ended)
            yield tokens, reading


# Compiled once per model, for any number of generators.


@functools.partial(jax.jit, static_argnums=0, keep_unused=True)
def _begin(model: Model, params, seed: int):
    # All is made on the devices of the parameters, also where it does not depend on them: with a key elsewhere, writing
    # would be compiled twice.
    return model.bind(params).init_carry(1, decoding=True), jax.random.key_data(jax.random.key(seed))


@functools.partial(jax.jit, static_argnums=0, donate_argnums=2)
def _read_blocks(
    model: Model, params, carry, tokens: Int[Array, "1 n"], start: Bool[Array, "1 c"], targets: Array | None
):
    """Reads whole blocks: returns the carry, and the losses of `targets`, if there are any."""
    module = model.bind(params)
    hidden, carry = module(tokens, carry, start)
    return carry, None if targets is None else token_losses(module, hidden, targets, LOSS_SLICE).nats


@functools.partial(jax.jit, static_argnums=0, donate_argnums=2)
def _read_tokens(model: Model, params, carry, tokens: Int[Array, "1 w"], count, targets: Array | None):
    """Reads the first `count` tokens of `tokens`: returns the carry, and the losses of `targets`, if there are any."""
    module = model.bind(params)

    def read_token(i, loop):
        carry, nats = loop
        logits, carry = module.decode_step(tokens[:, i], carry)
        if targets is not None:
            nats = nats.at[:, i].set(-jax.nn.log_softmax(logits)[:, targets[0, i]])
        return carry, nats

    carry, nats = jax.lax.fori_loop(0, count, read_token, (carry, jnp.zeros(tokens.shape)))
    return carry, None if targets is None else nats


@functools.partial(
    jax.jit,
    static_argnums=0,
    static_argnames=("sampling", "end_of_document", "stop_at_end", "chunk"),
    donate_argnums=2,
)
def _write_tokens(
    model: Model,
    params,
    carry,
    token: Int[Array, " 1"],
    key: UInt32[Array, "..."],
    count,
    *,
    sampling: SamplingConfig,
    end_of_document: int | None,
    stop_at_end: bool,
    chunk: int,
):
    """Generates up to `count` tokens after `token`. Returns carry, key, tokens [chunk], and the number generated."""
    module = model.bind(params)

    def unfinished(loop):
        i, _, token, _, _ = loop
        going_on = end_of_document is None or token[0] != end_of_document
        return (i < count) & ((i == 0) | going_on)

    def write_token(loop):
        i, carry, token, key, written = loop
        logits, carry = module.decode_step(token, carry)
        if end_of_document is not None and not stop_at_end:
            logits = logits.at[:, end_of_document].set(-jnp.inf)
        key, token_key = jax.random.split(jax.random.wrap_key_data(key))
        token = sample(logits, token_key, sampling)
        return i + 1, carry, token, jax.random.key_data(key), written.at[i].set(token[0])

    loop = (0, carry, token, key, jnp.zeros(chunk, jnp.int32))
    count, carry, _, key, written = jax.lax.while_loop(unfinished, write_token, loop)
    return carry, key, written, count


def save_reading(path: str | Path, reading: Reading, unfinished: bytes, identity: dict[str, Any]) -> None:
    """Writes the state and the bytes of an incomplete character to a file; if it fails, an earlier file is unchanged.

    `identity`: properties of the checkpoint that computed the carry, for JSON, which `load_reading` compares.
    """
    arrays = {name: np.asarray(leaf) for name, leaf in named_arrays({"carry": reading.carry}).items()}
    facts = {
        "identity": identity,
        "token": reading.token,
        "num_read": reading.num_read,
        "ended": reading.ended,
        "unfinished": unfinished.hex(),
    }
    try:
        with replacing(path) as file:
            np.savez(file, facts=np.array(json.dumps(facts)), key=np.asarray(reading.key), **arrays)
    except OSError as error:
        raise UserError(f"cannot write the carry to {path}: {error.strerror}") from None


def load_reading(path: str | Path, abstract_carry: Any, identity: dict[str, Any]) -> tuple[Reading, bytes]:
    """Reads a file of `save_reading` for the checkpoint with this identity: the state, and an incomplete character."""
    try:
        with np.load(path) as file:
            facts = json.loads(str(file["facts"]))
            check_same(
                path, facts["identity"], identity, way_out="choose the checkpoint that wrote it (--checkpoint, --step)"
            )
            # numpy loads bfloat16 as raw bytes.
            leaves = [file[name].view(leaf.dtype) for name, leaf in named_arrays({"carry": abstract_carry}).items()]
            key = file["key"]
    except FileNotFoundError:
        raise UserError(f"there is no saved carry {path}") from None
    except OSError as error:
        raise UserError(f"cannot read the saved carry {path}: {error.strerror}") from None
    except (*DAMAGED_NPZ, KeyError) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"{path} is not a saved carry, or it is damaged") from None
    carry = jax.tree.unflatten(jax.tree.structure(abstract_carry), leaves)
    reading = Reading(jax.device_put(carry), facts["token"], jax.device_put(key), facts["num_read"], facts["ended"])
    return reading, bytes.fromhex(facts["unfinished"])
