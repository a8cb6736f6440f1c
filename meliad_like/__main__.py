"""All commands in one: `meliad_like train --help` is the same as `python -m meliad_like.train --help`."""

import difflib
import runpy
import sys

from meliad_like import __version__
from meliad_like.command_line import HELP, closed_pipes

COMMANDS = {
    "prepare": "turns documents into a token store",
    "train": "trains a model, or resumes its training",
    "evaluate": "evaluates held-out documents",
    "generate": "continues a prompt",
    "plot": "draws the metrics of runs",
    "convert": "converts checkpoints of other programs, and back",
    "configs": "lists the gin files and what they do",
    "describe": "shows a run's config, parameters, memory and cost before it is trained",
    "smoke": "tries a run in a minute: small, killed, resumed, evaluated",
    "plan": "plans memory and time on a TPU slice, without one",
    "experiments": "makes the papers' tables",
    "studies": "compares models token by token, in pages",
    "harness": "the tasks of the lm-evaluation-harness",
    "history": "ancient history: spans of the distant past in a window",
}
"""The commands: modules of the package, each imported only when it is called, with what it does."""


def usage() -> str:
    """The text of `meliad_like --help`."""
    commands = "".join(f"  {name:<12} {what}\n" for name, what in COMMANDS.items())
    return (
        f"meliad_like COMMAND --flag=value ...\n\n{commands}\n--help after a command shows its flags, with an example."
    )


def main() -> None:
    name, *words = sys.argv[1:] or HELP[:1]
    if name in HELP or name == "--version":
        with closed_pipes():
            print(usage() if name in HELP else __version__)
        return
    if name not in COMMANDS:
        (nearest,) = difflib.get_close_matches(name, COMMANDS, n=1, cutoff=0)
        print(f"error: meliad_like has no command {name!r} (nearest: {nearest}); --help lists them", file=sys.stderr)
        sys.exit(2)
    sys.argv[1:] = words
    # Not imported: as modules `train` and others would hide the package's functions of these names.
    runpy.run_module(f"meliad_like.{name}", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
