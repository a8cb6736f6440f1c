"""Local copies of token stores that are in object stores."""

import os
import sys
from pathlib import Path

from etils import epath

from meliad_like.errors import UserError, refusals
from meliad_like.remote import copy_folder, is_remote, one_line, size_of
from meliad_like.resumable import locked, whole_folder


def cache_folder() -> Path:
    """The folder of the copies: `meliad_like/stores` in `$XDG_CACHE_HOME`, by default in `~/.cache`."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "meliad_like" / "stores"


def local_split(store: epath.Path, fingerprint: str, split: str, num_bytes: int) -> epath.Path:
    """The folder of a split on a local disk: in the store itself, or a copy of it, made once for all processes.

    Args:
      fingerprint: fingerprint of the store; a store that was prepared again gets its own copy.
      num_bytes: size of the split's tokens.

    Raises:
      UserError: there is no room for the copy, it does not have this size, or the object store refuses.
    """
    if not is_remote(store):
        return store / split
    copy = cache_folder() / fingerprint / split
    # All processes of this machine arrive at the same time; one of them makes the copy.
    with locked(copy.parent / f".{split}.lock"):
        if not copy.exists():
            _copy(store / split, copy)
        tokens = epath.Path(copy / "tokens.bin")
        if size_of(tokens) != num_bytes:
            raise UserError(f"{tokens}, a copy, has {size_of(tokens)} bytes and should have {num_bytes}: delete {copy}")
    return epath.Path(copy)


def _copy(source: epath.Path, target: Path) -> None:
    print(f"copying {source} to {target}", file=sys.stderr)
    try:
        with whole_folder(target) as incomplete:
            copy_folder(source, epath.Path(incomplete))
    except refusals() as error:
        raise UserError(
            f"{source} can't be copied to {target.parent}: {one_line(error)}; the same command tries it again"
        ) from error
