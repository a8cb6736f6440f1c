"""The model class of the lm-evaluation-harness (`lm_eval`), which finds it by the name `meliad_like` after the import.

import lm_eval, meliad_like.harness.model
lm_eval.simple_evaluate(model="meliad_like", model_args="checkpoint=runs/quickstart", tasks=["task.yaml"])

In the harness's own adapters a prompt that is longer than the context is cut, and long documents are cut into windows.
Here nothing is cut: the model reads them whole, and remembers of them what it can.
"""

import functools
import itertools
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Array, Bool, Int
from lm_eval.api.instance import Instance  # type: ignore[import-not-found]  # an extra
from lm_eval.api.model import TemplateLM  # type: ignore[import-not-found]  # an extra
from lm_eval.api.registry import register_model  # type: ignore[import-not-found]  # an extra
from lm_eval.models.utils import normalize_gen_kwargs, postprocess_generated_text  # type: ignore[import-not-found]  # an extra

from meliad_like.data.split import Documents
from meliad_like.errors import UserError
from meliad_like.evaluation.perplexity import Evaluator
from meliad_like.generation.reading import LOSS_SLICE, NO_TOKEN
from meliad_like.layers.lanes import join_lanes
from meliad_like.layers.losses import TokenLosses, token_losses
from meliad_like.library import LanguageModel, State, load
from meliad_like.mesh import MeshConfig, make_mesh
from meliad_like.models.model import Model
from meliad_like.run.text import encode_prompt

SAMPLING = ("temperature", "top_k", "top_p")
MAX_TOKENS = 256
"""The largest number of tokens that are written where a task names none, as in the harness's own adapters."""
SHORTEST = 16
"""The smallest number of tokens of a sequence for which a program is compiled."""


class Question(NamedTuple):
    """Tokens of which the last are scored."""

    index: int
    """The place in the list of requests."""
    tokens: tuple[int, ...]
    num_scored: int

    def num_before(self, w: int) -> int:
        """The number of tokens in whole blocks that are read before those whose predictions are scored."""
        return (len(self.tokens) - self.num_scored - 1) // w * w


class Row(NamedTuple):
    """A question with the state after its first tokens."""

    question: Question
    state: State | None
    """The state after `num_read` tokens, a whole number of blocks; None before the first token."""
    num_read: int

    @property
    def num_inputs(self) -> int:
        return len(self.question.tokens) - 1 - self.num_read


class Shape(NamedTuple):
    """What rows must have in common to be read in one batch."""

    model: Model
    length: int
    """The number of tokens with padding, a whole number of blocks."""
    begins: bool
    """Whether they begin documents."""


@register_model("meliad_like")
class HarnessModel(TemplateLM):
    """A trained model of any family, on the first device."""

    def __init__(
        self,
        checkpoint: str | Path | LanguageModel,
        step: int | None = None,
        batch_size: int = 8,
        first_tokens: bool = False,
        gin_params: str | Sequence[str] = (),
    ):
        """
        Args:
          checkpoint: whatever `meliad_like.load` opens, or a model that it has returned.
          step: which checkpoint of a training; None: the newest.
          batch_size: the number of texts that are read in parallel.
          first_tokens: whether the end-of-document token is read before every document, so that the document's first
            token has a probability too. The harness's own adapters do this. The models trained here have never read
            that token, and their evaluation doesn't count first tokens; GPT-2 and others were trained with it.
          gin_params: bindings that change the checkpoint's config, as of `meliad_like.load`.

        Raises:
          UserError: there is no such model.
        """
        super().__init__()
        given = isinstance(checkpoint, LanguageModel)
        self.lm = checkpoint if given else load(checkpoint, step=step, gin_params=gin_params)
        self._name = str(checkpoint) if isinstance(checkpoint, str | Path) else ""
        self._batch_size, self._first_tokens = int(batch_size), first_tokens

    def get_model_info(self) -> dict[str, Any]:
        """What the harness writes into its results."""
        opened = self.lm.opened
        return {
            "checkpoint": self._name,
            "checkpoint_step": opened.step,
            "model_num_parameters": opened.model.num_parameters,
            "vocabulary": opened.vocabulary.fingerprint,
            "first_tokens": self._first_tokens,
        }

    @property
    def eot_token_id(self) -> int:
        return self.lm.vocabulary.end_of_document

    @property
    def prefix_token_id(self) -> int:
        """The token read in place of an empty context. Raises a UserError if there is none."""
        if not self._first_tokens:
            raise UserError(
                "a task has an empty context, so that the first token of its text has no probability: choose "
                "--first_tokens to read an end of document before it"
            )
        return self.eot_token_id

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        return encode_prompt(self.lm.vocabulary, string).tolist()

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[tuple[str, str], list[int], list[int]]], **_: Any
    ) -> list[tuple[float, bool]]:
        """The log-probability of each continuation in nats, and whether each of its tokens was the most likely one."""
        questions = [
            Question(i, (*context, *continuation), len(continuation))
            for i, (_, context, continuation) in enumerate(requests)
        ]
        found = [(0.0, True)] * len(questions)
        batches: dict[Shape, list[Row]] = {}

        def score(shape: Shape) -> None:
            rows = batches.pop(shape)
            for row, result in zip(rows, self._score(shape, rows), strict=True):
                found[row.question.index] = result

        for row in self._rows(sorted(questions, key=lambda question: question.tokens), None, 0):
            shape = self._shape(row.num_inputs, row.state is None)
            batches.setdefault(shape, []).append(row)
            if len(batches[shape]) == self._batch_size:
                score(shape)
        for shape in list(batches):
            score(shape)
        for request, result in zip(requests, found):
            self.cache_hook.add_partial("loglikelihood", request[0], result)
        return found

    def _rows(self, questions: list[Question], state: State | None, num_read: int) -> Iterator[Row]:
        """Each of the questions, which are sorted and share their first `num_read` tokens, with its state.

        Whole blocks that several questions share are read once.
        """
        w, segment = self.lm.model.config.window_length, self.lm.opened.run.data.segment_length
        yield from (Row(question, state, num_read) for question in questions if question.num_before(w) <= num_read)
        longer = (question for question in questions if question.num_before(w) > num_read)
        for _, group in itertools.groupby(longer, lambda question: question.tokens[num_read : num_read + w]):
            first, *others = members = list(group)
            stop = min(question.num_before(w) for question in members)
            if others:
                stop = min(stop, _common(first.tokens, others[-1].tokens) // w * w)
                yield from self._rows(members, self._read(first, state, num_read, stop), stop)
            elif len(first.tokens) - num_read > segment:
                yield Row(first, self._read(first, state, num_read, stop), stop)
            else:
                yield Row(first, state, num_read)

    def _read(self, question: Question, state: State | None, start: int, stop: int) -> State:
        """The state after the tokens up to `stop`, whole blocks, of which `state` has read those up to `start`."""
        reading = self.lm.read(question.tokens[start : stop + 1], state).reading
        # The last of these tokens, which the model has not read yet, is that of one question alone.
        return State(self.lm.opened, reading._replace(token=np.array([NO_TOKEN], np.int32)))

    def _shape(self, num_inputs: int, begins: bool) -> Shape:
        """The shape of a batch of rows with `num_inputs` tokens each; `begins`: whether they begin documents."""
        model = self.lm.model
        if begins and num_inputs <= model.config.window_length:
            # A pretrained model may have much larger windows than a task has texts.
            length = min(_power_of_two(max(num_inputs, SHORTEST)), model.config.window_length)
            model = model.for_separate_sequences(length)
        w = model.config.window_length
        return Shape(model, _power_of_two(-(-num_inputs // w)) * w, begins)

    def _score(self, shape: Shape, rows: list[Row]) -> Iterator[tuple[float, bool]]:
        """The log-probability of the scored tokens of each row, and whether they were the most likely ones."""
        model, length, begins = shape
        tokens = np.zeros((self._batch_size, length + 1), np.int32)
        start = np.zeros((self._batch_size, length // model.config.window_length), bool)
        start[:, 0] = begins
        for i, row in enumerate(rows):
            tokens[i, : row.num_inputs + 1] = row.question.tokens[row.num_read :]
        # Unused lanes repeat the last one, so that a program is compiled for one number of lanes.
        states = [row.state for row in (rows + rows[-1:] * self._batch_size)[: self._batch_size]]
        carry = None if begins else join_lanes([state.reading.carry for state in states if state is not None])
        losses = _losses(model, self.lm.params, carry, tokens[:, :-1], tokens[:, 1:], start)
        nats, correct = np.asarray(losses.nats, np.float64), np.asarray(losses.correct)
        for i, row in enumerate(rows):
            scored = np.s_[i, row.num_inputs - row.question.num_scored : row.num_inputs]
            yield -float(nats[scored].sum()), bool(correct[scored].all())

    def loglikelihood_rolling(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[float]:
        """The log-probability of each text in nats, read from its beginning to its end with the model's memory."""
        before = [self.eot_token_id] if self._first_tokens else []
        texts = [np.asarray(before + self.tok_encode(request.args[0]), np.int32) for request in requests]
        lengths = np.array([len(text) for text in texts])
        if lengths.max(initial=0) > 1:
            found = [-float(nats.sum(dtype=np.float64)) for nats in self._evaluator(texts).token_losses(self.lm.params)]
        else:
            found = [0.0] * len(texts)
        for request, result in zip(requests, found):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, result)
        return found

    def _evaluator(self, texts: list[np.ndarray]) -> Evaluator:
        lengths = np.array([len(text) for text in texts])
        unknown = np.zeros_like(lengths)  # Bytes and words, which the harness counts itself.
        documents = Documents(
            [str(i) for i in range(len(texts))],
            lengths,
            unknown,
            unknown,
            read=lambda document, start, stop: texts[document][start:stop],
            indices=np.arange(len(texts)),
        )
        model, length, _ = self._shape(int(lengths.max()) - 1, True)
        return Evaluator(
            model,
            documents,
            make_mesh(MeshConfig(), jax.devices()[:1]),
            name="harness",
            segment_length=min(length, self.lm.opened.run.data.segment_length),
            max_lanes=self._batch_size,
        )

    def generate_until(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[str]:
        """What the model writes after each context, up to the first of the task's `until`, which is left out."""
        found = [""] * len(requests)
        # Texts are written side by side if their settings are the same.
        same = lambda i: json.dumps(requests[i].args[1], sort_keys=True)  # noqa: E731
        for _, group in itertools.groupby(sorted(range(len(requests)), key=same), same):
            members = list(group)
            for first in range(0, len(members), self._batch_size):
                batch = members[first : first + self._batch_size]
                settings = normalize_gen_kwargs(requests[batch[0]].args[1], MAX_TOKENS)
                texts = self._write([requests[i].args[0] for i in batch], batch, **settings)
                for i, text in zip(batch, texts, strict=True):
                    found[i] = text
        for request, text in zip(requests, found):
            self.cache_hook.add_partial("generate_until", request.args, text)
        return found

    def _write(
        self,
        contexts: list[str],
        seeds: list[int],
        *,
        until: list[str],
        max_gen_toks: int,
        do_sample: bool,
        **settings: Any,
    ) -> list[str]:
        if unknown := settings.keys() - set(SAMPLING):
            raise UserError(f"generation_kwargs.{min(unknown)} is not one of do_sample, {', '.join(SAMPLING)}")
        states = self.lm.read([self.tok_encode(context) or [self.prefix_token_id] for context in contexts])
        texts, unfinished = [""] * len(contexts), [b""] * len(contexts)
        stops = [stop for stop in until if stop]
        sampling: dict[str, Any] = settings if do_sample else {"temperature": 0.0}
        for pieces in self.lm.stream(states, max_gen_toks, seed=seeds, **sampling):
            texts = [text + piece.text for text, piece in zip(texts, pieces, strict=True)]
            unfinished = [piece.state.unfinished for piece in pieces]
            if all(any(stop in text for stop in stops) for text in texts):
                break
        whole = (text + rest.decode(errors="replace") for text, rest in zip(texts, unfinished))
        return [postprocess_generated_text(text, stops, None) for text in whole]


def _common(a: Sequence[int], b: Sequence[int]) -> int:
    """The number of first elements that two sequences share."""
    return next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))


def _power_of_two(n: int) -> int:
    """The smallest power of two that is at least n."""
    return 1 << (n - 1).bit_length()


@functools.partial(jax.jit, static_argnums=0)
def _losses(
    model: Model,
    params: Any,
    carry: Any,
    inputs: Int[Array, "b n"],
    targets: Int[Array, "b n"],
    start: Bool[Array, "b c"],
) -> TokenLosses:
    """The losses of the targets. Without a carry, documents begin."""
    module = model.bind(params)
    if carry is None:
        carry = module.begin_decoding(module.init_carry(len(inputs)))
    # While decoding, windows that overlap read tokens without repetition.
    (output,), _ = module.read_while_decoding(inputs, carry, start)
    return token_losses(module, module.finish(output, None), targets, LOSS_SLICE)
