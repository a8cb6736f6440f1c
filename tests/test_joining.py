"""How processes find each other: those that don't come are named, in every one that did, and so is one that dies."""

import re
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest

from meliad_like.errors import UserError
from meliad_like.training import joining
from meliad_like.training.joining import call_the_roll, initialize_distributed


@pytest.fixture
def address():
    with socket.create_server(("localhost", 0)) as server:
        return f"localhost:{server.getsockname()[1]}"


@pytest.fixture(autouse=True)
def _short_grace(monkeypatch):
    monkeypatch.setattr(joining, "GRACE", 1.0)


def call(address, processes, num_processes, timeout_seconds):
    """What each of these processes was told: None, or the error."""
    told = {}

    def one(process_id):
        told[process_id] = None
        try:
            call_the_roll(address, num_processes, process_id, timeout_seconds)
        except UserError as error:
            told[process_id] = str(error)

    threads = [threading.Thread(target=one, args=(process_id,)) for process_id in processes]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return told


def test_all_come_in_any_order(address):
    assert call(address, [2, 1, 0, 3], 4, 60) == dict.fromkeys(range(4))


def test_the_port_is_free_for_jax_while_they_stay_connected(address):
    places = [(process_id, []) for process_id in range(2)]
    threads = [
        threading.Thread(target=lambda n=n, here=here: here.append(call_the_roll(address, 2, n, 60)))
        for n, here in places
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    with socket.create_server(("", int(address.partition(":")[2]))):
        pass


# Joins, says so, and does what the second argument says: stays, dies by a signal, fails, or ends.
MEMBER = """
import os, signal, sys, time
from meliad_like.errors import UserError
from meliad_like.training import joining
joining.GRACE = 1.0
number, deed = int(sys.argv[2]), sys.argv[3]
company = joining.call_the_roll(sys.argv[1], 3, number, 60)
company.watch()
with company:
    print("here", flush=True)
    if deed == "stay":
        time.sleep(600)
    time.sleep(1)
    if deed == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    if deed == "fail":
        raise UserError("no")
# The first one ends before the others.
time.sleep(number)
"""


def members(address, deeds):
    """Exit statuses and standard errors of three processes."""
    command = [sys.executable, "-c", MEMBER, address]
    processes = [
        subprocess.Popen([*command, str(n), deed], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for n, deed in enumerate(deeds)
    ]
    errors = [process.communicate(timeout=120)[1] for process in processes]
    return [process.returncode for process in processes], errors


@pytest.mark.parametrize("number", [0, 2])
def test_when_one_dies_all_others_end_and_name_it(address, number):
    deeds = ["stay"] * 3
    deeds[number] = "die"
    statuses, errors = members(address, deeds)
    assert statuses.pop(number) == -signal.SIGKILL and statuses == [1, 1]
    del errors[number]
    assert all(error.startswith(f"error: process {number} has died: this one, number ") for error in errors)


def test_one_that_fails_gives_the_others_time_to_find_the_same(address):
    statuses, errors = members(address, ["fail", "stay", "fail"])
    assert statuses == [1, 1, 1]
    assert "UserError: no" in errors[0] and "UserError: no" in errors[2]
    # Of the two, the one that it heard of first.
    assert re.match("error: process [02] failed: this one, number 1, can't go on without it; the same comm", errors[1])


def test_a_failure_is_no_death_to_those_who_hear_of_it_from_another(address):
    statuses, errors = members(address, ["stay", "stay", "fail"])
    assert statuses == [1, 1, 1]
    for number in (0, 1):
        assert errors[number].startswith(f"error: process 2 failed: this one, number {number}, can't go on without it")


def test_a_machine_that_is_silent_is_noticed_before_jax_does(address):
    """jax's heartbeat takes 100 s."""
    found = {}

    def one(process_id):
        found[process_id] = call_the_roll(address, 2, process_id, 60)

    threads = [threading.Thread(target=one, args=(process_id,)) for process_id in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for company in found.values():
        (connection,) = company._connections.values()
        assert connection.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        options = (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)
        idle, interval, count = (connection.getsockopt(socket.IPPROTO_TCP, option) for option in options)
        assert idle + interval * count < 100
        connection.close()


def test_one_that_is_done_is_not_missed(address):
    assert members(address, ["end", "end", "end"]) == ([0, 0, 0], ["", "", ""])


def test_the_missing_are_named_in_all_that_came(address):
    told = call(address, [4, 0, 2], 5, 1)
    assert len(set(told.values())) == 1
    assert told[0].startswith("2 of 5 processes did not come within 1 s: number 1, 3; ")


def test_without_process_0(address):
    (error,) = call(address, [1], 2, 0.5).values()
    assert error.startswith(f"process 0 did not come to {address} within 0 s (Connection refused): ")


def test_processes_that_were_told_of_different_numbers(address):
    threads = [threading.Thread(target=call, args=(address, [2], 3, 5))]
    threads[0].start()
    told = call(address, [0], 2, 5)
    threads[0].join()
    assert told[0].startswith("a process was started as number 2 of 3, and process 0 as one of 2: ")


def test_strangers_and_processes_that_begin_again_do_no_harm(address):
    host, port = address.split(":")

    def come_and_go():
        for message in (b"GET / HTTP/1.0\r\n\r\n", b"[1, 3]", b""):
            deadline = time.monotonic() + 10
            while time.monotonic() < deadline:
                try:
                    with socket.create_connection((host, int(port))) as connection:
                        connection.sendall(message)
                    break
                except ConnectionRefusedError:
                    time.sleep(0.05)

    stranger = threading.Thread(target=come_and_go)
    stranger.start()
    first = threading.Thread(target=lambda: told.update(call(address, [0], 3, 60)))
    told = {}
    first.start()
    stranger.join()
    told.update(call(address, [1, 2], 3, 60))
    first.join()
    assert told == dict.fromkeys(range(3))


def test_a_port_that_is_taken(address):
    port = int(address.partition(":")[2])
    with socket.create_server(("", port)), pytest.raises(UserError, match=f"process 0 can't listen at port {port}"):
        call_the_roll(address, 2, 0, 1)


def test_all_three_or_a_cluster(monkeypatch):
    with pytest.raises(UserError, match="num_processes=2 and process_id=None must be given together"):
        initialize_distributed("localhost:1", 2)
    with pytest.raises(UserError, match="this machine is part of no cluster that jax detects"):
        initialize_distributed()


def test_a_jax_that_does_not_say_is_named_with_the_way_out(monkeypatch):
    monkeypatch.setattr(joining, "detect_cluster", None)
    with pytest.raises(UserError, match="does not say which cluster this machine is part of: give --coordinator_addr"):
        initialize_distributed()


def test_a_cluster_says_who_is_who(monkeypatch):
    called = []

    def no_others(*place):
        called.append(place)
        return joining.Company(0, {})

    monkeypatch.setattr(joining, "call_the_roll", no_others)
    monkeypatch.setattr(joining.jax.distributed, "initialize", lambda *place, **_: called.append(place))
    monkeypatch.setattr(joining.jax.config, "update", lambda *_: None)
    slurm = {"JOB_ID": "7", "STEP_NODELIST": "node1", "NTASKS": "2", "PROCID": "1", "LOCALID": "0"}
    for name, value in slurm.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    initialize_distributed(timeout_seconds=5)
    (address, *place), given = called
    assert address.startswith("node1:") and place == [2, 1, 5] and given == (None, None, None)
