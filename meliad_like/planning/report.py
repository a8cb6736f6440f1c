"""What a plan says: memory, traffic and time of each program on each device."""

from collections.abc import Sequence
from typing import Any

from rich.table import Table

from meliad_like.planning.programs import Need
from meliad_like.planning.topology import GIB, Topology

PARTS = ("parameters", "optimizer state", "carry", "batch")


def fits(need: Need, topology: Topology) -> bool:
    """Whether a program fits, as far as the memory of a device is known."""
    return not need.gave_up and (topology.chip is None or need.total <= topology.chip.memory)


def limit(need: Need, topology: Topology) -> str:
    """What makes the program slow, or impossible; nothing for devices that are not known."""
    if not fits(need, topology):
        return "memory's size"
    times = seconds(need, topology)
    return max(times, key=lambda name: times[name]) if times else ""


def seconds(need: Need, topology: Topology) -> dict[str, float]:
    """What a run of the program takes at least, by what limits it; nothing for devices that are not known."""
    if topology.chip is None or topology.peak_flops is None:
        return {}
    state = sum(need.parts.values())
    linked = sum(traffic.num_bytes for traffic in need.collectives.values())
    return {
        "arithmetic": need.flops / topology.peak_flops,
        # The state is read and, but for parameters outside of training, written; activations are both.
        "memory": (state + 2 * need.activations) / topology.chip.memory_bandwidth,
        "links": linked / topology.chip.link_bandwidth,
    }


def table(needs: Sequence[Need], topology: Topology) -> Table:
    """Rows of figures, a column for each program."""
    result = Table(title=f"On each of {len(topology.devices)} devices ({topology.kind}, {topology.name})")
    result.add_column("")
    for need in needs:
        result.add_column(need.name, justify="right")
    rows: list[list[str]] = [[part, *(_gib(need.parts.get(part)) for need in needs)] for part in PARTS]
    rows.append(["activations", *(_gib(need.activations) for need in needs)])
    rows.append(["results", *(_gib(need.results) for need in needs)])
    rows.append(["code", *(_gib(need.code) for need in needs)])
    rows.append(["in all", *(_gib(need.total) for need in needs)])
    if topology.chip is not None:
        rows.append(["left", *(_gib(topology.chip.memory - need.total) for need in needs)])
    for kind in sorted({kind for need in needs for kind in need.collectives}):
        found = [need.collectives.get(kind) for need in needs]
        rows.append([kind, *("" if t is None else f"{t.count:,} of {t.num_bytes / 1e6:,.1f} MB" for t in found)])
    rows.append(["TFLOP", *(f"{need.flops / 1e12:,.4f}" for need in needs)])
    times = [seconds(need, topology) for need in needs]
    for name in times[0]:
        rows.append([f"ms of {name}, at least", *(f"{1e3 * t[name]:,.3f}" for t in times)])
    if times[0]:
        rows.append(["limited by", *(limit(need, topology) for need in needs)])
    rows.append(["compiled in", *(f"{need.compile_seconds:.0f} s" for need in needs)])
    for row in rows:
        result.add_row(*row, end_section=row[0] in ("batch", "code", "left"))
    return result


def to_json(needs: Sequence[Need], topology: Topology) -> dict[str, Any]:
    return {
        "topology": topology.name,
        "devices": len(topology.devices),
        "kind": topology.kind,
        "memory_bytes": topology.chip and topology.chip.memory,
        "programs": [
            need._asdict()
            | {
                "total": need.total,
                "limited_by": limit(need, topology),
                "fits": fits(need, topology),
                "seconds": seconds(need, topology),
                "collectives": {kind: traffic._asdict() for kind, traffic in need.collectives.items()},
            }
            for need in needs
        ],
    }


def _gib(num_bytes: float | None) -> str:
    return "" if num_bytes is None else f"{num_bytes / GIB:,.3f} GiB"
