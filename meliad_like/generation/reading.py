"""The states of a batch of texts, and how texts of any lengths are read into them, each as if it were alone."""

import functools
import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, UInt32

from meliad_like.errors import DAMAGED_NPZ, UserError, one_line, reading, refusals
from meliad_like.layers.basic import check_tokens
from meliad_like.layers.lanes import choose_lanes, join_lanes, take_lanes
from meliad_like.layers.losses import token_losses
from meliad_like.models.model import Model, block_offset
from meliad_like.remote import any_path, write_whole
from meliad_like.resumable import check_same
from meliad_like.training.checkpoints import named_arrays

LOSS_SLICE = 256
"""The number of tokens whose logits exist at the same time, if only losses are requested."""
FEW_TOKENS = 16
"""The smallest number of tokens for which a program is compiled: a CPU reads as many in about the time of one."""
SEVERAL_TOKENS = 128
"""The next number of tokens for which a program is compiled; larger ones are powers of two."""
SHORT_TEXT = 512
"""The smallest result of `longest_text`; the next ones are 4 and 16 times as large, and so on."""
NO_TOKEN = -1
"""The `GenerationState.token` of a text without tokens."""
WITHOUT_COPIES = {"xla_cpu_copy_insertion_use_region_analysis": True}
"""XLA's options for a loop over tokens. By default a CPU's program copies all cached keys and values for every token,
because they are read before one of them is replaced. Other platforms ignore it."""


class GenerationState(NamedTuple):
    """The states of a generator in `b` texts. Each use consumes them: the buffers of the carry are donated."""

    carry: Any
    """The model's carry after the tokens before `token`; the lanes are the texts."""
    token: Int[np.ndarray, " b"]
    """The last token of each text, which has not been read yet; NO_TOKEN before the first one."""
    key: UInt32[Array, "b ..."]
    """Data of the random key for the next tokens of each text."""
    num_read: Int[np.ndarray, " b"]
    """The number of tokens that the carry has read."""
    ended: Bool[np.ndarray, " b"]
    """Whether `token` is an end of document that the model has generated. A prompt can be continued even after an
    end-of-document token, which in vocabularies of whole words also ends lines."""


def take_states(state: GenerationState, lanes: Sequence[int]) -> GenerationState:
    """The state of these texts alone, in this order; the buffers are copies."""
    index = np.asarray(lanes, np.int32)
    return GenerationState(take_lanes(state.carry, index), *(x[index] for x in state[1:]))


def join_states(states: Sequence[GenerationState]) -> GenerationState:
    """One state with the texts of all of these, in their order."""
    carry, token, key, num_read, ended = zip(*states)
    token, num_read, ended = map(np.concatenate, (token, num_read, ended))
    return GenerationState(join_lanes(carry), token, jnp.concatenate(key), num_read, ended)


class RequestedResults(NamedTuple):
    """The results that are kept of each token that is read."""

    losses: bool = False
    """`nats`, float32: the loss of the token that comes next; `correct`, bool: whether no token has a smaller one."""
    logits: bool = False
    """`logits`, float32[v], of the next token."""
    layers: tuple[int, ...] = ()
    """`layer 2`, [d], ...: the output of these layers, counted from 1, before the final norm; 0: the embedding."""


class TextReader:
    """Reads texts with fixed parameters: to the end of a block, whole segments, whole blocks, and the rest at once."""

    def __init__(self, model: Model, params: Any, segment_length: int):
        self._model, self._params = model, params
        self._segment_length = segment_length
        self._window_length, self._overlap = model.config.window_length, model.config.overlap

    def read(self, state: GenerationState, texts: Sequence[Int[np.ndarray, " n"]]) -> GenerationState:
        """The states after these tokens, one array for each text of `state`."""
        return self.look(state, texts, RequestedResults())[1]

    def look(
        self, state: GenerationState, texts: Sequence[Int[np.ndarray, " n"]], requested: RequestedResults
    ) -> tuple[list[dict[str, np.ndarray]], GenerationState]:
        """Reads texts, and returns the requested results of their tokens.

        Returns:
            For each text the results by name, [n, ...]: of the last token before the text, if there is one, and of the
            tokens of the text but its last; and the states after the texts.
        """
        check_tokens(np.concatenate(texts), self._model.vocabulary_size)
        # The last token before each text has not been read yet; if it is a generated end of document, it is dropped.
        is_before = (state.token != NO_TOKEN) & ~state.ended
        rows = [
            np.concatenate([state.token[lane : lane + before], text]).astype(np.int32)
            for lane, (before, text) in enumerate(zip(is_before.tolist(), texts))
        ]
        remaining = np.array([max(len(row) - 1, 0) for row in rows])
        place, num_read = np.zeros(len(rows), int), state.num_read.copy()
        carry, parts_by_text = state.carry, [[] for _ in rows]
        while remaining.any():
            counts, size, are_blocks = self._next(num_read, remaining)
            tokens, targets = _cut(rows, place, counts, size)
            common = (self._model, self._params, carry, tokens, targets)
            lanes = None if counts.all() else counts > 0
            if are_blocks:
                start = (num_read == 0)[:, None] & (np.arange(size // self._window_length) == 0)
                carry, results = _read_blocks(*common, start, lanes, requested=requested)
            else:
                longest = longest_text(self._model, (num_read + counts)[counts > 0])
                carry, results = _read_tokens(*common, counts, lanes, requested=requested, longest=longest)
            on_host = {name: np.asarray(result) for name, result in results.items()}
            for lane in np.flatnonzero(counts).tolist():
                parts_by_text[lane].append({name: result[lane, : counts[lane]] for name, result in on_host.items()})
            remaining, place, num_read = remaining - counts, place + counts, num_read + counts
        token, ended = state.token.copy(), state.ended.copy()
        for lane, text in enumerate(texts):
            if len(text):
                token[lane], ended[lane] = rows[lane][place[lane]], False
        joined = [
            {name: np.concatenate([p[name] for p in parts]) for name in parts[0]} if parts else {}
            for parts in parts_by_text
        ]
        return joined, GenerationState(carry, token, state.key, num_read, ended)

    def _next(
        self, num_read: Int[np.ndarray, " b"], remaining: Int[np.ndarray, " b"]
    ) -> tuple[Int[np.ndarray, " b"], int, bool]:
        """The number of tokens that each text reads next, the number with padding, and whether they are whole blocks.
        How a text is cut depends on no other text."""
        w = self._window_length
        offset = block_offset(num_read, w, self._overlap)
        inside = (offset > 0) & (remaining > 0)
        # Windows that overlap repeat tokens, which blocks of a segment don't.
        sizes = () if inside.any() or self._overlap else (self._segment_length, w)
        for size in sizes:
            if (full := remaining >= size).any():
                return np.where(full, size, 0), size, True
        counts = np.where(inside | ~inside.any(), np.minimum(remaining, w - offset), 0)
        if (several := counts > FEW_TOKENS).any():
            counts = np.where(several, counts, 0)
            return counts, min(max(power_of_two(int(counts.max())), SEVERAL_TOKENS), w), False
        return counts, min(FEW_TOKENS, w), False


def longest_text(model: Model, num_tokens: Int[np.ndarray, " _"]) -> int | None:
    """The smallest of 512, 2,048, 8,192 ... that is at least each of these lengths of texts (`LayerContext.longest`);
    None if it is more than a quarter of what a token sees."""
    longest = SHORT_TEXT
    while longest < num_tokens.max():
        longest *= 4
    return longest if 4 * longest <= model.num_visible else None


def power_of_two(n: int) -> int:
    """The smallest power of two that is at least n."""
    return 1 << (n - 1).bit_length()


def read_while_decoding(
    module: Any, tokens: Int[Array, "b n"], carry: Any, start: Bool[Array, "b c"], *, every_layer: bool = False
) -> tuple[list[Float[Array, "b n d"]], Any]:
    """Reads a segment as `BaseDecoder.read_segment`, with the carry's form for decoding. It begins with a block."""
    outputs, carry = module.read_segment(tokens, module.end_decoding(carry), start, every_layer=every_layer)
    return outputs, module.begin_decoding(carry)


def _cut(
    rows: list[Int[np.ndarray, " n"]], place: Int[np.ndarray, " b"], counts: Int[np.ndarray, " b"], size: int
) -> tuple[Int[np.ndarray, "b size"], Int[np.ndarray, "b size"]]:
    """The next `counts` tokens of each row and the tokens that follow each of them, padded with zeros."""
    tokens, targets = np.zeros((2, len(rows), size), np.int32)
    for lane, (row, at, count) in enumerate(zip(rows, place, counts, strict=True)):
        tokens[lane, :count], targets[lane, :count] = row[at : at + count], row[at + 1 : at + count + 1]
    return tokens, targets


def _results(
    module: Any, outputs: list[Array], targets: Int[Array, "b n"], requested: RequestedResults
) -> dict[str, Array]:
    """The requested results, [b, n, ...], from the outputs of the layers, [b, n, d]."""
    hidden, results = module.finish(outputs[-1], None), {}
    if requested.losses:
        losses = token_losses(module, hidden, targets, LOSS_SLICE)
        results |= {"nats": losses.nats, "correct": losses.correct}
    if requested.logits:
        results["logits"] = module.logits(hidden)
    return results | {f"layer {layer}": outputs[layer] for layer in requested.layers}


# Compiled once per model, for any number of generators.


@functools.partial(jax.jit, static_argnums=0, static_argnames="requested", donate_argnums=2)
def _read_blocks(model: Model, params, carry, tokens, targets, start, lanes, *, requested: RequestedResults):
    """Reads whole blocks in the flagged lanes (None: in all): returns the carry and the results."""
    module = model.bind(params)
    outputs, next_carry = read_while_decoding(module, tokens, carry, start, every_layer=bool(requested.layers))
    return choose_lanes(lanes, next_carry, carry), _results(module, outputs, targets, requested)


@functools.partial(jax.jit, static_argnums=0, static_argnames=("requested", "longest"), donate_argnums=2)
def _read_tokens(
    model: Model, params, carry, tokens, targets, counts, lanes, *, requested: RequestedResults, longest: int | None
):
    """Reads the first `counts` tokens of flagged lanes (None: of all) at once: returns the carry and the results."""
    module = model.bind(params)
    outputs, next_carry = module.read_tokens(tokens, counts, carry, longest)
    return choose_lanes(lanes, next_carry, carry), _results(module, outputs, targets, requested)


def save_state(path: str | Path, state: GenerationState, unfinished: bytes, identity: dict[str, Any]) -> None:
    """Writes the state of one text, and the bytes of an incomplete character, to a file, also on `gs://`.

    If it fails, an earlier file is unchanged.

    Args:
      identity: properties of the checkpoint that computed the carry, for JSON, which `load_state` compares.
    """
    arrays = {name: np.asarray(leaf) for name, leaf in named_arrays({"carry": state.carry}).items()}
    token = int(state.token[0])
    facts = {
        "identity": identity,
        "token": None if token == NO_TOKEN else token,
        "num_read": int(state.num_read[0]),
        "ended": bool(state.ended[0]),
        "unfinished": unfinished.hex(),
    }
    content = io.BytesIO()
    np.savez(content, facts=np.array(json.dumps(facts)), key=np.asarray(state.key[0]), **arrays)
    try:
        write_whole(any_path(path), content.getvalue())
    except refusals() as error:
        reason = getattr(error, "strerror", None) or one_line(error)
        raise UserError(f"cannot write the carry to {path}: {reason}") from None


def load_state(path: str | Path, abstract_carry: Any, identity: dict[str, Any]) -> tuple[GenerationState, bytes]:
    """Reads a file of `save_state` for the checkpoint with this identity: the state, and an incomplete character."""
    damaged = *DAMAGED_NPZ, KeyError
    with reading(path, "saved carry", *damaged), any_path(path).open("rb") as content, np.load(content) as file:
        facts = json.loads(str(file["facts"]))
        way_out = "choose the checkpoint that wrote it (--checkpoint, --step)"
        check_same(path, facts["identity"], identity, way_out=way_out)
        # numpy loads bfloat16 as raw bytes.
        leaves = [file[name].view(leaf.dtype) for name, leaf in named_arrays({"carry": abstract_carry}).items()]
        key = file["key"]
    carry = jax.tree.unflatten(jax.tree.structure(abstract_carry), leaves)
    token = np.array([NO_TOKEN if facts["token"] is None else facts["token"]], np.int32)
    num_read, ended = np.array([facts["num_read"]]), np.array([facts["ended"]])
    state = GenerationState(jax.device_put(carry), token, jax.device_put(key[None]), num_read, ended)
    return state, bytes.fromhex(facts["unfinished"])
