"""Reading and encoding of documents by several processes at once, with results in order."""

import collections
import functools
import itertools
import multiprocessing
import os
import signal
import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any, NamedTuple

import numpy as np

from meliad_like.data.split import count_words
from meliad_like.data.token_store import token_dtype
from meliad_like.errors import UserError
from meliad_like.remote import CHUNK_BYTES
from meliad_like.sources.base import BadDocumentError, Document, Reference, Source
from meliad_like.vocabularies.base import Vocabulary, load_vocabulary

PIECE_DOCUMENTS, PIECE_BYTES = 64, 2**20
"""The largest number of documents that a worker process gets at once, and how many bytes they may have on average."""


class Encoded(NamedTuple):
    """A document's tokens and sizes, as a worker process returns them."""

    name: str
    split: str
    tokens: np.ndarray | Path
    """[tokens], without the end of the document, in the type that the store has; or, of a large one, a file of them."""
    num_bytes: int
    """The number of bytes that cost loss."""
    num_words: int
    restored: bool
    """Whether decoding the tokens gives the text."""
    skipped: tuple[str, ...]
    """The reasons why files of the document were left out."""
    unscored: tuple[tuple[int, int], ...]
    """Ranges of tokens that cost no loss."""
    contents: tuple[tuple[str, str], ...]
    """The names and the contents of files that were read for it (`Document.contents`)."""


def encode_all(
    source: Source, vocabulary_folder: Path, num_workers: int, folder: Path
) -> Iterator[Encoded | BadDocumentError]:
    """Encodes all documents. Yields each in the order of the source, or why it is bad.

    Each of `num_workers` processes loads the vocabulary. 0: one per core; 1: this process does the work. Files of
    tokens are made in `folder`; the caller deletes them.
    """
    if not num_workers:
        num_workers = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if num_workers == 1:
        yield from map(partial(_encode, load_vocabulary(vocabulary_folder)), read_all(source))
        return
    # Jax and grain start threads, and a forked child would inherit locks that they hold.
    pool = ProcessPoolExecutor(num_workers, multiprocessing.get_context("spawn"), _end_with_parent)
    encode = partial(_encode_in_worker, vocabulary_folder, source.documents_at_once, folder)
    references, waiting = iter(source.references()), collections.deque[Future]()
    num_documents = num_bytes = 0

    def submit(piece: list[Reference]) -> Future:
        # A process that starts here inherits the blocked signal: on Ctrl-C it completes its piece without a traceback.
        # If it died while it sent a result, this process would wait for the rest.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            return pool.submit(encode, piece)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)

    try:
        while True:
            # So that few documents are in memory. Large ones are sent one by one, so that every process has some.
            most = _most(num_documents, num_bytes)
            while len(waiting) < 4 * num_workers and (piece := list(itertools.islice(references, most))):
                waiting.append(submit(piece))
            if not waiting:
                return
            results = waiting.popleft().result()
            num_documents += len(results)
            num_bytes += sum(result.num_bytes for result in results if isinstance(result, Encoded))
            yield from results
    except BrokenProcessPool:
        raise UserError("a process was killed, probably because memory is full: use fewer (--workers)") from None
    finally:
        pool.shutdown(cancel_futures=True)


def _end_with_parent() -> None:
    """Ends this worker process when its parent has ended in any way, for instance by a second Ctrl-C."""
    parent: Any = multiprocessing.parent_process()
    threading.Thread(target=lambda: (parent.join(), os._exit(1)), daemon=True).start()


def _most(num_documents: int, num_bytes: int) -> int:
    """The largest number of documents in the next piece, from the number and the bytes of the documents before."""
    return min(PIECE_BYTES // (num_bytes // num_documents + 1) or 1, PIECE_DOCUMENTS) if num_documents else 1


def _encode_in_worker(
    vocabulary_folder: Path, at_once: int, folder: Path, piece: list[Reference]
) -> list[Encoded | BadDocumentError]:
    vocabulary = _vocabulary_of_worker(vocabulary_folder)
    return [_in_file(_encode(vocabulary, document), folder) for document in _read(piece, at_once)]


def _in_file(encoded: Encoded | BadDocumentError, folder: Path) -> Encoded | BadDocumentError:
    """A document whose tokens are in a file if they are many: a pipe needs several copies of them in memory, where they
    also wait for the documents before."""
    if isinstance(encoded, BadDocumentError) or isinstance(encoded.tokens, Path) or encoded.tokens.nbytes < CHUNK_BYTES:
        return encoded
    with NamedTemporaryFile(dir=folder, delete=False) as file:
        encoded.tokens.tofile(file)
    return encoded._replace(tokens=Path(file.name))


_vocabulary_of_worker = functools.cache(load_vocabulary)


def _encode(vocabulary: Vocabulary, document: Document | BadDocumentError) -> Encoded | BadDocumentError:
    if isinstance(document, BadDocumentError):
        return document
    text, unscored, dtype = document.text, [], np.dtype(token_dtype(vocabulary.size))
    # Text that costs loss and text that costs none take turns. They are encoded separately, as a text that follows a
    # state is (`LanguageModel.score`), so that each edge is between two tokens.
    edges = [0, *itertools.chain.from_iterable(document.unscored), len(text)]
    parts = [text[begin:end] for begin, end in itertools.pairwise(edges)]
    # Not two copies of a large document at once.
    content, encode = bytearray(), vocabulary.encode
    for i, part in enumerate(parts):
        begin = len(content)
        for piece in vocabulary.pieces(part) if part else ():
            content += encode(piece).astype(dtype).tobytes()
            encode = vocabulary.encode_continuation
        if i % 2 and begin < len(content):
            unscored.append((begin // dtype.itemsize, len(content) // dtype.itemsize))
    tokens = np.frombuffer(content, dtype)
    return Encoded(
        document.name,
        document.split,
        tokens,
        sum(len(part.encode("utf-8")) for part in parts[::2]),
        sum(map(count_words, parts[::2])),
        vocabulary.restores(text, tokens),
        document.skipped,
        tuple(unscored),
        document.contents,
    )


def read_all(source: Source) -> Iterator[Document | BadDocumentError]:
    """All documents, or why they are bad, in order, read by this process."""
    references, number, size = source.references(), 0, 0
    while piece := list(itertools.islice(references, _most(number, size))):
        for document in _read(piece, source.documents_at_once):
            number += 1
            size += len(document.text) if isinstance(document, Document) else 0
            yield document


def _read(references: Iterable[Reference], at_once: int) -> Iterator[Document | BadDocumentError]:
    """Reads the documents in order, up to `at_once` of them at the same time."""
    if at_once == 1:
        yield from map(read, references)
        return
    with ThreadPoolExecutor(at_once) as readers:
        yield from readers.map(read, references)


def read(reference: Reference) -> Document | BadDocumentError:
    """The document, or why it is bad."""
    try:
        return reference()
    except BadDocumentError as error:
        return error.with_traceback(None)
