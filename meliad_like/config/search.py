"""Where gin files are looked for."""

import difflib
from pathlib import Path

from etils import epath

from meliad_like.errors import UserError

BASE = "base.gin"
_PACKAGE = Path(__file__).parent.parent


def gin_root() -> epath.Path:
    """The folder of the shipped gin files: `gin/` of the checkout, or its copy inside an installed package."""
    for folder in (_PACKAGE.parent / "gin", _PACKAGE / "gin_files"):
        if (folder / BASE).is_file():
            return epath.Path(folder)
    raise UserError(f"no {BASE} beside {_PACKAGE}: the installation of meliad_like lacks its gin files")


def shipped_files() -> list[str]:
    """Names of all shipped gin files, as `--gin_file` takes them."""
    root = Path(gin_root())
    return sorted(path.relative_to(root).as_posix() for path in root.rglob("*.gin"))


def find(name: str) -> epath.Path:
    """The gin file called `name`: as given (absolute, or from the current folder), else among the shipped ones.

    Raises:
      UserError: there is none; names the nearest one.
    """
    for path in (epath.Path(name), gin_root() / name):
        if path.is_file():
            return path
    here = [path.as_posix() for path in Path().glob("*.gin")]
    raise UserError(f"no gin file {name!r}{nearest(name, shipped_files() + here)}")


def nearest(name: str, candidates: list[str]) -> str:
    """` (nearest: ...)` to close a message about an unknown name."""
    # Folder and suffix are alike for all gin files, so they would drown the difference between the names themselves.
    match = difflib.get_close_matches(name, candidates, n=1, cutoff=0)
    by_stem = [candidate for candidate in candidates if Path(candidate).stem == Path(name).stem]
    return f" (nearest: {(by_stem or match)[0]})" if by_stem or match else ""
