"""Shows a run before it is trained, or lists the gin files and rows of tables of which runs are made.

    meliad_like describe table3 states          # those with these words in their names or descriptions
    meliad_like describe bias_skip              # a name of google-research/meliad
    meliad_like describe --gin_file=size/large_1200m.gin --gin_file=block_recurrent/fixed_skip.gin
    meliad_like describe --load_dir=FOLDER      # a trained model, ours or of transformers

Of a run it shows the whole config, its parameters, its memory, and the cost of a token. Activations are not included,
because only the compiler knows them: `meliad_like plan` compiles the run. Files and rows combine (gin/README.md).
"""

import os
from collections.abc import Sequence

from meliad_like.command_line import Command

COMMAND = Command(__doc__, words=True)
VOCABULARY_SIZE = COMMAND.shared("vocabulary_size")
LOAD_DIR = COMMAND.shared("load_dir")
CONFIG = COMMAND.bool("config", True, "Whether to show the config.")


def main(*words: str) -> int:
    # Nothing is computed, so an accelerator, which another program may use, is left alone.
    os.environ["JAX_PLATFORMS"] = "cpu"
    if not COMMAND.gin_flags:
        return list_files(words)
    from rich.console import Console

    from meliad_like.config import to_gin
    from meliad_like.planning.description import describe
    from meliad_like.run.opening import config_of
    from meliad_like.run.setup import vocabulary_size

    run = config_of(COMMAND, LOAD_DIR.value)
    size = VOCABULARY_SIZE.value or vocabulary_size(run)
    description = describe(run, size)
    if CONFIG.value:
        print(to_gin(run))
    Console().print(description.table().to_rich())
    print(f"with a vocabulary of {size:,} tokens; activations come on top: meliad_like plan shows them")
    return 0


def list_files(words: Sequence[str]) -> int:
    """Prints the gin files and rows whose names or descriptions have all words; returns 1 if there are none."""
    from meliad_like.config import about, shipped_files, shipped_rows
    from meliad_like.conversion.meliad_gin import FILES

    descriptions = {name: about(name) for name in (*shipped_files(), *shipped_rows())}
    for name, theirs in FILES.items():
        descriptions[name] += f" The reference's {theirs}."
    texts = {name: f"{name} {description}".lower() for name, description in descriptions.items()}
    names = [name for name, text in texts.items() if all(word.lower() in text for word in words)]
    for name in names:
        print(f"{name:<{max(map(len, names))}}  {descriptions[name]}")
    if not names:
        print(f"no gin file or row has {' and '.join(map(repr, words))} in its name or description")
    return int(not names)


if __name__ == "__main__":
    COMMAND.run(main)
