"""Evaluations as JSON files, and as tables for the terminal and for Markdown."""

import dataclasses
import functools
import gzip
import lzma
import math
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import numpy as np
from etils import epath
from rich.console import Console
from rich.progress import Progress

from meliad_like.data.readers import label
from meliad_like.data.split import Documents
from meliad_like.errors import UserError
from meliad_like.evaluation.scores import Evaluation
from meliad_like.resumable import write_json
from meliad_like.tables import Table
from meliad_like.vocabularies.base import Vocabulary

Result = TypeVar("Result")

FIGURES = (
    "bits_per_token",
    "perplexity",
    "bits_per_byte",
    "word_perplexity",
    "accuracy",
    "num_documents",
    "num_tokens",
    "num_bytes",
    "num_words",
    "tokens_per_word",
    "tokens_per_second",
)
"""The properties of an evaluation that are saved and displayed."""

COMPRESSORS: dict[str, Callable[[bytes], bytes]] = {
    "gzip -9": functools.partial(gzip.compress, compresslevel=9, mtime=0),
    "xz -9": functools.partial(lzma.compress, preset=9),
}


def table(evaluation: Evaluation) -> Table:
    """A table of all figures of one evaluation, one per row."""
    rows = [(name.removeprefix("num_").replace("_", " "), figure_text(getattr(evaluation, name))) for name in FIGURES]
    return Table(title(evaluation), ("", label(evaluation.split, evaluation.leaks_the_future)), rows)


def positions(evaluation: Evaluation) -> Table:
    """A table of bits per token by position in the document, which shows the value of long context."""
    rows = [
        (f"{score.start:,} to {score.stop - 1:,}", figure_text(score.num_tokens), figure_text(score.bits_per_token))
        for score in evaluation.positions
    ]
    return Table("by position in the document", ("position", "tokens", "bits per token"), rows)


def comparison(evaluations: Mapping[str, Evaluation], compressors: Mapping[str, float] | None = None) -> Table:
    """A table of evaluations of the same documents, one per row, followed by compressors (bits per byte)."""
    first_name, first = next(iter(evaluations.items()))
    for name, other in evaluations.items():
        if [(d.name, d.num_bytes) for d in other.documents] != [(d.name, d.num_bytes) for d in first.documents]:
            raise UserError(f"{name} ({title(other)}) and {first_name} ({title(first)}) are not of the same documents")
    figures = ("bits_per_byte", "bits_per_token", "word_perplexity", "accuracy")
    rows = [
        (label(name, result.leaks_the_future), *(figure_text(getattr(result, figure)) for figure in figures))
        for name, result in evaluations.items()
    ]
    rows += [(name, figure_text(bits_per_byte), "", "", "") for name, bits_per_byte in (compressors or {}).items()]
    return Table(title(first), ("", *(figure.replace("_", " ") for figure in figures)), rows)


def compressed_bits_per_byte(split: Documents, documents: Iterable[int], vocabulary: Vocabulary) -> dict[str, float]:
    """Bits per byte of general-purpose compressors on some documents of a split, file headers included.

    Each document is compressed separately, because the model also reads each document with an empty memory. Compressed
    is the text that the model has to predict: what the vocabulary decodes. If that is not exactly the original text
    (`lossless` is False), the bytes are still those of the original.
    """
    indices = list(documents)

    def sizes(document: int) -> list[int]:
        text = vocabulary.document_bytes(split.tokens(document, 0, int(split.lengths[document])))
        return [len(compress(text)) for compress in COMPRESSORS.values()]

    # zlib and lzma release the interpreter lock.
    with ThreadPoolExecutor() as pool:
        totals = np.sum(list(pool.map(sizes, indices)), axis=0)
    num_bytes = int(np.asarray(split.num_bytes)[indices].sum())
    return {name: 8 * int(total) / num_bytes for name, total in zip(COMPRESSORS, totals, strict=True)}


def title(evaluation: Evaluation) -> str:
    """The name of the evaluated split, with the size of a subset."""
    shown, whole = evaluation.num_documents, evaluation.documents_in_split
    documents = f"{shown:,} documents" if shown == whole else f"a subset, {shown:,} of {whole:,} documents"
    split = label(evaluation.split, evaluation.leaks_the_future)
    return f"{split}: {documents}, {size(evaluation)}"


def size(evaluation: Evaluation) -> str:
    """The number of the evaluated bytes, or of tokens if bytes are not counted."""
    return f"{evaluation.num_bytes:,} bytes" if evaluation.num_bytes else f"{evaluation.num_tokens:,} tokens"


def with_progress(title: str, work: Callable[[Callable[[int, int], None]], Result]) -> Result:
    """Runs `work` with a callback (done, total) that updates a progress bar; returns the result of `work`."""
    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(title, total=None)
        return work(lambda done, total: progress.update(task, completed=done, total=total))


def write(evaluation: Evaluation, path: epath.PathLike, **details: Any) -> None:
    """Writes the figures, the documents and the positions as JSON, NaN as null, after additional `details`."""
    figures = {name: getattr(evaluation, name) for name in FIGURES}
    finite = {name: value if math.isfinite(value) else None for name, value in figures.items()}
    write_json(path, details | {"figures": finite} | dataclasses.asdict(evaluation))


def figure_text(value: float) -> str:
    """A figure of an evaluation for a table; `-` for NaN."""
    if isinstance(value, int):
        return f"{value:,}"
    if math.isnan(value):
        return "-"
    if abs(value) < 1000:
        return f"{value:.4f}"
    return f"{value:,.0f}" if abs(value) < 1e9 else f"{value:.2e}"
