"""Evaluations and samples of a training, made after every given number of steps."""

import functools
import operator
from collections.abc import Callable
from typing import Any

import jax
from etils import epath

from meliad_like.data.readers import label
from meliad_like.evaluation import report
from meliad_like.evaluation.perplexity import Evaluator
from meliad_like.generation.streaming import Generator, SamplingConfig
from meliad_like.mesh import replicated
from meliad_like.run.evaluator import make_evaluator
from meliad_like.run.opening import save_vocabulary
from meliad_like.run.setup import Setup, metadata
from meliad_like.training.checkpoints import keep_best
from meliad_like.training.metrics import MetricsWriter
from meliad_like.training.step import TrainState

LOGGED = ("bits_per_token", "bits_per_byte", "perplexity", "word_perplexity", "accuracy")
"""The figures of an evaluation that are written as metrics."""


def check_hooks(setup: Setup) -> None:
    """Finds mistakes before the first step that would otherwise end the run at its first evaluation or sample.

    These come before the checkpoint of their step, so that all steps until then would be lost at every start.

    Raises:
      UserError: there are no documents to evaluate on or to sample from, or the model can't write.
    """
    training = setup.run.training
    if training.evaluate_every:
        _make_evaluator(setup)
    if training.sample_every:
        setup.store.split(training.evaluate_split)
        _make_generator(setup, None)


def _make_evaluator(setup: Setup) -> Evaluator:
    training = setup.run.training
    return make_evaluator(
        setup.run,
        setup.model,
        setup.store,
        training.evaluate_split,
        setup.mesh,
        max_tokens=training.evaluate_max_tokens,
    )


def _make_generator(setup: Setup, params: Any) -> Generator:
    return Generator(
        setup.model,
        params,
        segment_length=setup.run.data.segment_length,
        end_of_document=setup.store.vocabulary.end_of_document,
        sampling=SamplingConfig(),
    )


def evaluation_hook(setup: Setup, writer: MetricsWriter, best: epath.Path) -> Callable[[int, TrainState], None]:
    """Evaluates the whole of a split, and writes the result as metrics of that split's name.

    With `keep_best`, the best parameters so far are in the folder `best`.
    """
    run = setup.run
    evaluator = functools.cache(lambda: _make_evaluator(setup))

    def evaluate(step: int, state: TrainState) -> None:
        result = evaluator()(state.params)
        figures = {name: getattr(result, name) for name in LOGGED}
        writer.write(step, figures, kind=label(run.training.evaluate_split, result.leaks_the_future))
        writer.say(f"step {step}: {result.bits_per_byte:.3f} bits/byte on {report.title(result)}")
        if run.training.keep_best:
            if jax.process_index() == 0:
                save_vocabulary(setup.store.vocabulary, best)
            kept = metadata(setup, step) | {"bits_per_token": result.bits_per_token}
            keep_best(best, step, state, kept, operator.itemgetter("bits_per_token"))

    return evaluate


def sampling_hook(setup: Setup, folder: epath.Path) -> Callable[[int, TrainState], None]:
    """Writes a continuation of the first tokens of a held-out document to `step_N.txt`.

    Each process makes the sample, because its parameters may be spread over all of them; the first one writes it.
    """
    run, vocabulary = setup.run, setup.store.vocabulary

    def write(step: int, state: TrainState) -> None:
        split = setup.store.split(run.training.evaluate_split)
        prompt = split.tokens(0, 0, min(run.data.segment_length, int(split.lengths[0]) - 1))
        generator = _make_generator(setup, jax.device_put(state.params, replicated(setup.mesh)))
        reading = generator.read(generator.begin(step), prompt)
        tokens = [token for written, _ in generator.write(reading, run.training.sample_tokens) for token in written]
        if jax.process_index() == 0:
            folder.mkdir(parents=True, exist_ok=True)
            text = f"{vocabulary.decode(prompt)}\n--- continued by step {step}: ---\n{vocabulary.decode(tokens)}\n"
            (folder / f"step_{step}.txt").write_text(text)

    return write
