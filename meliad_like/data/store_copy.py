"""Token stores in object stores are read through a copy on this machine's disk."""

import errno
import fcntl
import os
import shutil
import sys
from pathlib import Path

from etils import epath

from meliad_like.errors import UserError, refusals
from meliad_like.remote import copy_folder, is_remote, one_line, size_of


def cache_folder() -> Path:
    """Where copies lie: `meliad_like/stores` in `$XDG_CACHE_HOME`, or else in `~/.cache`."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "meliad_like" / "stores"


def local_split(store: epath.Path, fingerprint: str, split: str, num_bytes: int) -> epath.Path:
    """The folder of a split on a local disk: in the store itself, or a copy of it, made once for all processes.

    Args:
      fingerprint: of the store; a store that was made anew gets a copy of its own.
      num_bytes: size of the split's tokens.

    Raises:
      UserError: there is no room for the copy, it does not have this size, or the object store refuses.
    """
    if not is_remote(store):
        return store / split
    copy = cache_folder() / fingerprint / split
    copy.parent.mkdir(parents=True, exist_ok=True)
    with (copy.parent / f".{split}.lock").open("w") as lock:
        # The processes of this machine come at the same time, and one of them copies.
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not copy.exists():
            _copy(store / split, copy)
        tokens = epath.Path(copy / "tokens.bin")
        if size_of(tokens) != num_bytes:
            raise UserError(f"{tokens}, a copy, has {size_of(tokens)} bytes and should have {num_bytes}: delete {copy}")
    return epath.Path(copy)


def _copy(source: epath.Path, target: Path) -> None:
    print(f"copying {source} to {target}", file=sys.stderr)
    incomplete = target.with_name(f"{target.name}.incomplete")
    shutil.rmtree(incomplete, ignore_errors=True)  # of a process that was killed
    try:
        copy_folder(source, epath.Path(incomplete))
    except refusals() as error:
        shutil.rmtree(incomplete, ignore_errors=True)
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise UserError(
                f"the disk is full: no room for a copy of {source} in {target.parent}; XDG_CACHE_HOME chooses another "
                "place"
            ) from None
        raise UserError(
            f"{source} can't be copied to {target.parent}: {one_line(error)}; the same command tries it again"
        ) from error
    incomplete.rename(target)
