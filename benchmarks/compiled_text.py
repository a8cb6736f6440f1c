"""The instructions of a compiled program, read from its text (`compiled.as_text()`)."""

import math
import re
from typing import NamedTuple

KINDS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")

_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) \((?!.* = ).*\{$")
# The first word before a parenthesis; the type of the result before it has none.
_INSTRUCTION = re.compile(r"^(?:ROOT )?%?([\w.\-]+) = (.*?) ([a-z][\w\-]*)\(")
_CALL = re.compile(
    r"(body|calls|to_apply|true_computation|false_computation)=%?([\w.\-]+)|branch_computations=\{([^}]*)\}"
)
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_CONDITION = re.compile(r"condition=%?([\w.\-]+)")
_BOUND = re.compile(r"= s32\[\]\S* constant\((\d+)\)")


class Instruction(NamedTuple):
    """One instruction of a computation."""

    name: str
    result: str
    """The type of its result, as XLA writes it."""
    opcode: str
    text: str

    @property
    def called(self) -> list[tuple[str, str]]:
        """The computations that it calls, and how (`body`, `calls`, ...); conditions of loops are left out."""
        calls = ((how, re.findall(r"[\w.\-]+", one or several)) for how, one, several in _CALL.findall(self.text))
        return [(how, name) for how, names in calls for name in names]


class Module:
    """A compiled program: the name of its entry, and the instructions of each computation by its name."""

    def __init__(self, text: str):
        self.entry, self.computations, name = "", {}, ""
        for line in map(str.strip, text.splitlines()):
            if match := _COMPUTATION.match(line):
                name = match[2]
                self.computations[name] = []
                self.entry = name if match[1] else self.entry
            elif name and (match := _INSTRUCTION.match(line)):
                self.computations[name].append(Instruction(match[1], match[2], match[3], line))

    def trips(self, instruction: Instruction) -> int:
        """How often an instruction runs the computations that it calls.

        For a loop, this is what the compiler says, or else the constant with which the loop's condition compares a
        counter from 0 (as in every `jax.lax.scan`); 1 if neither is known, and for other instructions.
        """
        if instruction.opcode != "while":
            return 1
        if known := _TRIPS.search(instruction.text):
            return int(known[1])
        condition = _CONDITION.search(instruction.text)
        compared = self.computations.get(condition[1] if condition else "", [])
        bounds = [int(bound[1]) for one in compared if (bound := _BOUND.search(one.text))]
        return bounds[0] if len(bounds) == 1 else 1

    def bytes_moved(self, name: str = "", trips: int = 1) -> int:
        """The bytes that the instructions of the program read from memory and write to it, at least: each array that a
        fusion, product, copy or kernel takes or makes. Of an array with a first axis as long as a loop, a run of its
        body moves one entry."""
        instructions = self.computations[name or self.entry]
        types = {one.name: one.result for one in instructions}
        moved = 0
        for one in instructions:
            if one.opcode in ("while", "call", "conditional"):
                bodies = [called for how, called in one.called if how in ("body", "to_apply")]
                moved += sum(self.trips(one) * self.bytes_moved(body, self.trips(one)) for body in bodies)
            elif one.opcode not in _MOVE_NOTHING:
                operands = _OPERAND.findall(one.text.split(f" {one.opcode}(", 1)[1].split(")", 1)[0])
                moved += sum(_bytes(types.get(operand, ""), trips) for operand in operands)
                moved += _bytes(one.result, trips)
        return moved


_MOVE_NOTHING = ("parameter", "tuple", "get-tuple-element", "bitcast", "constant", "after-all", "iota")
_OPERAND = re.compile(r"%([\w.\-]+)")
_ARRAY = re.compile(r"\b([a-z]+)(\d*)\w*\[([\d,]*)\]")


def _bytes(types: str, trips: int) -> int:
    """The size of arrays of these types, without what a run of a loop's body leaves out."""
    total = 0
    for _, bits, sizes in _ARRAY.findall(types):
        shape = [int(size) for size in sizes.split(",") if size]
        shape = shape[1:] if trips > 1 and shape[:1] == [trips] else shape
        total += max(int(bits or 8) // 8, 1) * math.prod(shape)
    return total
