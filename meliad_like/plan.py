"""Plans the memory and the time of a run on TPUs or GPUs, without them.

    meliad_like plan --gin_file=size/large_1200m.gin --gin_file=option/bfloat16.gin --topology=v4:2x2x4

Compiles the real training, evaluation and decoding steps, and shows memory, operations and the least time of each
device. If a step does not fit, the exit status is 1, and the nearest settings that fit are named.
"""

import os

from meliad_like.command_line import Command

COMMAND = Command(__doc__)
TOPOLOGY = COMMAND.string("topology", None, "TPUs (v4:2x2x4, v4-32), GPUs (h100:8, a100:2x8) or cpu:8.", required=True)
LOAD_DIR = COMMAND.shared("load_dir")
VOCABULARY_SIZE = COMMAND.shared("vocabulary_size")
SEARCH = COMMAND.bool("search", True, "Whether to search for settings that fit, if these don't.")
ALL = ["training", "evaluation", "decoding"]
PROGRAMS = COMMAND.multi_enum("program", ALL, ALL, "What to compile.")
QUICK = COMMAND.bool("quick", False, "Compile with the least effort: much sooner, activations up to 20 % larger.")
OUTPUT = COMMAND.output("output", "JSON file for the figures.")


def main() -> int:
    # The command itself runs on the CPU, independent of the platform for which it compiles.
    os.environ["JAX_PLATFORMS"] = "cpu"
    # The time to compile is one of the figures.
    os.environ["JAX_ENABLE_COMPILATION_CACHE"] = "false"
    from rich.console import Console

    from meliad_like.planning import report
    from meliad_like.planning.programs import estimates
    from meliad_like.planning.topology import GIB, open_topology
    from meliad_like.resumable import write_json
    from meliad_like.run.opening import config_of
    from meliad_like.run.setup import vocabulary_size

    run = config_of(COMMAND, LOAD_DIR.value)
    topology = open_topology(TOPOLOGY.value)
    size = VOCABULARY_SIZE.value or vocabulary_size(run)
    console, options = Console(), {"programs": PROGRAMS.value, "quick": QUICK.value}
    with console.status("compiling"):
        planned = list(estimates(run, size, topology, **options))
    console.print(report.table(planned).to_rich())
    if OUTPUT.value:
        write_json(OUTPUT.value, report.to_json(planned))
    too_large = [f"{estimate.name} ({estimate.total / GIB:,.1f} GiB)" for estimate in planned if not estimate.fits]
    if not too_large:
        return 0
    print(f"does not fit: {', '.join(too_large)}")
    if SEARCH.value:
        with console.status("searching for settings that fit") as status:
            fitting = report.nearest_that_fits(run, size, topology, status.update, **options)
        advice = "nothing that was tried would fit: choose a larger topology, a smaller model or fewer tokens per step"
        print(f"it would fit with {fitting}" if fitting else advice)
    return 1


if __name__ == "__main__":
    COMMAND.run(main)
