"""The programs of a run, compiled for devices that this machine need not have, and what they need on each device."""

import functools
import re
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from meliad_like.config import RunConfig
from meliad_like.evaluation.perplexity import evaluation_step
from meliad_like.mesh import carry_shardings, lane_sharding, make_mesh, replicated
from meliad_like.models.model import Model
from meliad_like.planning.clock import Clock, read_clock
from meliad_like.planning.collectives import Traffic, traffic
from meliad_like.planning.hlo import Module
from meliad_like.planning.topology import Topology
from meliad_like.training.program import Program, make_program

PROGRAMS = ("training", "evaluation", "decoding")
PARTS = ("parameters", "optimizer state", "carry", "batch")

# The TPU compiler's messages, about all memory that is used or about temporary arrays alone.
_USED = re.compile(r"Used ([\d.]+)([KMGT]?) of [\d.]+[KMGT]? hbm")
_TEMPORARY = re.compile(r"required for HLO temporaries \(([\d.]+)([KMGT]?)\)")


class Need(NamedTuple):
    """What one program needs on each device, in bytes."""

    name: str
    topology: Topology
    parts: dict[str, int]
    """Arguments, which stay in memory: parameters, optimizer state, carry, batch."""
    activations: int
    """The most temporary memory at a time, gradients included. If the compiler gave up: the memory that it reports
    besides the parts."""
    results: int
    """Results that don't take the place of arguments."""
    code: int
    collectives: dict[str, Traffic]
    flops: float
    """By our own count, divided evenly among the devices."""
    compile_seconds: float
    gave_up: bool = False
    """Whether the compiler found no program that fits into the device's memory."""
    clock: Clock | None = None
    """The compiler's estimate of the time; None where the compiler makes none, as for CPUs."""

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
        chip, peak_flops = self.topology.chip, self.topology.peak_flops
        if chip is None or peak_flops is None:
            return {}
        linked = sum(traffic.num_bytes for traffic in self.collectives.values())
        return {
            "arithmetic": self.flops / peak_flops,
            # At least: all arguments are read once, and temporary memory is written and read.
            "memory": (sum(self.parts.values()) + 2 * self.activations) / chip.memory_bandwidth,
            "links": linked / chip.link_bandwidth,
        }

    @property
    def estimated_seconds(self) -> float | None:
        """The time of a run of the program by the compiler's estimate."""
        chip = self.topology.chip
        return None if chip is None or self.clock is None else self.clock.cycles / chip.clock

    @property
    def share_of_peak(self) -> float | None:
        """The share of the peak rate of the program's operations, by the compiler's estimate of its time."""
        seconds, peak_flops = self.estimated_seconds, self.topology.peak_flops
        return None if seconds is None or peak_flops is None else self.flops / seconds / peak_flops

    @property
    def limited_by(self) -> str:
        """The resource that limits the program; empty for unknown devices."""
        times = self.seconds
        return max(times, key=lambda name: times[name], default="") if self.fits else "memory's size"


def needs(
    run: RunConfig, vocabulary_size: int, topology: Topology, programs: Sequence[str] = PROGRAMS, quick: bool = False
) -> Iterator[Need]:
    """Compiles the programs of a run of one stage, in turn.

    With `quick` the compiler makes the least effort, and needs half the time or less; activations are then up to 20
    percent larger (docs/planning.md). Raises UserError if the mesh does not fit the devices, the lanes or the model.
    """
    mesh, num_lanes = make_mesh(run.mesh, topology.devices), run.data.num_lanes
    program = make_program(run, vocabulary_size, mesh)
    model, state, batch = program.model, program.abstract_state, program.abstract_batch
    lanes, carry = lane_sharding(mesh, num_lanes), _decoding_carry(model, num_lanes, mesh)
    token = jax.ShapeDtypeStruct((num_lanes,), jnp.int32, sharding=lanes)
    evaluate = jax.jit(
        functools.partial(evaluation_step, model, run.training.loss_slice),
        donate_argnums=1,
        out_shardings=(_shardings(state.carry), replicated(mesh)),
    )
    decode = jax.jit(
        lambda params, token, carry: model.bind(params).decode_step(token, carry),
        donate_argnums=2,
        out_shardings=(lanes, _shardings(carry)),
    )
    # O0, by a number that both jax 0.10 and 0.12 accept.
    options = {"optimization_level": 9} if quick else {}
    parts, forward, tokens = state_parts(program), model.forward_flops_per_token, run.data.tokens_per_step
    read = {name: parts[name] for name in ("parameters", "carry", "batch")}
    held = {"parameters": parts["parameters"], "carry": _size_on_device(carry)}
    known: dict[str, tuple[Callable[[], jax.stages.Compiled], dict[str, int], float]] = {
        "training": (lambda: program.compile_step(options), parts, model.training_flops_per_token * tokens),
        "evaluation": (
            lambda: evaluate.lower(state.params, state.carry, batch).compile(options),
            read,
            forward * tokens,
        ),
        "decoding": (lambda: decode.lower(state.params, token, carry).compile(options), held, forward * num_lanes),
    }
    for name in programs:
        compile_program, resident, flops = known[name]
        with jax.set_mesh(mesh):
            need = _need(name, compile_program, resident, flops / mesh.size, topology)
        yield need


def _need(
    name: str,
    compile_program: Callable[[], jax.stages.Compiled],
    parts: dict[str, int],
    flops: float,
    topology: Topology,
) -> Need:
    began = time.perf_counter()
    try:
        compiled = compile_program()
    except jax.errors.JaxRuntimeError as error:
        if (activations := refused_bytes(str(error), sum(parts.values()))) is None:
            raise
        return Need(name, topology, parts, activations, 0, 0, {}, flops, time.perf_counter() - began, gave_up=True)
    seconds = time.perf_counter() - began
    memory, module = compiled.memory_analysis(), Module(compiled.as_text())
    assert memory is not None
    results = memory.output_size_in_bytes - memory.alias_size_in_bytes
    # The TPU compiler's `temp_size` counts gaps in its heap twice; its peak leaves some of them out, at most a tenth of
    # a GiB. On a CPU the former is right, and the peak is that of the arguments.
    peak = memory.peak_memory_in_bytes - memory.argument_size_in_bytes - results
    return Need(
        name=name,
        topology=topology,
        parts=parts,
        activations=memory.temp_size_in_bytes if topology.kind == "cpu" else peak,
        results=results,
        code=memory.generated_code_size_in_bytes,
        collectives=traffic(module),
        flops=flops,
        compile_seconds=seconds,
        clock=read_clock(module),
    )


def refused_bytes(message: str, held: int) -> int | None:
    """The memory that a program would use besides `held`, from the TPU compiler's error; None for other errors."""
    for pattern, besides in ((_TEMPORARY, 0), (_USED, held)):
        if "RESOURCE_EXHAUSTED" in message and (found := pattern.search(message)):
            return int(float(found[1]) * 1024 ** " KMGT".index(found[2] or " ")) - besides
    return None


def state_parts(program: Program) -> dict[str, int]:
    """Bytes on a device between training steps, by kind; known without compiling."""
    state = program.abstract_state
    trees = (state.params, state.optimizer_state, state.carry, program.abstract_batch)
    return {name: _size_on_device(tree) for name, tree in zip(PARTS, trees, strict=True)}


def least_bytes(run: RunConfig, vocabulary_size: int, topology: Topology) -> int:
    """The least memory of a training step on each device: arguments and gradients. Nothing is compiled."""
    parts = state_parts(make_program(run, vocabulary_size, make_mesh(run.mesh, topology.devices)))
    return sum(parts.values()) + parts["parameters"]


def _size_on_device(tree: Any) -> int:
    """Bytes of abstract arrays on one device."""
    leaves = jax.tree.leaves(tree)
    return sum(int(np.prod(x.sharding.shard_shape(x.shape))) * x.dtype.itemsize for x in leaves)


def _decoding_carry(model: Model, num_lanes: int, mesh: Mesh) -> Any:
    shapes = model.abstract_carry(num_lanes, decoding=True)
    shardings = carry_shardings(mesh, num_lanes, model.carry_axes(shapes))
    return jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), shapes, shardings)


def _shardings(tree: Any) -> Any:
    return jax.tree.map(lambda x: x.sharding, tree)
