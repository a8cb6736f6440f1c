"""The programs of a run, compiled for devices that this machine need not have, and their needs on each device."""

import functools
import math
import re
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from meliad_like.config import RunConfig
from meliad_like.evaluation.perplexity import evaluation_step
from meliad_like.mesh import COPIES, MeshConfig, carry_shardings, lane_sharding, make_mesh, replicated
from meliad_like.planning.topology import Topology
from meliad_like.training.program import TrainingProgram, make_program

PROGRAMS = ("training", "evaluation", "decoding")
PARTS = ("parameters", "optimizer state", "carry", "batch")
Compilation = Callable[[], jax.stages.Compiled]

# The TPU compiler's messages, about all memory that is used or about temporary arrays alone.
_USED = re.compile(r"Used ([\d.]+)([KMGT]?) of [\d.]+[KMGT]? hbm")
_TEMPORARY = re.compile(r"required for HLO temporaries \(([\d.]+)([KMGT]?)\)")


class MemoryEstimate(NamedTuple):
    """The memory that one program needs on each device, in bytes."""

    name: str
    topology: Topology
    parts: dict[str, int]
    """Arguments, which stay in memory: parameters, optimizer state, carry, batch."""
    activations: int
    """The most temporary memory at a time, gradients included. If the compiler gave up: the memory that it reports
    in addition to the parts."""
    results: int
    """Results that don't take the place of arguments."""
    code: int
    flops: float
    """The operations by our own count, divided evenly among the devices."""
    compile_seconds: float
    gave_up: bool = False
    """Whether the compiler found no program that fits into the device's memory."""

    @property
    def total(self) -> int:
        return sum(self.parts.values()) + self.activations + self.results + self.code

    @property
    def fits(self) -> bool:
        """True if the memory of a device is not known, unless the compiler gave up."""
        return not self.gave_up and (self.topology.chip is None or self.total <= self.topology.chip.memory)

    @property
    def seconds(self) -> dict[str, float]:
        """The least time of a run of the program, by resource; empty for unknown devices."""
        if (chip := self.topology.chip) is None:
            return {}
        return {
            "arithmetic": self.flops / chip.peak_flops,
            # At least: all arguments are read once, and temporary memory is written and read.
            "memory": (sum(self.parts.values()) + 2 * self.activations) / chip.memory_bandwidth,
        }

    @property
    def limited_by(self) -> str:
        """The resource that limits the program; empty for unknown devices."""
        times = self.seconds
        return max(times, key=lambda name: times[name], default="") if self.fits else "memory's size"


def estimates(
    run: RunConfig, vocabulary_size: int, topology: Topology, programs: Sequence[str] = PROGRAMS, quick: bool = False
) -> Iterator[MemoryEstimate]:
    """Compiles the programs of a run of one stage, in turn.

    With `quick` the compiler makes the least effort, and needs half the time or less; activations are then up to 20
    percent larger (docs/planning.md). Raises UserError if the mesh does not fit the devices, the lanes or the model.
    """
    mesh, num_lanes = make_mesh(run.mesh, topology.devices), run.data.num_lanes
    # The kernels that compile for one of the devices, where the config leaves this to the program.
    with jax.set_mesh(make_mesh(MeshConfig(), topology.devices[:1])):
        run = run.on_this_platform()
    program = make_program(run, vocabulary_size, mesh)
    model, state, batch = program.model, program.abstract_state, program.abstract_batch
    shapes = model.abstract_carry(num_lanes, decoding=True)
    shardings = carry_shardings(mesh, num_lanes, shapes)
    carry = jax.tree.map(lambda x, sharding: x.update(sharding=sharding), shapes, shardings)
    lanes = lane_sharding(mesh, num_lanes)
    token = jax.ShapeDtypeStruct((num_lanes,), jnp.int32, sharding=lanes)
    evaluation = functools.partial(evaluation_step, model, run.training.loss_slice)
    carried = jax.tree.map(lambda x: x.sharding, state.carry)
    evaluate = jax.jit(evaluation, donate_argnums=1, out_shardings=(carried, replicated(mesh)))
    decode = jax.jit(
        lambda params, token, carry: model.bind(params).decode_step(token, carry),
        donate_argnums=2,
        out_shardings=(lanes, shardings),
    )
    # O0, by a number that both jax 0.10 and 0.12 accept.
    options = {"optimization_level": 9} if quick else {}
    parts, forward, tokens = state_parts(program), model.flops.forward, run.data.tokens_per_step
    inputs = {name: parts[name] for name in ("parameters", "carry", "batch")}
    held = {"parameters": parts["parameters"], "carry": _size_on_device(carry)}
    known: dict[str, tuple[Compilation, dict[str, int], float]] = {
        "training": (lambda: program.compile_step(options), parts, model.flops.training * tokens),
        "evaluation": (
            lambda: evaluate.lower(state.params, state.carry, batch).compile(options),
            inputs,
            forward * tokens,
        ),
        "decoding": (lambda: decode.lower(state.params, token, carry).compile(options), held, forward * num_lanes),
    }
    for name in programs:
        compile_program, resident, flops = known[name]
        with jax.set_mesh(mesh):
            estimate = measure(compile_program, name, resident, flops / mesh.size, topology)
        yield estimate


def measure(
    compile_program: Callable[[], jax.stages.Compiled],
    name: str,
    parts: dict[str, int],
    flops: float,
    topology: Topology,
) -> MemoryEstimate:
    """Compiles a program; `parts` and `flops` are those of `MemoryEstimate`."""
    began = time.perf_counter()
    try:
        compiled = compile_program()
    except jax.errors.JaxRuntimeError as error:
        if (activations := refused_bytes(str(error), sum(parts.values()))) is None:
            raise
        seconds = time.perf_counter() - began
        return MemoryEstimate(name, topology, parts, activations, 0, 0, flops, seconds, gave_up=True)
    seconds, memory = time.perf_counter() - began, compiled.memory_analysis()
    assert memory is not None
    results = memory.output_size_in_bytes - memory.alias_size_in_bytes
    # The TPU compiler's `temp_size` counts gaps in its heap twice; its peak leaves some of them out, at most a tenth of
    # a GiB. On a CPU the former is right, and the peak is that of the arguments.
    peak = memory.peak_memory_in_bytes - memory.argument_size_in_bytes - results
    activations = memory.temp_size_in_bytes if topology.kind == "cpu" else peak
    code = memory.generated_code_size_in_bytes
    return MemoryEstimate(name, topology, parts, activations, results, code, flops, seconds)


def refused_bytes(message: str, held: int) -> int | None:
    """The memory that a program would use in addition to `held`, by the TPU compiler's error; None for others."""
    for pattern, counted in ((_TEMPORARY, 0), (_USED, held)):
        if "RESOURCE_EXHAUSTED" in message and (size := pattern.search(message)):
            return int(float(size[1]) * 1024 ** " KMGT".index(size[2] or " ")) - counted
    return None


def state_parts(program: TrainingProgram) -> dict[str, int]:
    """Bytes on a device between training steps, by kind; known without compiling."""
    state = program.abstract_state
    trees = (state.params, state.optimizer_state, state.carry, program.abstract_batch)
    return {name: _size_on_device(tree) for name, tree in zip(PARTS, trees, strict=True)}


def least_bytes(run: RunConfig, vocabulary_size: int, topology: Topology) -> int:
    """The least memory of a training step on each device: arguments, and its share of the gradient, before the
    parameters are updated. Nothing is compiled."""
    mesh = make_mesh(run.mesh, topology.devices)
    parts = state_parts(make_program(run, vocabulary_size, mesh))
    return sum(parts.values()) + parts["parameters"] // math.prod(mesh.shape[axis] for axis in COPIES)


def _size_on_device(tree: Any) -> int:
    """Bytes of abstract arrays on one device."""
    leaves = jax.tree.leaves(tree)
    return sum(int(np.prod(x.sharding.shard_shape(x.shape))) * x.dtype.itemsize for x in leaves)
