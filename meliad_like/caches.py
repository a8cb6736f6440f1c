"""Files in the user's cache directory: `meliad_like` in `$XDG_CACHE_HOME`, by default in `~/.cache`."""

import contextlib
import hashlib
import os
import platform
import sys
from pathlib import Path

MOST_BYTES = 2 << 30
"""The size to which the folder of compiled programs is cut at the start of a program. JAX's own limit is not used: it
needs a lock at every access, fails for users without a name, and for good after a process was killed as it wrote."""
MIN_SECONDS = 0.1
"""Programs that compile in less time are not kept: there are hundreds, and reading one takes about as long."""


def cache_folder(name: str) -> Path:
    """A folder in the user's cache directory, which need not exist yet."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "meliad_like" / name


def keep_compiled_programs() -> None:
    """Lets JAX keep compiled programs for later processes, unless the environment or the program has chosen otherwise.

    `JAX_COMPILATION_CACHE_DIR=DIR` chooses another folder, an empty one or `JAX_ENABLE_COMPILATION_CACHE=false` none.
    """
    config = sys.modules["jax"].config if "jax" in sys.modules else None
    if "JAX_COMPILATION_CACHE_DIR" in os.environ or (config and config.jax_compilation_cache_dir is not None):
        return
    # RuntimeError: there is no home.
    with contextlib.suppress(OSError, RuntimeError):
        folder = cache_folder("compiled") / _processor()
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK):
            return
        if config is None:
            os.environ["JAX_COMPILATION_CACHE_DIR"] = str(folder)
            os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", str(MIN_SECONDS))
        else:
            config.update("jax_compilation_cache_dir", str(folder))
            if config.jax_persistent_cache_min_compile_time_secs == 1:  # JAX's default
                config.update("jax_persistent_cache_min_compile_time_secs", MIN_SECONDS)
        _remove_oldest(folder)


def _processor() -> str:
    """A name for the instructions of this machine's processor, without which a program for another one may crash."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    features = {line for line in lines if line.startswith(("flags", "Features"))}
    return hashlib.sha256(repr((platform.machine(), sorted(features))).encode()).hexdigest()[:12]


def _remove_oldest(folder: Path) -> None:
    """Removes the programs that were not used for longest, so that the others have at most `MOST_BYTES` together."""
    programs = [(path, path.stat()) for path in folder.glob("*-cache")]
    size = 0
    for path, stat in sorted(programs, key=lambda program: max(program[1].st_atime, program[1].st_mtime), reverse=True):
        size += stat.st_size
        if size > MOST_BYTES:
            path.unlink(missing_ok=True)
