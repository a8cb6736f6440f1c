"""Draws a run's loss as a picture: `python -m meliad_like.plot --workdir=DIR [--evaluation=FILE] [--output=PNG]`."""

from pathlib import Path

from absl import flags

from meliad_like import command_line

WORKDIR = flags.DEFINE_multi_string("workdir", None, "Folder of a run. Repeatable, for one picture.", required=True)
METRIC = flags.DEFINE_string("metric", "bits_per_byte", "Which of the figures in metrics.jsonl.")
EVALUATION = flags.DEFINE_string("evaluation", None, "What evaluate --compare --output wrote: adds the compressors.")
OUTPUT = flags.DEFINE_string(
    "output", None, "The picture. Default: METRIC.png in the first run's folder (here, where that is on gs://)."
)


def main() -> None:
    from meliad_like.evaluation import pictures
    from meliad_like.remote import is_remote

    curves, first = pictures.read_runs(WORKDIR.value, METRIC.value), WORKDIR.value[0]
    levels = pictures.read_levels(EVALUATION.value) if EVALUATION.value else {}
    name = f"{METRIC.value}.png"
    # The picture of a run in a bucket is written to the current folder.
    output = Path(OUTPUT.value or (name if is_remote(first) else Path(first) / name))
    pictures.draw(curves, levels, METRIC.value.replace("_", " "), output)
    print(f"drew {output}")


if __name__ == "__main__":
    command_line.run(main)
