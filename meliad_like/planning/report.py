"""The report of a plan: memory, traffic and time of each program on each device, and the nearest settings that fit."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from meliad_like.config import RunConfig
from meliad_like.errors import UserError
from meliad_like.planning.programs import PARTS, PROGRAMS, Need, least_bytes, needs
from meliad_like.planning.topology import GIB, Topology
from meliad_like.tables import Table

# The rematerialisations that need less memory than each one.
SPARING: dict[str, tuple[str, ...]] = {"none": ("dots", "layers"), "dots": ("layers",)}


def table(planned: Sequence[Need]) -> Table:
    """A row for each figure, and a column for each program."""
    topology = planned[0].topology
    rows: dict[str, list[str]] = {part: [_gib(need.parts.get(part)) for need in planned] for part in PARTS}
    rows |= {name: [_gib(getattr(need, name)) for need in planned] for name in ("activations", "results", "code")}
    rows["total"] = [_gib(need.total) for need in planned]
    if topology.chip is not None:
        rows["left"] = [_gib(topology.chip.memory - need.total) for need in planned]
    for kind in sorted({kind for need in planned for kind in need.collectives}):
        found = [need.collectives.get(kind) for need in planned]
        rows[kind] = ["" if t is None else f"{t.count:,} of {t.num_bytes / 1e6:,.1f} MB" for t in found]
    rows["TFLOP"] = [f"{need.flops / 1e12:,.4f}" for need in planned]
    for name in planned[0].seconds:
        rows[f"ms of {name}, at least"] = [f"{1e3 * need.seconds[name]:,.3f}" for need in planned]
    if planned[0].seconds:
        rows["limited by"] = [need.limited_by for need in planned]
    rows |= _estimates(planned)
    rows["compiled in"] = [f"{need.compile_seconds:.0f} s" for need in planned]
    title = f"On each of {len(topology.devices)} devices ({topology.kind}, {topology.name})"
    return Table(title, ("", *(need.name for need in planned)), [(name, *cells) for name, cells in rows.items()])


def _estimates(planned: Sequence[Need]) -> dict[str, list[str]]:
    """Rows for the compiler's estimate of the time, and for its share of the peak; none where there is no estimate."""
    if not any(need.clock for need in planned):
        return {}
    rows = {
        "ms, estimated": [_number(need.estimated_seconds, 1e3, ",.3f") for need in planned],
        "share of peak, estimated": [_number(need.share_of_peak, 1, ".1%") for need in planned],
    }
    for part in dict.fromkeys(part for need in planned if need.clock for part in need.clock.parts):
        cycles = [need.clock.parts.get(part) if need.clock else None for need in planned]
        rows[f"ms of {part}, estimated"] = [
            _number(count, 1e3 / need.topology.chip.clock if need.topology.chip else None, ",.3f")
            for count, need in zip(cycles, planned, strict=True)
        ]
    unknown = [need.clock.without_estimate if need.clock else {} for need in planned]
    if any(unknown):
        rows["without an estimate"] = [", ".join(f"{kind}: {n:,}" for kind, n in one.items()) for one in unknown]
    return rows


def costliest(need: Need, number: int) -> Table | None:
    """The instructions with the longest estimated time, at most `number`; None without estimates."""
    if need.clock is None or need.topology.chip is None:
        return None
    total, clock = need.clock.cycles, need.topology.chip.clock
    rows = [
        (one.name, f"{1e3 * one.cycles / clock:,.3f}", f"{one.cycles / total:.1%}", f"{one.runs:,}", one.part,
         one.source, one.result)
        for one in need.clock.costliest[:number]
    ]  # fmt: skip
    header = ("instruction", "ms", "share", "runs", "part", "line", "result")
    return Table(f"The costliest instructions of {need.name}, by the compiler's estimate", header, rows)


def to_json(planned: Sequence[Need]) -> dict[str, Any]:
    """The figures of a plan for JSON."""
    topology = planned[0].topology
    derived = ("total", "limited_by", "fits", "seconds", "estimated_seconds", "share_of_peak")
    programs = [
        {name: value for name, value in need._asdict().items() if name != "topology"}
        | {name: getattr(need, name) for name in derived}
        | {"collectives": {kind: traffic._asdict() for kind, traffic in need.collectives.items()}}
        | {"clock": need.clock and need.clock.to_json()}
        for need in planned
    ]
    memory = topology.chip and topology.chip.memory
    devices = {"devices": len(topology.devices), "kind": topology.kind, "memory_bytes": memory}
    return {"topology": topology.name, **devices, "programs": programs}


def _number(value: float | None, factor: float | None, form: str) -> str:
    return "" if value is None or factor is None else format(factor * value, form)


def _gib(num_bytes: float | None) -> str:
    return "" if num_bytes is None else f"{num_bytes / GIB:,.3f} GiB"


def nearest_that_fits(
    run: RunConfig,
    vocabulary_size: int,
    topology: Topology,
    programs: Sequence[str] = PROGRAMS,
    quick: bool = False,
    on_try: Callable[[str], None] = lambda bindings: None,
) -> str | None:
    """The first of `alternatives` that fits, as bindings; None if none of them fits.

    The arguments are those of `needs`; if the memory of the chips is not known, only the compiler decides what fits.
    `on_try` is called with the bindings that are about to be compiled.
    """
    memory = math.inf if topology.chip is None else topology.chip.memory
    for bindings, other in alternatives(run, len(topology.devices)):
        try:
            if least_bytes(other, vocabulary_size, topology) > memory:
                continue
            on_try(bindings)
            if all(need.fits for need in needs(other, vocabulary_size, topology, programs, quick)):
                return bindings
        except UserError:
            # The mesh doesn't divide the lanes or the model.
            continue
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
