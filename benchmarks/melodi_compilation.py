"""How long the compiler takes for MELODI's training step, with its scan over windows and with the windows unrolled.

    python benchmarks/melodi_compilation.py                                # for this machine's CPU
    python benchmarks/melodi_compilation.py --topology=v4:2x2x4            # for TPUs of another machine

The reference unrolls the windows of a segment in Python. Unrolling the scan of every layer makes a program of as many
operations.
"""

import functools
from unittest import mock

import jax
from absl import app, flags
from rich.console import Console
from tpu_clock import clock_step

from meliad_like import config
from meliad_like.families.melodi import decoder as melodi
from meliad_like.planning.topology import open_topology
from meliad_like.tables import Table

TOPOLOGY = flags.DEFINE_string("topology", "cpu:1", "What the step is compiled for, as for `plan`.")
WINDOWS = flags.DEFINE_list("windows", ["2", "8"], "Numbers of windows in a segment.")
GIN_PARAM = flags.DEFINE_multi_string("gin_param", [], "Bindings on top of melodi/base.gin.")

FILES = ["size/medium_150m.gin", "option/bfloat16.gin", "melodi/base.gin"]
VOCABULARY_SIZE = 32_000


def main(_) -> None:
    topology, rows = open_topology(TOPOLOGY.value), []
    window = config.parse(FILES, GIN_PARAM.value).model.window_length
    for windows in map(int, WINDOWS.value):
        length = windows * window
        tokens = 2 * len(topology.devices) * length
        params = [f"ReaderConfig.segment_length = {length}", f"ReaderConfig.tokens_per_step = {tokens}"]
        run = config.parse(FILES, [*params, *GIN_PARAM.value])
        for name, unroll in (("scan", 1), ("unrolled", True)):
            with mock.patch.object(melodi.jax.lax, "scan", functools.partial(jax.lax.scan, unroll=unroll)):
                need, clock = clock_step(run, VOCABULARY_SIZE, topology)
            cycles = f"{clock.cycles / 1e6:.1f}" if clock else "-"
            rows.append((str(windows), name, f"{need.compile_seconds:.0f}", f"{need.total / 2**30:.1f}", cycles))
            print(*rows[-1], flush=True)
    header = ("windows", "windows' loop", "compilation, s", "GiB a device", "million cycles")
    Console().print(Table(f"{TOPOLOGY.value}, {' '.join(GIN_PARAM.value)}", header, rows).to_rich())


if __name__ == "__main__":
    app.run(main)
