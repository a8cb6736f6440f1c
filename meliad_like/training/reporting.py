"""Computes the logged figures from the metrics of steps: averages between two logs, speeds, shares of the peak."""

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import jax

from meliad_like.config import RunConfig
from meliad_like.data.loading import BatchIterator
from meliad_like.data.readers import ReaderConfig, label
from meliad_like.data.token_store import Totals
from meliad_like.optimization.optimizers import applied_rate
from meliad_like.optimization.schedules import make_schedule
from meliad_like.training.hardware import peak_flops, peak_memory_bytes
from meliad_like.training.metrics import MetricsWriter
from meliad_like.training.step import StepMetrics


class Reporter:
    """Collects the metrics of steps between two logs, and writes their averages."""

    def __init__(
        self,
        run: RunConfig,
        writer: MetricsWriter,
        batches: BatchIterator,
        *,
        last_step: int,
        leaks: bool,
        bytes_per_token: float,
        flops_per_token: float,
    ):
        """
        Args:
          run: config of the stage that is trained.
          writer: writes the figures.
          batches: iterator that reports how long the loop has waited for batches.
          last_step: last step of the stage, which is always logged.
          leaks: whether the reader's choices use the targets (`leaks_the_future`), which is then logged.
          bytes_per_token: average bytes of text per target.
          flops_per_token: floating-point operations of training per token.
        """
        self._run, self._writer, self._batches = run, writer, batches
        self._last_step, self._leaks = last_step, leaks
        self._learning_rate = applied_rate(run.optimizer, make_schedule(run.schedule, run.training.num_steps))
        self._bytes_per_token, self._flops_per_token = bytes_per_token, flops_per_token
        self._peak, self._peak_source = peak_flops(run.model.activation_dtype)
        self._gathered: list[StepMetrics] = []
        self._seconds_out = self._waited = 0.0
        self._began = time.perf_counter()

    def report(self, step: int, metrics: StepMetrics) -> None:
        """Adds the metrics of a step. Every `log_every` steps, and after the stage's last step, writes the averages."""
        self._gathered.append(metrics)
        if step % self._run.training.log_every and step != self._last_step:
            return
        now = time.perf_counter()
        seconds = max(now - self._began - self._seconds_out, 1e-9)
        # Skipped steps don't count in the averages.
        taken = [m for m in self._gathered if m.finite]
        loss, accuracy = (average_by_token(taken, name) for name in ("loss", "accuracy"))
        bits = loss / math.log(2)
        tokens_per_second = self._run.data.tokens_per_step * len(self._gathered) / seconds
        flops = self._flops_per_token * tokens_per_second
        last = self._gathered[-1]
        self._writer.write(
            step,
            {
                "loss": loss,
                "bits_per_token": bits,
                "bits_per_byte": bits / self._bytes_per_token,
                "accuracy": accuracy,
                "gradient_norm": float(last.gradient_norm),
                "update_norm": float(last.update_norm),
                "parameter_norm": float(last.parameter_norm),
                # The optimizer does not count skipped steps.
                "learning_rate": float(self._learning_rate(step - 1 - int(last.num_skipped))),
                "num_tokens": sum(int(m.num_tokens) for m in taken),
                "num_skipped": int(last.num_skipped),
                "tokens_per_second": tokens_per_second,
                "model_flops_per_second": flops,
                "share_of_peak": flops / (self._peak * jax.device_count()),
                "data_wait_seconds": self._batches.seconds_waited - self._waited,
                "memory_bytes": peak_memory_bytes(),
            },
            kind=label("train", self._leaks),
        )
        warning = "  leaks the future" if self._leaks else ""
        self._writer.progress(step, bits / self._bytes_per_token, tokens_per_second, int(last.num_skipped), warning)
        self._gathered, self._seconds_out, self._waited = [], 0.0, self._batches.seconds_waited
        self._began = now

    @contextmanager
    def outside_of_training(self) -> Iterator[None]:
        """A context; time spent in it does not count as training."""
        began = time.perf_counter()
        yield
        self._seconds_out += time.perf_counter() - began


def bytes_per_target(reader: ReaderConfig, totals: Totals) -> float:
    """The ratio of all bytes and all targets of an epoch; a document's first token may not be a target."""
    return totals.bytes / (totals.tokens - (0 if reader.first_tokens_are_targets else totals.documents))


def average_by_token(steps: Sequence[StepMetrics], name: str) -> float:
    """The average of a metric over the targets of some steps; NaN where these have no targets, as in padding."""
    num_tokens = sum(int(m.num_tokens) for m in steps)
    weighted = sum(float(getattr(m, name)) * int(m.num_tokens) for m in steps)
    return weighted / num_tokens if num_tokens else math.nan
