"""Turns documents into a token store, once for all runs that read them.

    meliad_like prepare --gin_file=task/books.gin --gin_param="FolderSourceConfig.folder = 'my_books'"

A store that is there already is compared with the documents, and used.
"""

from meliad_like.command_line import Command

COMMAND = Command(__doc__)
STORE = COMMAND.string("store", None, "Folder of the token store. Default: ReaderConfig.store.")
WORKERS = COMMAND.integer("workers", 0, "Processes that read and tokenise; 0: one per core.", lower_bound=0)


def main() -> None:
    run = COMMAND.read_config()
    from meliad_like.data.preparation import prepare

    prepare(run.source, run.vocabulary, STORE.value or run.data.store, WORKERS.value, for_training=True)


if __name__ == "__main__":
    COMMAND.run(main)
