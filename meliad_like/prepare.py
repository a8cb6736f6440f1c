"""Turns documents into a token store, once for all runs that read them.

    meliad_like prepare --gin_file=task/books.gin --gin_param="FolderSourceConfig.folder = 'my_books'"
    meliad_like prepare --load_dir=FOLDER --gin_file=task/my_files.gin    # in the tokens of a trained model

A store that is there is compared with the documents, and those of new files are added. Machines with a common disk
can share the work: each makes parts (`--part=1/64` to `--part=64/64`), and `prepare` without `--part` joins them.
"""

import re

from meliad_like.command_line import Command
from meliad_like.errors import UserError

COMMAND = Command(__doc__)
LOAD_DIR = COMMAND.shared("load_dir", "Folder of a model with whose vocabulary a run would start.")
STORE = COMMAND.string("store", None, "Folder of the token store. Default: ReaderConfig.store.")
WORKERS = COMMAND.integer("workers", 0, "Processes that read and tokenise; 0: one per core.", lower_bound=0)
PART = COMMAND.string("part", None, "K/N: make only the Kth of N parts; the same command makes a lost part again.")


def main() -> None:
    if PART.value is not None and not re.fullmatch(r"\d+/\d+", PART.value):
        raise UserError(f"--part={PART.value} must be two numbers, such as --part=3/64")
    from meliad_like.data.preparation import prepare, prepare_part
    from meliad_like.run.opening import config_of

    run = config_of(COMMAND, LOAD_DIR.value)
    store = STORE.value or run.data.store
    if PART.value:
        prepare_part(run.source, run.vocabulary, store, *map(int, PART.value.split("/")), num_workers=WORKERS.value)
    else:
        prepare(run.source, run.vocabulary, store, WORKERS.value, for_training=True)


if __name__ == "__main__":
    COMMAND.run(main)
