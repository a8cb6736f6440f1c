"""The time of a training step, measured for several models in turn, so that all see the same changes of speed.

Only ratios within a round are compared: a shared machine may be twice as fast a minute later.
"""

import contextlib
import dataclasses
import os
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np
from jax.experimental.compilation_cache import compilation_cache
from jax.sharding import Mesh

from meliad_like.config import RunConfig
from meliad_like.config.run import stages_of
from meliad_like.data.batch import Batch
from meliad_like.experiments.evaluations import facts
from meliad_like.mesh import lane_sharding, make_mesh
from meliad_like.run.setup import vocabulary_size
from meliad_like.training.hardware import peak_flops
from meliad_like.training.program import make_program

WARM_UP = 2  # rounds that don't count


class TimedStep:
    """The training step of a run, compiled, with its state and a batch of random tokens; nothing is read from disk. It
    is timed `in_a_row`, without waiting in between, as a training does it."""

    def __init__(self, run: RunConfig, vocabulary_size: int, mesh: Mesh, in_a_row: int = 1):
        program, began = make_program(run.on_this_platform(), vocabulary_size, mesh), time.perf_counter()
        self.step = program.compile_step()
        self.compile_seconds = time.perf_counter() - began
        self.run, self.model, self.state, self.in_a_row = run, program.model, program.initialise(), in_a_row
        lanes = lane_sharding(mesh, run.data.num_lanes)
        self.batch = jax.device_put(random_batch(program.abstract_batch, vocabulary_size), lanes)
        self.seconds: list[float] = []

    def __call__(self) -> None:
        """Does the steps and adds the time of one to `seconds`."""
        began = time.perf_counter()
        for _ in range(self.in_a_row):
            self.state, _ = self.step(self.state, self.batch)
        jax.block_until_ready(self.state)
        self.seconds.append((time.perf_counter() - began) / self.in_a_row)

    @property
    def memory_bytes(self) -> int:
        """The most that the step needs on a device, as the compiler plans it: state, batch and temporary arrays."""
        analysis = self.step.memory_analysis()
        assert analysis is not None
        return analysis.temp_size_in_bytes + analysis.argument_size_in_bytes


@contextlib.contextmanager
def without_compiled_programs() -> Iterator[None]:
    """Compiles everything anew inside the `with` statement, and keeps none of it."""
    config: Any = jax.config
    before = config.jax_enable_compilation_cache
    try:
        config.update("jax_enable_compilation_cache", False)
        # JAX asks for the setting once.
        compilation_cache.reset_cache()
        yield
    finally:
        config.update("jax_enable_compilation_cache", before)
        compilation_cache.reset_cache()


def random_batch(shapes: Batch, vocabulary_size: int) -> Batch:
    """A batch of random tokens, with a document for each lane."""
    zeros = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), shapes)
    b, n = zeros.inputs.shape
    tokens = np.random.default_rng(0).integers(0, vocabulary_size, (b, n + 1)).astype(np.int32)
    zeros.start[:, 0] = True
    return zeros._replace(inputs=tokens[:, :-1], targets=tokens[:, 1:], loss_mask=np.ones((b, n), bool))


def time_in_turn(steps: Mapping[str, TimedStep], repeats: int) -> dict[str, Any]:
    """Times every step `repeats` times, one of each in a round.

    Returns:
      `device`; `peak`, the device's FLOP/s in the precision of the steps; and for each of `rows` its `seconds` by
      round, `memory_bytes`, `compile_seconds` and `share_of_peak`.
    """
    peak = peak_flops(next(iter(steps.values())).run.model.activation_dtype)
    for _ in range(WARM_UP + repeats):
        for step in steps.values():
            step()
    rows = {}
    for name, step in steps.items():
        seconds = step.seconds[WARM_UP:]
        flops = step.model.flops.training * step.run.data.tokens_per_step
        rows[name] = {
            "seconds": seconds,
            "memory_bytes": step.memory_bytes,
            "compile_seconds": step.compile_seconds,
            "share_of_peak": flops / float(np.median(seconds)) / (peak * jax.device_count()),
        }
    return {"device": jax.devices()[0].device_kind, "peak": peak, "rows": rows}


def relative_time(rows: Mapping[str, Any], name: str, baseline: str) -> float:
    """The median over rounds of the ratio of a step's time to the baseline's in the same round."""
    return float(np.median(np.array(rows[name]["seconds"]) / np.array(rows[baseline]["seconds"])))


def in_shares(parts: Mapping[str, Any], shares: Mapping[str, float]) -> dict[str, Any]:
    """The average step of a training with several kinds of steps, one after the other: `parts` are `rows` of
    `time_in_turn`, and `shares` of all steps, by the names of the kinds, add up to 1."""
    if len(shares) == 1:
        return dict(parts[next(iter(shares))])
    weights, kinds = list(shares.values()), [parts[name] for name in shares]
    seconds = np.array([kind["seconds"] for kind in kinds])
    used = weights * np.median(seconds, axis=1)
    return {
        "seconds": np.dot(weights, seconds).tolist(),
        "memory_bytes": max(kind["memory_bytes"] for kind in kinds),
        "compile_seconds": sum(kind["compile_seconds"] for kind in kinds),
        "share_of_peak": float(np.average([kind["share_of_peak"] for kind in kinds], weights=used)),
    }


def time_runs(runs: Mapping[str, RunConfig], repeats: int) -> dict[str, Any]:
    """Times the training steps of runs in turn, as `time_in_turn`; `rows` have the facts of their runs, too. The step
    of a run with stages is the average of theirs."""
    shares: dict[str, dict[str, float]] = {name: defaultdict(float) for name in runs}
    parts: dict[Any, str] = {}
    steps = {}
    for name, run in runs.items():
        for stage in (stages := stages_of(run)):
            # Stages that are the same in everything that takes time are timed once.
            training = dataclasses.replace(stage.run.training, num_steps=1)
            same = stage.run.model, stage.run.data, stage.run.optimizer, training
            part = parts.setdefault(same, name if len(stages) == 1 else f"{name}, stage {stage.index + 1}")
            shares[name][part] += (stage.last_step - stage.first_step) / run.training.num_steps
            if part not in steps:
                # The time to compile is one of the figures.
                with without_compiled_programs():
                    steps[part] = TimedStep(stage.run, vocabulary_size(stage.run), make_mesh(stage.run.mesh))
                print(f"compiled {part} in {steps[part].compile_seconds:.1f} s", flush=True)
    timing = time_in_turn(steps, repeats)
    timing["rows"] = {
        name: facts(run, vocabulary_size(run)) | {"device": device_name()} | in_shares(timing["rows"], shares[name])
        for name, run in runs.items()
    }
    return timing


def device_name() -> str:
    """The name of this machine's device; for a CPU its number of cores."""
    device = jax.devices()[0]
    return f"CPU with {os.cpu_count()} cores" if device.platform == "cpu" else device.device_kind
