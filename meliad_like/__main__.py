"""All commands in one: `meliad_like train --help` is the same as `python -m meliad_like.train --help`."""

import difflib
import runpy
import sys
from pathlib import Path

from meliad_like import __version__
from meliad_like.command_line import HELP, closed_pipes

COMMANDS = (
    *("prepare", "train", "evaluate", "generate", "plot", "convert", "describe", "plan"),
    *("experiments", "studies", "harness", "history"),
)
"""The commands: modules of the package, each imported only when it is called."""


def usage() -> str:
    """The text of `meliad_like --help`, with the first line of each command's documentation."""
    folder, lines = Path(__file__).parent, []
    for name in COMMANDS:
        path = folder / name / "__main__.py" if (folder / name).is_dir() else folder / f"{name}.py"
        what, *_ = path.read_text().removeprefix('"""').splitlines()
        lines.append(f"  {name:<12} {what}\n")
    end = "--help after a command shows its flags, with an example."
    return f"meliad_like COMMAND --flag=value ...\n\n{''.join(lines)}\n{end}"


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
    # An import of the modules `train` and others would hide the package's functions of these names.
    runpy.run_module(f"meliad_like.{name}", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
