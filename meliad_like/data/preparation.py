"""Turns a source of documents into a token store."""

from collections.abc import Iterator
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from meliad_like.data.documents import (
    SOURCES,
    SPLITS,
    Source,
    SourceConfig,
    open_source,
    source_fingerprint,
)
from meliad_like.data.encoding import encode_all, read_document
from meliad_like.data.token_store import (
    FORMAT_VERSION,
    STORE_NAME,
    SplitWriter,
    StoreInfo,
    TokenStore,
    read_info,
    store_fingerprint,
    token_dtype,
    write_info,
)
from meliad_like.data.vocabulary import Vocabulary, VocabularyConfig, make_vocabulary
from meliad_like.errors import UserError
from meliad_like.remote import is_remote
from meliad_like.resumable import check_same, locked, whole_folder
from meliad_like.tables import Table

SHOWN = 10  # The number of reasons for left-out documents that are printed.


def prepare(source: SourceConfig, vocabulary: VocabularyConfig, folder: str | Path, num_workers: int = 0) -> TokenStore:
    """Opens the token store of these documents and this vocabulary in `folder`, or writes it if there is none.

    A store appears in `folder` only when it is complete. Progress, warnings and a table go to standard error.

    Args:
      source: config of the documents' source.
      vocabulary: config of the vocabulary.
      folder: folder of the store, on a local disk.
      num_workers: number of processes that read and tokenise (0: one per core). The store does not depend on it.

    Raises:
      UserError: `folder` holds something else, a document is bad, or the disk is full.
    """
    if is_remote(folder):
        raise UserError(
            f"a token store is made on a local disk: choose a folder here and copy it to {folder} afterwards"
        )
    folder = Path(folder).expanduser().absolute()
    console = Console(stderr=True)
    opened = open_source(source)
    source_print = source_fingerprint(source, opened)
    vocabulary_print = vocabulary.settings_fingerprint
    # A second process waits here, and then finds the complete store.
    with locked(folder.parent / f".{folder.name}.lock"):
        if folder.exists() and any(folder.iterdir()):
            _check_same(folder, source_print, vocabulary_print)
            console.print(f"reusing the token store {folder}", markup=False, highlight=False, soft_wrap=True)
        else:
            with whole_folder(folder) as incomplete:
                made = _make_vocabulary(source, opened, vocabulary, console)
                made.save(incomplete)
                if not made.lossless:
                    console.print(
                        "this vocabulary does not keep text exactly (whitespace or rare characters): "
                        "bits per byte are not comparable with those of other vocabularies",
                        style="yellow",
                    )
                info = StoreInfo(
                    version=FORMAT_VERSION,
                    fingerprint=store_fingerprint(source_print, made.fingerprint),
                    source=source_print,
                    source_settings=source.settings_fingerprint,
                    vocabulary=made.fingerprint,
                    vocabulary_settings=vocabulary_print,
                    dtype=token_dtype(made.size),
                    splits={},
                    skipped=(),
                )
                _write(incomplete, source, opened, made, info, num_workers, console)
    store = TokenStore(folder)
    for reason in store.info.skipped[:SHOWN]:
        console.print(f"left out: {reason}", style="yellow", markup=False, highlight=False, soft_wrap=True)
    if len(store.info.skipped) > SHOWN:
        console.print(f"... and {len(store.info.skipped) - SHOWN} more, in {folder / STORE_NAME}", style="yellow")
    console.print(_table(store).to_rich())
    return store


def _write(
    folder: Path,
    config: SourceConfig,
    source: Source,
    vocabulary: Vocabulary,
    info: StoreInfo,
    num_workers: int,
    console: Console,
) -> None:
    """Writes the tokens of all documents, in the source's order, and then `store.json`."""
    writers = {split: SplitWriter(folder / split, vocabulary, info.dtype) for split in SPLITS}
    skipped, names, num_bytes = [], set(), 0
    columns = (TextColumn("tokenising"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[size]}"))
    with Progress(*columns, TimeRemainingColumn(), console=console) as progress:
        task = progress.add_task("", total=source.num_documents, size="")
        for result in encode_all(config, source, folder, num_workers):
            if isinstance(result, str):
                skipped.append(result)
            else:
                writers[result.split].write(result.name, result.tokens, result.num_bytes, result.num_words)
                skipped += result.skipped
                num_bytes += result.num_bytes
                if result.name in config.split_rule.listed:
                    names.add(result.name)
            progress.update(task, advance=1, size=f"{num_bytes / 1e6:,.1f} MB")
    if unknown := config.split_rule.listed - names:
        raise UserError(
            f"validation_documents or test_documents names {min(unknown)!r}, which is no document of the source"
            f"{f', or one of the {len(skipped)} that were left out' if skipped else ''}"
        )
    totals = {split: writer.close() for split, writer in writers.items()}
    if not any(total.documents for total in totals.values()):
        raise UserError(
            f"the {SOURCES.name_of(config)} source has no documents that can be used ({len(skipped)} were left out)"
        )
    write_info(folder, StoreInfo(**{**vars(info), "splits": totals, "skipped": tuple(skipped)}))


def _make_vocabulary(
    config: SourceConfig, source: Source, vocabulary: VocabularyConfig, console: Console
) -> Vocabulary:
    def texts() -> Iterator[str]:
        for reference in source.references():
            document = read_document(reference, config)
            if not isinstance(document, str) and document.split == "train":
                yield document.text

    if not vocabulary.trained:
        return make_vocabulary(vocabulary)
    with console.status(vocabulary.progress):
        return make_vocabulary(vocabulary, texts())


def _check_same(folder: Path, source: str, vocabulary: str) -> None:
    """Raises a UserError unless the store in `folder` was made of this source and by these vocabulary settings."""
    if not (folder / STORE_NAME).exists():
        raise UserError(f"{folder} is neither empty nor a token store: choose another --store")
    info = read_info(folder)
    saved = {"source": info.source, "vocabulary": info.vocabulary_settings}
    wanted = {"source": source, "vocabulary": vocabulary}
    check_same(folder, saved, wanted, way_out="delete the token store, or choose another --store")


def _table(store: TokenStore) -> Table:
    rows = []
    for name, totals in store.info.splits.items():
        longest = int(store.split(name).lengths.max()) if totals.documents else 0
        counts = (totals.documents, totals.tokens, totals.bytes, totals.words, longest)
        rows.append((name, *(f"{count:,}" for count in counts)))
    header = ("split", "documents", "tokens", "bytes", "words", "longest (tokens)")
    return Table(f"{store.folder.name}, vocabulary of {store.vocabulary.size}", header, rows)
