"""A trained model in Python: score a text, read it, and continue from what was read any number of times.

import meliad_like

lm = meliad_like.load("runs/quickstart")
lm.score("import os").bits_per_byte
book = lm.read(open("book.txt").read())
print(lm.generate(book, tokens=200, temperature=0.7))
book.save("book.npz")
book = lm.resume("book.npz")
"""

import dataclasses
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int

from meliad_like.config import read_changes
from meliad_like.conversion.pretrained import kind_of, open_pretrained
from meliad_like.data.vocabulary import StreamingDecoder
from meliad_like.generation.streaming import Generator, Reading, SamplingConfig, load_reading, save_reading
from meliad_like.run.opening import OpenedCheckpoint, open_checkpoint
from meliad_like.run.text import carry_identity, encode_prompt

Text = str | Sequence[int] | np.ndarray
"""A text, or its tokens."""


def load(path: str | Path, *, step: int | None = None) -> "LanguageModel":
    """Opens a trained model on the first device.

    Args:
      path: a checkpoint folder or the working folder of a training, also on `gs://`; or a folder of Hugging Face's
        transformers (GPT-2, Llama) with its tokenizer; or a GGUF file.
      step: which checkpoint of a training; None: the newest that is not damaged.

    Raises:
      UserError: there is no such model, or it is damaged.
    """
    if (kind := kind_of(path)) is not None:
        return LanguageModel(open_pretrained(kind, path, read_changes((), ())))
    return LanguageModel(open_checkpoint(path, step=step))


@dataclasses.dataclass(frozen=True, eq=False)
class State:
    """What a model remembers of a text. Its size does not depend on the length of the text.

    No method changes a state, so it can be read on and continued any number of times.
    """

    model: "LanguageModel" = dataclasses.field(repr=False)
    reading: Reading = dataclasses.field(repr=False)
    unfinished: bytes = b""
    """The bytes of a character that the text has not completed."""

    @property
    def num_tokens(self) -> int:
        """The number of tokens of the text."""
        return self.reading.num_read + (self.reading.token is not None)

    def save(self, path: str | Path) -> None:
        """Writes the state to a file for `LanguageModel.resume`; if that fails (a UserError), an earlier file stays."""
        save_reading(path, self.reading, self.unfinished, carry_identity(self.model.opened))


class Score(NamedTuple):
    """The probability of a text, token by token."""

    tokens: Int[np.ndarray, " n"]
    log_probabilities: Float[np.ndarray, " n"]
    """The natural logarithm of each token's probability after all tokens before it. The first token of a document,
    which nothing precedes, has none: NaN."""
    num_bytes: int
    """The number of bytes of the text in UTF-8."""
    state: State
    """The state after the text."""

    @property
    def bits_per_byte(self) -> float:
        """The bits of all tokens that have a probability, over all bytes, as the evaluation counts them."""
        return -float(np.nansum(self.log_probabilities, dtype=np.float64)) / math.log(2) / self.num_bytes


@dataclasses.dataclass(frozen=True, eq=False)
class Continuation:
    """What a model has written; `str` of it is the text."""

    text: str
    tokens: list[int]
    state: State = dataclasses.field(repr=False)
    """The state after the text. The model that `stream`s may use its memory again for the next piece."""

    def __str__(self) -> str:
        return self.text


class LanguageModel:
    """A trained model with its parameters and its vocabulary. Texts that it reads are documents of their own."""

    def __init__(self, opened: OpenedCheckpoint):
        self.opened = opened
        self.model, self.params, self.vocabulary = opened.model, opened.params, opened.vocabulary

    def begin(self, seed: int = 0) -> State:
        """The state before the first token of a document. The random seed is for texts that continue it."""
        return State(self, self._generator().begin(seed))

    def resume(self, path: str | Path) -> State:
        """Reads a state from a file. Raises a UserError if it is damaged, or of another model."""
        fresh = self._generator().begin(0)
        reading, unfinished = load_reading(path, fresh.carry, carry_identity(self.opened))
        carry, key = jax.tree.map(
            lambda new, old: jax.device_put(new, old.sharding), *((x.carry, x.key) for x in (reading, fresh))
        )
        return State(self, reading._replace(carry=carry, key=key), unfinished)

    def read(self, text: Text, state: State | None = None) -> State:
        """The state after a text of any length, which begins a document or follows what `state` has read."""
        tokens, state = self._tokens(text), state or self.begin()
        if not len(tokens):
            return state
        return State(self, self._generator().read(_copy(state.reading), tokens))

    def score(self, text: Text, state: State | None = None) -> Score:
        """The probability of each token of a text, which begins a document or follows what `state` has read."""
        tokens, state = self._tokens(text), state or self.begin()
        nats, reading = self._generator().score(_copy(state.reading), tokens)
        return Score(tokens, -nats, len(self.vocabulary.decode_bytes(tokens.tolist())), State(self, reading))

    def generate(self, start: "State | Text", tokens: int = 200, **settings: Any) -> Continuation:
        """Continues a state or a text by up to this number of tokens. `settings` are those of `stream`."""
        written: list[int] = []
        text, state = "", start if isinstance(start, State) else self.read(start)
        for piece in self.stream(state, tokens, **settings):
            text, state = text + piece.text, piece.state
            written += piece.tokens
        return Continuation(text + state.unfinished.decode(errors="replace"), written, state)

    def stream(
        self,
        start: "State | Text",
        tokens: int = 200,
        *,
        seed: int | None = None,
        stop_at_end: bool = True,
        chunk: int = 8,
        **sampling: Any,
    ) -> Iterator[Continuation]:
        """Yields a continuation in pieces of `chunk` tokens, as they are written.

        Args:
          start: the state or the text that is continued.
          tokens: the largest number of tokens.
          seed: random seed; None: the random state of `start`.
          stop_at_end: whether the end of the document ends the text. If not, this token is never sampled, except in
            vocabularies of whole words, where it ends lines, too.
          sampling: the fields of `SamplingConfig`: `temperature`, `top_k`, `top_p`.
        """
        state = start if isinstance(start, State) else self.read(start)
        reading, decoder = _copy(state.reading), StreamingDecoder(self.vocabulary, state.unfinished)
        if seed is not None:
            key = jax.random.key_data(jax.random.key(seed))
            reading = reading._replace(key=jax.device_put(key, reading.key.sharding))
        generator = self._generator(SamplingConfig(**sampling), stop_at_end, chunk)
        for written, after in generator.write(reading, tokens):
            text = "".join(map(decoder.push, written))
            yield Continuation(text, written, State(self, after, decoder.unfinished))

    def _tokens(self, text: Text) -> Int[np.ndarray, " n"]:
        return encode_prompt(self.vocabulary, text) if isinstance(text, str) else np.asarray(text, np.int32)

    def _generator(self, sampling: SamplingConfig | None = None, stop_at_end: bool = True, chunk: int = 8) -> Generator:
        end = self.vocabulary.end_of_document
        ends_lines = bool(self.vocabulary.decode_bytes([end]))
        return Generator(
            self.model,
            self.params,
            segment_length=self.opened.run.data.segment_length,
            end_of_document=None if ends_lines and not stop_at_end else end,
            sampling=sampling or SamplingConfig(),
            stop_at_end=stop_at_end,
            chunk=chunk,
        )


def _copy(reading: Reading) -> Reading:
    """A copy, whose buffers the generator may use for its results."""
    return reading._replace(carry=jax.tree.map(jnp.copy, reading.carry))
