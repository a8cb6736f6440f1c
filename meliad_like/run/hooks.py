"""Hooks that are called between the steps of a training: evaluations and samples."""

import functools
import operator
import sys
from collections.abc import Callable
from typing import Any

import jax
from etils import epath

from meliad_like.data.readers import label
from meliad_like.evaluation import report
from meliad_like.evaluation.perplexity import Evaluator, make_evaluator
from meliad_like.generation.streaming import Generator, SamplingConfig
from meliad_like.mesh import replicated
from meliad_like.run.opening import save_vocabulary
from meliad_like.run.setup import StageSetup, metadata
from meliad_like.run.step_log import bits_shown
from meliad_like.training.checkpoints import keep_best
from meliad_like.training.metrics import MetricsWriter
from meliad_like.training.step import TrainState

LOGGED = ("bits_per_token", "bits_per_byte", "perplexity", "word_perplexity", "accuracy")
"""The figures of an evaluation that are written as metrics."""


def check_hooks(setup: StageSetup) -> None:
    """Finds mistakes before the first step that would otherwise end the run at its first evaluation or sample.

    These come before the checkpoint of their step, so that all steps until then would be lost at every start.
    """
    if setup.run.training.evaluate_every:
        _make_evaluator(setup)
    if setup.run.training.sample_every:
        setup.store.split(setup.run.training.evaluate_split)
        _make_generator(setup, None)


def _make_evaluator(setup: StageSetup) -> tuple[Evaluator, bool]:
    """The evaluator, and whether it reads a beginning, because every document is longer than an evaluation may be."""
    split, limit = setup.run.training.evaluate_split, setup.run.training.evaluate_max_tokens
    documents = setup.store.split(split)
    if reads_a_beginning := limit is not None and bool(documents.lengths.min() > limit):
        documents = documents.beginnings(setup.store.vocabulary, limit, sys.maxsize)
    options = {"max_tokens": limit, "documents": documents}
    return make_evaluator(setup.run, setup.model, setup.store, split, setup.program.mesh, **options), reads_a_beginning


def _make_generator(setup: StageSetup, params: Any) -> Generator:
    return Generator(
        setup.model,
        params,
        segment_length=setup.run.data.segment_length,
        vocabulary=setup.store.vocabulary,
        sampling=SamplingConfig(),
    )


def evaluation_hook(setup: StageSetup, writer: MetricsWriter, best: epath.Path) -> Callable[[int, TrainState], None]:
    """A hook that evaluates a split and writes its metrics. With `keep_best` it also keeps the best parameters."""
    training = setup.run.training
    make = functools.cache(lambda: _make_evaluator(setup))

    def evaluate(step: int, state: TrainState) -> None:
        evaluator, reads_a_beginning = make()
        result = evaluator(state.params)
        figures = {name: getattr(result, name) for name in LOGGED}
        writer.write(step, figures, kind=(kind := label(training.evaluate_split, result.leaks_the_future)))
        name = result.documents[0].name
        shown = f"{kind}: the first {report.size(result)} of {name}" if reads_a_beginning else report.title(result)
        writer.say(f"step {step}: {bits_shown(result.bits_per_token, result.bits_per_byte)} on {shown}")
        if training.keep_best:
            if jax.process_index() == 0:
                save_vocabulary(setup.store.vocabulary, best)
            about = metadata(setup, step) | {"bits_per_token": result.bits_per_token}
            keep_best(best, step, state, about, operator.itemgetter("bits_per_token"))

    return evaluate


def sampling_hook(setup: StageSetup, folder: epath.Path) -> Callable[[int, TrainState], None]:
    """A hook that writes a continuation of the first tokens of a held-out document to `step_N.txt`.

    Each process makes the sample, because its parameters may be spread over all of them; the first one writes it.
    """
    run, vocabulary = setup.run, setup.store.vocabulary

    def write(step: int, state: TrainState) -> None:
        split = setup.store.split(run.training.evaluate_split)
        prompt = split.tokens(0, 0, min(run.data.segment_length, int(split.lengths[0]) - 1))
        generator = _make_generator(setup, jax.device_put(state.params, replicated(setup.program.mesh)))
        tokens = generator.continuation(prompt, run.training.sample_tokens, seed=step)
        if jax.process_index() == 0:
            folder.mkdir(parents=True, exist_ok=True)
            text = f"{vocabulary.decode(prompt)}\n--- continued by step {step}: ---\n{vocabulary.decode(tokens)}\n"
            (folder / f"step_{step}.txt").write_text(text)

    return write
