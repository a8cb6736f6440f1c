"""The TPU compiler's clock: how long a program takes on a TPU, by the TPU compiler's estimate for each instruction.

The compiler writes `estimated_cycles` into the text of a compiled program. A step's cycles are the sum over all
instructions, each as often as it runs. docs/planning.md compares this sum with measured times, and lists what it does
not see: kernels, sorts, gathers and scatters have no estimate, and instructions that overlap are added up.
"""

import functools
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import jax
from compiled_text import KINDS, Instruction, Module

import meliad_like
from meliad_like.config import RunConfig
from meliad_like.mesh import make_mesh
from meliad_like.mixers.base import MIXERS
from meliad_like.planning.programs import MemoryEstimate, measure, state_parts
from meliad_like.planning.topology import Topology
from meliad_like.training.program import make_program

CLOCKS = {"TPU v4": 1.05e9, "TPU v5 lite": 1.5e9, "TPU v5": 1.75e9, "TPU v6 lite": 1.75e9}
"""Cycles per second: the peak rate over the operations of all matrix units in a cycle. v4 and v5p have 8 units of
128 x 128, v5e has 4, v6e has 4 of 256 x 256."""
SCOPES = ("embedding", "attention", "feedforward", "loss", "optimizer")
"""The names with `jax.named_scope` of parts that all models have; each mixer's part has its registered name."""
COLLECTIVES, COPIES, OTHER = "collectives", "copies and casts", "other"
PACKAGE = Path(meliad_like.__file__).parent

_CYCLES = re.compile(r'"estimated_cycles":"(\d+)"')
_OPERATION = re.compile(r'op_name="([^"]*)"')
_SOURCE = re.compile(r'source_file="([^"]*)" source_line=(\d+)')
_FRAME = re.compile(r"stack_frame_id=(\d+)")
# These move or convert values without computing any.
_MOVES = {
    *("bitcast", "bitcast-convert", "broadcast", "concatenate", "constant", "convert", "copy", "copy-done"),
    *("copy-start", "dynamic-slice", "dynamic-update-slice", "get-tuple-element", "pad", "parameter", "reshape"),
    *("reverse", "slice", "transpose", "tuple"),
}
_BLIND = {"sort", "gather", "scatter"}
"""Instructions that take time, and to which the compiler gives no estimate."""


class Timed(NamedTuple):
    """An instruction with an estimate."""

    name: str
    result: str
    """The type of its result, without layouts."""
    part: str
    source: str
    """The innermost line of the package that it was traced from; empty if that is not known."""
    runs: int
    """How often a step runs it."""
    cycles: int
    """The estimated cycles of all runs together."""


class Clock(NamedTuple):
    """The estimate for one run of a program, on each device."""

    parts: dict[str, int]
    """Cycles by part of the model, the longest first."""
    costliest: list[Timed]
    """The instructions with the most cycles, in descending order."""
    without_estimate: dict[str, int]
    """How often a step runs kernels, sorts, gathers and scatters that have no estimate, by these words."""

    @property
    def cycles(self) -> int:
        return sum(self.parts.values())


def clock_step(run: RunConfig, vocabulary_size: int, topology: Topology) -> tuple[MemoryEstimate, Clock | None]:
    """Compiles the training step of a run of one stage; no clock if it does not fit, or the compiler has none."""
    program, texts = make_program(run, vocabulary_size, make_mesh(run.mesh, topology.devices)), []

    def compile_step() -> jax.stages.Compiled:
        compiled = program.compile_step()
        texts.append(compiled.as_text())
        return compiled

    flops = program.model.flops.training * run.data.tokens_per_step / program.mesh.size
    estimate = measure(compile_step, "training", state_parts(program), flops, topology)
    return estimate, read_clock(texts[0]) if texts else None


def read_clock(text: str, num_costliest: int = 20) -> Clock | None:
    """The clock of a compiled program by its text; None if there are no estimates, which only TPUs' compilers make."""
    module, locations, timed, without_estimate = Module(text), _Locations(text), [], Counter[str]()
    for instruction, runs in _executed(module, module.entry, 1):
        if estimate := _CYCLES.search(instruction.text):
            result = re.sub(r"\{[^{}]*\}", "", instruction.result)
            part, source = _part(module, instruction), locations.of(instruction)
            timed.append(Timed(instruction.name, result, part, source, runs, runs * int(estimate[1])))
        elif instruction.opcode == "custom-call" and "tpu_custom_call" in instruction.text:
            without_estimate["kernels"] += runs
        else:
            without_estimate.update({f"{kind}s": runs for kind in _opcodes(module, instruction) & _BLIND})
    if not timed:
        return None
    parts: Counter[str] = Counter()
    for one in timed:
        parts[one.part] += one.cycles
    timed.sort(key=lambda one: -one.cycles)
    return Clock(dict(parts.most_common()), timed[:num_costliest], dict(without_estimate))


def _executed(module: Module, name: str, runs: int) -> Iterator[tuple[Instruction, int]]:
    """The instructions of a computation and of those that it calls, and how often each runs.

    A fusion is one instruction. Of a condition's branches, the one with the most cycles counts.
    """
    for instruction in module.computations.get(name, []):
        yield instruction, runs
        if instruction.opcode in ("while", "call"):
            for _, called in instruction.called:
                yield from _executed(module, called, runs * module.trips(instruction))
        elif instruction.opcode == "conditional":
            branches = [list(_executed(module, called, runs)) for _, called in instruction.called]
            yield from max(branches, key=_sum, default=[])


def _sum(executed: list[tuple[Instruction, int]]) -> int:
    estimates = ((_CYCLES.search(instruction.text), runs) for instruction, runs in executed)
    return sum(runs * int(cycles[1]) for cycles, runs in estimates if cycles)


def _part(module: Module, instruction: Instruction) -> str:
    """The part of the model that an instruction belongs to: the innermost named scope of its operation's path."""
    opcodes = _opcodes(module, instruction)
    if any(opcode.startswith(KINDS) for opcode in opcodes):
        return COLLECTIVES
    if opcodes <= _MOVES:
        return COPIES
    operation = _OPERATION.search(instruction.text)
    scopes = _scopes().findall(operation[1]) if operation else []
    return scopes[-1] if scopes else OTHER


def _opcodes(module: Module, instruction: Instruction) -> set[str]:
    """The opcode of an instruction; of a fusion, those of the instructions in it."""
    if instruction.opcode != "fusion":
        return {instruction.opcode}
    return {one.opcode for _, called in instruction.called for one in module.computations.get(called, [])}


@functools.cache
def _scopes() -> re.Pattern[str]:
    return re.compile(rf"\b({'|'.join((*SCOPES, *MIXERS))})\b")


class _Locations:
    """The lines of source from which instructions were traced, by the tables at the beginning of a program's text."""

    def __init__(self, text: str):
        self.tables: dict[str, dict[int, str]] = {}
        table: dict[int, str] = {}
        for line in map(str.strip, text.splitlines()):
            if re.fullmatch(r"\w+", line):
                table = self.tables.setdefault(line, {})
            elif match := re.match(r"(\d+) (.*)", line):
                table[int(match[1])] = match[2]

    def of(self, instruction: Instruction) -> str:
        if source := _SOURCE.search(instruction.text):
            return self._name(source[1], int(source[2])) or f"{source[1]}:{source[2]}"
        frame = _FRAME.search(instruction.text)
        number = int(frame[1]) if frame else 0
        while entry := self.tables.get("StackFrames", {}).get(number):
            fields = dict(re.findall(r"(\w+)=(\d+)", entry))
            location = dict(re.findall(r"(\w+)=(\d+)", self.tables["FileLocations"][int(fields["file_location_id"])]))
            file = self.tables["FileNames"][int(location["file_name_id"])].strip('"')
            if name := self._name(file, int(location["line"])):
                return name
            number = int(fields.get("parent_frame_id", 0)) if fields.get("parent_frame_id") != str(number) else 0
        return ""

    @staticmethod
    def _name(file: str, line: int) -> str:
        """A line of the package, relative to it; empty for other files."""
        path = Path(file)
        return f"{path.relative_to(PACKAGE)}:{line}" if path.is_relative_to(PACKAGE) else ""
