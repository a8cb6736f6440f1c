"""Training: from a config and a working folder to a trained model."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import jax
from etils import epath
from jax.experimental import multihost_utils

from meliad_like import config as configuration
from meliad_like.config import RunConfig
from meliad_like.config.stages import stages_of
from meliad_like.data.loading import load_batches
from meliad_like.errors import UserError
from meliad_like.mesh import lane_sharding
from meliad_like.remote import any_path
from meliad_like.run.hooks import check_hooks, evaluation_hook, sampling_hook
from meliad_like.run.opening import save_vocabulary
from meliad_like.run.reporting import Reporter
from meliad_like.run.setup import Setup, metadata, set_up, starting_state
from meliad_like.training.checkpoints import Checkpoints
from meliad_like.training.loop import Hook, Loop
from meliad_like.training.metrics import MetricsWriter
from meliad_like.training.ownership import Ownership
from meliad_like.training.preemption import EXIT_STATUS, Preemption
from meliad_like.training.profiling import Profiler
from meliad_like.training.step import TrainState


class Outputs(NamedTuple):
    """Where a run writes."""

    folder: epath.Path
    ownership: Ownership
    checkpoints: Checkpoints
    writer: MetricsWriter
    profiler: Profiler


def train(
    run: RunConfig, workdir: str | Path, load_dir: str | None = None, profile_steps: tuple[int, int] | None = None
) -> int:
    """Trains until `num_steps`, stage after stage, from the newest checkpoint of the working folder.

    Args:
      workdir: on a disk that all processes see, or on gs://.
      load_dir: checkpoint folder whose parameters a fresh run starts with.
      profile_steps: the first and the last step of those to trace.

    Returns:
      The exit status: 0, or `preemption.EXIT_STATUS` after SIGTERM or Ctrl-C with everything saved.

    Raises:
      UserError: the config does not fit the documents, the devices or the folder, or the loss is not finite.
    """
    # --- set-up, of all stages: a mistake in the last one is found now ---
    folder = any_path(workdir, schemes=("gs",))
    if profile_steps is not None and profile_steps[0] > run.training.num_steps:
        first, last = profile_steps
        raise UserError(
            f"--profile_steps={first}:{last} begins after TrainingConfig.num_steps={run.training.num_steps}"
        )
    setups = [set_up(run, stage) for stage in stages_of(run)]
    _check_parameters(setups)
    for setup in setups:
        check_hooks(setup)
    # Checked by every process before the first one writes: if one process alone failed, the others would wait for it.
    configuration.check_workdir(run, folder)
    multihost_utils.sync_global_devices("the working folder is this run's")
    with Ownership(folder) as ownership:
        if jax.process_index() == 0:
            configuration.save(run, folder)
            save_vocabulary(setups[0].store.vocabulary, folder / "checkpoints")
        return _train(run, folder, setups, ownership, load_dir, profile_steps)


def _train(
    run: RunConfig,
    folder: epath.Path,
    setups: Sequence[Setup],
    ownership: Ownership,
    load_dir: str | None,
    profile_steps: tuple[int, int] | None,
) -> int:
    num_steps = run.training.num_steps
    checkpoints = Checkpoints(
        folder / "checkpoints",
        keep_last=run.training.checkpoints_kept,
        keep_every=run.training.checkpoint_keep_every or None,
    )
    with checkpoints:
        start_step = checkpoints.read_metadata()["step"] if checkpoints.steps() else 0
        if start_step >= num_steps:
            if jax.process_index() == 0:
                print(f"{folder} is at step {start_step} of {num_steps}: nothing left to do; raise num_steps")
            return 0
        # A stage's last checkpoint holds what that stage remembered.
        first = next(i for i, setup in enumerate(setups) if start_step <= setup.stage.last_step)
        state = starting_state(setups[first], checkpoints, load_dir)
        with (
            MetricsWriter(folder, start_step, num_steps) as writer,
            Preemption() as preempted,
            Profiler(folder, profile_steps) as profiler,
        ):
            writer.say(
                f"{setups[-1].model.num_parameters:,} parameters, from step {start_step:,} to {num_steps:,}; "
                f"{setups[first].reader.padding_share:.2%} of the positions are padding"
                f"{'; selections leak the future' if setups[first].reader.leaks_the_future else ''}"
            )
            outputs = Outputs(folder, ownership, checkpoints, writer, profiler)
            for setup in setups[first:]:
                if setup is not setups[first]:
                    state = setup.begin_stage(state)
                    writer.say(
                        f"step {setup.stage.first_step:,}: {setup.reader.num_lanes} lanes of "
                        f"{setup.run.data.segment_length} tokens from here on"
                    )
                if int(state.step) < setup.stage.last_step:
                    state, stopped = _train_stage(setup, state, outputs, preempted)
                    if stopped:
                        return EXIT_STATUS
    return 0


def _check_parameters(setups: Sequence[Setup]) -> None:
    for setup in setups:
        if setup.model.abstract_params != setups[-1].model.abstract_params:
            raise UserError(f"stage {setup.stage.index + 1} would need other parameters than the last stage")


def _train_stage(setup: Setup, state: TrainState, outputs: Outputs, preempted: Preemption) -> tuple[TrainState, bool]:
    """Trains until the stage's last step; returns the state, and whether SIGTERM or Ctrl-C came before."""
    run, stage, step = setup.run, setup.stage, int(state.step)
    folder, ownership, checkpoints, writer, profiler = outputs

    def save(step: int, state: TrainState) -> None:
        # A run is often stopped at a step that was saved anyway.
        if step not in checkpoints.steps():
            setup.store.check_unchanged()
            ownership.check()
            writer.upload()
            checkpoints.save(step, state, metadata(setup, step))

    train_step = setup.program.compile_step()
    with load_batches(
        setup.reader,
        lane_sharding(setup.mesh, setup.reader.num_lanes),
        step - stage.first_step,
        num_threads=run.data.num_threads,
        batches_ahead=run.data.batches_ahead,
        device_batches_ahead=run.data.device_batches_ahead,
    ) as batches:
        reporter = Reporter(setup, writer, batches, save, folder)
        loop = Loop(
            num_steps=run.training.num_steps,
            log_every=run.training.log_every,
            report=reporter.report,
            hooks=[
                Hook(run.training.evaluate_every, evaluation_hook(setup, writer, folder / "best")),
                Hook(run.training.sample_every, sampling_hook(setup, folder / "samples")),
                Hook(run.training.checkpoint_every, save),
            ],
            outside_of_training=reporter.outside_of_training,
            save=save,
            checkpoints=checkpoints,
            writer=writer,
            profiler=profiler,
            preempted=preempted,
        )
        return loop.run(train_step, state, batches, step, stage.last_step)
