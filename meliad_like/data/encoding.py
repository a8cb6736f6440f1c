"""Reads and encodes the documents of a source, in parallel and in order."""

import collections
import multiprocessing
import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from meliad_like.data.documents import Document, Reference, Source, SourceConfig
from meliad_like.data.sources.base import EmptyDocumentError, NotUTF8Error
from meliad_like.data.token_store import count_words
from meliad_like.data.vocabulary import Vocabulary, load_vocabulary


@dataclass(frozen=True)
class EncodedDocument:
    """A document's tokens and sizes, as a worker process returns them."""

    name: str
    split: str
    tokens: np.ndarray
    """int32[tokens], without the end of the document."""
    num_bytes: int
    num_words: int
    skipped: tuple[str, ...]
    """The reasons why files of the document were left out."""


class _Encoder:
    """Reads and encodes one document. A worker process receives this object when it starts."""

    def __init__(self, config: SourceConfig, vocabulary: Vocabulary):
        self._config = config
        self._vocabulary = vocabulary

    def __call__(self, reference: Reference) -> EncodedDocument | str:
        """The encoded document, or the reason why it is left out."""
        document = read_document(reference, self._config)
        if isinstance(document, str):
            return document
        text = document.text
        tokens = self._vocabulary.encode(text)
        return EncodedDocument(
            document.name, document.split, tokens, len(text.encode("utf-8")), count_words(text), document.skipped
        )


def encode_all(
    config: SourceConfig, source: Source, vocabulary_folder: Path, num_workers: int
) -> Iterator[EncodedDocument | str]:
    """Encodes all documents. Yields each in the order of the source, or the reason why it is left out.

    Args:
      vocabulary_folder: where each worker loads the vocabulary from.
      num_workers: number of processes; 0: one per core; 1: this process does the work.

    Raises:
      UserError: a document is bad, and the config's policy is to stop.
    """
    num_workers = num_workers or num_cores()
    if num_workers == 1:
        yield from map(_Encoder(config, load_vocabulary(vocabulary_folder)), source.references())
        return
    # Not forked: jax and grain start threads, and a forked child would inherit locks that they hold.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(num_workers, context, _start_worker, (config, str(vocabulary_folder))) as pool:
        try:
            yield from _bounded_map(pool, _encode_in_worker, source.references(), 4 * num_workers)
        finally:
            pool.shutdown(cancel_futures=True)


def read_document(reference: Reference, config: SourceConfig) -> Document | str:
    """The document, or the reason why the config's policies leave it out."""
    try:
        return reference.read()
    except NotUTF8Error as error:
        if config.undecodable == "stop":
            raise
        return str(error)
    except EmptyDocumentError as error:
        if config.empty == "stop":
            raise
        return str(error)


def _bounded_map(pool: ProcessPoolExecutor, function: Callable, items: Iterable, ahead: int) -> Iterator:
    """Like `pool.map`, in order, but with at most `ahead` items and results in memory."""
    waiting: collections.deque = collections.deque()
    for item in items:
        waiting.append(pool.submit(function, item))
        if len(waiting) == ahead:
            yield waiting.popleft().result()
    while waiting:
        yield waiting.popleft().result()


def _start_worker(config: SourceConfig, folder: str) -> None:
    global _encoder
    _encoder = _Encoder(config, load_vocabulary(folder))


def _encode_in_worker(reference: Reference) -> EncodedDocument | str:
    return _encoder(reference)


def num_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
