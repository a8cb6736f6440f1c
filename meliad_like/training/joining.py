"""How the processes of a run join.

Before jax joins them, each reports to process 0: where one is missing, jax would end the others with a stack trace
after its time-out, and name nobody.
"""

import json
import socket
import time
from contextlib import ExitStack

import jax
from jax._src.clusters import ClusterEnv

from meliad_like.errors import UserError

ALL_HERE = "all here"
PROBLEM = "problem: "
GRACE = 10.0  # seconds


def initialize_distributed(
    coordinator_address: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    timeout_seconds: int = 300,
) -> None:
    """Joins this process to the others of the run; must come before anything that asks jax for its devices.

    Without arguments the cluster says who is who (a TPU pod, SLURM, GKE or MPI, as jax detects them); with all three,
    the processes meet at `coordinator_address` ("host:port", where process 0 listens).

    Raises:
      UserError: no cluster was detected, the arguments don't fit together, or not all processes came within
        `timeout_seconds`; names those that did not.
    """
    given = place = (coordinator_address, num_processes, process_id)
    if all(value is None for value in given):
        # As jax.distributed.initialize asks; it has no public name.
        place = ClusterEnv.auto_detect_unset_distributed_params(*given, None, None, timeout_seconds)[:3]
        if None in place:
            raise UserError("this machine is part of no cluster that jax detects (a TPU pod, SLURM, GKE or MPI)")
    elif None in given:
        raise UserError(
            f"coordinator_address={coordinator_address}, num_processes={num_processes} and process_id={process_id} "
            "must be given together, or not at all on a cluster that jax detects"
        )
    call_the_roll(*place, timeout_seconds)
    # Used by processes that compute on CPUs alone; accelerators have their own.
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(*given, initialization_timeout=timeout_seconds)


def call_the_roll(address: str, num_processes: int, process_id: int, timeout_seconds: float) -> None:
    """Waits until all processes have come.

    Process 0 listens where jax's own service will, hears from each of the others, and tells them how it ended.

    Args:
      address: "host:port" of process 0.

    Raises:
      UserError: in every process that came: names those that did not.
    """
    if num_processes == 1:
        return
    deadline = time.monotonic() + timeout_seconds
    host, _, port = address.rpartition(":")
    if not port.isdigit():
        raise UserError(f"coordinator_address={address} must be host:port")
    if process_id == 0:
        verdict = _listen(int(port), num_processes, deadline, timeout_seconds)
    else:
        verdict = _report(host.strip("[]"), int(port), (process_id, num_processes), deadline, timeout_seconds)
    if verdict != ALL_HERE:
        raise UserError(verdict.removeprefix(PROBLEM))


def _listen(port: int, num_processes: int, deadline: float, timeout_seconds: float) -> str:
    try:
        server = _server(port, num_processes)
    except OSError as error:
        raise UserError(
            f"process 0 can't listen at port {port} ({error.strerror}): choose another coordinator_address"
        ) from None
    with server, ExitStack() as stack:
        present: dict[int, socket.socket] = {}
        verdict = ALL_HERE
        while len(present) < num_processes - 1 and verdict == ALL_HERE:
            server.settimeout(max(deadline - time.monotonic(), 0.01))
            try:
                connection = stack.enter_context(server.accept()[0])
                number, total = _heard(connection)
            except TimeoutError:
                if time.monotonic() < deadline:
                    continue
                missing = [str(n) for n in range(1, num_processes) if n not in present]
                verdict = (
                    f"{PROBLEM}{len(missing)} of {num_processes} processes did not come within "
                    f"{timeout_seconds:.0f} s: number {', '.join(missing)}; look at why on their machines, "
                    "and start all of them again"
                )
            except (OSError, ValueError):
                continue  # nobody of ours
            else:
                # One that was started again takes its own place.
                present[number] = connection
                if total != num_processes or not 0 < number < total:
                    verdict = (
                        f"{PROBLEM}a process was started as number {number} of {total}, and process 0 as one of "
                        f"{num_processes}: all need the same num_processes, and numbers of their own"
                    )
        for connection in present.values():
            _tell(connection, verdict)
    return verdict


def _server(port: int, backlog: int) -> socket.socket:
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", port), family=socket.AF_INET6, backlog=backlog, dualstack_ipv6=True)
    return socket.create_server(("", port), backlog=backlog)


def _heard(connection: socket.socket) -> tuple[int, int]:
    connection.settimeout(GRACE)
    number, total = json.loads(connection.recv(64))
    return int(number), int(total)


def _tell(connection: socket.socket, verdict: str) -> None:
    try:
        connection.sendall(verdict.encode())
        connection.shutdown(socket.SHUT_WR)
        # The other side closes first: the port is then free at once, for jax.
        connection.settimeout(GRACE)
        connection.recv(1)
    except OSError:
        pass  # it has gone since, which jax will notice


def _report(host: str, port: int, place: tuple[int, int], deadline: float, timeout_seconds: float) -> str:
    while True:
        try:
            with socket.create_connection((host, port), timeout=GRACE) as connection:
                connection.sendall(json.dumps(place).encode())
                # Process 0 may have come later, and then waits longer.
                connection.settimeout(timeout_seconds + GRACE)
                verdict = connection.makefile(errors="replace").read()
            # Something else may listen there, such as the run that this one takes the place of.
            if verdict == ALL_HERE or verdict.startswith(PROBLEM):
                return verdict
            reason = "something else answers there"
        except OSError as error:
            reason = error.strerror or str(error)
        if time.monotonic() > deadline:
            return (
                f"process 0 did not come to {host}:{port} within {timeout_seconds:.0f} s ({reason}): look at why on "
                "its machine, and whether this one can reach that port"
            )
        time.sleep(0.2)
