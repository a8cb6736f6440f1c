"""A trained model with its parameters and its vocabulary."""

import dataclasses
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any, TypedDict, Unpack, get_args

import jax
import numpy as np

from meliad_like.caches import keep_compiled_programs
from meliad_like.config import read_changes
from meliad_like.errors import UserError
from meliad_like.generation.beam_search import BeamConfig, Beams, beam_search
from meliad_like.generation.reading import GenerationState, RequestedResults, join_states, load_state, take_states
from meliad_like.generation.sampling import SamplingConfig
from meliad_like.generation.streaming import Generator, check_prompts
from meliad_like.layers.basic import check_tokens
from meliad_like.library.results import Continuation, Hypothesis, Outputs, Score, State
from meliad_like.models.config import ActivationDtype
from meliad_like.run.opening import OpenedCheckpoint, open_model
from meliad_like.run.text import EncodedText, carry_identity, check_text, encode_text
from meliad_like.vocabularies.base import utf8_decoder

Text = str | Sequence[int] | np.ndarray
"""A text, or its tokens."""


class WritingSettings(TypedDict, total=False):
    """The settings of `LanguageModel.generate` and `stream`: those of `SamplingConfig`, and two of `Generator`."""

    temperature: float
    top_k: int
    top_p: float
    stop_at_end: bool
    chunk: int | None


class SearchSettings(TypedDict, total=False):
    """The settings of `LanguageModel.search`: those of `BeamConfig`."""

    width: int
    length_penalty: float
    end_tokens: Collection[int]
    """The tokens that end a hypothesis; by default the end of the document."""
    forbidden_tokens: Collection[int]


def load(
    path: str | Path,
    *,
    step: int | None = None,
    gin_params: str | Sequence[str] = (),
    dtype: ActivationDtype = "float32",
) -> "LanguageModel":
    """Opens a trained model on the first device.

    Args:
      path: a checkpoint folder or the working folder of a training, or a folder of Hugging Face's transformers
        (docs/pretrained.md) with its tokenizer, all of them also on `gs://`; or a model of huggingface.co,
        `hf://ORG/NAME` or `hf://ORG/NAME@REVISION`, which the Hub's library keeps in its cache.
      step: which checkpoint of a training; None: the newest that is not damaged.
      gin_params: bindings that change the model's config, such as `"DecoderConfig.attention_kernel = 'none'"`, as with
        the flag `--gin_param`; one, or several.
      dtype: the dtype in which matrices are kept. `bfloat16` takes half of the memory, and changes nothing for a model
        that was published in it.

    Raises:
      UserError: there is no such model, or it is damaged; or it has no steps; or the changed model needs other
        parameters.
    """
    keep_compiled_programs()
    changes = read_changes((), [gin_params] if isinstance(gin_params, str) else gin_params)
    if dtype not in get_args(ActivationDtype):
        raise UserError(f"dtype={dtype!r} is not one of {', '.join(get_args(ActivationDtype))}")
    return LanguageModel(open_model(path, step=step, changes=changes, dtype=dtype))


class LanguageModel:
    """A trained model with its parameters and its vocabulary. Texts that it reads are documents of their own.

    `model` has the pure functions, which take `params` (docs/design.md, "The contract").
    """

    def __init__(self, opened: OpenedCheckpoint):
        self.opened = opened
        self.model, self.params, self.vocabulary = opened.model, opened.params, opened.vocabulary

    def __repr__(self) -> str:
        numbers = f"{self.model.num_parameters:,} parameters, {self.state_size:,} bytes of state for each text"
        return f"<{type(self).__name__}: {numbers}; a token sees {self.model.sight}>"

    @property
    def state_size(self) -> int:
        """The number of bytes that a `State` keeps of a text, at any place of a document."""
        carry = self.model.abstract_carry(1, decoding=True)
        return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(carry))

    def begin(self, seed: int = 0) -> State:
        """The state before the first token of a document. The random seed is for texts that continue it."""
        return State(self.opened, self._generator().begin(seed))

    def resume(self, path: str | Path) -> State:
        """Reads a state from a file, also on `gs://`. Raises a UserError if it is damaged, or of another model."""
        fresh = self._generator().begin(0)
        batch, unfinished = load_state(path, fresh.carry, carry_identity(self.opened))
        carry, key = jax.tree.map(
            lambda new, old: jax.device_put(new, old.sharding), *((x.carry, x.key) for x in (batch, fresh))
        )
        return State(self.opened, batch._replace(carry=carry, key=key), unfinished=unfinished)

    def read(self, text: Text, state: State | None = None) -> State:
        """The state after a text of any length, which begins a document or follows what `state` has read."""
        return self.read_batch([text], state)[0]

    def read_batch(self, texts: Sequence[Text], states: State | Sequence[State] | None = None) -> list[State]:
        """`read` of several texts; `states`: the state before all of them, or one for each."""
        encoded, start = self._encoded(texts, states)
        batch = self._generator().read(start, [text.tokens for text in encoded])
        return [State(self.opened, batch, lane, text.unfinished) for lane, text in enumerate(encoded)]

    def score(self, text: Text, state: State | None = None) -> Score:
        """The probability of each token of a text, which begins a document or follows what `state` has read."""
        return self.score_batch([text], state)[0]

    def score_batch(self, texts: Sequence[Text], states: State | Sequence[State] | None = None) -> list[Score]:
        """`score` of several texts; `states`: the state before all of them, or one for each."""
        encoded, start = self._encoded(texts, states)
        scores, batch = self._generator().score(start, [text.tokens for text in encoded])
        return [
            Score(text.tokens, -nats, correct, text.num_bytes, State(self.opened, batch, lane, text.unfinished))
            for lane, (text, (nats, correct)) in enumerate(zip(encoded, scores))
        ]

    def forward(self, text: Text, state: State | None = None, *, layers: Sequence[int] = ()) -> Outputs:
        """The logits after each token of a text that begins a document or follows `state`, and hidden states.

        `layers`: the layers whose outputs are returned, counted from 1; 0: the embedding; -1: the last layer.
        """
        return self.forward_batch([text], state, layers=layers)[0]

    def forward_batch(
        self, texts: Sequence[Text], states: State | Sequence[State] | None = None, *, layers: Sequence[int] = ()
    ) -> list[Outputs]:
        """`forward` of several texts; `states`: the state before all of them, or one for each."""
        number = len(self.model.bind(self.params).layers)
        for layer in layers:
            if not -number - 1 <= layer <= number:
                raise UserError(f"layers: there is no layer {layer}; the layers are 1 to {number}, and 0 the embedding")
        requested = RequestedResults(logits=True, layers=tuple(sorted({layer % (number + 1) for layer in layers})))
        encoded, batch = self._encoded(texts, states)
        tokens = [text.tokens for text in encoded]
        # Another token after each text, which is not read: only tokens that another one follows have results.
        longer = [np.append(one, 0).astype(np.int32) for one in tokens]
        results, _ = self._generator().look(batch, longer, requested)
        outputs = []
        for one, arrays in zip(tokens, results, strict=True):
            # Without the results of the token before the text.
            arrays = {name: array[len(array) - len(one) :] for name, array in arrays.items()}
            hidden = {layer: arrays[f"layer {layer % (number + 1)}"] for layer in layers} if arrays else {}
            outputs.append(Outputs(one, arrays.get("logits", np.zeros((0, self.model.vocabulary_size))), hidden))
        return outputs

    def generate(
        self, start: State | Text, tokens: int = 200, *, seed: int | None = None, **settings: Unpack[WritingSettings]
    ) -> Continuation:
        """Continues a state or a text by at most this number of tokens.

        `seed`: random seed; None: the random state of `start`.
        """
        return self.generate_batch([start], tokens, seeds=None if seed is None else [seed], **settings)[0]

    def generate_batch(
        self,
        starts: Sequence[State | Text],
        tokens: int = 200,
        *,
        seeds: Sequence[int] | None = None,
        **settings: Unpack[WritingSettings],
    ) -> list[Continuation]:
        """`generate` from several states or texts, with a seed for each."""
        states = self._starts(starts)
        whole = [Continuation("", [], state, False) for state in states]
        for pieces in self.stream_batch(states, tokens, seeds=seeds, **settings):
            whole = [
                Continuation(one.text + new.text, one.tokens + new.tokens, new.state, new.ended)
                for one, new in zip(whole, pieces)
            ]
        rests = [one.state.unfinished.decode(errors="replace") for one in whole]
        return [dataclasses.replace(one, text=one.text + rest) for one, rest in zip(whole, rests)]

    def stream(
        self, start: State | Text, tokens: int = 200, *, seed: int | None = None, **settings: Unpack[WritingSettings]
    ) -> Iterator[Continuation]:
        """Yields the continuation of `generate` in pieces as they are written: of `chunk` tokens, or of 8 to 64."""
        return (
            piece for [piece] in self.stream_batch([start], tokens, seeds=None if seed is None else [seed], **settings)
        )

    def stream_batch(
        self,
        starts: Sequence[State | Text],
        tokens: int = 200,
        *,
        seeds: Sequence[int] | None = None,
        **settings: Unpack[WritingSettings],
    ) -> Iterator[list[Continuation]]:
        """`stream` from several states or texts, with a seed for each: yields lists of a piece for each.

        Where a text ends, the piece ends for all, and later pieces of this text are empty.
        """
        states, is_alone = self._starts(starts), len(starts) == 1
        sampling: dict[str, Any] = dict(settings)
        stop_at_end, chunk = sampling.pop("stop_at_end", True), sampling.pop("chunk", None)
        generator = self._generator(SamplingConfig(**sampling), stop_at_end, chunk)
        decoders = [utf8_decoder(state.unfinished) for state in states]
        for written, batch in generator.write(self._joined(states, seeds), tokens):
            texts = [decoder.decode(self.vocabulary.decode_bytes(new)) for decoder, new in zip(decoders, written)]
            for lane, new in enumerate(written):
                if new:
                    states[lane] = State(self.opened, batch, lane, decoders[lane].getstate()[0])
                    if batch.ended[lane] and not is_alone:
                        # The other texts are continued, in the same memory.
                        states[lane] = states[lane].copy()
            yield [Continuation(*piece) for piece in zip(texts, written, states, batch.ended.tolist())]

    def search(self, start: State | Text, tokens: int = 200, **settings: Unpack[SearchSettings]) -> list[Hypothesis]:
        """The most likely continuations of a state or a text by at most this number of tokens, the best first.

        They are found by beam search (`generation/beam_search.py`).
        """
        return self.search_batch([start], tokens, **settings)[0]

    def search_batch(
        self, starts: Sequence[State | Text], tokens: int = 200, **settings: Unpack[SearchSettings]
    ) -> list[list[Hypothesis]]:
        """`search` from several states or texts."""
        options: dict[str, Any] = {"end_tokens": self.vocabulary.end_tokens, **settings}
        states = self._starts(starts)
        batch = self._joined(states)
        check_prompts(batch)
        beams, batch = beam_search(self.model, self.params, self.vocabulary, batch, tokens, BeamConfig(**options))
        return [self._hypotheses(text, state, beams, batch) for text, state in enumerate(states)]

    def _hypotheses(self, text: int, start: State, beams: Beams, batch: GenerationState) -> list[Hypothesis]:
        """The hypotheses of one text of a search, the best first."""
        hypotheses, width = [], beams.length.shape[1]
        for place in range(width):
            log_probability = float(beams.log_probability[text, place])
            if log_probability == -np.inf:
                break
            tokens = beams.tokens[text, place, : beams.length[text, place]].tolist()
            decoder = utf8_decoder(start.unfinished)
            complete = decoder.decode(self.vocabulary.decode_bytes(tokens))
            state = State(self.opened, batch, text * width + place, decoder.getstate()[0])
            ended, score = bool(beams.ended[text, place]), float(beams.score[text, place])
            whole = complete + decoder.decode(b"", final=True)
            hypotheses.append(Hypothesis(whole, tokens, state, ended, log_probability, score))
        return hypotheses

    def _starts(self, starts: Sequence[State | Text]) -> list[State]:
        """The states that are continued."""
        new_states = iter(self.read_batch(texts) if (texts := [x for x in starts if not isinstance(x, State)]) else ())
        return [start if isinstance(start, State) else next(new_states) for start in starts]

    def _encoded(
        self, texts: Sequence[Text], states: State | Sequence[State] | None
    ) -> tuple[list[EncodedText], GenerationState]:
        """The texts, and a new batch of the states before each of them."""
        if states is None or isinstance(states, State):
            states = [states or self.begin()] * len(texts)
        if len(states) != len(texts):
            raise UserError(f"{len(states)} states for {len(texts)} texts: give one for each text, or one for all")
        for text in texts:
            check_text(text)
            check_tokens(np.asarray([] if isinstance(text, str) else text, int), self.vocabulary.size)
        encoded = [
            encode_text(self.vocabulary, text, state.num_tokens > 0, state.unfinished)
            for text, state in zip(texts, states)
        ]
        return encoded, self._joined(states)

    def _joined(self, states: Sequence[State], seeds: Sequence[int] | None = None) -> GenerationState:
        """A new batch of these states, with random states from the seeds if there are any."""
        for state in states:
            state.check_model(self.opened)
        batch = states[0].batch
        if all(state.batch is batch for state in states):
            batch = take_states(batch, [state.lane for state in states])
        else:
            batch = join_states([state.batch_of_one for state in states])
        if seeds is None:
            return batch
        if len(seeds) != len(states):
            raise UserError(f"{len(seeds)} seeds for {len(states)} texts: give one for each text")
        key = jax.random.key_data(jax.vmap(jax.random.key)(np.asarray(seeds, np.uint32)))
        return batch._replace(key=jax.device_put(key, batch.key.sharding))

    def _generator(
        self, sampling: SamplingConfig | None = None, stop_at_end: bool = True, chunk: int | None = None
    ) -> Generator:
        return Generator(
            self.model,
            self.params,
            segment_length=self.opened.run.data.segment_length,
            vocabulary=self.vocabulary,
            sampling=sampling or SamplingConfig(),
            stop_at_end=stop_at_end,
            chunk=chunk,
        )
