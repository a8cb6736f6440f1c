"""The report of a plan: memory, traffic and time of each program on each device."""

from collections.abc import Sequence
from typing import Any

from meliad_like.planning.programs import PARTS, Need
from meliad_like.planning.topology import GIB, Topology
from meliad_like.tables import Table


def fits(need: Need, topology: Topology) -> bool:
    """Whether a program fits; True if the memory of a device is not known, unless the compiler gave up."""
    return not need.gave_up and (topology.chip is None or need.total <= topology.chip.memory)


def limit(need: Need, topology: Topology) -> str:
    """The resource that limits the program; empty for unknown devices."""
    if not fits(need, topology):
        return "memory's size"
    times = seconds(need, topology)
    return max(times, key=lambda name: times[name]) if times else ""


def seconds(need: Need, topology: Topology) -> dict[str, float]:
    """The least time of a run of the program, by resource; empty for unknown devices."""
    if topology.chip is None or topology.peak_flops is None:
        return {}
    linked = sum(traffic.num_bytes for traffic in need.collectives.values())
    return {
        "arithmetic": need.flops / topology.peak_flops,
        # The state is read and, but for parameters outside of training, written; activations are both.
        "memory": (sum(need.parts.values()) + 2 * need.activations) / topology.chip.memory_bandwidth,
        "links": linked / topology.chip.link_bandwidth,
    }


def table(needs: Sequence[Need], topology: Topology) -> Table:
    """A row for each figure, and a column for each program."""
    rows: dict[str, list[str]] = {part: [_gib(need.parts.get(part)) for need in needs] for part in PARTS}
    rows |= {name: [_gib(getattr(need, name)) for need in needs] for name in ("activations", "results", "code")}
    rows["total"] = [_gib(need.total) for need in needs]
    if topology.chip is not None:
        rows["left"] = [_gib(topology.chip.memory - need.total) for need in needs]
    for kind in sorted({kind for need in needs for kind in need.collectives}):
        found = [need.collectives.get(kind) for need in needs]
        rows[kind] = ["" if t is None else f"{t.count:,} of {t.num_bytes / 1e6:,.1f} MB" for t in found]
    rows["TFLOP"] = [f"{need.flops / 1e12:,.4f}" for need in needs]
    times = [seconds(need, topology) for need in needs]
    rows |= {f"ms of {name}, at least": [f"{1e3 * t[name]:,.3f}" for t in times] for name in times[0]}
    if times[0]:
        rows["limited by"] = [limit(need, topology) for need in needs]
    rows["compiled in"] = [f"{need.compile_seconds:.0f} s" for need in needs]
    title = f"On each of {len(topology.devices)} devices ({topology.kind}, {topology.name})"
    return Table(title, ("", *(need.name for need in needs)), [(name, *cells) for name, cells in rows.items()])


def to_json(needs: Sequence[Need], topology: Topology) -> dict[str, Any]:
    """The figures of a plan for JSON."""

    def program(need: Need) -> dict[str, Any]:
        return need._asdict() | {
            "total": need.total,
            "limited_by": limit(need, topology),
            "fits": fits(need, topology),
            "seconds": seconds(need, topology),
            "collectives": {kind: traffic._asdict() for kind, traffic in need.collectives.items()},
        }

    memory = topology.chip and topology.chip.memory
    devices = {"devices": len(topology.devices), "kind": topology.kind, "memory_bytes": memory}
    return {"topology": topology.name, **devices, "programs": [program(need) for need in needs]}


def _gib(num_bytes: float | None) -> str:
    return "" if num_bytes is None else f"{num_bytes / GIB:,.3f} GiB"
