"""Paths that may be in an object store (gs://...): the packages that they need, and reading and writing of files.

`etils.epath` can't append to an object, map it into memory or lock it. The packages repeat a request that fails.
"""

import importlib.util
import logging
import os
import shutil
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, BinaryIO, Literal, NamedTuple, TypeAlias

from etils import epath
from fsspec.config import conf
from fsspec.core import url_to_fs

from meliad_like.errors import UserError, one_line, refusals

# The package that epath needs for each scheme.
PACKAGES = {"gs": "gcsfs", "s3": "s3fs", "az": "adlfs", "hf": "huggingface_hub"}
# It logs a traceback of each error that it raises.
logging.getLogger("gcsfs").setLevel(logging.CRITICAL)
CHUNK_BYTES = 1 << 24
AnyPath: TypeAlias = Path | epath.Path
"""`pathlib`'s path on a disk, `epath`'s in an object store."""
Output = Literal["file", "picture", "folder", "any"]
"""The kind of path to which results are written."""


def is_remote(path: epath.PathLike) -> bool:
    """Whether the path names an object store."""
    return "://" in os.fspath(path)


def any_path(path: epath.PathLike, schemes: Collection[str] = tuple(PACKAGES)) -> epath.Path:
    """A path that can be read: a local one, with `~` expanded, or one of an object store with a supported scheme.

    Raises a UserError if the scheme is not supported, or if its package is not installed. From the first path in a
    bucket on, the contents of its folders are not cached in this process, because other processes write into them.
    """
    if not is_remote(path):
        return epath.Path(path).expanduser()
    scheme = os.fspath(path).partition("://")[0]
    if scheme not in schemes:
        known = " or ".join(["a local path", *(f"{name}://" for name in schemes)])
        raise UserError(f"{os.fspath(path)}: {scheme}:// is not supported here: use {known}")
    if importlib.util.find_spec(PACKAGES[scheme]) is None:
        raise UserError(f"{os.fspath(path)} needs a package that is not installed: pip install {PACKAGES[scheme]}")
    if scheme != "hf":
        conf.setdefault(scheme, {})["use_listings_cache"] = False
    return epath.Path(path)


def absolute(path: epath.PathLike) -> AnyPath:
    """The same as a path that other folders and machines can use."""
    return any_path(path) if is_remote(path) else Path(path).expanduser().absolute()


class Version(NamedTuple):
    """The properties of a file that change when its content changes."""

    size: int
    """In bytes."""
    tag: int | str
    """The time of its last change in nanoseconds; in an object store, what the store gives to each content."""
    sha256: str = ""
    """SHA-256 of the content, where the object store knows it."""


def version(path: epath.PathLike) -> Version:
    """The version of a file. Raises one of `refusals` if it can't be read."""
    if is_remote(path):
        system, place = url_to_fs(os.fspath(path))
        return _version(system.info(place))
    status = os.stat(path)
    return Version(status.st_size, status.st_mtime_ns)


def versions_below(folder: epath.Path) -> dict[str, Version]:
    """The files at any depth in a folder of an object store, by their paths below it."""
    system, place = url_to_fs(os.fspath(folder))
    found = system.find(place, detail=True)
    # A bucket may have objects for folders.
    files = {path: info for path, info in found.items() if info["type"] == "file" and path[-1] != "/"}
    return {path[len(place) :].strip("/"): _version(info) for path, info in files.items()}


def _version(info: dict[str, Any]) -> Version:
    # Of s3://, az://, hf:// and gs://.
    tag = next((str(info[name]) for name in ("ETag", "etag", "blob_id", "generation") if name in info), "")
    return Version(info["size"], tag, (info.get("lfs") or {}).get("sha256", ""))


def read_whole(path: AnyPath) -> bytes:
    """The content of a file, in an object store with one request: a file that is opened needs several."""
    if isinstance(path, Path):
        return path.read_bytes()
    system, place = url_to_fs(os.fspath(path))
    return system.cat_file(place)


def size_of(path: epath.Path) -> int:
    """The size of a file in bytes; 0 if it does not exist."""
    return version(path).size if path.exists() else 0


@contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    """A temporary file for writing, which replaces `path` (on a disk) at the end of the `with` statement.

    If anything fails or the process ends before, `path` is unchanged. Its folder is created if needed.
    """
    part = Path(f"{os.fspath(path)}.part")
    part.parent.mkdir(parents=True, exist_ok=True)
    try:
        with part.open("wb") as file:
            yield file
            file.flush()
            # Otherwise the rename could reach the disk before the content, and a power cut would leave an empty file.
            os.fsync(file.fileno())
        part.replace(path)
        flush(part.parent)
    finally:
        part.unlink(missing_ok=True)


def flush(path: str | os.PathLike[str]) -> None:
    """Waits until a file, or the entries of a folder, are on the disk, where a power cut can't change them."""
    number = os.open(path, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)


def flush_all(folder: str | os.PathLike[str]) -> None:
    """Waits until all files and folders below a folder on a disk, the folder, and its place in its parent are there."""
    for place, _, names in os.walk(folder, topdown=False):
        for name in names:
            flush(os.path.join(place, name))
        flush(place)
    flush(Path(folder).parent)


def check_output(path: epath.PathLike, flag: str, kind: Output = "file") -> None:
    """Checks before the work that its results can be written to the path given as `flag`."""
    place = Path(path).absolute()
    if kind == "picture":
        # Takes part of a second to import, which other commands don't need.
        from matplotlib.backend_bases import FigureCanvasBase

        formats = FigureCanvasBase.get_supported_filetypes()
        if place.suffix.lower().removeprefix(".") not in formats:
            raise UserError(f"--{flag}={path} must end with one of .{', .'.join(sorted(formats))}")
    if is_remote(path):
        return
    if kind in ("file", "picture") and place.is_dir():
        raise UserError(f"--{flag}={path} is a folder: name a file in it")
    if kind == "folder" and place.exists() and not place.is_dir():
        raise UserError(f"--{flag}={path} is a file: name a folder")
    folder = place if place.is_dir() else next(parent for parent in place.parents if parent.exists())
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        raise UserError(f"cannot write --{flag}={path}: {folder} is not a folder that can be written to")


def write_whole(path: epath.PathLike, content: str | bytes) -> None:
    """Writes a file atomically: a reader sees either the old or the complete new content. Text is written as UTF-8."""
    content = content.encode() if isinstance(content, str) else content
    if is_remote(path):
        # An object appears only when its upload is complete.
        epath.Path(path).write_bytes(content)
        return
    with replacing(path) as file:
        file.write(content)


def copy_folder(source: epath.Path, target: epath.Path, last: str = "", *, deep: bool = True) -> None:
    """Copies all files below a folder into another one, which is created if needed; each of the two may be remote.

    The file named `last` in the folder is copied after all others. Without `deep` no folders are copied.
    """
    target.mkdir(parents=True, exist_ok=True)
    for path in sorted(source.iterdir(), key=lambda path: path.name == last):
        if path.is_dir():
            if deep:
                copy_folder(path, target / path.name)
            continue
        with path.open("rb") as read, (target / path.name).open("wb") as written:
            shutil.copyfileobj(read, written, CHUNK_BYTES)


def from_hub(path: epath.PathLike, patterns: Iterable[str]) -> epath.PathLike:
    """The folder in the Hub's own cache with the files that match the patterns of hf://ORG/NAME or
    hf://ORG/NAME@REVISION, of which those that are not there are downloaded; another path is returned unchanged."""
    if not os.fspath(path).startswith("hf://"):
        return path
    # Importing it takes half a second.
    from huggingface_hub import snapshot_download

    name, _, revision = os.fspath(any_path(path)).removeprefix("hf://").partition("@")
    try:
        return snapshot_download(name, revision=revision or None, allow_patterns=list(patterns))
    # ValueError: the name is not that of a repository.
    except (*refusals(), ValueError) as error:
        raise UserError(f"the model {os.fspath(path)} can't be downloaded: {one_line(error)}") from None


@contextmanager
def local_files(folder: epath.PathLike) -> Iterator[Path]:
    """A local folder with the files: the folder itself, or a temporary copy of a remote one without its folders."""
    path = any_path(folder)
    if not is_remote(path):
        yield Path(path)
        return
    with TemporaryDirectory() as copy:
        if path.is_dir():
            copy_folder(path, epath.Path(copy), deep=False)
        yield Path(copy)


@contextmanager
def written_locally(folder: epath.PathLike) -> Iterator[Path]:
    """A local folder for writing: `folder` itself, or a temporary one that is then copied to a remote `folder`."""
    path = any_path(folder)
    path.mkdir(parents=True, exist_ok=True)
    if not is_remote(path):
        yield Path(path)
        return
    with TemporaryDirectory() as local:
        yield Path(local)
        copy_folder(epath.Path(local), path)
