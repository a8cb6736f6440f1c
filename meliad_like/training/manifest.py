"""A list of a checkpoint's files with sizes and checksums, which reveals truncated and damaged files."""

import json
import zlib
from collections.abc import Iterator

from etils import epath

from meliad_like.saved_json import read_json

MANIFEST = "manifest.json"
# orbax writes the time of the commit into the second file afterwards; it is not needed for restoring.
UNLISTED = (MANIFEST, "_CHECKPOINT_METADATA")
CHUNK_BYTES = 1 << 22


def write_manifest(folder: epath.Path) -> None:
    """Writes the manifest of all files that are under `folder` now."""
    files = {str(path.relative_to(folder)): _size_and_checksum(path) for path in _files(folder)}
    (folder / MANIFEST).write_text(json.dumps({"files": files}))


def find_damage(folder: epath.Path) -> str | None:
    """Describes the first damaged file under `folder`; None: all files are unchanged."""
    try:
        files = read_json(folder / MANIFEST)["files"]
        entries = [(name, size, checksum) for name, (size, checksum) in files.items()]
    except FileNotFoundError:
        return f"{MANIFEST} is missing"
    except (ValueError, KeyError, TypeError, AttributeError):
        return f"{MANIFEST} is damaged"
    for name, size, checksum in entries:
        try:
            actual_size, actual_checksum = _size_and_checksum(folder / name)
        except (FileNotFoundError, IsADirectoryError, NotADirectoryError):
            return f"{name} is missing"
        if actual_size != size:
            return f"{name} has {actual_size} bytes instead of {size}"
        if actual_checksum != checksum:
            return f"the content of {name} has changed"
    return None


def _files(folder: epath.Path) -> Iterator[epath.Path]:
    # epath's own `walk` and `rglob` don't work on gs://.
    for path in folder.iterdir():
        if path.is_dir():
            yield from _files(path)
        elif path.name not in UNLISTED:
            yield path


def _size_and_checksum(path: epath.Path) -> tuple[int, int]:
    size = checksum = 0
    with path.open("rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            size += len(chunk)
            checksum = zlib.crc32(chunk, checksum)
    return size, checksum
