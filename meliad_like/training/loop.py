"""The training loop: one step after the other, with reports, evaluations, checkpoints and traces."""

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, NamedTuple, TypeVar

import jax
from etils import epath

from meliad_like.errors import UserError
from meliad_like.remote import written_locally
from meliad_like.training.checkpoints import Checkpoints
from meliad_like.training.metrics import MetricsWriter
from meliad_like.training.processes import Preemption

State = TypeVar("State")


class Hook(NamedTuple):
    """A function of the steps done and the state, called every `every` steps (0: never), and after the last step."""

    every: int
    call: Callable[[int, Any], None]

    def due(self, step: int, num_steps: int) -> bool:
        """Whether the hook is to be called after `step` steps."""
        return self.every > 0 and (step % self.every == 0 or step == num_steps)


def parse_steps(text: str) -> tuple[int, int]:
    """Parses `FIRST:LAST` into the first and the last step. Raises a UserError if the text has another form."""
    match = re.fullmatch(r"(\d+):(\d+)", text)
    if match is None or not 1 <= int(match[1]) <= int(match[2]):
        raise UserError(f"--profile_steps={text} must be FIRST:LAST, such as 10:15, with 1 <= FIRST <= LAST")
    return int(match[1]), int(match[2])


class Profiler(ExitStack):
    """Traces `--profile_steps` in process 0, for xprof and Perfetto. Use it in a `with` statement."""

    def __init__(self, workdir: epath.PathLike, steps: tuple[int, int] | None):
        """Traces from the first to the last of `steps` (None: nothing), into the folder `profile` of the run's."""
        super().__init__()
        first, last = (1, 0) if steps is None or jax.process_index() else steps
        self._steps, self._has_begun = range(first, last + 1), False
        self.folder = epath.Path(workdir) / "profile"

    def before(self, step: int, state: Any) -> None:
        """Call it before a step is dispatched, with the state from which the step starts."""
        if step in self._steps and not self._has_begun:
            # Wait for earlier steps, which must not be in the trace.
            jax.block_until_ready(state)
            self.enter_context(jax.profiler.trace(self.enter_context(written_locally(self.folder))))
            self._has_begun = True

    def after(self, step: int, metrics: Any) -> bool:
        """Call it after a step is dispatched. Returns whether the trace was completed and written with this step."""
        if is_last := self._has_begun and step == self._steps[-1]:
            jax.block_until_ready(metrics)
            self.close()
        return is_last


class Session(NamedTuple):
    """The resources that every training has open while it runs."""

    folder: epath.PathLike
    checkpoints: Checkpoints
    writer: MetricsWriter
    preempted: Preemption
    profiler: Profiler


@contextmanager
def open_session(
    folder: epath.PathLike,
    checkpoints: Checkpoints,
    start_step: int,
    num_steps: int,
    profile_steps: tuple[int, int] | None = None,
    **tracking: Any,
) -> Iterator[Session]:
    """Opens the metrics of a working folder, handles SIGTERM and Ctrl-C, and ends both in an orderly way.

    `tracking` are further arguments of `MetricsWriter`.
    """
    with (
        MetricsWriter(folder, start_step, num_steps, **tracking) as writer,
        Preemption() as preempted,
        Profiler(folder, profile_steps) as profiler,
    ):
        yield Session(folder, checkpoints, writer, preempted, profiler)


def run_steps(
    session: Session,
    train_step: Callable[[State, Any], tuple[State, Any]],
    state: State,
    batches: Iterator[Any],
    step: int,
    last_step: int,
    *,
    num_steps: int,
    log_every: int,
    report: Callable[[int, Any, Any], None],
    hooks: Sequence[Hook],
    save: Callable[[int, Any], None],
    outside_of_training: Callable[[], AbstractContextManager] = nullcontext,
) -> tuple[State, bool]:
    """Trains from step `step` to `last_step`. The host is always one step ahead of the devices.

    Args:
      state: the state after `step` steps.
      batches: the batches from step `step + 1` on.
      num_steps: the number of steps of the whole training.
      report: called with each step, its metrics, and a state at most one step newer; an error ends the training.
      hooks: in the order of their calls; the checkpoint comes last, so that errors of other hooks precede it.
      outside_of_training: a context for the hooks; time spent in it does not count as training.

    Returns:
      The state, and whether SIGTERM or Ctrl-C ended the training, with the state saved, before the last step.
    """
    _, checkpoints, writer, preempted, profiler = session
    pending: tuple[int, Any] | None = None
    writer.start_clock(step)
    while step < last_step:
        profiler.before(step + 1, state)
        with jax.profiler.StepTraceAnnotation("train", step_num=step + 1):
            state, metrics = train_step(state, next(batches))
        step += 1
        if profiler.after(step, metrics):
            writer.say(f"step {step}: wrote a trace into {profiler.folder}")
        # The metrics of the previous step are ready; the host would have to wait for the metrics of this step.
        if pending is not None:
            report(*pending, state)
        pending = (step, metrics)
        if step % log_every == 0:
            # Raises errors of the background save of the last checkpoint; the next save may be hours away.
            checkpoints.check()
        stop = preempted.reached(step)
        due = [hook for hook in hooks if hook.due(step, num_steps)]
        if due or stop:
            report(*pending, state)
            pending = None
            if stop:
                # The sender of the signal may not wait for an evaluation.
                save(step, state)
                checkpoints.wait()
            with outside_of_training():
                for hook in due:
                    hook.call(step, state)
        if stop:
            writer.say(
                f"{preempted.signal_name}: saved step {step} in {checkpoints.folder}; the same command resumes it"
            )
            return state, True
    if pending is not None:
        report(*pending, state)
    return state, False
