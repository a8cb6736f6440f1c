"""Trains a model, or resumes its training.

    meliad_like train --gin_file=quickstart.gin --workdir=runs/quickstart
    meliad_like train --smoke --gin_file=size/large_1200m.gin --gin_file=task/pg19_tokens.gin

With several processes the command is started once for each, with the same files and working folder: `--distributed`
on a cluster that jax detects, otherwise with `--coordinator_address`, `--num_processes` and `--process_id`.
"""

from meliad_like.command_line import Command
from meliad_like.errors import UserError

COMMAND = Command(__doc__)
WORKDIR = COMMAND.string("workdir", None, "Required but with --smoke. Folder of config, checkpoints, metrics.")
SMOKE = COMMAND.bool(
    "smoke",
    False,
    "Only try the run, made small: it trains, is killed, resumes, evaluates and writes text, in a minute or two.",
)
LOAD_DIR = COMMAND.shared("load_dir")
PROFILE_STEPS = COMMAND.string("profile_steps", None, "FIRST:LAST, such as 10:15: a trace of them in WORKDIR/profile.")
DISTRIBUTED = COMMAND.bool("distributed", False, "One process of a cluster that jax detects: TPU pod, SLURM, GKE, MPI.")
COORDINATOR_ADDRESS = COMMAND.string("coordinator_address", None, "host:port at which process 0 listens, elsewhere.")
NUM_PROCESSES = COMMAND.integer("num_processes", None, "Needed with --coordinator_address.", lower_bound=1)
JOIN_SECONDS = COMMAND.integer("join_seconds", 300, "How long the processes wait for each other.", lower_bound=1)
PROCESS_ID = COMMAND.integer("process_id", None, "Needed with --coordinator_address, from 0.", lower_bound=0)


def main() -> int:
    workdir = WORKDIR.value
    if SMOKE.value:
        from meliad_like.planning.smoke import smoke
        from meliad_like.run.opening import config_of

        smoke(config_of(COMMAND, LOAD_DIR.value), workdir, COMMAND.gin_flags)
        return 0
    if workdir is None:
        raise UserError("--workdir is missing: name the folder of the run")
    # Checked before the processes join, unless they all have to read a checkpoint.
    run = COMMAND.read_config() if LOAD_DIR.value is None else None
    from meliad_like.run.opening import config_of
    from meliad_like.run.training import train
    from meliad_like.training.loop import parse_steps
    from meliad_like.training.processes import initialize_distributed

    profile_steps = parse_steps(PROFILE_STEPS.value) if PROFILE_STEPS.value else None
    place = (COORDINATOR_ADDRESS.value, NUM_PROCESSES.value, PROCESS_ID.value)
    if DISTRIBUTED.value or any(value is not None for value in place):
        initialize_distributed(*place, JOIN_SECONDS.value)
    if run is None:
        run = config_of(COMMAND, LOAD_DIR.value)
    return train(run, workdir, LOAD_DIR.value, profile_steps)


if __name__ == "__main__":
    COMMAND.run(main)
