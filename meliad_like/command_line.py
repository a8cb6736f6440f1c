"""The flags that entry points share, and the report of mistakes on the command line."""

import errno
import os
import shlex
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from absl import app, flags, logging

from meliad_like.errors import MissingStoreError, UserError, bucket_errors, is_full_disk, out_of_memory

if TYPE_CHECKING:
    from meliad_like.config import RunConfig

GIN_FILE = flags.DEFINE_multi_string(
    "gin_file", [], "A gin file, by path or as named under gin/ (size/tiny.gin). Repeatable, in any order."
)
GIN_PARAM = flags.DEFINE_multi_string(
    "gin_param", [], "One binding on top of the files, such as DecoderConfig.num_layers=3. Repeatable; the last wins."
)

REFUSED = (errno.EACCES, errno.EEXIST, errno.EISDIR, errno.ENAMETOOLONG, errno.ENOTDIR, errno.EPERM, errno.EROFS)
"""Errors of the operating system about a path from the user. Commands check for missing files themselves."""

PATHS = ("workdir", "checkpoint", "folder", "input", "load_dir", "output", "store")
"""Flags of any command that name a file or folder. An empty path would be the current folder."""

INTERRUPTED = 128 + signal.SIGINT
"""The exit status in a shell of a program that SIGINT (Ctrl-C) has ended."""


def read_config() -> "RunConfig":
    """The run described by `--gin_file` and `--gin_param`."""
    # Imported here, because the configs import jax, which takes seconds; mistyped flags are reported earlier.
    from meliad_like import config

    return config.parse(GIN_FILE.value, GIN_PARAM.value)


def refuse_unused(subject: str, used_by: Mapping[str, Sequence[str]]) -> None:
    """Refuses the flags that have no effect on the subject of a command; `used_by` names the subjects of each flag."""
    for name, subjects in used_by.items():
        if flags.FLAGS[name].present and subject not in subjects:
            raise UserError(f"--{name} has no effect on {subject}: it is for {' and '.join(subjects)}")


def run(main: Callable[..., int | None], *, subjects: Sequence[str] = ()) -> None:
    """Parses the flags and exits with what `main` returns; a UserError is one line on stderr and exit status 2.

    With `subjects`, the first argument of the command must be one of these words and is passed to `main`.
    """

    def report(argv: list[str]) -> int | None:
        words, others = argv[1 : 1 + bool(subjects)], argv[1 + bool(subjects) :]
        try:
            if others:
                raise UserError(f"unexpected argument {others[0]!r}; flags are written --name=value")
            if empty := [name for name in PATHS if name in flags.FLAGS and flags.FLAGS[name].value in ("", [""])]:
                raise UserError(f"--{empty[0]}= is empty: is the variable set that it should hold?")
            if subjects and (not words or words[0] not in subjects):
                given = f"not {words[0]!r}" if words else "which is missing"
                raise UserError(f"the first argument must be {' or '.join(subjects)}, {given}")
            return main(*words)
        except MissingStoreError as error:
            used = [f"--gin_file={name}" for name in GIN_FILE.value] + [f"--gin_param={x}" for x in GIN_PARAM.value]
            return _fail(MissingStoreError(error.folder, "".join(f" {shlex.quote(flag)}" for flag in used)))
        except UserError as error:
            return _fail(error)
        except OSError as error:
            if is_full_disk(error):
                return _fail(f"the disk is full: {error.filename or 'a file'} could not be written; free some space")
            if error.errno in REFUSED and error.filename is not None:
                return _fail(f"{error.filename}: {os.strerror(error.errno)}; name another path")
            raise
        except bucket_errors() as error:
            message = " ".join(str(error).split())
            return _fail(f"the object store failed: {message}; the same command tries again")
        except KeyboardInterrupt:
            print("interrupted", file=sys.stderr)
            sys.stdout.flush()
            sys.stderr.flush()
            # The interpreter's own clean-up crashes, with the report of a segmentation fault, while jax has work left.
            os._exit(INTERRUPTED)
        except RuntimeError as error:
            if (message := out_of_memory(error)) is None:
                raise
            return _fail(message)

    app.run(report, flags_parser=_parse_flags)


def _parse_flags(argv: list[str]) -> list[str]:
    try:
        words = flags.FLAGS(argv)
    except flags.Error as error:
        sys.exit(_fail(error))
    # jax logs every accelerator that it does not find; --verbosity=0 shows that, and warnings always show. Set here
    # because absl has INFO as the default of every program.
    if flags.FLAGS["verbosity"].using_default_value:
        flags.FLAGS.verbosity = logging.WARNING
    return words


def _fail(error: Exception | str) -> int:
    print(f"error: {error}", file=sys.stderr)
    return 2
