"""A run before anything is compiled or trained: its parameters, its memory between steps, and the cost of a token."""

from typing import NamedTuple

import jax

from meliad_like.config import RunConfig
from meliad_like.config.run import stages_of
from meliad_like.mesh import MeshConfig, make_mesh
from meliad_like.models.model import Model
from meliad_like.planning.programs import state_parts
from meliad_like.planning.topology import GIB
from meliad_like.tables import Table
from meliad_like.training.hardware import DATASHEET_FLOPS
from meliad_like.training.program import make_program, num_trained

EXAMPLES = {"TPU v4": "TPU v4", "v5e": "TPU v5e", "v5p": "TPU v5p", "v6e": "TPU v6e", "H100": "NVIDIA H100 80GB HBM3"}
"""Devices for which the time of a training is estimated, by their names in the table."""
SHARE_OF_PEAK = 0.4
"""The share of a device's peak that training is assumed to reach: that of Slide:13L on an H200, the only one that was
measured (docs/performance.md). Models with recurrences reach less."""


class Description(NamedTuple):
    """The needs of a run, over all devices together."""

    model: Model
    """The model of the last stage."""
    num_trained: int
    """The number of parameters that are trained."""
    parts: dict[str, int]
    """Bytes between steps by kind (`planning.programs.PARTS`), in the stage that needs the most."""
    num_lanes: int
    """The number of lanes in that stage."""
    num_steps: int
    num_tokens: int
    """Tokens of all steps, padding included."""
    total_flops: float
    """Operations of all steps of all stages (`layers/flops.py`)."""

    def table(self) -> Table:
        """The figures, one for each row."""
        rows = [("parameters", f"{self.model.num_parameters:,}")]
        if self.num_trained != self.model.num_parameters:
            rows.append(("trained parameters", f"{self.num_trained:,}"))
        rows += [(f"{name}, all devices together", _size(num_bytes)) for name, num_bytes in self.parts.items()]
        rows += [
            ("carry of one document, of any length", _size(self.parts["carry"] / self.num_lanes)),
            ("the model sees", self.model.sight),
            ("a checkpoint", _size(sum(self.parts.values()) - self.parts["batch"])),
            ("a token's operations, reading", f"{self.model.flops.forward:.4g}"),
            ("a token's operations, training", f"{self.model.flops.training:.4g}"),
            ("steps", f"{self.num_steps:,}"),
            ("tokens of all steps", f"{self.num_tokens:,}"),
            ("operations of all steps", f"{self.total_flops:.4g}"),
        ]
        for name, kind in EXAMPLES.items():
            days = self.total_flops / (SHARE_OF_PEAK * DATASHEET_FLOPS[kind]) / 86_400
            rows.append((f"days of one {name} at {SHARE_OF_PEAK:.0%} of its peak", f"{days:,.3g}"))
        return Table("what the run needs", ("", ""), rows)


def describe(run: RunConfig, vocabulary_size: int) -> Description:
    """The figures of a run whose vocabulary has this size. Raises a UserError if the sizes don't go together."""
    # Everything on one device: what is needed in total does not depend on the mesh.
    mesh, stages = make_mesh(MeshConfig(), jax.devices()[:1]), stages_of(run)
    programs = [make_program(stage.run, vocabulary_size, mesh) for stage in stages]
    needs = [(state_parts(program), stage.run.data.num_lanes) for program, stage in zip(programs, stages, strict=True)]
    parts, lanes = max(needs, key=lambda need: sum(need[0].values()))
    tokens = [(stage.last_step - stage.first_step) * stage.run.data.tokens_per_step for stage in stages]
    total = sum(n * program.model.flops.training for n, program in zip(tokens, programs, strict=True))
    model = programs[-1].model
    trained = num_trained(stages[-1].run, model)
    return Description(model, trained, parts, lanes, run.training.num_steps, sum(tokens), total)


def _size(num_bytes: float) -> str:
    return f"{num_bytes / GIB:,.3f} GiB" if num_bytes >= GIB / 10 else f"{num_bytes / 2**20:,.3f} MiB"
