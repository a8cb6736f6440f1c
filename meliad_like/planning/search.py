"""The nearest settings that would fit, for a run that does not."""

import dataclasses
import math
from collections.abc import Callable, Sequence

from meliad_like.config import RunConfig
from meliad_like.errors import UserError
from meliad_like.planning.programs import PROGRAMS, least_bytes, needs
from meliad_like.planning.report import fits
from meliad_like.planning.topology import Topology

# The rematerialisations that need less memory than each one.
SPARING: dict[str | None, tuple[str, ...]] = {"none": ("dots", "layers"), "dots": ("layers",)}


def nearest_that_fits(
    run: RunConfig,
    vocabulary_size: int,
    topology: Topology,
    programs: Sequence[str] = PROGRAMS,
    quick: bool = False,
    on_try: Callable[[str], None] = lambda bindings: None,
) -> str | None:
    """The first of `alternatives` that fits, as bindings; None if none of them fits.

    The arguments are those of `needs`; if the memory of the chips is not known, only the compiler decides what fits.
    `on_try` is called with the bindings that are about to be compiled.
    """
    memory = math.inf if topology.chip is None else topology.chip.memory
    for bindings, other in alternatives(run, len(topology.devices)):
        try:
            if least_bytes(other, vocabulary_size, topology) > memory:
                continue
            on_try(bindings)
            if all(fits(need, topology) for need in needs(other, vocabulary_size, topology, programs, quick)):
                return bindings
        except UserError:
            # The mesh doesn't divide the lanes or the model.
            continue
    return None


def alternatives(run: RunConfig, num_devices: int) -> list[tuple[str, RunConfig]]:
    """The nearest settings that need less memory, as bindings and as a run; the cheapest first."""
    found: list[tuple[str, RunConfig]] = []

    def add(bindings: str, **changes) -> None:
        found.append((bindings, dataclasses.replace(run, **changes)))

    fields = {field.name: getattr(run.model, field.name) for field in dataclasses.fields(run.model)}
    model = run.model
    for remat in SPARING.get(fields.get("remat"), ()):
        model = dataclasses.replace(run.model, remat=remat)
        add(f"{type(model).__name__}.remat = {remat!r}", model=model)
    name = f" with {type(model).__name__}.remat = 'layers'" if model is not run.model else ""
    parts = run.training.gradient_accumulation
    shards = num_devices // (run.mesh.tensor * run.mesh.sequence)
    while run.data.num_lanes % (2 * parts * shards) == 0:
        parts *= 2
        training = dataclasses.replace(run.training, gradient_accumulation=parts)
        add(f"TrainingConfig.gradient_accumulation = {parts}{name}", training=training, model=model)
    fsdp = run.mesh.fsdp
    # The number of copies then follows from the number of devices.
    data = "" if run.mesh.data == -1 else " with MeshConfig.data = -1"
    while shards % (2 * fsdp) == 0:
        fsdp *= 2
        mesh = dataclasses.replace(run.mesh, data=-1, fsdp=fsdp)
        add(f"MeshConfig.fsdp = {fsdp}{data}{name}", mesh=mesh, model=model)
    # Last, because fewer lanes, with fewer tokens in each step, are another training.
    tokens, parts = run.data.tokens_per_step, run.training.gradient_accumulation
    while tokens // run.data.segment_length % (2 * parts * shards) == 0:
        tokens //= 2
        fewer = dataclasses.replace(run.data, tokens_per_step=tokens)
        add(f"ReaderConfig.tokens_per_step = {tokens}{name}", data=fewer, model=model)
    return found
