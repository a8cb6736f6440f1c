"""The collectives of a compiled program, read from its HLO."""

import math
import re
from collections import Counter
from typing import NamedTuple

KINDS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")
BITS = {"pred": 8, "bf16": 16, "f16": 16, "f32": 32, "f64": 64}

_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) \((?!.* = ).*\{$")
# The end of an asynchronous pair, because it always returns the results alone.
_INSTRUCTION = re.compile(rf"= (.*?) ({'|'.join(KINDS)})(?:-done)?\(")
# A collective that the TPU compiler overlaps with products appears in each of the fusions around them.
_CHAIN = re.compile(r'(channel_id=\d+).*(chain_id="\d+")')
# A reduce-scatter is an all-reduce there, in a fusion that keeps a part of the result.
_SCATTERED = "all-reduce-scatter"
_SHAPE = re.compile(r"\b([a-z]+\d*)\[([\d,]*)\]")
_CALL = re.compile(
    r"(body|calls|to_apply|true_computation|false_computation)=%?([\w.\-]+)|branch_computations=\{([^}]*)\}"
)
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_CONDITION = re.compile(r" while\(.*condition=%?([\w.\-]+)")
_BOUND = re.compile(r"= s32\[\]\S* constant\((\d+)\)")


class Traffic(NamedTuple):
    """The collectives of one kind, in a run of the program, on each device."""

    count: int
    num_bytes: int
    """Bytes of the results; for a reduce-scatter on TPUs, of its arguments."""


def traffic(hlo: str) -> dict[str, Traffic]:
    """Collectives by kind in the text of a compiled program, as `compiled.as_text()` gives it.

    The body of a loop counts as often as it runs, if the compiler says so, or if the loop's condition compares a
    counter from 0 with a constant (as in every `jax.lax.scan`). All branches of a condition count.
    """
    # (kind, bytes, chain): the chain is equal in all fusions that belong to one asynchronous collective.
    found: dict[str, list[tuple[str, int, tuple[str, ...] | None]]] = {}
    calls: dict[str, list[tuple[str, str, int]]] = {}
    bounds: dict[str, list[int]] = {}
    entry = name = ""
    for line in hlo.splitlines():
        line = line.strip()
        if match := _COMPUTATION.match(line):
            name = match[2]
            found[name], calls[name], bounds[name] = [], [], []
            entry = name if match[1] else entry
            continue
        if match := _INSTRUCTION.search(line):
            num_bytes = sum(_num_bytes(*shape) for shape in _SHAPE.findall(match[1]))
            kind = "reduce-scatter" if name.startswith(_SCATTERED) else match[2]
            chain = _CHAIN.search(line)
            found[name].append((kind, num_bytes, chain and chain.groups()))
        if match := _BOUND.search(line):
            bounds[name].append(int(match[1]))
        # The TPU compiler gives no trip counts, and writes conditions before their loops.
        trips = _trips(line, bounds) if " while(" in line else 1
        for how, one, several in _CALL.findall(line):
            for called in [one] if one else re.findall(r"[\w.\-]+", several):
                calls[name].append((how, called, trips))

    def total(name: str, chains: set[tuple[str, ...]]) -> Counter:
        """The counts of a computation; `chains` are those already counted in the same body."""
        sums: Counter = Counter()
        for kind, num_bytes, chain in found.get(name, []):
            if chain not in chains:
                sums += Counter({(kind, "count"): 1, (kind, "bytes"): num_bytes})
            if chain is not None:
                chains.add(chain)
        for how, called, trips in calls.get(name, []):
            for key, value in total(called, chains if how == "calls" else set()).items():
                sums[key] += trips * value
        return sums

    sums = total(entry, set())
    return {kind: Traffic(sums[kind, "count"], sums[kind, "bytes"]) for kind in KINDS if sums[kind, "count"]}


def _trips(line: str, bounds: dict[str, list[int]]) -> int:
    """How often a loop runs; 1 if that is not known."""
    if known := _TRIPS.search(line):
        return int(known[1])
    condition = _CONDITION.search(line)
    constants = bounds.get(condition[1], []) if condition else []
    return constants[0] if len(constants) == 1 else 1


def _num_bytes(dtype: str, dimensions: str) -> int:
    bits = BITS.get(dtype) or int(re.sub(r"\D", "", dtype) or 32)
    return math.prod(int(size) for size in dimensions.split(",") if size) * bits // 8
