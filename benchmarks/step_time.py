"""Times training steps of several rows in turn, so that all see the same changes of the machine's speed.

On a laptop, with the configuration of docs/performance.md:

    python benchmarks/step_time.py

At the size of table 1 of the Block-Recurrent paper, on an accelerator:

    python benchmarks/step_time.py --scale=paper --lanes=4
"""

import json
import os
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pandas as pd
from absl import app, flags
from rich.console import Console

from meliad_like import config
from meliad_like.command_line import keep_freed_memory
from meliad_like.experiments.step_time import TimedStep, relative_time, time_in_turn
from meliad_like.mesh import make_mesh
from meliad_like.studies.frames import table_of

SCALES = {
    "tiny": (["size/tiny.gin"], 256),
    "laptop": (["size/laptop.gin"], 256),
    "paper": (["size/medium_150m.gin", "option/bfloat16.gin"], 32_000),
}

SCALE = flags.DEFINE_enum("scale", "laptop", list(SCALES), "Size of the models.")
ROWS = flags.DEFINE_list(
    "rows", ["slide_12l", "slide_13l", "fixed_skip", "lstm_dual"], "Files of gin/block_recurrent, or of gin."
)
LANES = flags.DEFINE_integer("lanes", 1, "Lanes of a step, of the size's segments; other rows read as much.")
JOBS = flags.DEFINE_integer("jobs", 1, "Programs compiled at the same time.", lower_bound=1)
REPEATS = flags.DEFINE_integer("repeats", 15, "Timed steps of each row.", lower_bound=1)
IN_A_ROW = flags.DEFINE_integer("in_a_row", 1, "Steps between two waits for the device, as between logs of a training.")
GIN_PARAM = flags.DEFINE_multi_string("gin_param", [], "Bindings for all rows.")
OUTPUT = flags.DEFINE_string("output", None, "JSON file for the figures.")

FORMATS = {
    "parameters": ",.0f",
    "milliseconds": ".1f",
    "minimum_milliseconds": ".1f",
    "relative": ".3f",
    "share_of_peak": ".1%",
    "memory_gigabytes": ".2f",
    "compile_seconds": ".1f",
}


def main(_) -> None:
    files, vocabulary_size = SCALES[SCALE.value]
    tokens = LANES.value * config.parse(files, GIN_PARAM.value).data.segment_length
    params = [f"ReaderConfig.tokens_per_step = {tokens}", *GIN_PARAM.value]
    runs = {
        name: config.parse([*files, f"{name}.gin" if "/" in name else f"block_recurrent/{name}.gin"], params)
        for name in ROWS.value
    }
    with ThreadPoolExecutor(JOBS.value) as pool:
        made = pool.map(lambda run: TimedStep(run, vocabulary_size, make_mesh(run.mesh), IN_A_ROW.value), runs.values())
        steps = dict(zip(runs, made, strict=True))
    timing = time_in_turn(steps, REPEATS.value)
    reference = "slide_13l" if "slide_13l" in steps else ROWS.value[0]

    figures = {
        name: {
            "parameters": steps[name].model.num_parameters,
            "milliseconds": 1e3 * float(np.median(row["seconds"])),
            "minimum_milliseconds": 1e3 * min(row["seconds"]),
            "relative": relative_time(timing["rows"], name, reference),
            "share_of_peak": row["share_of_peak"],
            "memory_gigabytes": row["memory_bytes"] / 1e9,
            "compile_seconds": row["compile_seconds"],
        }
        for name, row in timing["rows"].items()
    }
    frame = pd.DataFrame(figures).T.rename_axis("row").reset_index()
    title = f"{timing['device']}, {tokens:,} tokens a step, peak {timing['peak'] / 1e9:,.0f} GFLOP/s"
    Console(width=140).print(table_of(frame, title, FORMATS).to_rich())
    if OUTPUT.value:
        with open(OUTPUT.value, "w") as file:
            json.dump({**timing, "tokens_per_step": tokens, "rows": figures}, file, indent=2)


if __name__ == "__main__":
    # As launch/environment.sh does; it must be there before the program starts. The imports above have started threads,
    # too late for keep_freed_memory to give all of them one arena.
    if "GLIBC_TUNABLES" not in os.environ:
        tunables = "glibc.malloc.hugetlb=1:glibc.malloc.arena_max=1"
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, "GLIBC_TUNABLES": tunables})
    keep_freed_memory()
    app.run(main)
