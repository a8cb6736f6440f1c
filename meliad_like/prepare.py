"""Turns documents into a token store, once: `python -m meliad_like.prepare --gin_file=task/books.gin --store=DIR`."""

from absl import flags

from meliad_like import command_line
from meliad_like.data.preparation import prepare

__all__ = ["prepare"]

STORE = flags.DEFINE_string("store", None, "Folder of the token store. Default: ReaderConfig.store.")
WORKERS = flags.DEFINE_integer("workers", 0, "Processes that read and tokenise; 0: one per core.", lower_bound=0)


def main() -> None:
    run = command_line.read_config()
    prepare(run.source, run.vocabulary, STORE.value or run.data.store, WORKERS.value, for_training=True)


if __name__ == "__main__":
    command_line.run(main)
