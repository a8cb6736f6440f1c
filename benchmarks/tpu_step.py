r"""How long a training step takes on a TPU, by [the clock](tpu_clock.py) of its compiler (libtpu); it needs no TPU.

One step by part of the model, with its costliest instructions:

    python benchmarks/tpu_step.py --gin_file=size/medium_150m.gin --gin_file=block_recurrent/slide_13l.gin \
        --gin_file=option/bfloat16.gin --vocabulary_size=32000 --topology=v4:2x2x4

All rows of a table of the papers, or some (--row), beside the paper's step times; minutes a row. It resumes:

    python benchmarks/tpu_step.py --table=table1 --gin_file=task/pg19_tokens.gin --gin_file=option/bfloat16.gin \
        --topology=v4:2x2x4
"""

import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pandas as pd
from absl import app, flags
from rich.console import Console
from tpu_clock import CLOCKS, Clock, clock_step

from meliad_like import config
from meliad_like.config import RunConfig
from meliad_like.config.run import stages_of
from meliad_like.experiments.tables import SUBJECTS
from meliad_like.experiments.tables.table import configure
from meliad_like.planning.topology import Topology, open_topology
from meliad_like.resumable import write_json
from meliad_like.run.setup import vocabulary_size
from meliad_like.tables import Table

GIN_FILE = flags.DEFINE_multi_string("gin_file", [], "Gin files of the run, or of the task and options of all rows.")
GIN_PARAM = flags.DEFINE_multi_string("gin_param", [], "Bindings.")
TOPOLOGY = flags.DEFINE_string("topology", "v4:2x2x4", "TPU slice by its chips.")
VOCABULARY_SIZE = flags.DEFINE_integer("vocabulary_size", None, "Number of tokens. Default: as for `meliad_like plan`.")
COSTLIEST = flags.DEFINE_integer("costliest", 10, "The number of instructions to list.")
TABLE = flags.DEFINE_enum("table", None, list(SUBJECTS), "A table whose rows are compiled at the paper's size.")
ROW = flags.DEFINE_multi_string("row", [], "Name of a row of the table. Repeatable. Default: all.")
OUTPUT = flags.DEFINE_string(
    "output", None, "JSON file for the figures. Default for a table: runs/tpu_step/TABLE_TOPOLOGY.json."
)


def time_step(run: RunConfig, topology: Topology) -> tuple[Clock, dict[str, Any]]:
    """The clock of a training step, and its figures: time, operations, memory, compilation."""
    estimate, clock = clock_step(run, VOCABULARY_SIZE.value or vocabulary_size(run), topology)
    if clock is None or topology.chip is None:
        reason = "the step does not fit into memory" if estimate.gave_up else "its compiler estimates no times"
        raise app.UsageError(f"--topology={topology.name}: {reason}")
    return clock, {
        "cycles": clock.cycles,
        "seconds": clock.cycles / CLOCKS[topology.kind],
        "flops": estimate.flops,
        "memory_bytes": estimate.total,
        "compile_seconds": estimate.compile_seconds,
        "without_estimate": clock.without_estimate,
    }


def share_of_peak(figures: dict[str, Any], topology: Topology) -> float:
    """The share of the chip's peak rate of operations."""
    assert topology.chip is not None
    return figures["flops"] / figures["seconds"] / topology.chip.peak_flops


def show_step(run: RunConfig, topology: Topology) -> None:
    """Prints the step by part of the model, and its costliest instructions."""
    clock, figures = time_step(run, topology)
    rate, costliest = CLOCKS[topology.kind], clock.costliest[: COSTLIEST.value]

    def cells(cycles: int) -> tuple[str, ...]:
        return f"{cycles / 1e6:,.3f}", f"{1e3 * cycles / rate:,.3f}", f"{cycles / clock.cycles:.1%}"

    parts = [(part, *cells(cycles)) for part, cycles in {**clock.parts, "all": clock.cycles}.items()]
    title = (
        f"{topology.kind}, {topology.name}: {share_of_peak(figures, topology):.1%} of the peak, "
        f"{figures['memory_bytes'] / 2**30:.2f} GiB, compiled in {figures['compile_seconds']:.0f} s; "
        f"without an estimate: {clock.without_estimate or 'nothing'}"
    )
    console = Console(width=200)
    console.print(Table(title, ("part", "million cycles", "ms", "share"), parts).to_rich())
    header = ("instruction", "million cycles", "ms", "share", "runs", "part", "line", "result")
    rows = [(one.name, *cells(one.cycles), f"{one.runs:,}", one.part, one.source, one.result) for one in costliest]
    console.print(Table("the costliest instructions", header, rows).to_rich())
    if OUTPUT.value:
        write_json(OUTPUT.value, figures | {"parts": clock.parts, "costliest": [one._asdict() for one in costliest]})


def show_table(name: str, topology: Topology) -> None:
    """Compiles the rows of a table that have no figures yet, stage by stage; prints and writes all."""
    table, path = SUBJECTS[name], Path(OUTPUT.value or f"runs/tpu_step/{name}_{topology.name.replace(':', '_')}.json")
    figures = json.loads(path.read_text()) if path.exists() else {}
    rows = [table.row(name) for name in ROW.value] or [row for row in table.rows if not row.trained_as]
    for row in rows:
        if row.name in figures:
            continue
        run = configure(row, table.scales["paper"], GIN_FILE.value, GIN_PARAM.value)
        steps = pd.DataFrame([time_step(stage.run, topology)[1] for stage in stages_of(run)])
        shares = [stage.last_step - stage.first_step for stage in stages_of(run)]
        figures[row.name] = {
            **{name: float(np.average(steps[name], weights=shares)) for name in ("cycles", "seconds", "flops")},
            "memory_bytes": int(steps["memory_bytes"].max()),
            "compile_seconds": float(steps["compile_seconds"].sum()),
            "without_estimate": steps["without_estimate"].iloc[-1],
        }
        write_json(path, figures)
        print(f"{row.name}: {figures[row.name]['cycles'] / 1e6:.1f} million cycles", flush=True)
    cells = []
    for row in rows:
        mine, baseline = figures[row.name], figures.get(table.row(row.baseline).run_name)
        relative = f"{mine['cycles'] / baseline['cycles']:.3f}" if baseline else ""
        blind = ", ".join(f"{kind}: {number:,}" for kind, number in mine["without_estimate"].items())
        sizes = f"{share_of_peak(mine, topology):.0%}", f"{mine['memory_bytes'] / 2**30:.1f}"
        times = f"{mine['cycles'] / 1e6:,.1f}", relative, f"{1e3 * mine['seconds']:,.1f}"
        paper, compiled = str(row.paper.get("step time", "")), f"{mine['compile_seconds']:.0f}"
        cells.append((row.label, paper, *times, *sizes, compiled, blind))
    header = ("row", "paper", "million cycles", "relative", "ms", "peak", "GiB", "compiled in s", "without an estimate")
    print(Table(f"{table.title}, on {topology.name}", header, cells).to_markdown())


def main(_) -> None:
    # The program itself runs on the CPU, whatever it compiles for.
    jax.config.update("jax_platforms", "cpu")
    topology = open_topology(TOPOLOGY.value)
    if TABLE.value:
        show_table(TABLE.value, topology)
    else:
        show_step(config.parse(GIN_FILE.value, GIN_PARAM.value), topology)


if __name__ == "__main__":
    app.run(main)
