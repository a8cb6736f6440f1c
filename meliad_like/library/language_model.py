"""A trained model with its parameters and its vocabulary."""

import functools
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any, TypedDict, TypeVar, Unpack, overload

import jax
import numpy as np
from jaxtyping import Int

from meliad_like.config import read_changes
from meliad_like.conversion.pretrained import kind_of, open_pretrained
from meliad_like.data.vocabulary import StreamingDecoder
from meliad_like.errors import UserError
from meliad_like.generation.beam_search import BeamConfig, Beams, beam_search
from meliad_like.generation.reading import Reading, Wanted, join_readings, load_reading, take_reading
from meliad_like.generation.sampling import SamplingConfig
from meliad_like.generation.streaming import Generator, check_prompts
from meliad_like.library.results import Continuation, Hypothesis, Outputs, Score, State
from meliad_like.remote import local_files
from meliad_like.run.opening import OpenedCheckpoint, open_checkpoint
from meliad_like.run.text import carry_identity, encode_prompt

Text = str | Sequence[int] | np.ndarray
"""A text, or its tokens."""
Result = TypeVar("Result")


class WritingSettings(TypedDict, total=False):
    """The settings of `LanguageModel.generate` and `stream`."""

    temperature: float
    """The divisor of the logits; 0: always the most likely token. Default: 1."""
    top_k: int
    """Sample from this number of most likely tokens; 0, the default: from all tokens."""
    top_p: float
    """Sample from the most likely tokens that together reach this probability. Default: 1."""
    stop_at_end: bool
    """Whether the end of the document ends the text, which is the default. If not, this token is never sampled, except
    in vocabularies of whole words, where it ends lines, too."""
    chunk: int
    """The number of tokens of a piece. Default: 8."""


class SearchSettings(TypedDict, total=False):
    """The settings of `LanguageModel.search`."""

    width: int
    """The number of hypotheses that are kept in each step. Default: 4."""
    num_best: int | None
    """The number of hypotheses that are returned, `width` by default. There can be fewer."""
    length_penalty: float
    """The exponent of the normalisation by length. Default: 0, no normalisation."""
    end_tokens: Collection[int] | None
    """A hypothesis ends with the first of these tokens. Default: the end of the document."""
    forbidden_tokens: Collection[int]
    """Tokens that no hypothesis contains."""


def load(path: str | Path, *, step: int | None = None, gin_params: str | Sequence[str] = ()) -> "LanguageModel":
    """Opens a trained model on the first device.

    Args:
      path: a checkpoint folder or the working folder of a training, or a folder of Hugging Face's transformers (GPT-2,
        Llama) with its tokenizer, all of them also on `gs://`; or a GGUF file.
      step: which checkpoint of a training; None: the newest that is not damaged.
      gin_params: bindings that change the model's config, such as `"SlidingWindow.kernel = 'none'"`, as with the flag
        `--gin_param`; one, or several.

    Raises:
      UserError: there is no such model, or it is damaged; or it has no steps; or the changed model needs other
        parameters.
    """
    changes = read_changes((), [gin_params] if isinstance(gin_params, str) else gin_params)
    if (kind := kind_of(path)) is not None:
        if step is not None:
            raise UserError(f"step={step}: {path} is no training, and has only one state")
        with local_files(path) as place:
            return LanguageModel(open_pretrained(kind, place, changes))
    return LanguageModel(open_checkpoint(path, step=step, changes=changes))


class LanguageModel:
    """A trained model with its parameters and its vocabulary. Texts that it reads are documents of their own.

    `model` has the pure functions, which take `params` (docs/design.md, "The contract").
    """

    def __init__(self, opened: OpenedCheckpoint):
        self.opened = opened
        self.model, self.params, self.vocabulary = opened.model, opened.params, opened.vocabulary

    def begin(self, seed: int = 0) -> State:
        """The state before the first token of a document. The random seed is for texts that continue it."""
        return self._state(self._generator().begin(seed))

    def resume(self, path: str | Path) -> State:
        """Reads a state from a file, also on `gs://`. Raises a UserError if it is damaged, or of another model."""
        fresh = self._generator().begin(0)
        reading, unfinished = load_reading(path, fresh.carry, carry_identity(self.opened))
        carry, key = jax.tree.map(
            lambda new, old: jax.device_put(new, old.sharding), *((x.carry, x.key) for x in (reading, fresh))
        )
        return self._state(reading._replace(carry=carry, key=key), unfinished=unfinished)

    @overload
    def read(self, text: Text, state: State | None = None) -> State: ...
    @overload
    def read(self, text: Sequence[Text], state: State | Sequence[State] | None = None) -> list[State]: ...
    def read(self, text, state=None):
        """The state after a text of any length, which begins a document or follows what `state` has read.

        Args:
          text: a text or its tokens, or a list of them.
          state: the state before all of the texts, or a list with one for each text.
        """
        texts, states = self._texts_and_states(text, state)
        after = self._generator().read(self._joined(states), texts)
        unfinished = [b"" if len(tokens) else state.unfinished for tokens, state in zip(texts, states)]
        return _like(_is_batch(text), [self._state(after, *one) for one in enumerate(unfinished)])

    @overload
    def score(self, text: Text, state: State | None = None) -> Score: ...
    @overload
    def score(self, text: Sequence[Text], state: State | Sequence[State] | None = None) -> list[Score]: ...
    def score(self, text, state=None):
        """The probability of each token of a text, which begins a document or follows what `state` has read.

        Args:
          text: a text or its tokens, or a list of them.
          state: the state before all of the texts, or a list with one for each text.
        """
        texts, states = self._texts_and_states(text, state)
        generator = self._generator()
        nats, unread = generator.score(self._joined(states), texts)
        finish = functools.cache(lambda: generator.read(*unread))

        def one(lane: int, tokens: Int[np.ndarray, " n"]) -> Score:
            num_bytes = len(self.vocabulary.decode_bytes(tokens.tolist()))
            return Score(tokens, -nats[lane], num_bytes, lambda: self._state(finish(), lane))

        return _like(_is_batch(text), [one(lane, tokens) for lane, tokens in enumerate(texts)])

    @overload
    def forward(self, text: Text, state: State | None = None, *, layers: Sequence[int] = ()) -> Outputs: ...
    @overload
    def forward(
        self, text: Sequence[Text], state: State | Sequence[State] | None = None, *, layers: Sequence[int] = ()
    ) -> list[Outputs]: ...
    def forward(self, text, state=None, *, layers=()):
        """The logits after each token of a text, and hidden states.

        Args:
          text: a text or its tokens, or a list of them.
          state: the state before all of the texts, or a list with one for each text.
          layers: the layers whose outputs are returned, counted from 1; 0: the embedding; -1: the last layer.
        """
        texts, states = self._texts_and_states(text, state)
        number = len(self.model.bind(self.params).layers)
        for layer in layers:
            if not -number - 1 <= layer <= number:
                raise UserError(f"layers: there is no layer {layer}; the layers are 1 to {number}, and 0 the embedding")
        wanted = Wanted(logits=True, layers=tuple(sorted({layer % (number + 1) for layer in layers})))
        # Another token after each text, which is not read: results are those of tokens that another one follows.
        longer = [np.append(tokens, 0).astype(np.int32) for tokens in texts]
        found, _ = self._generator().reader.look(self._joined(states), longer, wanted)
        outputs = []
        for tokens, results in zip(texts, found, strict=True):
            own = {name: result[len(result) - len(tokens) :] for name, result in results.items()}
            hidden = {layer: own[f"layer {layer % (number + 1)}"] for layer in layers} if own else {}
            outputs.append(Outputs(tokens, own.get("logits", np.zeros((0, self.model.vocabulary_size))), hidden))
        return _like(_is_batch(text), outputs)

    @overload
    def generate(
        self, start: State | Text, tokens: int = 200, *, seed: int | None = None, **settings: Unpack[WritingSettings]
    ) -> Continuation: ...
    @overload
    def generate(
        self,
        start: State | Text | Sequence[State | Text],
        tokens: int = 200,
        *,
        seed: int | Sequence[int] | None = None,
        **settings: Unpack[WritingSettings],
    ) -> list[Continuation]: ...
    def generate(self, start, tokens=200, *, seed=None, **settings):
        """Continues states or texts by up to this number of tokens. The other arguments are those of `stream`."""
        states, seeds, is_batch = self._starts(start, seed)
        texts, written, ended = [""] * len(states), [[] for _ in states], [False] * len(states)
        for pieces in self._write(states, seeds, tokens, **settings):
            texts = [text + piece.text for text, piece in zip(texts, pieces)]
            written = [before + piece.tokens for before, piece in zip(written, pieces)]
            states, ended = zip(*((piece.state, piece.ended) for piece in pieces))
        texts = [text + state.unfinished.decode(errors="replace") for text, state in zip(texts, states)]
        return _like(is_batch, [Continuation(*one) for one in zip(texts, written, states, ended)])

    @overload
    def stream(
        self,
        start: State | Text,
        tokens: int = 200,
        *,
        seed: int | None = None,
        **settings: Unpack[WritingSettings],
    ) -> Iterator[Continuation]: ...
    @overload
    def stream(
        self,
        start: State | Text | Sequence[State | Text],
        tokens: int = 200,
        *,
        seed: int | Sequence[int] | None = None,
        **settings: Unpack[WritingSettings],
    ) -> Iterator[list[Continuation]]: ...
    def stream(self, start, tokens=200, *, seed=None, **settings) -> Iterator[Any]:
        """Yields a continuation in pieces of `chunk` tokens, as they are written.

        In a batch of texts, the pieces are lists. Where a text ends, the piece ends for all, and later pieces of this
        text are empty.

        Args:
          start: the state or the text that is continued, or a list of them.
          tokens: the largest number of tokens.
          seed: random seed; None: the random state of `start`. A list has a seed for each `start`, or continues one
            `start` once for each seed.
          settings: those of `WritingSettings`: `temperature`, `top_k`, `top_p`, `stop_at_end`, `chunk`.
        """
        states, seeds, is_batch = self._starts(start, seed)
        for pieces in self._write(states, seeds, tokens, **settings):
            yield _like(is_batch, pieces)

    @overload
    def search(
        self, start: State | Text, tokens: int = 200, **settings: Unpack[SearchSettings]
    ) -> list[Hypothesis]: ...
    @overload
    def search(
        self, start: Sequence[State | Text], tokens: int = 200, **settings: Unpack[SearchSettings]
    ) -> list[list[Hypothesis]]: ...
    def search(self, start, tokens=200, *, num_best=None, end_tokens=None, forbidden_tokens=(), **settings):
        """The most likely continuations, the best first, by beam search (`generation/beam_search.py`).

        Args:
          start: the state or the text that is continued, or a list of them.
          tokens: the largest number of tokens.
          settings: those of `SearchSettings`: `width`, `num_best`, `length_penalty`, `end_tokens`, `forbidden_tokens`.
        """
        ends = (self.vocabulary.end_of_document,) if end_tokens is None else tuple(end_tokens)
        config = BeamConfig(end_tokens=ends, forbidden_tokens=tuple(forbidden_tokens), **settings)
        num_best = config.width if num_best is None else num_best
        if not 1 <= num_best <= config.width:
            raise UserError(f"num_best={num_best} must be at least 1 and at most width={config.width}")
        states, _, is_batch = self._starts(start, None)
        reading = self._joined(states)
        check_prompts(reading)
        beams, after = beam_search(self.model, self.params, reading, tokens, config)
        return _like(
            is_batch, [self._hypotheses(text, state, beams, after, num_best) for text, state in enumerate(states)]
        )

    def _hypotheses(self, text: int, start: State, beams: Beams, after: Reading, num_best: int) -> list[Hypothesis]:
        """The best hypotheses of one text of a search."""
        found, width = [], beams.length.shape[1]
        for place in range(num_best):
            log_probability = float(beams.log_probability[text, place])
            if log_probability == -np.inf:
                break
            tokens = beams.tokens[text, place, : beams.length[text, place]].tolist()
            decoder = StreamingDecoder(self.vocabulary, start.unfinished)
            written = "".join(map(decoder.push, tokens))
            state = self._state(after, text * width + place, decoder.unfinished)
            ended, score = bool(beams.ended[text, place]), float(beams.score[text, place])
            found.append(Hypothesis(written + decoder.finish(), tokens, state, ended, log_probability, score))
        return found

    def _write(
        self,
        states: list[State],
        seeds: Sequence[int] | None,
        num_tokens: int,
        *,
        stop_at_end: bool = True,
        chunk: int = 8,
        **sampling: Any,
    ) -> Iterator[list[Continuation]]:
        """Yields a piece of each text."""
        generator = self._generator(SamplingConfig(**sampling), stop_at_end, chunk)
        decoders = [StreamingDecoder(self.vocabulary, state.unfinished) for state in states]
        for written, after in generator.write(self._joined(states, seeds), num_tokens):
            texts = ["".join(map(decoder.push, tokens)) for decoder, tokens in zip(decoders, written)]
            for lane, tokens in enumerate(written):
                if tokens:
                    states[lane] = self._state(after, lane, decoders[lane].unfinished)
                    if after.ended[lane] and len(states) > 1:
                        # The other texts are continued, in the same memory.
                        states[lane] = states[lane].copy()
            yield [Continuation(*one) for one in zip(texts, written, states, after.ended.tolist())]

    def _starts(
        self, start: "State | Text | Sequence[State | Text]", seed: int | Sequence[int] | None
    ) -> tuple[list[State], list[int] | None, bool]:
        """The states that are continued, a seed for each, if any are given, and whether the result is a list."""
        items = list(start) if _is_batch(start) else [start]
        texts: Any = [item for item in items if not isinstance(item, State)]
        read = self.read(texts) if texts else []
        states = [item if isinstance(item, State) else read.pop(0) for item in items]
        if seed is None or isinstance(seed, int | np.integer):
            return states, None if seed is None else [seed] * len(states), _is_batch(start)
        seeds = list(seed)
        states = states * len(seeds) if len(states) == 1 else states
        if len(seeds) != len(states):
            raise UserError(f"{len(seeds)} seeds for {len(states)} texts: give one for each text")
        return states, seeds, True

    def _texts_and_states(
        self, text: "Text | Sequence[Text]", state: State | Sequence[State] | None
    ) -> tuple[list[Int[np.ndarray, " n"]], list[State]]:
        """The tokens of each text, and the state before it."""
        texts = [self._tokens(one) for one in (text if _is_batch(text) else [text])]
        if state is None or isinstance(state, State):
            return texts, [state or self.begin()] * len(texts)
        if len(state) != len(texts):
            raise UserError(f"{len(state)} states for {len(texts)} texts: give one for each text, or one for all")
        return texts, list(state)

    def _tokens(self, text: Text) -> Int[np.ndarray, " n"]:
        return encode_prompt(self.vocabulary, text) if isinstance(text, str) else np.asarray(text, np.int32)

    def _state(self, batch: Reading, lane: int = 0, unfinished: bytes = b"") -> State:
        return State(self.opened, batch, lane, unfinished)

    def _joined(self, states: Sequence[State], seeds: Sequence[int] | None = None) -> Reading:
        """A new batch of these states, with random states from the seeds if there are any."""
        for state in states:
            state.check_model(self.opened)
        batch = states[0].batch
        if all(state.batch is batch for state in states):
            reading = take_reading(batch, [state.lane for state in states])
        else:
            reading = join_readings([state.reading for state in states])
        if seeds is None:
            return reading
        key = jax.random.key_data(jax.vmap(jax.random.key)(np.asarray(seeds, np.uint32)))
        return reading._replace(key=jax.device_put(key, reading.key.sharding))

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


def _is_batch(text: Any) -> bool:
    """Whether this is a list of texts or states, and not a single one."""
    if isinstance(text, str | State):
        return False
    if hasattr(text, "ndim"):
        return text.ndim > 1
    return len(text) > 0 and not isinstance(text[0], int | np.integer)


def _like(is_batch: bool, results: list[Result]) -> Any:
    """The list of results for a batch, and otherwise the only result."""
    return results if is_batch else results[0]
