"""The log of a training's steps: the averages of their metrics, and the error at a step that is not finite."""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import jax
import numpy as np

from meliad_like.data.loading import BatchIterator
from meliad_like.data.readers import ScheduledReader, label
from meliad_like.errors import UserError
from meliad_like.optimization.optimizers import applied_rate
from meliad_like.optimization.schedules import make_schedule
from meliad_like.run.setup import StageSetup
from meliad_like.training.hardware import peak_flops, peak_memory_bytes
from meliad_like.training.loop import Session
from meliad_like.training.step import StepMetrics, TrainState

FEW_LANES = 16
MANY_STEPS = 100
"""With fewer lanes than these, which stay in their documents for this many steps, training follows single documents."""

MEASURED = (
    "tokens_per_second",
    "seconds_per_step",
    "model_flops_per_second",
    "share_of_peak",
    "data_wait_seconds",
    "memory_bytes",
)
"""The figures of a row that are measured, so that no two runs share them."""


def epochs_per_step(setup: StageSetup) -> float:
    """The share of an epoch in a step of a stage. An epoch of a mixture of stores has the targets of all of them."""
    data = setup.run.data
    targets = sum(data.num_targets(store.totals("train")) for store in setup.stores)
    return data.tokens_per_step * (1 - setup.reader.padding_share) / targets


def reading_report(setups: Sequence[StageSetup]) -> list[str]:
    """Lines that say which part of the documents all stages of a run read, with a warning where lanes are too few."""
    num_documents = int(np.count_nonzero(setups[0].reader.documents.lengths > 1))
    steps = [setup.stage.last_step - setup.stage.first_step for setup in setups]
    readers = [setup.reader for setup in setups if isinstance(setup.reader, ScheduledReader)]
    epochs = sum(epochs_per_step(setup) * num for setup, num in zip(setups, steps, strict=True))
    if epochs >= 1:
        # To count the documents of many epochs would be slow, and tell nothing.
        lines = [f"reads {epochs:.1f} epochs of {num_documents:,} documents"]
    else:
        read = [reader.documents_read(num) for reader, num in zip(readers, steps)]
        of = f"{len(np.unique(np.concatenate(read))):,} of " if read else ""
        lines = [f"reads {of}{num_documents:,} documents, {epochs:.1%} of the tokens"]
    for reader in readers:
        lanes, in_a_row = reader.num_lanes, reader.steps_in_document
        if lanes < min(FEW_LANES, num_documents) and in_a_row >= MANY_STEPS:
            lines.append(
                f"warning: for about {in_a_row:,.0f} steps in a row each step sees the same "
                f"{lanes} of {num_documents:,} documents: use more lanes, of shorter segments "
                f"(ReaderConfig.segment_length={reader.segment_length})"
            )
    return lines


class StepLog:
    """The log of a stage's steps. It writes the averages of the steps between two logs."""

    def __init__(self, setup: StageSetup, session: Session, batches: BatchIterator, save: Callable[[int, Any], None]):
        """Starts the clock, after compilation. `save` saves the state before a step that is not finite."""
        run = setup.run
        self._setup, self._writer, self._workdir = setup, session.writer, session.folder
        self._batches, self._save = batches, save
        self._learning_rate = applied_rate(run.optimizer, make_schedule(run.schedule, run.training.num_steps))
        self._epochs_per_step = epochs_per_step(setup)
        self._bytes_per_token = run.data.bytes_per_target([store.totals("train") for store in setup.stores])
        self._flops_per_token = setup.model.flops.training
        self._peak_flops = peak_flops(run.model.activation_dtype) * jax.device_count()
        self._num_steps, self._seconds_out, self._waited = 0, 0.0, 0.0
        self._began = time.perf_counter()

    def report(self, step: int, metrics: StepMetrics, state: TrainState) -> None:
        """Logs every `log_every` steps, and after the stage's last step; `state` is one after `step` or later.

        Raises:
          UserError: the step is not finite and the policy is to stop, after saving the state before it; too many steps
            in a row were skipped; or the parameters after the step, which are not saved, are not finite.
        """
        metrics, setup, unlogged = jax.device_get(metrics), self._setup, self._writer.unlogged
        training = setup.run.training
        if not np.isfinite(metrics.parameter_norm):
            problem = f"the parameters after step {step} are not finite, although loss and gradient were"
            raise UserError(f"{problem}: begin another run with a smaller learning rate: --workdir=NEW")
        stops = not metrics.finite and training.nonfinite == "stop"
        if stops:
            # Before a row is written with the steps that the resumed run has to log. A halted step changes no state.
            self._save(int(state.step), setup.to_save(state))
        self._num_steps += 1
        # Skipped steps don't count in the averages.
        unlogged.consecutive_skips = 0 if metrics.finite else unlogged.consecutive_skips + 1
        if metrics.finite:
            unlogged.add(int(metrics.num_tokens), {"loss": metrics.loss, "accuracy": metrics.accuracy})
        if step % training.log_every == 0 or step == setup.stage.last_step:
            self._write(step, metrics)
        another = f"begin another run with a smaller learning rate: --load_dir={self._workdir} --workdir=NEW"
        if stops:
            saved = f"the state after step {int(state.step)} is saved: resume with --gin_file=option/skip_nonfinite.gin"
            problem = f"step {step} is not finite: {_culprit(setup, step, metrics)}"
            raise UserError(f"{problem}; {saved}, which skips such steps, or {another}")
        if unlogged.consecutive_skips >= min(training.max_consecutive_skips, training.num_steps):
            skipped = f"{unlogged.consecutive_skips} steps in a row were skipped, the last one step {step}"
            problem = f"{skipped}: {_culprit(setup, step, metrics)}"
            raise UserError(f"{problem}; {another}, or raise TrainingConfig.max_consecutive_skips")

    def _write(self, step: int, last: StepMetrics) -> None:
        """Writes the averages of the steps since the last call; `step` is the last of them."""
        now, leaks = time.perf_counter(), self._setup.reader.leaks_the_future
        seconds = max(now - self._began - self._seconds_out, 1e-9)
        averages, num_tokens = self._writer.unlogged.take()
        bits = averages.get("loss", math.nan) / math.log(2)
        bits_per_byte = bits / self._bytes_per_token
        tokens_per_second = self._setup.run.data.tokens_per_step * self._num_steps / seconds
        flops = self._flops_per_token * tokens_per_second
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
                "seconds_per_step": seconds / self._num_steps,
                "model_flops_per_second": flops,
                "share_of_peak": flops / self._peak_flops,
                "data_wait_seconds": self._batches.seconds_waited - self._waited,
                "memory_bytes": peak_memory_bytes(),
            },
            kind=label("train", leaks),
        )
        speed, epochs = f"{tokens_per_second:,.0f} tokens/s", f"{step * self._epochs_per_step:.1f} epochs"
        skipped = f"  {last.num_skipped} skipped" if last.num_skipped else ""
        shown = f"{bits_shown(bits, bits_per_byte)}  {speed}  {epochs}"
        self._writer.show(step, shown, skipped + "  leaks the future" * leaks)
        self._num_steps, self._seconds_out, self._waited = 0, 0.0, self._batches.seconds_waited
        self._began = now

    @contextmanager
    def outside_of_training(self) -> Iterator[None]:
        """A context; time spent in it does not count as training."""
        began = time.perf_counter()
        yield
        self._seconds_out += time.perf_counter() - began


def bits_shown(per_token: float, per_byte: float) -> str:
    """The loss in a line of the log: by byte, unless bytes are not counted (`TokenStore.totals`)."""
    return f"{per_token:.3f} bits/token" if math.isnan(per_byte) else f"{per_byte:.3f} bits/byte"


def _culprit(setup: StageSetup, step: int, metrics: StepMetrics) -> str:
    """Describes what was not finite in a step, with the documents of the first lane whose loss was not."""
    lanes = np.flatnonzero(~metrics.lane_finite)
    if not lanes.size:
        return "all losses are, but the gradient or the update is not"
    documents = np.unique(setup.reader.batch(step - 1 - setup.stage.first_step, lanes[:1].tolist()).document)
    names = ", ".join(str(setup.reader.documents.names[i]) for i in documents if i >= 0)
    return f"the loss of {lanes.size} of {setup.reader.num_lanes} lanes, first of lane {lanes[0]} in document {names}"
