"""The instructions of a compiled program, read from its text (`compiled.as_text()`)."""

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
