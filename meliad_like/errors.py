"""The exception whose message is for the user, and groups of exceptions of disks, buckets and npz files."""

import errno
import re
import shlex
import sys
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager


class UserError(ValueError):
    """A mistake in the configuration, the data or the command line.

    The message is one line, which names the problem and its solution. Entry points print it
    without a traceback and exit with status 2; any other exception is a defect and keeps its traceback.
    """


class StoreError(UserError):
    """A token store that has to be made; the message ends with the command that makes it."""

    def __init__(self, folder: str, problem: str, flags: str = ""):
        """`flags`: the flags of the command that describe the store's documents and vocabulary."""
        self.folder, self.problem = folder, problem
        super().__init__(f"{problem} with python -m meliad_like.prepare{flags} --store={shlex.quote(folder)}")


DAMAGED_NPZ = (ValueError, EOFError, NotImplementedError, zipfile.BadZipFile, zlib.error, AttributeError, TypeError)
"""numpy's errors for a file that is damaged or not an npz file."""


def is_full_disk(error: BaseException) -> bool:
    """Whether the cause of an error is a full disk or quota."""
    return isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)


def out_of_memory(error: RuntimeError) -> str | None:
    """A message if the cause of a jax error is that a device's memory is full, otherwise None."""
    match = re.search(r"RESOURCE_EXHAUSTED: (.{,150})", str(error))
    return match and (
        f"the device's memory is full ({match[1]}): raise TrainingConfig.gradient_accumulation, lower "
        "ReaderConfig.tokens_per_step or ReaderConfig.segment_length, or bind ModelConfig.remat = 'layers'; "
        "python -m meliad_like.plan finds settings that fit"
    )


@contextmanager
def reading(path: object, what: str, *damaged: type[Exception]) -> Iterator[None]:
    """Turns errors while a file is read into UserErrors; errors of the types `damaged` say that it is not a `what`."""
    try:
        yield
    except UserError:
        raise
    except refusals() as error:
        raise UserError(f"cannot read {path}: {getattr(error, 'strerror', None) or one_line(error)}") from None
    except damaged as error:
        raise UserError(f"{path} is damaged, or no {what}: {one_line(error)[:150]}") from None


def one_line(error: Exception) -> str:
    """The message of an error on one line; gcsfs's messages contain the whole response of the server."""
    return " ".join(str(error).split())[:300]


BUCKET_ERRORS = {
    "aiohttp": ("ClientError",),
    "azure.core.exceptions": ("AzureError",),
    "botocore.exceptions": ("BotoCoreError", "ClientError"),
    "gcsfs.retry": ("ChecksumError", "HttpError"),
    "google.auth.exceptions": ("GoogleAuthError",),
    "httpx": ("HTTPError",),
}
"""The names of errors by module."""


def bucket_errors() -> tuple[type[Exception], ...]:
    """Errors that the packages for object stores raise after their last retry, other than OSErrors."""
    loaded = [(sys.modules[name], errors) for name, errors in BUCKET_ERRORS.items() if name in sys.modules]
    return tuple(getattr(module, error) for module, errors in loaded for error in errors)


def refusals() -> tuple[type[Exception], ...]:
    """Errors of disks and buckets, for an `except` clause, which calls this only after an exception."""
    return OSError, *bucket_errors()
