"""How the processes of a run connect. If a process does not start, or dies, jax's time-outs end the others."""

import socket
import sys

import jax

from meliad_like.errors import UserError
from meliad_like.remote import one_line

HEARTBEAT_SECONDS = 30
"""After this time without a heartbeat of a process, jax ends all others and names it in the log of process 0."""
SHUTDOWN_SECONDS = 60
"""The time that a process waits for the others before it exits, also after an error."""


def initialize_distributed(
    coordinator_address: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    timeout_seconds: int = 300,
) -> None:
    """Connects this process to the others of the run; must be called before any use of jax's devices.

    Without arguments, jax detects the cluster (a TPU pod, SLURM, GKE or MPI). With all three arguments, the processes
    connect to `coordinator_address` ("host:port", where process 0 listens). jax ends the process if not all processes
    connect within `timeout_seconds`.

    Raises:
      UserError: no cluster was detected, the arguments don't fit together, or process 0 can't listen at its port.
    """
    place = (coordinator_address, num_processes, process_id)
    if None in place and place != (None, None, None):
        raise UserError(
            f"coordinator_address={coordinator_address}, num_processes={num_processes} and process_id={process_id} "
            "must be given together, or not at all on a cluster that jax detects"
        )
    if coordinator_address is not None:
        port = coordinator_address.rpartition(":")[2]
        if not port.isdigit():
            raise UserError(f"coordinator_address={coordinator_address} must be host:port")
        if process_id == 0:
            _check_port(int(port))
        print(
            f"process {process_id} of {num_processes}: waiting up to {timeout_seconds} s for all processes at "
            f"{coordinator_address}",
            file=sys.stderr,
            flush=True,
        )
    # Used only by processes on CPUs; accelerators have their own collectives.
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    try:
        jax.distributed.initialize(
            *place,
            initialization_timeout=timeout_seconds,
            heartbeat_timeout_seconds=HEARTBEAT_SECONDS,
            shutdown_timeout_seconds=SHUTDOWN_SECONDS,
        )
    except ValueError as error:
        raise UserError(f"this machine is part of no cluster that jax detects: {one_line(error)}") from None


def _check_port(port: int) -> None:
    # jax 0.10 crashes if it can't listen at the port.
    try:
        socket.create_server(("", port)).close()
    except OSError as error:
        raise UserError(
            f"process 0 can't listen at port {port} ({error.strerror}): choose another coordinator_address"
        ) from None
