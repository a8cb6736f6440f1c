"""What happens between the steps of a training: the report of each step, evaluations and samples."""

import functools
import math
import operator
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import jax
import numpy as np
from etils import epath

from meliad_like.config.run import stages_of
from meliad_like.data.loading import BatchIterator
from meliad_like.data.readers import ReaderConfig, label
from meliad_like.data.token_store import Totals
from meliad_like.errors import UserError
from meliad_like.evaluation import report
from meliad_like.evaluation.perplexity import Evaluator, make_evaluator
from meliad_like.generation.streaming import Generator, SamplingConfig
from meliad_like.mesh import replicated
from meliad_like.optimization.optimizers import applied_rate
from meliad_like.optimization.schedules import make_schedule
from meliad_like.run.opening import save_vocabulary
from meliad_like.run.setup import Setup, metadata, set_up
from meliad_like.training.checkpoints import keep_best
from meliad_like.training.hardware import peak_flops, peak_memory_bytes
from meliad_like.training.metrics import MetricsWriter
from meliad_like.training.step import StepMetrics, TrainState

LOGGED = ("bits_per_token", "bits_per_byte", "perplexity", "word_perplexity", "accuracy")
"""The figures of an evaluation that are written as metrics."""


def check_hooks(setup: Setup) -> None:
    """Finds mistakes before the first step that would otherwise end the run at its first evaluation or sample.

    These come before the checkpoint of their step, so that all steps until then would be lost at every start.
    """
    if setup.run.training.evaluate_every:
        _make_evaluator(setup)
    if setup.run.training.sample_every:
        setup.store.split(setup.run.training.evaluate_split)
        _make_generator(setup, None)


def _make_evaluator(setup: Setup) -> tuple[Evaluator, bool]:
    """The evaluator, and whether it reads a beginning, because every document is longer than an evaluation may be."""
    split, limit = setup.run.training.evaluate_split, setup.run.training.evaluate_max_tokens
    documents = setup.store.split(split)
    if reads_a_beginning := limit is not None and bool(documents.lengths.min() > limit):
        documents = documents.beginnings(setup.store.vocabulary, limit, sys.maxsize)
    options = {"max_tokens": limit, "documents": documents}
    return make_evaluator(setup.run, setup.model, setup.store, split, setup.mesh, **options), reads_a_beginning


def _make_generator(setup: Setup, params: Any) -> Generator:
    return Generator(
        setup.model,
        params,
        segment_length=setup.run.data.segment_length,
        vocabulary=setup.store.vocabulary,
        sampling=SamplingConfig(),
    )


def evaluation_hook(setup: Setup, writer: MetricsWriter, best: epath.Path) -> Callable[[int, TrainState], None]:
    """A hook that evaluates a split and writes its metrics. With `keep_best` it also keeps the best parameters."""
    run = setup.run
    make = functools.cache(lambda: _make_evaluator(setup))

    def evaluate(step: int, state: TrainState) -> None:
        evaluator, reads_a_beginning = make()
        result = evaluator(state.params)
        figures = {name: getattr(result, name) for name in LOGGED}
        writer.write(step, figures, kind=label(run.training.evaluate_split, result.leaks_the_future))
        beginning = f", the beginning of {result.documents[0].name}" if reads_a_beginning else ""
        bits = _bits(result.bits_per_token, result.bits_per_byte)
        writer.say(f"step {step}: {bits} on {report.title(result)}{beginning}")
        if run.training.keep_best:
            if jax.process_index() == 0:
                save_vocabulary(setup.store.vocabulary, best)
            about = metadata(setup, step) | {"bits_per_token": result.bits_per_token}
            keep_best(best, step, state, about, operator.itemgetter("bits_per_token"))

    return evaluate


def sampling_hook(setup: Setup, folder: epath.Path) -> Callable[[int, TrainState], None]:
    """A hook that writes a continuation of the first tokens of a held-out document to `step_N.txt`.

    Each process makes the sample, because its parameters may be spread over all of them; the first one writes it.
    """
    run, vocabulary = setup.run, setup.store.vocabulary

    def write(step: int, state: TrainState) -> None:
        split = setup.store.split(run.training.evaluate_split)
        prompt = split.tokens(0, 0, min(run.data.segment_length, int(split.lengths[0]) - 1))
        generator = _make_generator(setup, jax.device_put(state.params, replicated(setup.mesh)))
        tokens = generator.continuation(prompt, run.training.sample_tokens, seed=step)
        if jax.process_index() == 0:
            folder.mkdir(parents=True, exist_ok=True)
            text = f"{vocabulary.decode(prompt)}\n--- continued by step {step}: ---\n{vocabulary.decode(tokens)}\n"
            (folder / f"step_{step}.txt").write_text(text)

    return write


class Reporter:
    """Collects the metrics of steps between two logs, writes their averages, and stops at a step that is not finite."""

    def __init__(
        self,
        setup: Setup,
        writer: MetricsWriter,
        batches: BatchIterator,
        save: Callable[[int, TrainState], None],
        workdir: object,
    ):
        """`save` saves the state before a step that is not finite; messages name the `workdir`."""
        run = setup.run
        self._setup, self._writer, self._batches, self._save, self._workdir = setup, writer, batches, save, workdir
        self._leaks = setup.reader.leaks_the_future
        self._learning_rate = applied_rate(run.optimizer, make_schedule(run.schedule, run.training.num_steps))
        totals = [store.totals("train") for store in setup.stores]
        self._bytes_per_token = bytes_per_target(run.data, totals)
        targets_per_step = run.data.tokens_per_step * (1 - setup.reader.padding_share)
        # Of a mixture: readings of as many targets as all stores have.
        self._epochs_per_step = targets_per_step / sum(num_targets(run.data, each) for each in totals)
        self._peak = peak_flops(run.model.activation_dtype)
        self._num_steps = 0
        self._seconds_out = self._waited = 0.0
        self._began = time.perf_counter()

    def report(self, step: int, metrics: StepMetrics, state: TrainState) -> None:
        """Adds the metrics of a step. Every `log_every` steps, and after the stage's last step, writes the averages.

        Raises a UserError if the step is not finite and the policy is to stop, after saving the state before it; if
        too many steps in a row were skipped; and whatever the policy, if the parameters after the step are not finite,
        of which nothing is saved.
        """
        metrics = jax.device_get(metrics)
        if not np.isfinite(metrics.parameter_norm):
            problem = f"the parameters after step {step} are not finite, although loss and gradient were"
            raise UserError(f"{problem}: begin another run with a smaller learning rate: --workdir=NEW")
        training = self._setup.run.training
        stops = not metrics.finite and training.nonfinite == "stop"
        if stops:
            # Before a row is written with the steps that the resumed run has to log.
            self._save_before(state)
        unlogged = self._writer.unlogged
        # Skipped steps don't count in the averages.
        unlogged.consecutive_skips = 0 if metrics.finite else unlogged.consecutive_skips + 1
        if metrics.finite:
            unlogged.add(int(metrics.num_tokens), {"loss": metrics.loss, "accuracy": metrics.accuracy})
        self._num_steps += 1
        if step % training.log_every == 0 or step == self._setup.stage.last_step:
            self._write(step, metrics)
        if stops:
            raise UserError(
                f"step {step} is not finite: {self._culprit(step, metrics)}; the state after step {int(state.step)} is "
                "saved: resume with --gin_file=option/skip_nonfinite.gin, which skips such steps, or begin another run "
                f"from there with a smaller learning rate: --load_dir={self._workdir} --workdir=NEW"
            )
        skips = unlogged.consecutive_skips
        if skips >= min(training.max_consecutive_skips, training.num_steps):
            raise UserError(
                f"{skips} steps in a row were skipped, the last one step {step}: {self._culprit(step, metrics)}; begin "
                f"another run with a smaller learning rate: --load_dir={self._workdir} --workdir=NEW, or raise "
                "TrainingConfig.max_consecutive_skips"
            )

    def _write(self, step: int, last: StepMetrics) -> None:
        now = time.perf_counter()
        seconds = max(now - self._began - self._seconds_out, 1e-9)
        averages, num_tokens = self._writer.unlogged.take()
        bits = averages.get("loss", math.nan) / math.log(2)
        bits_per_byte = bits / self._bytes_per_token
        tokens_per_second = self._setup.run.data.tokens_per_step * self._num_steps / seconds
        flops = self._setup.model.training_flops_per_token * tokens_per_second
        self._writer.write(
            step,
            {
                "loss": averages.get("loss", math.nan),
                "bits_per_token": bits,
                "bits_per_byte": bits_per_byte,
                "accuracy": averages.get("accuracy", math.nan),
                **{name: float(getattr(last, name)) for name in ("gradient_norm", "update_norm", "parameter_norm")},
                # The optimizer does not count skipped steps. There is no rate before that of step 0.
                "learning_rate": float(self._learning_rate(max(step - 1 - int(last.num_skipped), 0))),
                "num_tokens": num_tokens,
                "num_skipped": int(last.num_skipped),
                "tokens_per_second": tokens_per_second,
                "model_flops_per_second": flops,
                "share_of_peak": flops / (self._peak * jax.device_count()),
                "data_wait_seconds": self._batches.seconds_waited - self._waited,
                "memory_bytes": peak_memory_bytes(),
            },
            kind=label("train", self._leaks),
        )
        speed, epochs = f"{tokens_per_second:,.0f} tokens/s", f"{step * self._epochs_per_step:.1f} epochs"
        skipped = f"  {last.num_skipped} skipped" if last.num_skipped else ""
        leaks = "  leaks the future" if self._leaks else ""
        self._writer.show(step, f"{_bits(bits, bits_per_byte)}  {speed}  {epochs}", skipped + leaks)
        self._num_steps, self._seconds_out, self._waited = 0, 0.0, self._batches.seconds_waited
        self._began = now

    def _save_before(self, state: TrainState) -> None:
        """Saves the state before a step that was not finite, which a halted step has left unchanged."""
        setup, good_step = self._setup, int(state.step)
        if setup.stage.index and good_step == setup.stage.first_step:
            # A checkpoint of that step is the stage before's, with as many lanes as that has; their memory is not read.
            previous = stages_of(setup.whole_run)[setup.stage.index - 1]
            state = set_up(setup.whole_run, previous, setup.mesh).begin_stage(state)
        self._save(good_step, state)

    def _culprit(self, step: int, metrics: StepMetrics) -> str:
        """Describes what was not finite in a step, with the documents of the first lane whose loss was not."""
        setup, lanes = self._setup, np.flatnonzero(~metrics.lane_finite)
        if not lanes.size:
            return "all losses are, but the gradient or the update is not"
        documents = np.unique(setup.reader.batch(step - 1 - setup.stage.first_step, lanes[:1].tolist()).document)
        names = setup.reader.documents.names
        of = f"{lanes.size} of {setup.reader.num_lanes} lanes, first of lane {lanes[0]}"
        in_documents = ", ".join(str(names[i]) for i in documents if i >= 0)
        return f"the loss of {of} in document {in_documents}"

    @contextmanager
    def outside_of_training(self) -> Iterator[None]:
        """A context; time spent in it does not count as training."""
        began = time.perf_counter()
        yield
        self._seconds_out += time.perf_counter() - began


def num_targets(reader: ReaderConfig, totals: Totals) -> int:
    """The number of targets of an epoch; a document's first token may not be one."""
    return totals.tokens - (0 if reader.first_tokens_are_targets else totals.documents)


def _bits(per_token: float, per_byte: float) -> str:
    """The loss in a line of the log: by byte, unless bytes are not counted (`TokenStore.totals`)."""
    return f"{per_token:.3f} bits/token" if math.isnan(per_byte) else f"{per_byte:.3f} bits/byte"


def bytes_per_target(reader: ReaderConfig, totals: Sequence[Totals]) -> float:
    """The ratio of bytes and targets, averaged over the targets that are read of token stores with these totals.

    NaN if bytes are not counted (`TokenStore.totals`).
    """
    ratios = (each.bytes / num_targets(reader, each) for each in totals)
    return sum(share * ratio for share, ratio in zip(reader.shares, ratios, strict=True)) or math.nan
