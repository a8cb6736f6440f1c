"""Times training steps of several rows side by side, in turn, so that a change of the machine's speed hits all alike.

On a laptop, with the configuration of docs/performance.md:

    python benchmarks/step_time.py

At the size of table 1 of the Block-Recurrent paper, on an accelerator:

    python benchmarks/step_time.py --scale=paper --lanes=4
"""

import json
import os
import sys
import time
from typing import NamedTuple

import jax
import numpy as np
from absl import app, flags
from rich.console import Console
from rich.table import Table

from meliad_like import config
from meliad_like.data.batch import Batch
from meliad_like.models.flops import training_flops_per_token
from meliad_like.models.model import Model
from meliad_like.training.hardware import DATASHEET_FLOPS
from meliad_like.training.optimizers import make_optimizer
from meliad_like.training.schedules import make_schedule
from meliad_like.training.state import init_state
from meliad_like.training.step import make_train_step

SCALES = {"laptop": (["size/laptop.gin"], 256), "paper": (["size/medium_150m.gin", "option/bfloat16.gin"], 32_000)}

SCALE = flags.DEFINE_enum("scale", "laptop", list(SCALES), "Size of the models.")
ROWS = flags.DEFINE_list("rows", ["slide_12l", "slide_13l", "fixed_skip", "lstm_dual"], "Files of gin/block_recurrent.")
LANES = flags.DEFINE_integer("lanes", 1, "Lanes of a step.", lower_bound=1)
REPEATS = flags.DEFINE_integer("repeats", 15, "Timed steps of each row.", lower_bound=1)
GIN_PARAM = flags.DEFINE_multi_string("gin_param", [], "Bindings for all rows.")
OUTPUT = flags.DEFINE_string("output", None, "JSON file for the figures.")


class Row(NamedTuple):
    """A compiled step, its state, and what it costs."""

    train_step: jax.stages.Compiled
    state: list
    batch: Batch
    compile_seconds: float
    parameters: int
    flops: float
    memory: int
    seconds: list[float]


def make_row(name: str) -> Row:
    files, vocabulary_size = SCALES[SCALE.value]
    run = config.parse([*files, f"block_recurrent/{name}.gin"], GIN_PARAM.value)
    model = Model(run.model, vocabulary_size)
    optimizer = make_optimizer(run.optimizer, make_schedule(run.schedule, run.training.num_steps))
    b, n, c = LANES.value, run.data.segment_length, run.data.segment_length // run.model.window_length
    tokens = np.random.default_rng(0).integers(0, vocabulary_size, (b, n + 1)).astype(np.int32)
    blocks = np.zeros((b, c), np.int32)
    batch = Batch(tokens[:, :-1], tokens[:, 1:], np.ones((b, n), bool), blocks.astype(bool), blocks, blocks)
    state = jax.jit(lambda: init_state(model, optimizer, b, jax.random.key(0)))()
    began = time.perf_counter()
    step = make_train_step(model, optimizer, run.training)
    train_step = jax.jit(step, donate_argnums=0).lower(state, batch).compile()
    compile_seconds = time.perf_counter() - began
    memory = train_step.memory_analysis()
    return Row(
        train_step=train_step,
        state=[state],
        batch=jax.device_put(batch),
        compile_seconds=compile_seconds,
        parameters=model.num_parameters,
        flops=training_flops_per_token(run.model, vocabulary_size) * b * n,
        memory=memory.temp_size_in_bytes + memory.argument_size_in_bytes,
        seconds=[],
    )


def time_step(row: Row) -> float:
    state = row.state.pop()
    began = time.perf_counter()
    state, _ = row.train_step(state, row.batch)
    jax.block_until_ready(state)
    row.state.append(state)
    return time.perf_counter() - began


def main(_) -> None:
    rows = {name: make_row(name) for name in ROWS.value}
    x = jax.random.normal(jax.random.key(0), (2048, 2048))
    product = jax.jit(lambda x: x @ x)
    product_seconds = []
    for _ in range(REPEATS.value + 2):
        for row in rows.values():
            row.seconds.append(time_step(row))
        began = time.perf_counter()
        product(x).block_until_ready()
        product_seconds.append(time.perf_counter() - began)
    kind = jax.devices()[0].device_kind
    measured = 2 * 2048**3 / np.median(product_seconds[2:])
    peak = DATASHEET_FLOPS.get(kind, measured) if SCALE.value == "paper" else measured
    medians = {name: float(np.median(row.seconds[2:])) for name, row in rows.items()}
    reference = medians.get("slide_13l", next(iter(medians.values())))

    table = Table(title=f"{kind}, {LANES.value} lane(s), peak {peak / 1e9:,.0f} GFLOP/s")
    for column in ("row", "parameters", "ms a step", "min", "relative", "share of peak", "memory GB", "compile s"):
        table.add_column(column, justify="left" if column == "row" else "right")
    figures = {}
    for name, row in rows.items():
        seconds = medians[name]
        figures[name] = {
            "parameters": row.parameters,
            "milliseconds": 1e3 * seconds,
            "minimum_milliseconds": 1e3 * min(row.seconds[2:]),
            "relative": seconds / reference,
            "share_of_peak": row.flops / seconds / peak,
            "memory_gigabytes": row.memory / 1e9,
            "compile_seconds": row.compile_seconds,
        }
        formats = ("{:,}", "{:.1f}", "{:.1f}", "{:.3f}", "{:.1%}", "{:.2f}", "{:.1f}")
        table.add_row(name, *(f.format(value) for f, value in zip(formats, figures[name].values(), strict=True)))
    Console(width=120).print(table)
    if OUTPUT.value:
        with open(OUTPUT.value, "w") as file:
            json.dump({"device": kind, "peak": peak, "lanes": LANES.value, "rows": figures}, file, indent=2)


if __name__ == "__main__":
    # As launch/environment.sh does; it must be there before the program starts.
    if "GLIBC_TUNABLES" not in os.environ:
        os.execve(
            sys.executable, [sys.executable, *sys.argv], {**os.environ, "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
        )
    app.run(main)
