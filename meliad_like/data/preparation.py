"""Turns a source of documents into a token store; documents are read and encoded in parallel, and written in order."""

import collections
import contextlib
import functools
import io
import itertools
import multiprocessing
import os
import pickle
import signal
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from meliad_like.data.documents import (
    SOURCES,
    SPLITS,
    BadDocumentError,
    Document,
    EmptyDocumentError,
    NotUTF8Error,
    Reference,
    Source,
    SourceConfig,
    fill_splits,
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

Result = TypeVar("Result")
SHOWN = 10  # The number of reasons for left-out documents that are printed.
PIECE_DOCUMENTS, PIECE_BYTES = 256, 2**20
"""The largest number of documents that a worker process gets at once, and of bytes that it gets or returns, up to the
last document."""


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
                opened = fill_splits(source, opened)
                encoder = _make_vocabulary(source, opened, vocabulary, console)
                encoder.save(incomplete)
                splits, skipped, changed = _write(incomplete, source, opened, encoder, num_workers, console)
                _check_splits(source, opened, splits, len(skipped), for_training)
                write_info(
                    incomplete,
                    fingerprint=fingerprint([FORMAT_VERSION, contents, encoder.fingerprint]),
                    source=contents,
                    source_settings=source.settings_fingerprint,
                    settings={"source": source.settings, "vocabulary": vocabulary.settings},
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
    _print_table(store, console)
    return store


def _make_vocabulary(
    config: SourceConfig, source: Source, vocabulary: VocabularyConfig, console: Console
) -> Vocabulary:
    if not vocabulary.trained:
        return vocabulary.make()

    def texts() -> Iterator[str]:
        bad = []
        documents = (_read(reference, config) for reference in source.references())
        for document in _with_progress(documents, source, console, "reading documents for the vocabulary"):
            if isinstance(document, Document) and document.split == "train":
                yield document.text
            elif isinstance(document, LeftOut) and not document.allowed:
                bad.append(document)
        _check_documents(bad, console)
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
    documents that the vocabulary changes.

    Raises a UserError that lists what is wrong, after all documents were read, if a bad one may not be left out.
    """
    writers = {split: SplitWriter(folder / split, vocabulary) for split in SPLITS}
    bad, skipped, unknown, changed = [], [], set(config.listed), 0
    with contextlib.closing(encode_all(config, source, folder, num_workers)) as encoded:
        for result in _with_progress(encoded, source, console, "tokenising"):
            if isinstance(result, LeftOut) and result.allowed:
                skipped.append(result.reason)
            elif isinstance(result, LeftOut):
                bad.append(result)
            else:
                writers[result.split].write(result.name, result.tokens, result.num_bytes, result.num_words)
                changed += not result.restored
                skipped += result.skipped
                unknown.discard(result.name)
    _check_documents(bad, console)
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
            "test_documents name the documents of these splits, and FolderSourceConfig.splits_by_name = False ignores "
            "names of files and folders"
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
            raise_it = f"raise SourceConfig.{split}_share ({share} of the documents, at random), or "
            advice = raise_it if source.by_share else ""
            yield f"no document is for {split}: {advice}name some in SourceConfig.{split}_documents"


def _print_table(store: TokenStore, console: Console) -> None:
    # Imported here, because this imports pandas, and worker processes import this module.
    from meliad_like.tables import Table

    rows = []
    for name, totals in store.info.splits.items():
        longest = int(store.split(name).lengths.max()) if totals.documents else 0
        counts = (totals.documents, totals.tokens, totals.bytes, totals.words, longest)
        rows.append((name, *(f"{count:,}" for count in counts)))
    header = ("split", "documents", "tokens", "bytes", "words", "longest (tokens)")
    table = Table(f"{store.folder.name}, vocabulary of {store.vocabulary.size}", header, rows)
    console.print(table.to_rich(), soft_wrap=False)


class LeftOut(NamedTuple):
    """A bad document."""

    kind: str
    """`BadDocumentError.kind`."""
    reason: str
    allowed: bool
    """Whether the config's policies leave it out; otherwise there will be no store."""


def _check_documents(bad: Sequence[LeftOut], console: Console) -> None:
    """Prints the first reasons of each kind and raises a UserError with the numbers, if there are bad documents."""
    kinds: dict[str, list[str]] = {}
    for document in bad:
        kinds.setdefault(document.kind, []).append(document.reason)
    if len(bad) == 1:
        raise UserError(bad[0].reason)
    for kind, reasons in kinds.items():
        console.print("\n".join(reasons[:SHOWN]), style="yellow")
        if len(reasons) > SHOWN:
            console.print(f"... and {len(reasons) - SHOWN} more that {kind}", style="yellow")
    if bad:
        numbers = "; ".join(f"{len(reasons)} {kind} ({reasons[0]})" for kind, reasons in kinds.items())
        raise UserError(f"documents can't be used: {numbers}")


class Encoded(NamedTuple):
    """A document's tokens and sizes, as a worker process returns them."""

    name: str
    split: str
    tokens: np.ndarray
    """[tokens], without the end of the document, in the type that the store has."""
    num_bytes: int
    num_words: int
    restored: bool
    """Whether the text comes back from the tokens."""
    skipped: tuple[str, ...]
    """The reasons why files of the document were left out."""


def encode_all(
    config: SourceConfig, source: Source, vocabulary_folder: Path, num_workers: int
) -> Iterator[Encoded | LeftOut]:
    """Encodes all documents. Yields each in the order of the source, or the reason why it is left out.

    Each of `num_workers` processes loads the vocabulary. 0: one per core; 1: this process does the work.
    """
    if not num_workers:
        num_workers = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if num_workers == 1:
        yield from map(partial(_encode, config, load_vocabulary(vocabulary_folder)), source.references())
        return
    # Not forked: jax and grain start threads, and a forked child would inherit locks that they hold.
    pool = ProcessPoolExecutor(num_workers, multiprocessing.get_context("spawn"), _end_with_parent)
    encode, references = partial(_encode_in_worker, config, vocabulary_folder), iter(source.references())
    waiting: collections.deque[tuple[bytes, int, Future]] = collections.deque()
    num_documents = num_bytes = 0

    def submit(piece: bytes, begin: int) -> tuple[bytes, int, Future]:
        # A process that starts here inherits the blocked signal: on Ctrl-C it completes its piece without a traceback.
        # If it died while it sent a result, this process would wait for the rest.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            return piece, begin, pool.submit(encode, piece, begin)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)

    try:
        while True:
            # So that few documents are in memory. Large ones are sent one by one, so that every process has some.
            most = PIECE_BYTES // (num_bytes // num_documents + 1) if num_documents else 1
            while len(waiting) < 4 * num_workers and (piece := _piece(references, most)):
                waiting.append(submit(piece, 0))
            if not waiting:
                return
            piece, begin, future = waiting.popleft()
            results, is_complete = future.result()
            if not is_complete:
                waiting.appendleft(submit(piece, begin + len(results)))
            num_documents += len(results)
            num_bytes += sum(result.num_bytes for result in results if isinstance(result, Encoded))
            yield from results
    except BrokenProcessPool:
        raise UserError(
            "a process that tokenises was killed, probably because memory is full: use fewer of them (--workers)"
        ) from None
    finally:
        pool.shutdown(cancel_futures=True)


def _end_with_parent() -> None:
    """Ends this worker process when its parent has ended in any way, for instance by a second Ctrl-C."""
    parent: Any = multiprocessing.parent_process()
    threading.Thread(target=lambda: (parent.join(), os._exit(1)), daemon=True).start()


def _piece(references: Iterator[Reference], most: int) -> bytes:
    """The next references, at most about `most`, pickled one after the other; empty if there are no more."""
    piece = io.BytesIO()
    pickler = pickle.Pickler(piece)
    for reference in itertools.islice(references, min(max(most, 1), PIECE_DOCUMENTS)):
        pickler.dump(reference)
        if piece.tell() > PIECE_BYTES:
            break
    return piece.getvalue()


def _encode_in_worker(
    config: SourceConfig, vocabulary_folder: Path, piece: bytes, begin: int
) -> tuple[list[Encoded | LeftOut], bool]:
    """The documents of a piece from `begin` on, and whether they are all; a large result ends early."""
    vocabulary, results, num_bytes = _vocabulary_of_worker(vocabulary_folder), [], 0
    for reference in itertools.islice(_unpickled(piece), begin, None):
        if num_bytes > PIECE_BYTES:
            return results, False
        results.append(_encode(config, vocabulary, reference))
        num_bytes += results[-1].tokens.nbytes if isinstance(results[-1], Encoded) else 0
    return results, True


def _unpickled(piece: bytes) -> Iterator[Reference]:
    file = io.BytesIO(piece)
    unpickler = pickle.Unpickler(file)
    while file.tell() < len(piece):
        yield unpickler.load()


_vocabulary_of_worker = functools.cache(load_vocabulary)


def _encode(config: SourceConfig, vocabulary: Vocabulary, reference: Reference) -> Encoded | LeftOut:
    document = _read(reference, config)
    if isinstance(document, LeftOut):
        return document
    text, tokens = document.text, vocabulary.encode(document.text).astype(token_dtype(vocabulary.size))
    num_bytes = len(text.encode("utf-8"))
    restored = vocabulary.restores(text, tokens)
    return Encoded(document.name, document.split, tokens, num_bytes, count_words(text), restored, document.skipped)


def _read(reference: Reference, config: SourceConfig) -> Document | LeftOut:
    """The document, or why it is bad."""
    try:
        return reference()
    except BadDocumentError as error:
        policies = {NotUTF8Error: config.undecodable, EmptyDocumentError: config.empty}
        return LeftOut(error.kind, str(error), policies.get(type(error)) == "skip")
