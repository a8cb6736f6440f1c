"""One training at a time in a working folder; the error names the owner."""

import errno
import fcntl
import os
import re
import subprocess
import sys
import textwrap

import pytest

from meliad_like.errors import UserError
from meliad_like.training.processes import LOCK_NAME, Ownership

# Takes the folder, says so, and waits to be killed.
OWNER = """
import sys, time
from meliad_like.training.processes import Ownership
with Ownership(sys.argv[1]):
    print("taken", flush=True)
    time.sleep(600)
"""


def test_the_second_is_refused_with_the_name_of_the_first(tmp_path):
    with Ownership(tmp_path) as first:
        message = (
            rf"another training is writing to {tmp_path}: process {os.getpid()} on \S+, since 2\S+; end that one, or"
        )
        with pytest.raises(UserError, match=message), Ownership(tmp_path):
            pass
        first.check()
    with Ownership(tmp_path) as next_one:
        next_one.check()


def test_a_killed_training_leaves_the_folder_free(tmp_path):
    command = [sys.executable, "-c", textwrap.dedent(OWNER), str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout.readline() == "taken\n"
        with pytest.raises(UserError, match=f"process {owner.pid} on"), Ownership(tmp_path):
            pass
        owner.kill()
    with Ownership(tmp_path) as ours:
        ours.check()


def test_where_nothing_can_be_locked_the_later_one_wins(tmp_path, monkeypatch):
    def no_locks(*_):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", no_locks)
    with Ownership(tmp_path) as first:
        first.check()
        with Ownership(tmp_path):
            message = (
                rf"another training has taken {tmp_path}: process \d+ on .*; this one ends, and saves nothing more"
            )
            with pytest.raises(UserError, match=message):
                first.check()
    with Ownership(tmp_path) as first:
        (tmp_path / LOCK_NAME).unlink()
        with pytest.raises(UserError, match=re.escape(".lock has been deleted")):
            first.check()


def test_a_folder_that_cannot_be_written_to(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=f"{tmp_path}/file can't be written to: "), Ownership(tmp_path / "file"):
        pass
