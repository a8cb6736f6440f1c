"""Turns checkpoints of other code into ours and back.

python -m meliad_like.convert meliad --input=FILE_OR_FOLDER --output=DIR --gin_file=... [--gin_file=...]
python -m meliad_like.convert meliad --reverse --input=DIR --output=FILE.npz

The gin files describe the model as it was trained; the reference does not mask the empty cache at a document's start:
--gin_file=option/unmasked_empty_cache.gin.
"""

from absl import flags

from meliad_like import command_line
from meliad_like.errors import UserError

INPUT = flags.DEFINE_string(
    "input", None, "npz file or orbax folder; with --reverse, our checkpoint folder.", required=True
)
OUTPUT = flags.DEFINE_string("output", None, "Our checkpoint folder; with --reverse, an npz file.", required=True)
REVERSE = flags.DEFINE_bool("reverse", False, "From ours to theirs.")


def main(subject: str) -> None:
    if REVERSE.value:
        if command_line.GIN_FILE.value or command_line.GIN_PARAM.value:
            raise UserError("--gin_file and --gin_param have no effect with --reverse: the checkpoint has its config")
        from meliad_like.conversion.checkpoint import convert_to_meliad

        convert_to_meliad(INPUT.value, OUTPUT.value)
    else:
        run = command_line.read_config()
        from meliad_like.conversion.checkpoint import convert_from_meliad

        convert_from_meliad(INPUT.value, run, OUTPUT.value)
    print(f"{subject}: {INPUT.value} -> {OUTPUT.value}")


if __name__ == "__main__":
    command_line.run(main, subjects=("meliad",))
