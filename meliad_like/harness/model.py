"""The model class of the lm-evaluation-harness (`lm_eval`), which finds it by the name `meliad_like` after the import.

    import lm_eval, meliad_like.harness.model

    lm_eval.simple_evaluate(model="meliad_like", model_args="checkpoint=runs/quickstart", tasks=["task.yaml"])

Unlike in the harness's own adapters, no prompt and no document is cut: the model reads them whole (docs/harness.md).
"""

import itertools
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
from lm_eval.api.instance import Instance  # type: ignore[import-not-found]  # an extra
from lm_eval.api.model import TemplateLM  # type: ignore[import-not-found]  # an extra
from lm_eval.api.registry import register_model  # type: ignore[import-not-found]  # an extra
from lm_eval.models.utils import normalize_gen_kwargs, postprocess_generated_text  # type: ignore[import-not-found]  # an extra

from meliad_like.errors import UserError
from meliad_like.generation.reading import power_of_two
from meliad_like.layers.basic import check_tokens
from meliad_like.library import LanguageModel, State, load
from meliad_like.models.config import ActivationDtype
from meliad_like.run.text import encode_text

SAMPLING = ("temperature", "top_k", "top_p")
MAX_TOKENS = 256
"""The largest number of tokens that are written where a task names none, as in the harness's own adapters."""
SHORTEST = 16
"""The smallest number of tokens that texts must share to be read once."""


class Question(NamedTuple):
    """Tokens of which the last are scored, and the state after the first of them."""

    index: int
    """The place in the list of requests."""
    tokens: tuple[int, ...]
    num_scored: int
    num_read: int = 0
    """The number of tokens after which `state` is."""
    state: State | None = None
    """The state after these tokens; None before the first one."""

    @property
    def num_before(self) -> int:
        """The number of tokens before those that are scored."""
        return len(self.tokens) - self.num_scored

    @property
    def rest(self) -> tuple[int, ...]:
        """The tokens that are still to be read."""
        return self.tokens[self.num_read :]


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
        dtype: ActivationDtype = "float32",
    ):
        """
        Args:
          checkpoint, step, gin_params, dtype: the arguments of `meliad_like.load`; or a model that it has returned.
          batch_size: the number of texts that are read in parallel.
          first_tokens: whether the end-of-document token is read before every document and in place of an empty
            context, so that the first token has a probability too, as in the harness's own adapters: for models, such
            as GPT-2, that were trained with it.
        """
        super().__init__()
        is_open = isinstance(checkpoint, LanguageModel)
        self.lm = checkpoint if is_open else load(checkpoint, step=step, gin_params=gin_params, dtype=dtype)
        if reason := self.lm.model.config.traits.needs_segments:
            problem = f"what this model remembers depends on where segments end ({reason})"
            raise UserError(f"{problem}, and a task's texts have no segments: use python -m meliad_like.evaluate")
        self._name = "" if is_open else str(checkpoint)
        self._batch_size, self._first_tokens = int(batch_size), first_tokens

    def get_model_info(self) -> dict[str, Any]:
        """The facts that the harness writes into its results."""
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
            problem = "a task has an empty context, or one that is only a part of its text's first token"
            way_out = "choose --first_tokens to read an end of document before it"
            raise UserError(f"{problem}, so that this token has no probability: {way_out}")
        return self.eot_token_id

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        return encode_text(self.lm.vocabulary, string).tokens.tolist()

    def loglikelihood(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """The log-probability of each continuation in nats, and whether its tokens were the most likely ones.

        It is that of the whole text minus that of the context, as `LanguageModel.score` has them. Tokens that both
        begin with cancel out, and are not computed; from the first other token on, the whole text must be likely.
        """
        questions = []
        for context, continuation in (request.args for request in requests):
            whole, alone = self.tok_encode(context + continuation), self.tok_encode(context)
            if not (num_shared := _num_shared(whole, alone)):
                whole, alone, num_shared = [self.prefix_token_id, *whole], [self.prefix_token_id, *alone], 1
            for tokens in (whole, alone):
                questions.append(Question(len(questions), tuple(tokens), len(tokens) - num_shared))
        scores = self._answers(questions)
        results = [(whole - alone, greedy) for (whole, greedy), (alone, _) in zip(scores[::2], scores[1::2])]
        return self._cached("loglikelihood", requests, results)

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[tuple[str, str], list[int], list[int]]], **_: Any
    ) -> list[tuple[float, bool]]:
        """`loglikelihood` of tokens that were encoded elsewhere. Raises a UserError if one is not in the vocabulary."""
        texts = [(context or [self.prefix_token_id], continuation) for _, context, continuation in requests]
        for x, y in texts:
            check_tokens(np.array([*x, *y], int), self.lm.vocabulary.size)
        return self._answers([Question(i, (*x, *y), len(y)) for i, (x, y) in enumerate(texts)])

    def _answers(self, questions: list[Question]) -> list[tuple[float, bool]]:
        """The log-probability of each question's scored tokens, and whether all were the most likely ones."""
        results: dict[int, tuple[float, bool]] = dict.fromkeys(range(len(questions)), (0.0, True))
        # Texts of about the same length are read side by side.
        batches: dict[int, list[Question]] = {}
        scored = (question for question in questions if question.num_scored)
        for question in self._with_states(sorted(scored, key=lambda question: question.tokens)):
            batch = batches.setdefault(power_of_two(len(question.rest)), [])
            batch.append(question)
            if len(batch) == self._batch_size:
                results.update(self._score(batch))
                batch.clear()
        for batch in filter(None, batches.values()):
            results.update(self._score(batch))
        return list(results.values())

    def _with_states(self, questions: list[Question]) -> Iterator[Question]:
        """Each of the questions, which are sorted and have the same state, with the state that it is scored from.

        What several questions share is read once, if it has `SHORTEST` tokens.
        """
        start = questions[0].num_read if questions else 0
        yield from (question for question in questions if question.num_before < start + SHORTEST)
        longer = (question for question in questions if question.num_before >= start + SHORTEST)
        groups = [list(group) for _, group in itertools.groupby(longer, lambda question: question.rest[:SHORTEST])]
        yield from (group[0] for group in groups if len(group) == 1)
        for some in self._side_by_side([group for group in groups if len(group) > 1]):
            # All of a group begin with what the first and the last of the sorted ones share.
            shared = (_num_shared(group[0].tokens, group[-1].tokens) for group in some)
            stops = [min(stop, *(question.num_before for question in group)) for stop, group in zip(shared, some)]
            texts = [group[0].tokens[start:stop] for stop, group in zip(stops, some)]
            # Each has memory of its own, so that one that waits does not keep the others.
            states = [state.copy() for state in self.lm.read_batch(texts, some[0][0].state)]
            for group, stop, state in zip(some, stops, states, strict=True):
                yield from self._with_states([question._replace(num_read=stop, state=state) for question in group])

    def _score(self, questions: list[Question]) -> Iterator[tuple[int, tuple[float, bool]]]:
        """The index of each question, the log-probability of its scored tokens, and whether all were most likely."""
        begin = self.lm.begin()
        for some in self._side_by_side(questions):
            scores = self.lm.score_batch([x.rest for x in some], [x.state or begin for x in some])
            for question, score in zip(some, scores, strict=True):
                scored = np.s_[-question.num_scored :]
                nats = score.log_probabilities[scored].sum(dtype=np.float64)
                yield question.index, (float(nats), bool(score.most_likely[scored].all()))

    def _side_by_side(self, items: list[Any]) -> Iterator[list[Any]]:
        """The items in batches whose sizes are powers of two, so that few programs are compiled."""
        while items:
            count = 1 << (min(len(items), self._batch_size).bit_length() - 1)
            yield items[:count]
            items = items[count:]

    def loglikelihood_rolling(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[float]:
        """The log-probability of each text in nats, read from its beginning to its end with the model's memory."""
        prefix = [self.eot_token_id] if self._first_tokens else []
        texts = [prefix + self.tok_encode(request.args[0]) for request in requests]
        scored = [Question(i, tuple(text), max(len(text) - 1, 0)) for i, text in enumerate(texts)]
        return self._cached("loglikelihood_rolling", requests, [nats for nats, _ in self._answers(scored)])

    def generate_until(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[str]:
        """The model's continuation of each context, up to the first of the task's `until`, which is left out."""
        results = [""] * len(requests)
        # Texts are written side by side if their settings are the same.
        groups: dict[str, list[int]] = {}
        for i, request in enumerate(requests):
            groups.setdefault(json.dumps(request.args[1], sort_keys=True), []).append(i)
        for members in groups.values():
            for first in range(0, len(members), self._batch_size):
                batch = members[first : first + self._batch_size]
                settings = normalize_gen_kwargs(requests[batch[0]].args[1], MAX_TOKENS)
                for i, text in zip(batch, self._write([requests[i].args[0] for i in batch], batch, **settings)):
                    results[i] = text
        return self._cached("generate_until", requests, results)

    def _cached(self, method: str, requests: Sequence[Instance], results: list[Any]) -> list[Any]:
        """The results, which the harness may keep for later evaluations."""
        for request, result in zip(requests, results):
            self.cache_hook.add_partial(method, request.args, result)
        return results

    def _write(
        self, contexts: list[str], seeds: list[int], until: list[str], max_gen_toks: int, do_sample: bool, **settings
    ) -> list[str]:
        """The model's continuation of each context, with a seed for each."""
        if unknown := settings.keys() - set(SAMPLING):
            raise UserError(f"generation_kwargs.{min(unknown)} is not one of do_sample, {', '.join(SAMPLING)}")
        states = self.lm.read_batch([self.tok_encode(context) or [self.prefix_token_id] for context in contexts])
        texts, rest = [""] * len(contexts), [""] * len(contexts)
        stops = [stop for stop in until if stop]
        sampling: dict[str, Any] = settings if do_sample else {"temperature": 0.0}
        for pieces in self.lm.stream_batch(states, max_gen_toks, seeds=seeds, **sampling):
            texts = [text + piece.text for text, piece in zip(texts, pieces, strict=True)]
            rest = [piece.state.unfinished.decode(errors="replace") for piece in pieces]
            if all(any(stop in text for stop in stops) for text in texts):
                break
        return [postprocess_generated_text(text + end, stops, None) for text, end in zip(texts, rest)]


@contextmanager
def tokenizer_for_tasks(model: HarnessModel, name: str) -> Iterator[None]:
    """Inside, the tokenizer of this name is the model's vocabulary, which `transformers` may not be able to express.

    Tasks that make documents of a number of tokens ask `transformers` for a tokenizer, and that for `input_ids` alone.
    """
    try:
        from transformers import AutoTokenizer  # type: ignore[import-not-found]  # an extra
    except ModuleNotFoundError:
        yield  # Only these tasks need it, and say so.
        return
    of_transformers = AutoTokenizer.from_pretrained

    def from_pretrained(requested: str, **settings: Any) -> Any:
        if requested != name:
            return of_transformers(requested, **settings)
        return lambda text: SimpleNamespace(input_ids=model.tok_encode(text))

    AutoTokenizer.from_pretrained = from_pretrained
    try:
        yield
    finally:
        AutoTokenizer.from_pretrained = of_transformers


def _num_shared(first: Sequence[int], second: Sequence[int]) -> int:
    """The number of tokens with which both begin."""
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(first, second)))
