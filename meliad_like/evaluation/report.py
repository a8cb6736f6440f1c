"""Evaluations as JSON files, and as tables for the terminal and for Markdown."""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from etils import epath
from rich.console import Console
from rich.progress import Progress

from meliad_like.data.readers import label
from meliad_like.errors import UserError
from meliad_like.evaluation.protocols import ProtocolScore
from meliad_like.evaluation.scores import Evaluation
from meliad_like.resumable import write_json
from meliad_like.tables import Table

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


def table(evaluation: Evaluation) -> Table:
    """A table of all figures of one evaluation, one per row."""
    rows = [(name.removeprefix("num_").replace("_", " "), _text(getattr(evaluation, name))) for name in FIGURES]
    return Table(title(evaluation), ("", label(evaluation.split, evaluation.leaks_the_future)), rows)


def positions(evaluation: Evaluation) -> Table:
    """A table of bits per token by position in the document, which shows the value of long context."""
    rows = [
        (f"{score.start:,} to {score.stop - 1:,}", _text(score.num_tokens), _text(score.bits_per_token))
        for score in evaluation.positions
    ]
    return Table("by position in the document", ("position", "tokens", "bits per token"), rows)


def comparison(evaluations: Mapping[str, Evaluation], compressors: Mapping[str, float] | None = None) -> Table:
    """A table of evaluations of the same documents, one per row, followed by compressors (bits per byte)."""
    first, *others = evaluations.values()
    for name, other in zip(list(evaluations)[1:], others, strict=True):
        if [(d.name, d.num_bytes) for d in other.documents] != [(d.name, d.num_bytes) for d in first.documents]:
            raise UserError(
                f"{name} ({title(other)}) and {next(iter(evaluations))} ({title(first)}) are not of the same documents"
            )
    figures = ("bits_per_byte", "bits_per_token", "word_perplexity", "accuracy")
    rows = [
        (label(name, result.leaks_the_future), *(_text(getattr(result, figure)) for figure in figures))
        for name, result in evaluations.items()
    ]
    rows += [(name, _text(bits_per_byte), "", "", "") for name, bits_per_byte in (compressors or {}).items()]
    return Table(title(first), ("", *(figure.replace("_", " ") for figure in figures)), rows)


def protocols(scores: Sequence[ProtocolScore]) -> Table:
    """A table of protocols on the same tokens, one per row."""
    rows = [
        (
            score.protocol,
            _text(score.num_tokens),
            _text(score.bits_per_token),
            _text(score.perplexity),
            f"{score.min_visible:,} / {score.mean_visible:,.1f} / {score.max_visible:,}",
            f"{score.flops / score.num_tokens:.3g}",
            _text(score.tokens_per_second),
        )
        for score in scores
    ]
    header = ("", "tokens", "bits per token", "perplexity", "visible", "FLOPs per token", "tokens per second")
    return Table("by protocol; visible: the fewest, mean and most tokens that a layer attends to", header, rows)


def title(evaluation: Evaluation) -> str:
    """The name of the evaluated split, with the size of a subset."""
    shown, whole = evaluation.num_documents, evaluation.documents_in_split
    documents = f"{shown:,} documents" if shown == whole else f"a subset, {shown:,} of {whole:,} documents"
    split = label(evaluation.split, evaluation.leaks_the_future)
    return f"{split}: {documents}, {evaluation.num_bytes:,} bytes"


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


def _text(value: float) -> str:
    if isinstance(value, int):
        return f"{value:,}"
    if math.isnan(value):
        return "-"
    if abs(value) < 1000:
        return f"{value:.4f}"
    return f"{value:,.0f}" if abs(value) < 1e9 else f"{value:.2e}"
