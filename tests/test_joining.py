"""The processes of a run connect, or end."""

import socket

import forked
import pytest

from meliad_like.errors import UserError
from meliad_like.training.processes import initialize_distributed

ALONE = """
from meliad_like.training.processes import initialize_distributed
initialize_distributed({address!r}, 2, {process}, timeout_seconds=1)
"""


@pytest.fixture
def address():
    with socket.create_server(("localhost", 0)) as server:
        return f"localhost:{server.getsockname()[1]}"


@pytest.mark.parametrize("process", [0, 1])
def test_one_that_waits_in_vain_says_for_whom_and_ends(address, process):
    program = ALONE.format(address=address, process=process)
    ended = forked.run("-c", program)
    assert ended.returncode != 0
    assert f"process {process} of 2: waiting up to 1 s for all processes at {address}" in ended.stderr
    assert "DEADLINE_EXCEEDED" in ended.stderr


def test_an_address_where_process_0_can_not_listen(address):
    with socket.create_server(("", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(UserError, match=f"process 0 can't listen at port {port}"):
            initialize_distributed(f"localhost:{port}", 2, 0)
    with pytest.raises(UserError, match="coordinator_address=localhost must be host:port"):
        initialize_distributed("localhost", 2, 0)


def test_all_three_or_a_cluster():
    with pytest.raises(UserError, match="num_processes=2 and process_id=None must be given together"):
        initialize_distributed("localhost:1", 2)
    # In a process of its own: jax refuses where a test before has computed anything.
    program = "from meliad_like.training.processes import initialize_distributed\ninitialize_distributed()"
    done = forked.run("-c", program)
    assert "UserError: this machine is not part of a cluster that jax detects" in done.stderr
