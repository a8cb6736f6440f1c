"""How the processes of a run find each other, and notice that one has gone.

Before jax joins them, each reports to process 0, and stays connected. Where one doesn't come or dies, the others say
which; jax would end them with stack traces, after minutes, and name nobody.
"""

import json
import os
import selectors
import socket
import sys
import threading
import time
from contextlib import suppress
from typing import Self

import jax

from meliad_like.errors import UserError

try:
    # What jax.distributed.initialize asks; it has no public name.
    from jax._src.clusters import ClusterEnv

    detect_cluster = ClusterEnv.auto_detect_unset_distributed_params
except (ImportError, AttributeError):
    detect_cluster = None

ALL_HERE = "all here\n"
PROBLEM = "problem: "
# What a process says last, with the number of the process that it says it of: process 0 speaks of others as well.
FINISHED, FAILED, LOST = "finished", "failed", "lost"
GRACE = 10.0  # seconds
# Else the kernel would ask after two hours whether a silent machine is there. 80 s are less than jax's heartbeat takes.
# In seconds, seconds, tries; milliseconds.
KEEP_ALIVE = {"TCP_KEEPIDLE": 30, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 5, "TCP_USER_TIMEOUT": 80_000}


class Company:
    """The other processes of a run: the death of one is the end of this one too, with a message.

    To be left at the end, which the others then don't take for its death; or used in a `with`, which does that.
    """

    def __init__(self, process_id: int, connections: dict[int, socket.socket]):
        """
        Args:
          connections: of process 0 to all others, by their numbers; of the others to process 0.
        """
        self._process_id = process_id
        self._connections = connections

    def watch(self) -> None:
        """From here on."""
        threading.Thread(target=self._watch, daemon=True).start()

    def leave(self, failed: bool = False) -> None:
        """Says that this process is done, or can't go on."""
        for connection in self._connections.values():
            _say(connection, FAILED if failed else FINISHED, self._process_id)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind, *_) -> None:
        if kind is jax.errors.JaxRuntimeError:
            # An exchange that failed, often because another process has died: it's better to hear of that.
            time.sleep(GRACE / 5)
        self.leave(failed=kind is not None)

    def _watch(self) -> None:
        with selectors.DefaultSelector() as selector:
            for number, connection in self._connections.items():
                connection.settimeout(None)
                selector.register(connection, selectors.EVENT_READ, number)
            while selector.get_map():
                for key, _ in selector.select():
                    selector.unregister(key.fileobj)
                    try:
                        said = self._connections[key.data].recv(64)
                    except OSError:
                        said = b""
                    # Process 0 may have said two things at once.
                    what, _, whose = said.decode().partition("\n")[0].partition(" ")
                    if what != FINISHED:
                        self._end(int(whose) if whose else key.data, what == FAILED)

    def _end(self, number: int, failed: bool) -> None:
        for each, connection in self._connections.items():
            if self._process_id == 0 and each != number:
                _say(connection, FAILED if failed else LOST, number)
        if failed:
            # By an error that this process may have met as well: that says more.
            time.sleep(GRACE)
        how = "failed" if failed else "has died"
        print(
            f"error: process {number} {how}: this one, number {self._process_id}, can't go on without it; the same "
            "command, with all processes, goes on from the last checkpoint",
            file=sys.stderr,
            flush=True,
        )
        os._exit(1)


def initialize_distributed(
    coordinator_address: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    timeout_seconds: int = 300,
) -> Company:
    """Joins this process to the others of the run; must come before anything that asks jax for its devices.

    Without arguments the cluster says who is who (a TPU pod, SLURM, GKE or MPI, as jax detects them); with all three,
    the processes meet at `coordinator_address` ("host:port", where process 0 listens).

    Raises:
      UserError: no cluster was detected, the arguments don't fit together, or not all processes came within
        `timeout_seconds`; names those that did not.
    """
    given = place = (coordinator_address, num_processes, process_id)
    if all(value is None for value in given):
        if detect_cluster is None:
            raise UserError(
                f"jax {jax.__version__} does not say which cluster this machine is part of: give "
                "--coordinator_address, --num_processes and --process_id"
            )
        place = detect_cluster(*given, None, None, timeout_seconds)[:3]
        if None in place:
            raise UserError("this machine is part of no cluster that jax detects (a TPU pod, SLURM, GKE or MPI)")
    elif None in given:
        raise UserError(
            f"coordinator_address={coordinator_address}, num_processes={num_processes} and process_id={process_id} "
            "must be given together, or not at all on a cluster that jax detects"
        )
    company = call_the_roll(*place, timeout_seconds)
    company.watch()
    # Used by processes that compute on CPUs alone; accelerators have their own.
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(*given, initialization_timeout=timeout_seconds)
    return company


def call_the_roll(address: str, num_processes: int, process_id: int, timeout_seconds: float) -> Company:
    """Waits until all processes have come.

    Process 0 listens where jax's own service will, hears from each of the others, and tells them how it ended.

    Args:
      address: "host:port" of process 0.

    Raises:
      UserError: in every process that came: names those that did not.
    """
    if num_processes == 1:
        return Company(process_id, {})
    deadline = time.monotonic() + timeout_seconds
    host, _, port = address.rpartition(":")
    if not port.isdigit():
        raise UserError(f"coordinator_address={address} must be host:port")
    if process_id == 0:
        return Company(0, _listen(int(port), num_processes, deadline, timeout_seconds))
    place = (process_id, num_processes)
    return Company(process_id, {0: _report(host.strip("[]"), int(port), place, deadline, timeout_seconds)})


def _listen(port: int, num_processes: int, deadline: float, timeout_seconds: float) -> dict[int, socket.socket]:
    try:
        server = _server(port, num_processes)
    except OSError as error:
        raise UserError(
            f"process 0 can't listen at port {port} ({error.strerror}): choose another coordinator_address"
        ) from None
    present: dict[int, socket.socket] = {}
    problem = None
    with server:
        while problem is None:
            # One that has gone may begin again, and must find this one listening.
            present = {number: connection for number, connection in present.items() if not _has_gone(connection)}
            if len(present) == num_processes - 1:
                break
            server.settimeout(max(deadline - time.monotonic(), 0.01))
            try:
                connection, _ = server.accept()
            except TimeoutError:
                missing = [str(number) for number in range(1, num_processes) if number not in present]
                problem = (
                    f"{len(missing)} of {num_processes} processes did not come within {timeout_seconds:.0f} s: number "
                    f"{', '.join(missing)}; look at why on their machines, and start all of them again"
                )
                break
            try:
                number, total = _heard(connection)
            except (OSError, ValueError, TypeError):
                connection.close()  # none of ours
                continue
            # One that was started again takes its own place.
            present[number] = connection
            if total != num_processes or not 0 < number < total:
                problem = (
                    f"a process was started as number {number} of {total}, and process 0 as one of {num_processes}: "
                    "all need the same num_processes, and numbers of their own"
                )
    for connection in present.values():
        _send(connection, (ALL_HERE if problem is None else f"{PROBLEM}{problem}\n").encode())
    if problem is not None:
        raise UserError(problem)
    return present


def _server(port: int, backlog: int) -> socket.socket:
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", port), family=socket.AF_INET6, backlog=backlog, dualstack_ipv6=True)
    return socket.create_server(("", port), backlog=backlog)


def _heard(connection: socket.socket) -> tuple[int, int]:
    """Number, and number of processes, of one that has connected."""
    connection.settimeout(GRACE)
    number, total = json.loads(connection.recv(64))
    _keep_alive(connection)
    return int(number), int(total)


def _has_gone(connection: socket.socket) -> bool:
    """Whether the other side, which has nothing to say before it is answered, has hung up."""
    connection.setblocking(False)
    try:
        return not connection.recv(1, socket.MSG_PEEK)
    except BlockingIOError:
        return False
    except OSError:
        return True
    finally:
        connection.settimeout(GRACE)


def _keep_alive(connection: socket.socket) -> None:
    # A machine that is gone without a word, and firewalls that forget a connection on which nothing is said.
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in KEEP_ALIVE.items():
        # Not every system has each.
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def _say(connection: socket.socket, what: str, number: int) -> None:
    _send(connection, f"{what} {number}\n".encode())


def _send(connection: socket.socket, message: bytes) -> None:
    # The other side may have gone, which is noticed elsewhere.
    with suppress(OSError):
        connection.sendall(message)


def _report(host: str, port: int, place: tuple[int, int], deadline: float, timeout_seconds: float) -> socket.socket:
    while True:
        try:
            connection = socket.create_connection((host, port), timeout=GRACE)
            _keep_alive(connection)
            connection.sendall(json.dumps(place).encode())
            # Process 0 may have come later, and then waits longer.
            connection.settimeout(timeout_seconds + GRACE)
            with connection.makefile(errors="replace") as answers:
                verdict = answers.readline(1000)
            if verdict == ALL_HERE:
                return connection
            connection.close()
            if verdict.startswith(PROBLEM):
                raise UserError(verdict.removeprefix(PROBLEM).strip())
            # Such as the run that this one takes the place of.
            reason = "something else answers there"
        except OSError as error:
            reason = error.strerror or str(error)
        if time.monotonic() > deadline:
            raise UserError(
                f"process 0 did not come to {host}:{port} within {timeout_seconds:.0f} s ({reason}): look at why on "
                "its machine, and whether this one can reach that port"
            )
        time.sleep(0.2)
