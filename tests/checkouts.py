"""A checkout that is set up already, for tests that run the launch scripts."""

import shlex
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

# A program that Ctrl-C reaches also where the tests run in the background, which ignores it, and hands that down.
INTERRUPTIBLE = ["env", "--default-signal=INT"]
BASH = [*INTERRUPTIBLE, "bash"]

# What an installation of the package reads, in addition to its code.
PACKAGING = (
    "setup.py",
    "requirements.txt",
    "constraints.txt",
    "constraints-3.12.txt",
    "pyproject.toml",
    "MANIFEST.in",
    "README.md",
)

# In the place of .venv/bin/python: the interpreter of the tests.
REAL_PYTHON = f'#!/usr/bin/env bash\nexec {shlex.quote(sys.executable)} "$@"\n'


def make_checkout(folder: Path, python: str = REAL_PYTHON, extra: str = "base") -> Path:
    """A checkout, with a space in its name, with `extra` installed: `python` is the text of its interpreter."""
    checkout = folder / "a checkout"
    (checkout / ".venv" / "bin").mkdir(parents=True)
    for name in ("launch", "gin", "meliad_like", *PACKAGING):
        (checkout / name).symlink_to(ROOT / name)
    interpreter = checkout / ".venv" / "bin" / "python"
    interpreter.write_text(python)
    interpreter.chmod(0o755)
    installed = [str(checkout), (ROOT / "requirements.txt").read_text() + (ROOT / "setup.py").read_text()]
    (checkout / ".venv" / f"installed-{extra}").write_text("\n".join(installed))
    return checkout
