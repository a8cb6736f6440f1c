"""The exception whose message is for the person at the command line, and those of disks, buckets and npz files."""

import sys
import zipfile
import zlib


class UserError(ValueError):
    """A mistake in the configuration, the data or the command line.

    The message is one line: it names the thing that is wrong and the way out. Entry points print it
    without a traceback and exit with status 2; any other exception is a defect and keeps its traceback.
    """


DAMAGED_NPZ = (ValueError, EOFError, NotImplementedError, zipfile.BadZipFile, zlib.error, AttributeError, TypeError)
"""What numpy raises of an npz file that is none, empty, or damaged in what the archive says of itself or holds."""


def bucket_errors() -> tuple[type[Exception], ...]:
    """What gcsfs raises, beside OSErrors, when it has asked a bucket again and again."""
    if "gcsfs" not in sys.modules:
        return ()
    from aiohttp import ClientError
    from gcsfs.retry import ChecksumError, HttpError
    from google.auth.exceptions import GoogleAuthError

    return ChecksumError, ClientError, GoogleAuthError, HttpError


def refusals() -> tuple[type[Exception], ...]:
    """What disks and buckets raise where they refuse; for `except`, which asks when something has been raised."""
    return OSError, *bucket_errors()
