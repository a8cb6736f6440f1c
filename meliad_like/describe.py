"""Shows a run before it is trained: its whole config, its parameters, its memory, and the cost of a token.

    meliad_like describe --gin_file=size/large_1200m.gin --gin_file=block_recurrent/fixed_skip.gin

Activations are not included, because only the compiler knows them: `meliad_like plan` compiles the run.
"""

import os

from meliad_like.command_line import Command

COMMAND = Command(__doc__)
VOCABULARY_SIZE = COMMAND.integer("vocabulary_size", None, "Default: as store or config say.", lower_bound=1)
CONFIG = COMMAND.bool("config", True, "Whether to show the config.")


def main() -> None:
    # Nothing is computed, so an accelerator, which another program may use, is left alone.
    os.environ["JAX_PLATFORMS"] = "cpu"
    run = COMMAND.read_config()
    from rich.console import Console

    from meliad_like.config import to_gin
    from meliad_like.planning.description import describe
    from meliad_like.run.setup import vocabulary_size

    size = VOCABULARY_SIZE.value or vocabulary_size(run)
    description = describe(run, size)
    if CONFIG.value:
        print(to_gin(run))
    Console().print(description.table().to_rich())
    print(f"with a vocabulary of {size:,} tokens; activations come on top: meliad_like plan shows them")


if __name__ == "__main__":
    COMMAND.run(main)
