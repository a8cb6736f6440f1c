"""The text of a compiled program, as `compiled.as_text()` gives it: computations, instructions, trip counts."""

import re
from typing import NamedTuple

_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) \((?!.* = ).*\{$")
# The first word before a parenthesis; the type of the result before it has none.
_INSTRUCTION = re.compile(r"^(?:ROOT )?%?([\w.\-]+) = (.*?) ([a-z][\w\-]*)\(")
_CALL = re.compile(
    r"(body|calls|to_apply|true_computation|false_computation)=%?([\w.\-]+)|branch_computations=\{([^}]*)\}"
)
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
_CONDITION = re.compile(r"condition=%?([\w.\-]+)")
_BOUND = re.compile(r" constant\((\d+)\)")


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
        names = []
        for how, one, several in _CALL.findall(self.text):
            names += [(how, name) for name in ([one] if one else re.findall(r"[\w.\-]+", several))]
        return names


class Module:
    """A compiled program.

    Attributes:
        entry: the name of the computation that runs first.
        computations: the instructions of each computation.
        lines: the lines outside of computations, such as tables of source locations.
    """

    def __init__(self, text: str):
        self.entry, self.computations, self.lines = "", {}, []
        name = ""
        for line in map(str.strip, text.splitlines()):
            if match := _COMPUTATION.match(line):
                name = match[2]
                self.computations[name] = []
                self.entry = name if match[1] else self.entry
            elif line.startswith("}"):
                name = ""
            elif not name:
                self.lines.append(line)
            elif match := _INSTRUCTION.match(line):
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
        found = [
            int(bound[1])
            for other in self.computations.get(condition[1] if condition else "", [])
            if other.opcode == "constant" and other.result.startswith("s32[]") and (bound := _BOUND.search(other.text))
        ]
        return found[0] if len(found) == 1 else 1
