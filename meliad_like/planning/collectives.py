"""The collectives of a compiled program, read from its HLO."""

import math
import re
from collections import Counter
from typing import NamedTuple

from meliad_like.planning.hlo import Module

KINDS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")
BITS = {"pred": 8, "bf16": 16, "f16": 16, "f32": 32, "f64": 64}

# A collective that the TPU compiler overlaps with products appears in each of the fusions around them.
_CHAIN = re.compile(r'(channel_id=\d+).*(chain_id="\d+")')
# A reduce-scatter is an all-reduce there, in a fusion that keeps a part of the result.
_SCATTERED = "all-reduce-scatter"
_SHAPE = re.compile(r"\b([a-z]+\d*)\[([\d,]*)\]")


class Traffic(NamedTuple):
    """The collectives of one kind, in a run of the program, on each device."""

    count: int
    num_bytes: int
    """Bytes of the results; for a reduce-scatter on TPUs, of its arguments."""


def traffic(module: Module) -> dict[str, Traffic]:
    """Collectives by kind. The body of a loop counts as often as it runs. All branches of a condition count."""

    def total(name: str, chains: set[tuple[str, ...]]) -> Counter:
        """The counts of a computation; `chains` are those already counted in the same body."""
        sums: Counter = Counter()
        for instruction in module.computations.get(name, []):
            # Of an asynchronous pair the end, because it always returns the results alone.
            kind = instruction.opcode.removesuffix("-done")
            if kind in KINDS:
                chain = _CHAIN.search(instruction.text)
                if chain is None or chain.groups() not in chains:
                    num_bytes = sum(_num_bytes(*shape) for shape in _SHAPE.findall(instruction.result))
                    kind = "reduce-scatter" if name.startswith(_SCATTERED) else kind
                    sums += Counter({(kind, "count"): 1, (kind, "bytes"): num_bytes})
                if chain is not None:
                    chains.add(chain.groups())
            for how, called in instruction.called:
                for key, value in total(called, chains if how == "calls" else set()).items():
                    sums[key] += module.trips(instruction) * value
        return sums

    sums = total(module.entry, set())
    return {kind: Traffic(sums[kind, "count"], sums[kind, "bytes"]) for kind in KINDS if sums[kind, "count"]}


def _num_bytes(dtype: str, dimensions: str) -> int:
    bits = BITS.get(dtype) or int(re.sub(r"\D", "", dtype) or 32)
    return math.prod(int(size) for size in dimensions.split(",") if size) * bits // 8
