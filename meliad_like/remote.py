"""Paths that may lie in an object store (gs://...): which packages they need, what such a store can't do, whole files.

`etils.epath` reads and writes whole objects there. It can't add to one, map one into memory or lock one.
"""

import importlib.util
import os
import shutil
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import BinaryIO

from etils import epath
from fsspec.config import conf

from meliad_like.errors import UserError

# By scheme; what epath reads them with.
PACKAGES = {"gs": "gcsfs", "s3": "s3fs", "az": "adlfs", "hf": "huggingface_hub"}
CHUNK_BYTES = 1 << 24
# gcsfs would remember what a folder holds, and other processes write into it.
conf.setdefault("gcs", {})["use_listings_cache"] = False


def is_remote(path: epath.PathLike) -> bool:
    """Whether the path names an object store."""
    return "://" in os.fspath(path)


def any_path(path: epath.PathLike, schemes: Collection[str] = tuple(PACKAGES)) -> epath.Path:
    """A path that can be read: of this machine, with `~` replaced, or of an object store of one of these kinds.

    Raises:
      UserError: another kind of object store, or the package for it is missing.
    """
    if not is_remote(path):
        return epath.Path(path).expanduser()
    scheme = os.fspath(path).partition("://")[0]
    if scheme not in schemes:
        known = ", ".join(f"{name}://" for name in schemes)
        raise UserError(f"{os.fspath(path)} can't lie on {scheme}://, but on a disk of this machine or on {known}")
    if importlib.util.find_spec(PACKAGES[scheme]) is None:
        raise UserError(f"{os.fspath(path)} needs a package that is not installed: pip install {PACKAGES[scheme]}")
    return epath.Path(path)


def one_line(error: Exception) -> str:
    """The message of an error on one line; that of gcsfs has the whole answer of the server."""
    return " ".join(str(error).split())[:300]


def size_of(path: epath.Path) -> int:
    """Bytes of a file; 0 where there is none."""
    if not path.exists():
        return 0
    # epath asks the system for the owner's name as well, and fails in containers where the user has none.
    return path.stat().length if is_remote(path) else os.stat(path).st_size


@contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    """A file to write into, which takes the place of `path` at the end of the `with`.

    Whatever ends the process before, or fails, `path` is what it was.

    Args:
      path: on a disk.
    """
    part = Path(f"{os.fspath(path)}.part")
    try:
        with part.open("wb") as file:
            yield file
            file.flush()
            # Where the name reaches the disk before the content, a power cut would leave an empty file.
            os.fsync(file.fileno())
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def write_whole(path: epath.PathLike, content: str | bytes) -> None:
    """Writes a file of which, at any moment, either all is there or what was there before; text as UTF-8."""
    content = content.encode() if isinstance(content, str) else content
    if is_remote(path):
        # An object appears when all of it has come.
        epath.Path(path).write_bytes(content)
        return
    with replacing(path) as file:
        file.write(content)


def copy_file(source: epath.Path, target: epath.Path) -> None:
    """Copies the content, whichever of the two is remote."""
    with source.open("rb") as read, target.open("wb") as written:
        shutil.copyfileobj(read, written, CHUNK_BYTES)


def copy_folder(source: epath.Path, target: epath.Path) -> None:
    """Copies all files below a folder into another, which is made if needed."""
    target.mkdir(parents=True, exist_ok=True)
    for path in source.iterdir():
        if path.is_dir():
            copy_folder(path, target / path.name)
        else:
            copy_file(path, target / path.name)


@contextmanager
def local_files(folder: epath.PathLike) -> Iterator[Path]:
    """The folder itself, or a copy of its own files that lasts as long as the `with`, for what reads local files."""
    path = any_path(folder)
    if not is_remote(path):
        yield Path(path)
        return
    with TemporaryDirectory() as copy:
        for file in path.iterdir() if path.is_dir() else ():
            if not file.is_dir():
                copy_file(file, epath.Path(copy) / file.name)
        yield Path(copy)


@contextmanager
def written_locally(folder: epath.PathLike) -> Iterator[Path]:
    """A local folder to write into, whose files then lie in `folder`: that itself, or for a remote one a copy."""
    path = any_path(folder)
    path.mkdir(parents=True, exist_ok=True)
    if not is_remote(path):
        yield Path(path)
        return
    with TemporaryDirectory() as local:
        yield Path(local)
        copy_folder(epath.Path(local), path)
