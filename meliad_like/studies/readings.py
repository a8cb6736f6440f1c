"""Models and the documents that they read for a study."""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jax.sharding import Mesh
from jaxtyping import Float

from meliad_like.config import RunConfig, differences, read_changes
from meliad_like.data.subset import Subset, random_order
from meliad_like.data.token_store import Split, TokenStore, short
from meliad_like.errors import UserError
from meliad_like.evaluation.report import with_progress
from meliad_like.run.evaluator import make_evaluator
from meliad_like.run.opening import OpenedCheckpoint, open_store, open_with


class StudyRequest(NamedTuple):
    """What the command line asks for."""

    checkpoint: str
    step: int | None
    others: Sequence[str]
    other_step: int | None
    gin_params: Sequence[str]
    store: str | None
    split: str
    documents: Sequence[str]
    """Names; none: `num_documents` random ones."""
    num_documents: int | None
    """None: all."""
    unit: str
    """`word`, `token`, or `auto`: words of a byte vocabulary, otherwise tokens."""
    top: int
    clear_every: int | None
    """Tokens; None: a segment of the training."""
    context_tokens: int | None
    """None: a window."""
    num_contexts: int
    """The most in each document."""
    num_tokens: int
    """The number to write after each context."""
    output: Path


class Subject(NamedTuple):
    """A model to be studied: a checkpoint, perhaps with some settings changed."""

    label: str
    folder: str
    """The checkpoint's folder."""
    gin_params: tuple[str, ...]
    """What is changed of its config."""
    opened: OpenedCheckpoint
    mesh: Mesh

    @property
    def run(self) -> RunConfig:
        return self.opened.run

    def details(self) -> dict[str, Any]:
        """Facts for a table of the page, and for JSON."""
        return {
            "label": self.label,
            "checkpoint": self.folder,
            "step": self.opened.step,
            "changed settings": list(self.gin_params),
            "parameters": self.opened.model.num_parameters,
            "window": self.run.model.window_length,
            "segment": self.run.data.segment_length,
        }


class Chosen(NamedTuple):
    """The documents of a study."""

    store: TokenStore
    split_name: str
    documents: Subset
    num_in_split: int

    @property
    def title(self) -> str:
        """The split, and how many of its documents were read."""
        number = len(self.documents.names)
        which = f"{number:,}" if number == self.num_in_split else f"{number:,} of {self.num_in_split:,}"
        documents = "document" if self.num_in_split == 1 else "documents"
        return f"{self.split_name}, {which} {documents}"

    @property
    def description(self) -> str:
        """The title, with the token store and its fingerprint."""
        return f"{self.title}; token store {self.store.folder} ({short(self.store.fingerprint)})"


@dataclass(frozen=True)
class Reading:
    """The losses of a model on the documents, token by token."""

    subject: Subject
    losses: list[Float[np.ndarray, " targets"]]
    """Nats of the tokens of each document, without its first."""

    @property
    def label(self) -> str:
        return self.subject.label

    @property
    def num_targets(self) -> int:
        return sum(map(len, self.losses))

    @cached_property
    def bits_per_token(self) -> float:
        return sum(float(nats.sum(dtype=np.float64)) for nats in self.losses) / math.log(2) / self.num_targets

    def details(self) -> dict[str, Any]:
        """Facts for a table of the page, and for JSON."""
        return self.subject.details() | {"bits per token": self.bits_per_token}


def open_subject(folder: str, gin_params: Sequence[str] = (), step: int | None = None, label: str = "") -> Subject:
    """Opens a checkpoint. The default of its label is the run's folder, the step if it is given, and what is changed.

    Raises:
      UserError: as `open_with`.
    """
    opened, mesh = open_with(folder, read_changes((), gin_params), step)
    return Subject(label or _label(folder, gin_params, step), folder, tuple(gin_params), opened, mesh)


def with_distinct_labels(subjects: Sequence[Subject]) -> list[Subject]:
    """The subjects, with folders and steps as labels if two of them have the same label."""
    if len({subject.label for subject in subjects}) == len(subjects):
        return list(subjects)
    return [s._replace(label=f"{s.folder}, step {s.opened.step:,}") for s in subjects]


def choose(subjects: Sequence[Subject], request: StudyRequest) -> Chosen:
    """The documents to read, of the requested store or of the one that the first model was trained with.

    Without names they are random, and the same ones each time.

    Raises:
      UserError: there is no such store, split or document, or a model has another vocabulary than the store.
    """
    store = open_store(subjects[0].opened, subjects[0].folder, request.store, prepare=False)
    for subject in subjects[1:]:
        store.check_vocabulary(subject.opened.vocabulary.fingerprint, f"the checkpoint {subject.folder}")
    split = store.split(request.split)
    if request.documents:
        chosen = [_index(split, name, request.split) for name in request.documents]
    else:
        order = random_order(len(split))
        # A document of one token has nothing to predict.
        chosen = np.sort(order[split.lengths[order] > 1][: request.num_documents]).tolist()
    return Chosen(store, request.split, Subset(split, np.asarray(chosen, np.int64)), len(split))


def _index(documents: Split, name: str, split: str) -> int:
    if name not in documents.names:
        some = ", ".join(documents.names[:5])
        raise UserError(f"--document={name} is not in {split}, which has {len(documents)}: {some}, ...")
    return documents.names.index(name)


def read(subject: Subject, chosen: Chosen) -> Reading:
    """Lets a model read the documents, each from the beginning of a segment."""
    opened = subject.opened
    evaluator = make_evaluator(
        opened.run,
        opened.model,
        chosen.store,
        chosen.split_name,
        subject.mesh,
        documents=chosen.documents,
        whole_segments=True,
    )
    return Reading(
        subject, with_progress(subject.label, lambda progress: evaluator.token_losses(opened.params, progress))
    )


def _label(folder: str, gin_params: Sequence[str], step: int | None) -> str:
    path = Path(folder)
    name = path.parent.name if path.name == "checkpoints" else path.name
    changes = [param.partition(".")[2].replace(" ", "") for param in gin_params]
    return ", ".join([name or str(path), *([f"step {step:,}"] if step is not None else []), *changes])


def write_summary(folder: Path, chosen: Chosen, details: dict[str, Any], name: str = "summary.json") -> None:
    """Writes the figures of a study, and which documents they are of."""
    saved = details | {"split": chosen.split_name, "store": chosen.store.fingerprint}
    (folder / name).write_text(json.dumps(saved, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def changed_settings(first: RunConfig, other: RunConfig) -> list[tuple[str, str, str]]:
    """The settings in which two runs differ, apart from documents and mesh: name and both values."""
    found = differences(first, other).items()
    return [(name, str(a), str(b)) for name, (a, b) in found if not name.startswith(("source.", "mesh."))]
