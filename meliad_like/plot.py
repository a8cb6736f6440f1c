"""Draws any figure of the metrics of one or several runs by step, or by the tokens or seconds of training until then.

    meliad_like plot --workdir=runs/quickstart --metric=gradient_norm

--workdir may be repeated, to draw several runs in one picture.
"""

from pathlib import Path

from meliad_like.command_line import Command

COMMAND = Command(__doc__, no_effect=dict.fromkeys(("gin_file", "gin_param"), "the figures are those of the run"))
WORKDIR = COMMAND.multi_string("workdir", None, "Folder of a run. Repeatable, for one picture.", required=True)
METRIC = COMMAND.string("metric", "bits_per_byte", "Which of the figures in metrics.jsonl.")
BY = COMMAND.enum("by", "steps", ["steps", "tokens", "seconds"], "The horizontal axis; tokens: those that cost loss.")
EVALUATION = COMMAND.string("evaluation", None, "What evaluate --compare --output wrote: adds the compressors.")
OUTPUT = COMMAND.output("output", "The picture. Default: METRIC.png in the first run's folder, if on disk.", "picture")


def main() -> None:
    from meliad_like.remote import is_remote
    from meliad_like.studies import pictures

    curves, first = pictures.read_runs(WORKDIR.value, METRIC.value, BY.value), WORKDIR.value[0]
    levels = pictures.read_levels(EVALUATION.value) if EVALUATION.value else {}
    name = f"{METRIC.value}.png"
    # The picture of a run in a bucket is written to the current folder.
    output = Path(OUTPUT.value or (name if is_remote(first) else Path(first) / name))
    pictures.draw(curves, levels, METRIC.value.replace("_", " "), output, BY.value)
    print(f"drew {output}")


if __name__ == "__main__":
    COMMAND.run(main)
