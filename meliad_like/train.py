"""Trains a model: `python -m meliad_like.train --gin_file=... --workdir=DIR`; the same command goes on after a stop."""

from absl import flags

from meliad_like import command_line

WORKDIR = flags.DEFINE_string("workdir", None, "Folder of the run: config, checkpoints, metrics.", required=True)
LOAD_DIR = flags.DEFINE_string("load_dir", None, "Checkpoint folder whose parameters a fresh run starts with.")


def main() -> int:
    run = command_line.read_config()
    from meliad_like.training.loop import train

    return train(run, WORKDIR.value, LOAD_DIR.value)


if __name__ == "__main__":
    command_line.run(main)
