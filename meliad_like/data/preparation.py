"""Turns a source of documents into a token store; documents are read and encoded in parallel, and written in order."""

import collections
import functools
import multiprocessing
import os
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import NamedTuple, TypeVar

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from meliad_like.data.documents import (
    SOURCES,
    SPLITS,
    Document,
    EmptyDocumentError,
    NotUTF8Error,
    Reference,
    Source,
    SourceConfig,
    open_source,
    source_fingerprint,
)
from meliad_like.data.split import count_words
from meliad_like.data.token_store import (
    FORMAT_VERSION,
    STORE_NAME,
    SplitWriter,
    TokenStore,
    Totals,
    absolute_folder,
    files_fingerprint,
    token_dtype,
    write_info,
)
from meliad_like.data.vocabulary import Vocabulary, VocabularyConfig, load_vocabulary
from meliad_like.errors import UserError
from meliad_like.registry import fingerprint
from meliad_like.remote import is_remote
from meliad_like.resumable import check_same, locked, whole_folder
from meliad_like.tables import Table

Result = TypeVar("Result")
SHOWN = 10  # The number of reasons for left-out documents that are printed.


def prepare(
    source: SourceConfig,
    vocabulary: VocabularyConfig,
    folder: str | Path,
    num_workers: int = 0,
    *,
    for_training: bool = False,
) -> TokenStore:
    """Opens the token store of these documents and this vocabulary in `folder`, or writes it if there is none.

    A store appears in `folder` only when it is complete. Progress, warnings and a table go to standard error.

    Args:
      num_workers: number of processes that read and tokenise (0: one per core). The store does not depend on it.
      for_training: whether a store without training documents is refused.

    Raises:
      UserError: `folder` holds something else, a document is bad, or the disk is full.
    """
    if is_remote(folder):
        raise UserError(f"a token store is made on a local disk: choose a folder here and copy it to {folder}")
    folder = Path(folder).expanduser().absolute()
    console = Console(stderr=True, highlight=False, markup=False, soft_wrap=True)
    opened = open_source(source)
    contents = source_fingerprint(source, opened)
    # A second process waits here, and then finds the complete store.
    with locked(folder.parent / f".{folder.name}.lock"):
        if folder.exists() and any(folder.iterdir()):
            if not (folder / STORE_NAME).exists():
                raise UserError(f"{folder} is neither empty nor a token store: choose another --store")
            store = TokenStore(folder)
            store.check_settings(source, vocabulary)
            # Documents without a folder to look at, such as those of another Python, differ in their contents alone.
            way_out = "delete the token store, or choose another --store"
            check_same(folder, {"source": store.info.source}, {"source": contents}, way_out=way_out)
            console.print(f"reusing the token store {folder}")
        else:
            with whole_folder(folder) as incomplete:
                encoder = _make_vocabulary(source, opened, vocabulary, console)
                encoder.save(incomplete)
                splits, skipped, changed = _write(incomplete, source, opened, encoder, num_workers, console)
                _check_splits(source, opened, splits, len(skipped), for_training)
                write_info(
                    incomplete,
                    fingerprint=fingerprint([FORMAT_VERSION, contents, encoder.fingerprint]),
                    source=contents,
                    source_settings=source.settings_fingerprint,
                    folder=absolute_folder(source),
                    files=files_fingerprint(opened),
                    vocabulary=encoder.fingerprint,
                    vocabulary_settings=vocabulary.settings_fingerprint,
                    dtype=token_dtype(encoder.size),
                    splits=splits,
                    skipped=skipped,
                    changed=changed,
                )
    store = TokenStore(folder)
    for warning in _warnings(source, opened, store):
        console.print(warning, style="yellow")
    console.print(_table(store).to_rich(), soft_wrap=False)
    return store


def _make_vocabulary(
    config: SourceConfig, source: Source, vocabulary: VocabularyConfig, console: Console
) -> Vocabulary:
    if not vocabulary.trained:
        return vocabulary.make()

    def texts() -> Iterator[str]:
        documents = (_read(reference, config) for reference in source.references())
        for document in _with_progress(documents, source, console, "reading documents for the vocabulary"):
            if not isinstance(document, str) and document.split == "train":
                yield document.text
        console.print("learning the vocabulary")

    return vocabulary.make(texts())


def _with_progress(results: Iterator[Result], source: Source, console: Console, what: str) -> Iterator[Result]:
    """The results for all documents of a source, while a progress bar shows their number."""
    columns = (TextColumn(what), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console) as progress:
        yield from progress.track(results, total=source.num_documents)


def _write(
    folder: Path, config: SourceConfig, source: Source, vocabulary: Vocabulary, num_workers: int, console: Console
) -> tuple[dict[str, Totals], list[str], int]:
    """Writes all documents in order. Returns each split's totals, the reasons of what was left out, and the number of
    documents that the vocabulary changes."""
    writers = {split: SplitWriter(folder / split, vocabulary) for split in SPLITS}
    skipped, unknown, changed = [], set(config.listed), 0
    encoded = encode_all(config, source, folder, num_workers)
    for result in _with_progress(encoded, source, console, "tokenising"):
        if isinstance(result, str):
            skipped.append(result)
        else:
            writers[result.split].write(result.name, result.tokens, result.num_bytes, result.num_words)
            changed += not result.restored
            skipped += result.skipped
            unknown.discard(result.name)
    if unknown:
        raise UserError(
            f"validation_documents or test_documents names {min(unknown)!r}, which is not a document of the source "
            f"({len(skipped)} were left out)"
        )
    return {split: writer.close() for split, writer in writers.items()}, skipped, changed


def _check_splits(
    config: SourceConfig, source: Source, totals: dict[str, Totals], num_skipped: int, for_training: bool
) -> None:
    if not any(total.documents for total in totals.values()) or (for_training and not totals["train"].documents):
        counts = ", ".join(f"{total.documents} for {split}" for split, total in totals.items())
        raise UserError(
            f"the {SOURCES.name_of(config)} source has no documents for training: {counts} ({num_skipped} were left "
            f"out); {source.passed_over or 'no files were passed over'}; SourceConfig.validation_documents and "
            "test_documents name the documents of these splits"
        )


def _warnings(config: SourceConfig, source: Source, store: TokenStore) -> Iterator[str]:
    if not store.vocabulary.lossless or store.info.changed:
        yield (
            "this vocabulary does not keep every text exactly: bits per byte are not comparable with those of others"
        )
    if store.info.changed:
        total = sum(totals.documents for totals in store.info.splits.values())
        share = f"{store.info.changed:,} of {total:,} documents ({store.info.changed / total:.1%})"
        yield f"{share} do not come back from their tokens as they were"
    skipped = store.info.skipped
    yield from (f"left out: {reason}" for reason in skipped[:SHOWN])
    if len(skipped) > SHOWN:
        yield f"... and {len(skipped) - SHOWN} more, in {store.folder / STORE_NAME}"
    if source.passed_over:
        yield source.passed_over
    for split in ("validation", "test"):
        if not store.totals(split).documents:
            share = getattr(config, f"{split}_share")
            yield (
                f"no document is for {split}: raise SourceConfig.{split}_share ({share} of the documents, at random), "
                f"or name some in SourceConfig.{split}_documents"
            )


def _table(store: TokenStore) -> Table:
    rows = []
    for name, totals in store.info.splits.items():
        longest = int(store.split(name).lengths.max()) if totals.documents else 0
        counts = (totals.documents, totals.tokens, totals.bytes, totals.words, longest)
        rows.append((name, *(f"{count:,}" for count in counts)))
    header = ("split", "documents", "tokens", "bytes", "words", "longest (tokens)")
    return Table(f"{store.folder.name}, vocabulary of {store.vocabulary.size}", header, rows)


class Encoded(NamedTuple):
    """A document's tokens and sizes, as a worker process returns them."""

    name: str
    split: str
    tokens: np.ndarray
    """int32[tokens], without the end of the document."""
    num_bytes: int
    num_words: int
    restored: bool
    """Whether the text comes back from the tokens."""
    skipped: tuple[str, ...]
    """The reasons why files of the document were left out."""


def encode_all(
    config: SourceConfig, source: Source, vocabulary_folder: Path, num_workers: int
) -> Iterator[Encoded | str]:
    """Encodes all documents. Yields each in the order of the source, or the reason why it is left out.

    Each of `num_workers` processes loads the vocabulary. 0: one per core; 1: this process does the work.
    """
    if not num_workers:
        num_workers = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if num_workers == 1:
        yield from map(partial(_encode, config, load_vocabulary(vocabulary_folder)), source.references())
        return
    # Not forked: jax and grain start threads, and a forked child would inherit locks that they hold.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(num_workers, context) as pool:
        encode, waiting = partial(_encode_in_worker, config, vocabulary_folder), collections.deque()
        try:
            for reference in source.references():
                waiting.append(pool.submit(encode, reference))
                # So that few documents are in memory.
                if len(waiting) == 4 * num_workers:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        finally:
            pool.shutdown(cancel_futures=True)


def _encode_in_worker(config: SourceConfig, vocabulary_folder: Path, reference: Reference) -> Encoded | str:
    return _encode(config, _vocabulary_of_worker(vocabulary_folder), reference)


_vocabulary_of_worker = functools.cache(load_vocabulary)


def _encode(config: SourceConfig, vocabulary: Vocabulary, reference: Reference) -> Encoded | str:
    document = _read(reference, config)
    if isinstance(document, str):
        return document
    text, tokens = document.text, vocabulary.encode(document.text)
    num_bytes = len(text.encode("utf-8"))
    restored = vocabulary.restores(text, tokens)
    return Encoded(document.name, document.split, tokens, num_bytes, count_words(text), restored, document.skipped)


def _read(reference: Reference, config: SourceConfig) -> Document | str:
    """The document, or the reason why the config's policies leave it out."""
    try:
        return reference()
    except (NotUTF8Error, EmptyDocumentError) as error:
        if (config.undecodable if isinstance(error, NotUTF8Error) else config.empty) == "stop":
            raise
        return str(error)
