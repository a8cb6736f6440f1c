"""Training: from a config and a working folder to a trained model."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
from etils import epath
from jax.experimental import multihost_utils
from jax.sharding import Mesh

from meliad_like import config as configuration
from meliad_like.config import RunConfig
from meliad_like.data.loading import load_batches
from meliad_like.mesh import lane_sharding
from meliad_like.remote import any_path
from meliad_like.run.hooks import check_hooks, evaluation_hook, sampling_hook
from meliad_like.run.opening import save_vocabulary, stores_read
from meliad_like.run.setup import StageSetup, metadata, set_up, starting_state
from meliad_like.run.step_log import StepLog, reading_report
from meliad_like.training.checkpoints import Checkpoints, first_metadata
from meliad_like.training.loop import Hook, Session, open_session, run_steps
from meliad_like.training.processes import EXIT_STATUS, Ownership
from meliad_like.training.program import num_trained
from meliad_like.training.step import TrainState


def train(
    run: RunConfig,
    workdir: str | Path,
    load_dir: str | None = None,
    profile_steps: tuple[int, int] | None = None,
    mesh: Mesh | None = None,
) -> int:
    """Trains until `num_steps`, stage after stage, from the newest checkpoint of the working folder.

    Args:
      workdir: the working folder, on a disk that all processes see, or on gs://.
      load_dir: checkpoint folder whose parameters a fresh run starts with.
      profile_steps: the first and the last step of those to trace.
      mesh: default: the mesh of the config, of all devices.

    Returns:
      The exit status: 0, or `EXIT_STATUS` after SIGTERM or Ctrl-C with everything saved.
    """
    # --- Set-up of all stages: a mistake in the last one is found now ---
    folder = any_path(workdir, schemes=("gs",))
    num_steps = run.training.num_steps
    all_setups = set_up(run, mesh, stores_read(first_metadata(folder / "checkpoints")))
    for setup in all_setups:
        check_hooks(setup)

    # --- The working folder: it is this run's, and no other process writes to it ---
    # Checked by every process before the first one writes: if one process alone failed, the others would wait for it.
    configuration.check_workdir(run, folder)
    versions = [store.fingerprint for store in all_setups[0].stores]
    multihost_utils.sync_global_devices(f"the working folder is this run's, which reads {versions} in all processes")
    keep = {"keep_last": run.training.checkpoints_kept, "keep_every": run.training.checkpoint_keep_every}
    with Ownership(folder) as ownership, Checkpoints(folder / "checkpoints", **keep) as checkpoints:
        saved = checkpoints.read_metadata() if checkpoints.steps() else {}
        start_step = saved.get("step", 0)
        if start_step >= num_steps:
            another = f"--load_dir={folder} starts another run with its parameters"
            more = another if run.schedule.num_independent(num_steps) < num_steps else "raise num_steps"
            if jax.process_index() == 0:
                print(f"{folder} is at step {start_step} of {num_steps}: nothing left to do; {more}")
            return 0
        if jax.process_index() == 0:
            configuration.save(run, folder)
            save_vocabulary(all_setups[0].store.vocabulary, folder / "checkpoints")

        # --- The state to begin with ---
        # A stage's last checkpoint holds what that stage remembered.
        first = next(i for i, setup in enumerate(all_setups) if start_step <= setup.stage.last_step)
        setups = all_setups[first:]
        state = starting_state(setups[0], checkpoints, load_dir)

        # --- Training, stage after stage ---
        settings = configuration.bound_values(run)
        tracking = {"trackers": run.trackers, "settings": settings, "logged": saved.get("logged")}
        with open_session(folder, checkpoints, start_step, num_steps, profile_steps, **tracking) as session:
            _announce(setups, start_step, load_dir, session)
            for line in reading_report(all_setups):
                session.writer.say(line)

            def save(step: int, state: TrainState) -> None:
                # A run is often stopped at a step that was saved anyway.
                if step not in checkpoints.steps():
                    for store in setups[0].stores:
                        store.check_unchanged()
                    ownership.check()
                    checkpoints.save(step, state, metadata(setups[0], step) | {"logged": session.writer.keep()})

            for setup in setups:
                if setup is not setups[0]:
                    state = setup.begin_stage(state)
                    lanes = f"{setup.reader.num_lanes} lanes of {setup.run.data.segment_length} tokens"
                    session.writer.say(f"step {setup.stage.first_step:,}: {lanes} from here on")
                if int(state.step) < setup.stage.last_step:
                    state, stopped = _train_stage(setup, state, session, save)
                    if stopped:
                        return EXIT_STATUS
            checkpoints.wait()
            session.writer.say(f"done: {num_steps:,} steps; checkpoints and metrics are in {folder}")
    return 0


def _announce(setups: Sequence[StageSetup], start_step: int, load_dir: str | None, session: Session) -> None:
    """Prints the number of parameters and of steps, and warnings about settings that have no effect."""
    run, reader, say = setups[0].whole_run, setups[0].reader, session.writer.say
    num_steps, warmup = run.training.num_steps, run.schedule.warmup_steps
    number, trained = setups[0].model.num_parameters, num_trained(run, setups[0].model)
    share = "" if trained == number else f", {trained:,} of them trained"
    say(
        f"{number:,} parameters{share}, from step {start_step:,} to {num_steps:,}; "
        f"{reader.padding_share:.2%} of the positions are padding"
        f"{'; selections leak the future' if reader.leaks_the_future else ''}"
    )
    if load_dir is not None and start_step:
        say(f"warning: --load_dir={load_dir} is not read, because {session.folder} has a checkpoint to resume from")
    for store in setups[0].stores:
        if store.version < store.newest:
            say(f"version {store.version} of the token store {store.folder} is read, as before; it has a newer one")
    if warmup >= num_steps:
        say(f"warning: the learning rate grows for {warmup:,} steps (warmup_steps), and the run has {num_steps:,}")


def _train_stage(
    setup: StageSetup, state: TrainState, session: Session, save: Callable[[int, Any], None]
) -> tuple[TrainState, bool]:
    """Trains until the stage's last step; returns the state, and whether SIGTERM or Ctrl-C came before."""
    run, stage, step = setup.run, setup.stage, int(state.step)
    folder, writer = epath.Path(session.folder), session.writer
    train_step = setup.program.compile_step()
    lanes = lane_sharding(setup.program.mesh, setup.reader.num_lanes)
    with load_batches(setup.reader, lanes, step - stage.first_step) as batches:
        log = StepLog(setup, session, batches, save)
        return run_steps(
            session,
            train_step,
            state,
            batches,
            step,
            stage.last_step,
            num_steps=run.training.num_steps,
            log_every=run.training.log_every,
            report=log.report,
            hooks=[
                Hook(run.training.evaluate_every, evaluation_hook(setup, writer, folder / "best")),
                Hook(run.training.sample_every, sampling_hook(setup, folder / "samples")),
                # The last step always has a checkpoint.
                Hook(run.training.checkpoint_every or run.training.num_steps, save),
            ],
            outside_of_training=log.outside_of_training,
            save=save,
        )
