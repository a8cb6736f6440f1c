"""What devices say to each other in a compiled program, read from its HLO."""

import math
import re
from collections import Counter
from typing import NamedTuple

KINDS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")
BITS = {"pred": 8, "bf16": 16, "f16": 16, "f32": 32, "f64": 64}

_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) \((?!.* = ).*\{$")
_INSTRUCTION = re.compile(rf"= (.*?) ({'|'.join(KINDS)})(-start)?\(")
_SHAPE = re.compile(r"\b([a-z]+\d*)\[([\d,]*)\]")
_CALL = re.compile(
    r"(?:body|calls|to_apply|true_computation|false_computation)=%?([\w.\-]+)|branch_computations=\{([^}]*)\}"
)
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')


class Traffic(NamedTuple):
    """Of one kind of collective, in a run of the program, on each device."""

    count: int
    num_bytes: int
    """Of the results."""


def traffic(hlo: str) -> dict[str, Traffic]:
    """Collectives by kind.

    Bodies of loops count as often as they run, where the compiler knows how often that is; of the branches of a
    condition all count.

    Args:
      hlo: the text of a compiled program, as `compiled.as_text()` gives it.
    """
    counts: dict[str, Counter] = {}
    calls: dict[str, list[tuple[str, int]]] = {}
    entry = name = ""
    for line in hlo.splitlines():
        line = line.strip()
        if match := _COMPUTATION.match(line):
            name = match[2]
            counts[name], calls[name] = Counter(), []
            entry = name if match[1] else entry
            continue
        if match := _INSTRUCTION.search(line):
            # What starts an asynchronous one returns its operands and its results, as many of each.
            sizes = [_num_bytes(*shape) for shape in _SHAPE.findall(match[1])]
            results = sizes[len(sizes) // 2 :] if match[3] and len(sizes) > 1 else sizes
            counts[name][match[2], "count"] += 1
            counts[name][match[2], "bytes"] += sum(results)
        trips = int(found[1]) if " while(" in line and (found := _TRIPS.search(line)) else 1
        for one, several in _CALL.findall(line):
            for called in [one] if one else re.findall(r"[\w.\-]+", several):
                calls[name].append((called, trips))

    def total(name: str) -> Counter:
        sums = Counter(counts.get(name, {}))
        for called, trips in calls.get(name, []):
            for key, value in total(called).items():
                sums[key] += trips * value
        return sums

    sums = total(entry)
    return {kind: Traffic(sums[kind, "count"], sums[kind, "bytes"]) for kind in KINDS if sums[kind, "count"]}


def _num_bytes(dtype: str, dimensions: str) -> int:
    bits = BITS.get(dtype) or int(re.sub(r"\D", "", dtype) or 32)
    return math.prod(int(size) for size in dimensions.split(",") if size) * bits // 8
