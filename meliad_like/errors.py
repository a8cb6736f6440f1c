"""The exception whose message is for the person at the command line, and those of disks, buckets and npz files."""

import errno
import sys
import zipfile
import zlib


class UserError(ValueError):
    """A mistake in the configuration, the data or the command line.

    The message is one line: it names the thing that is wrong and the way out. Entry points print it
    without a traceback and exit with status 2; any other exception is a defect and keeps its traceback.
    """


DAMAGED_NPZ = (ValueError, EOFError, NotImplementedError, zipfile.BadZipFile, zlib.error, AttributeError, TypeError)
"""Errors of numpy about a file that is no npz file, or a damaged one."""


def is_full_disk(error: BaseException) -> bool:
    """Whether the system raised an error because the disk, or a quota, is full."""
    return isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)


def bucket_errors() -> tuple[type[Exception], ...]:
    """Errors of gcsfs, other than OSErrors, after its last attempt."""
    if "gcsfs" not in sys.modules:
        return ()
    from aiohttp import ClientError
    from gcsfs.retry import ChecksumError, HttpError
    from google.auth.exceptions import GoogleAuthError

    return ChecksumError, ClientError, GoogleAuthError, HttpError


def refusals() -> tuple[type[Exception], ...]:
    """Errors of disks and buckets, for `except`, which evaluates this only when something was raised."""
    return OSError, *bucket_errors()
