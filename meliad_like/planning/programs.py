"""The programs of a run, compiled for devices that need not be there, and what they need on each of them."""

import functools
import re
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from meliad_like.config import RunConfig
from meliad_like.evaluation.perplexity import evaluation_step
from meliad_like.mesh import carry_shardings, lane_sharding, make_mesh, replicated
from meliad_like.models.model import Model
from meliad_like.planning.collectives import Traffic, traffic
from meliad_like.planning.topology import Topology
from meliad_like.training.program import Program, make_program

PROGRAMS = ("training", "evaluation", "decoding")

# What the TPU compiler says, of all that is used or of temporary arrays alone.
_USED = re.compile(r"Used ([\d.]+)([KMGT]?) of [\d.]+[KMGT]? hbm")
_TEMPORARY = re.compile(r"required for HLO temporaries \(([\d.]+)([KMGT]?)\)")


class Need(NamedTuple):
    """Of one program, in bytes on each device."""

    name: str
    parts: dict[str, int]
    """What goes in and stays: parameters, optimizer state, carry, batch."""
    activations: int
    """Everything temporary that is needed at once, gradients included. Where the compiler gave up: what it says is used
    beside the parts."""
    results: int
    """What comes out and takes no place of what went in."""
    code: int
    collectives: dict[str, Traffic]
    flops: float
    """By our own count; an operation of all devices together is shared out evenly."""
    compile_seconds: float
    gave_up: bool = False
    """Whether the compiler found no way to keep within the device's memory; there is no program then."""

    @property
    def total(self) -> int:
        return sum(self.parts.values()) + self.activations + self.results + self.code


def needs(
    run: RunConfig,
    vocabulary_size: int,
    topology: Topology,
    programs: Sequence[str] = PROGRAMS,
    quick: bool = False,
) -> Iterator[Need]:
    """Compiles the programs of a run, in turn.

    Args:
      run: of one stage.
      vocabulary_size: in tokens.
      topology: the devices.
      programs: some of PROGRAMS.
      quick: compile with the least effort, in half the time or less. The programs would be slower, and their
        activations come out as large or a little larger: by 0 to 20 percent (docs/planning.md).

    Raises:
      UserError: the mesh does not fit the devices, the lanes or the model.
    """
    mesh = make_mesh(run.mesh, topology.devices)
    program = make_program(run, vocabulary_size, mesh)
    model, state, batch = program.model, program.abstract_state, program.abstract_batch
    tokens = run.data.tokens_per_step / mesh.size
    parts = state_parts(program)
    # O0, by the number that both jax 0.10 and 0.12 understand.
    options = {"optimization_level": 9} if quick else {}

    def evaluate():
        with jax.set_mesh(mesh):
            step = jax.jit(
                functools.partial(evaluation_step, model, run.training.loss_slice),
                donate_argnums=1,
                in_shardings=(
                    _shardings(state.params),
                    _shardings(state.carry),
                    lane_sharding(mesh, run.data.num_lanes),
                ),
                out_shardings=(_shardings(state.carry), replicated(mesh)),
            )
            return step.lower(state.params, state.carry, batch).compile(options)

    read = {name: parts[name] for name in ("parameters", "carry", "batch")}
    decoding = _decoding_carry(model, state.params, run.data.num_lanes, mesh)

    def decode():
        lanes = lane_sharding(mesh, run.data.num_lanes)
        step = jax.jit(
            lambda params, token, carry: model.bind(params).decode_step(token, carry),
            donate_argnums=2,
            in_shardings=(_shardings(state.params), lanes, _shardings(decoding)),
            out_shardings=(lanes, _shardings(decoding)),
        )
        token = jax.ShapeDtypeStruct((run.data.num_lanes,), jnp.int32)
        with jax.set_mesh(mesh):
            return step.lower(state.params, token, decoding).compile(options)

    held = {"parameters": parts["parameters"], "carry": _size_on_device(decoding)}
    forward = model.forward_flops_per_token
    known = {
        "training": (functools.partial(program.compile_step, options), parts, model.training_flops_per_token * tokens),
        "evaluation": (evaluate, read, forward * tokens),
        "decoding": (decode, held, forward * run.data.num_lanes / mesh.size),
    }
    for name in programs:
        compile_program, resident, flops = known[name]
        yield _need(name, compile_program, resident, flops, topology)


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
        return Need(name, parts, activations, 0, 0, {}, flops, time.perf_counter() - began, gave_up=True)
    seconds = time.perf_counter() - began
    memory = compiled.memory_analysis()
    results = memory.output_size_in_bytes - memory.alias_size_in_bytes
    # The TPU compiler's `temp_size` counts the holes in its heap twice; its peak leaves some out, a tenth of a GiB at
    # most. On a CPU the former is right, and the peak is that of the arguments.
    peak = memory.peak_memory_in_bytes - memory.argument_size_in_bytes - results
    return Need(
        name=name,
        parts=parts,
        activations=memory.temp_size_in_bytes if topology.kind == "cpu" else peak,
        results=results,
        code=memory.generated_code_size_in_bytes,
        collectives=traffic(compiled.as_text()),
        flops=flops,
        compile_seconds=seconds,
    )


def refused_bytes(message: str, held: int) -> int | None:
    """What a program would use beside `held`, where the TPU compiler's error says that a device has less."""
    for pattern, besides in ((_TEMPORARY, 0), (_USED, held)):
        if "RESOURCE_EXHAUSTED" in message and (found := pattern.search(message)):
            return int(float(found[1]) * 1024 ** " KMGT".index(found[2] or " ")) - besides
    return None


def state_parts(program: Program) -> dict[str, int]:
    """What stays on a device between training steps, by kind, in bytes; known without compiling."""
    state = program.abstract_state
    shards = lane_sharding(program.mesh, program.abstract_batch.inputs.shape[0])
    batch = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=shards), program.abstract_batch)
    groups = {
        "parameters": state.params,
        "optimizer state": state.optimizer_state,
        "carry": state.carry,
        "batch": batch,
    }
    return {name: _size_on_device(tree) for name, tree in groups.items()}


def least_bytes(run: RunConfig, vocabulary_size: int, topology: Topology) -> int:
    """What a training step holds on each device at the very least: what stays, and gradients. Nothing is compiled.

    Raises:
      UserError: as `needs`.
    """
    parts = state_parts(make_program(run, vocabulary_size, make_mesh(run.mesh, topology.devices)))
    return sum(parts.values()) + parts["parameters"]


def _size_on_device(tree: Any) -> int:
    """Bytes of abstract arrays on one device."""
    leaves = jax.tree.leaves(tree)
    return sum(int(np.prod(x.sharding.shard_shape(x.shape))) * x.dtype.itemsize for x in leaves)


def _decoding_carry(model: Model, params: Any, num_lanes: int, mesh) -> Any:
    shapes = jax.eval_shape(lambda params: model.bind(params).init_carry(num_lanes, decoding=True), params)
    shardings = carry_shardings(mesh, num_lanes, shapes)
    return jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), shapes, shardings)


def _shardings(tree: Any) -> Any:
    return jax.tree.map(lambda x: x.sharding, tree)
