"""Writing of text: a prompt and a saved carry in, a stream of complete characters out."""

import hashlib
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np

from meliad_like.config import bound_values
from meliad_like.data.documents import SPLITS
from meliad_like.data.token_store import TokenStore
from meliad_like.data.vocabulary import StreamingDecoder, Vocabulary
from meliad_like.errors import UserError
from meliad_like.generation.streaming import Generator, SamplingConfig, load_reading, save_reading
from meliad_like.run.opening import OpenedCheckpoint

UNKNOWN = "\u2047"
SAMPLED = 1000  # Number of values of each parameter that identify a checkpoint.


class TextSpeed(NamedTuple):
    """Measured times."""

    tokens_read: int
    read_seconds: float
    """Includes compilation."""
    tokens_written: int
    tokens_per_second: float
    """Written, after the first chunk, which waits for the compiler; 0 where that was the only one."""


def write_text(
    opened: OpenedCheckpoint,
    prompt: str,
    num_tokens: int,
    sampling: SamplingConfig,
    show: Callable[[str], object],
    *,
    seed: int | None = None,
    stop_at_end: bool = True,
    load_carry: str | None = None,
    save_carry: str | None = None,
    chunk: int = 8,
) -> TextSpeed:
    """Reads the prompt and hands the text that follows to `show`, piece by piece as it is made.

    Args:
      prompt: may be empty where `load_carry` is given, after whose text it is read.
      num_tokens: the largest number of tokens to write, of which `chunk` are made before they are shown.
      seed: random seed; None: 0, or the random state in `load_carry`.
      stop_at_end: whether the end of the document ends the text. If not, this token is never sampled, but in
        vocabularies of whole words, where it ends lines, too.
      load_carry, save_carry: files of a saved carry: to resume from, and to write.
    """
    vocabulary = opened.vocabulary
    tokens = encode_prompt(vocabulary, prompt)
    ends_lines = bool(vocabulary.decode_bytes([vocabulary.end_of_document]))
    generator = Generator(
        opened.model,
        opened.params,
        segment_length=opened.run.data.segment_length,
        end_of_document=None if ends_lines and not stop_at_end else vocabulary.end_of_document,
        sampling=sampling,
        stop_at_end=stop_at_end,
        chunk=chunk,
    )
    reading, unfinished = generator.begin(seed or 0), b""
    if load_carry is not None:
        fresh = reading
        reading, unfinished = load_reading(load_carry, jax.eval_shape(lambda: fresh.carry), carry_identity(opened))
        if seed is not None:
            reading = reading._replace(key=fresh.key)
    began = time.perf_counter()
    reading = jax.block_until_ready(generator.read(reading, tokens))
    read_seconds = time.perf_counter() - began

    text = StreamingDecoder(vocabulary, b"" if prompt else unfinished)
    moments, counts, place = [], [], reading
    for written, place in generator.write(reading, num_tokens):  # noqa: B007  # the last one is saved
        show("".join(map(text.push, written)))
        moments.append(time.perf_counter())
        counts.append(len(written))
    if save_carry is None:
        show(text.finish())
    else:
        save_reading(save_carry, place, text.unfinished, carry_identity(opened))
    rate = sum(counts[1:]) / (moments[-1] - moments[0]) if len(moments) > 1 else 0.0
    return TextSpeed(len(tokens), read_seconds, sum(counts), rate)


def carry_identity(opened: OpenedCheckpoint) -> dict[str, Any]:
    """The properties, for JSON, that a saved carry and its checkpoint must have in common."""
    digest = hashlib.sha256()
    for leaf in jax.tree.leaves(opened.params):
        # A sample of the parameters distinguishes two trainings, and is fast for large models.
        digest.update(np.asarray(leaf.reshape(-1)[:SAMPLED]).tobytes())
    others = {"step": opened.step, "vocabulary": opened.vocabulary.fingerprint, "parameters": digest.hexdigest()}
    return bound_values(opened.run.model) | others


def encode_prompt(vocabulary: Vocabulary, prompt: str) -> np.ndarray:
    """The tokens of a prompt, int32[n]. Raises a UserError if the vocabulary has no token for one of its characters."""
    tokens = vocabulary.encode(prompt)
    if UNKNOWN in vocabulary.decode(tokens):
        for character in sorted(set(prompt) - {UNKNOWN}):
            if UNKNOWN in vocabulary.decode(vocabulary.encode(character)):
                place = prompt.index(character)
                raise UserError(
                    f"the checkpoint's vocabulary has no token for {character!r} (U+{ord(character):04X}), which the "
                    f"prompt has at character {place}: leave it out"
                )
    return tokens


def read_document(opened: OpenedCheckpoint, store: str | None, name: str, num_tokens: int) -> str:
    """The text of a document's first `num_tokens` tokens, without its end or half a character.

    It is looked for in `store` (None: the one that the model was trained with), among the documents held out first.
    """
    documents = TokenStore(store or opened.run.data.store)
    documents.check_vocabulary(opened.vocabulary.fingerprint, "the checkpoint")
    splits = [documents.split(split) for split in reversed(SPLITS) if documents.totals(split).documents]
    for split in splits:
        if name in split.names:
            index = split.names.index(name)
            tokens = split.tokens(index, 0, min(num_tokens, int(split.lengths[index]) - 1))
            return "".join(map(StreamingDecoder(opened.vocabulary).push, tokens.tolist()))
    raise UserError(
        f"the token store {documents.folder} has no document {name!r}; it has {', '.join(splits[0].names[:3])}, ..."
    )
