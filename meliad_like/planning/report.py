"""The report of a plan: memory and time of each program on each device, and the nearest settings that fit."""

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from meliad_like.config import RunConfig
from meliad_like.errors import UserError
from meliad_like.planning.programs import PARTS, MemoryEstimate, estimates, least_bytes
from meliad_like.planning.topology import GIB, Topology
from meliad_like.tables import Table

# The rematerialisations that need less memory than each one.
SPARING: dict[str, tuple[str, ...]] = {"none": ("dots", "layers"), "dots": ("layers",)}


def table(planned: Sequence[MemoryEstimate]) -> Table:
    """A row for each figure, and a column for each program."""
    topology = planned[0].topology
    rows: dict[str, list[str]] = {part: [_gib(estimate.parts.get(part)) for estimate in planned] for part in PARTS}
    for name in ("activations", "results", "code", "total"):
        rows[name] = [_gib(getattr(estimate, name)) for estimate in planned]
    if topology.chip is not None:
        rows["left"] = [_gib(topology.chip.memory - estimate.total) for estimate in planned]
    rows["TFLOP"] = [f"{estimate.flops / 1e12:,.4f}" for estimate in planned]
    for name in planned[0].seconds:
        rows[f"ms of {name}, at least"] = [f"{1e3 * estimate.seconds[name]:,.3f}" for estimate in planned]
    if planned[0].seconds:
        rows["limited by"] = [estimate.limited_by for estimate in planned]
    rows["compiled in"] = [f"{estimate.compile_seconds:.0f} s" for estimate in planned]
    title = f"On each of {len(topology.devices)} devices ({topology.kind}, {topology.name})"
    header = ("", *(estimate.name for estimate in planned))
    return Table(title, header, [(name, *cells) for name, cells in rows.items()])


def to_json(planned: Sequence[MemoryEstimate]) -> dict[str, Any]:
    """The figures of a plan for JSON."""
    topology = planned[0].topology
    derived = ("total", "limited_by", "fits", "seconds")
    programs = [
        estimate._asdict() | {"topology": topology.name} | {name: getattr(estimate, name) for name in derived}
        for estimate in planned
    ]
    memory = topology.chip and topology.chip.memory
    devices = {"devices": len(topology.devices), "kind": topology.kind, "memory_bytes": memory}
    return {"topology": topology.name, **devices, "programs": programs}


def _gib(num_bytes: float | None) -> str:
    return "" if num_bytes is None else f"{num_bytes / GIB:,.3f} GiB"


def nearest_that_fits(
    run: RunConfig, vocabulary_size: int, topology: Topology, on_try: Callable[[str], None], **options: Any
) -> str | None:
    """The first of `alternatives` that fits, as bindings; None if none of them fits.

    `on_try` is called with the bindings that are about to be compiled; `options` are those of `estimates`.
    """
    # If the memory of the chips is not known, only the compiler decides what fits.
    memory = math.inf if topology.chip is None else topology.chip.memory
    for bindings, other in alternatives(run, len(topology.devices)):
        # A mesh that doesn't divide the lanes or the model.
        with contextlib.suppress(UserError):
            if least_bytes(other, vocabulary_size, topology) <= memory:
                on_try(bindings)
                if all(estimate.fits for estimate in estimates(other, vocabulary_size, topology, **options)):
                    return bindings
    return None


def alternatives(run: RunConfig, num_devices: int) -> Iterator[tuple[str, RunConfig]]:
    """The nearest settings that need less memory, as bindings and as a run; the cheapest first."""
    model = run.model
    for remat in SPARING.get(model.remat, ()):
        model = replace(run.model, remat=remat)
        yield f"{type(model).__name__}.remat = {remat!r}", replace(run, model=model)
    name = f" with {type(model).__name__}.remat = 'layers'" if model is not run.model else ""
    parts = run.training.gradient_accumulation
    shards = num_devices // (run.mesh.tensor * run.mesh.sequence)
    while run.data.num_lanes % (2 * parts * shards) == 0:
        parts *= 2
        training = replace(run.training, gradient_accumulation=parts)
        yield f"TrainingConfig.gradient_accumulation = {parts}{name}", replace(run, training=training, model=model)
    fsdp = run.mesh.fsdp
    # The number of copies then follows from the number of devices.
    data = "" if run.mesh.data == -1 else " with MeshConfig.data = -1"
    while shards % (2 * fsdp) == 0:
        fsdp *= 2
        mesh = replace(run.mesh, data=-1, fsdp=fsdp)
        yield f"MeshConfig.fsdp = {fsdp}{data}{name}", replace(run, mesh=mesh, model=model)
    # Last, because fewer lanes, with fewer tokens in each step, are another training.
    tokens, parts = run.data.tokens_per_step, run.training.gradient_accumulation
    while tokens // run.data.segment_length % (2 * parts * shards) == 0:
        tokens //= 2
        fewer = replace(run.data, tokens_per_step=tokens)
        yield f"ReaderConfig.tokens_per_step = {tokens}{name}", replace(run, data=fewer, model=model)
