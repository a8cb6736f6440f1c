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

from meliad_like.config import RunConfig, read_changes
from meliad_like.data.subset import Subset, random_order
from meliad_like.data.token_store import TokenStore, short
from meliad_like.errors import UserError
from meliad_like.evaluation.perplexity import make_evaluator
from meliad_like.evaluation.report import with_progress
from meliad_like.run.opening import OpenedCheckpoint, open_store, open_with


class StudyRequest(NamedTuple):
    """What the command line asks for; its flags have the same names, or those of `__main__.FLAGS_OF_FIELDS`."""

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
    num_tokens: int
    output: Path
    """A folder that exists."""


class Subject(NamedTuple):
    """A model to be studied: a checkpoint, perhaps with some settings changed."""

    label: str
    folder: str
    """The checkpoint's folder."""
    changes: list[str]
    """What is changed of its config, as `field=value`."""
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
            "changed settings": self.changes,
            "parameters": self.opened.model.num_parameters,
            "window": self.run.model.window_length,
            "segment": self.run.data.segment_length,
        }


def open_subject(folder: str, gin_params: Sequence[str] = (), step: int | None = None) -> Subject:
    """Opens a checkpoint. Its label is the run's folder, the step if it is given, and what is changed.

    Raises:
      UserError: as `open_with`.
    """
    changes = read_changes((), gin_params)
    opened, mesh = open_with(folder, changes, step)
    path = Path(folder)
    name = path.parent.name if path.name == "checkpoints" else path.name
    changed = [f"{key.partition('.')[2]}={binding.value}" for key, binding in changes.bindings.items()]
    label = ", ".join([name or str(path), *([f"step {step:,}"] if step is not None else []), *changed])
    return Subject(label, folder, changed, opened, mesh)


def open_compared(request: StudyRequest) -> list[Subject]:
    """The checkpoint and the models to compare it with: others, or the same one with the requested settings."""
    subjects = [open_subject(request.checkpoint, step=request.step)]
    if request.gin_params and not request.others:
        subjects.append(open_subject(request.checkpoint, request.gin_params, request.step))
    subjects += [open_subject(folder, request.gin_params, request.other_step) for folder in request.others]
    return with_distinct_labels(subjects)


def with_distinct_labels(subjects: list[Subject]) -> list[Subject]:
    """The subjects, with folders and steps as labels if two of them have the same label."""
    if len({subject.label for subject in subjects}) == len(subjects):
        return subjects
    return [s._replace(label=f"{s.folder}, step {s.opened.step:,}") for s in subjects]


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
        return f"{self.split_name}, {which} document{'s' if self.num_in_split > 1 else ''}"

    @property
    def description(self) -> str:
        """The title, with the token store and its fingerprint."""
        return f"{self.title}; token store {self.store.folder} ({short(self.store.fingerprint)})"

    def whole(self, index: int) -> np.ndarray:
        """The tokens of a document."""
        return self.documents.tokens(index, 0, int(self.documents.lengths[index]))

    def write_summary(self, folder: Path, details: dict[str, Any], name: str = "summary.json") -> None:
        """Writes the figures of a study, and which documents they are of."""
        saved = details | {"split": self.split_name, "store": self.store.fingerprint}
        (folder / name).write_text(json.dumps(saved, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


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
    for name in request.documents:
        if name not in split.names:
            some = ", ".join(split.names[:5])
            raise UserError(f"--document={name} is not in {request.split}, which has {len(split)}: {some}, ...")
    chosen = [split.names.index(name) for name in request.documents]
    if not chosen:
        order = random_order(len(split))
        # A document of one token has nothing to predict.
        chosen = np.sort(order[split.lengths[order] > 1][: request.num_documents])
    return Chosen(store, request.split, Subset(split, np.asarray(chosen, np.int64)), len(split))


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


def read(subject: Subject, chosen: Chosen) -> Reading:
    """Lets a model read the documents, each from the beginning of a segment."""
    run, model, documents = subject.run, subject.opened.model, chosen.documents
    evaluate = make_evaluator(
        run, model, chosen.store, chosen.split_name, subject.mesh, documents=documents, whole_segments=True
    )
    losses = with_progress(subject.label, lambda report: evaluate.token_losses(subject.opened.params, report))
    return Reading(subject, losses)
