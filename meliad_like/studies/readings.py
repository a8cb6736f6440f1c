"""Models and the documents that they read for a study."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Float

from meliad_like.config import RunConfig, read_changes
from meliad_like.data.schedule import permutation
from meliad_like.data.split import Documents
from meliad_like.data.token_store import TokenStore, short
from meliad_like.errors import UserError
from meliad_like.evaluation.perplexity import Evaluator, make_evaluator
from meliad_like.evaluation.report import with_progress
from meliad_like.run.opening import OpenedCheckpoint, open_checkpoint, open_store


class StudyRequest(NamedTuple):
    """The flags that all studies have; a study's function `run` gets its own by name."""

    checkpoint: str
    step: int | None = None
    gin_param: Sequence[str] = ()
    store: str | None = None
    split: str = "test"
    document: Sequence[str] = ()
    num_documents: int | None = None
    """The number of random documents; None: all."""


class StudiedModel(NamedTuple):
    """A model to be studied: a checkpoint, perhaps with some settings changed."""

    label: str
    folder: str
    changes: list[str]
    """The changes of its config, as `field=value`."""
    opened: OpenedCheckpoint

    @property
    def run(self) -> RunConfig:
        return self.opened.run

    def details(self) -> dict[str, Any]:
        """Facts for the page and for JSON."""
        return {
            "label": self.label,
            "checkpoint": self.folder,
            "step": self.opened.step,
            "changed settings": self.changes,
            "parameters": self.opened.model.num_parameters,
            "window": self.run.model.window_length,
            "segment": self.run.data.segment_length,
        }


def open_studied(folder: str, gin_params: Sequence[str] = (), step: int | None = None) -> StudiedModel:
    """Opens a checkpoint. Its label is the run's folder, the step if it is given, and what is changed."""
    changes, path = read_changes((), gin_params), Path(folder)
    opened = open_checkpoint(folder, step=step, changes=changes, mesh="config")
    name = path.parent.name if path.name == "checkpoints" else path.name
    changed = [f"{key.partition('.')[2]}={binding.value}" for key, binding in changes.bindings.items()]
    label = ", ".join([name or str(path), *([f"step {step:,}"] if step is not None else []), *changed])
    return StudiedModel(label, folder, changed, opened)


def open_compared(request: StudyRequest, other: Sequence[str], other_step: int | None) -> list[StudiedModel]:
    """The checkpoint and the models to compare it with, all with different labels. The requested settings are those of
    the others; without others, of a second copy of the checkpoint."""
    models = [open_studied(request.checkpoint, (), request.step)]
    if request.gin_param and not other:
        models.append(open_studied(request.checkpoint, request.gin_param, request.step))
    models += [open_studied(folder, request.gin_param, other_step) for folder in other]
    if len({studied.label for studied in models}) == len(models):
        return models
    return [s._replace(label=", ".join([s.folder, f"step {s.opened.step:,}", *s.changes])) for s in models]


class Selection(NamedTuple):
    """The documents of a study."""

    store: TokenStore
    split_name: str
    documents: Documents
    num_in_split: int

    @property
    def description(self) -> str:
        """The split, how many of its documents were read, and the token store with its fingerprint."""
        number = len(self.documents.names)
        which = f"{number:,}" if number == self.num_in_split else f"{number:,} of {self.num_in_split:,}"
        store = f"token store {self.store.folder} ({short(self.store.fingerprint)})"
        return f"{self.split_name}, {which} document{'s' if self.num_in_split > 1 else ''}; {store}"

    def whole(self, index: int) -> np.ndarray:
        """The tokens of a document."""
        return self.documents.tokens(index, 0, int(self.documents.lengths[index]))


def choose(models: Sequence[StudiedModel], request: StudyRequest) -> Selection:
    """The documents to read, of the requested store or of the one that the first model was trained with. Without names
    they are random, and the same ones each time."""
    store = open_store(models[0].opened, models[0].folder, request.store, prepare=False)
    for studied in models[1:]:
        store.check_vocabulary(studied.opened.vocabulary.fingerprint, f"the checkpoint {studied.folder}")
    split = store.split(request.split)
    for name in request.document:
        if name not in split.names:
            some = ", ".join(split.names[:5])
            raise UserError(f"--document={name} is not in {request.split}, which has {len(split)}: {some}, ...")
    # A document that is named twice counts once.
    indices = [split.names.index(name) for name in dict.fromkeys(request.document)]
    if not indices:
        order = permutation(len(split), 0)
        # A document of one token has nothing to predict.
        indices = np.sort(order[split.lengths[order] > 1][: request.num_documents])
    return Selection(store, request.split, split.subset(np.asarray(indices, np.int64)), len(split))


class ModelLosses(NamedTuple):
    """The losses of a model on the documents, token by token."""

    studied: StudiedModel
    losses: list[Float[np.ndarray, " targets"]]
    """Nats of the tokens of each document, without its first; 0 where a token costs none."""
    counted: list[Bool[np.ndarray, " targets"]]
    """True for targets that cost loss (`Documents.counted_targets`)."""

    @property
    def num_targets(self) -> int:
        return int(sum(map(np.count_nonzero, self.counted)))

    @property
    def bits_per_token(self) -> float:
        return sum(float(nats.sum(dtype=np.float64)) for nats in self.losses) / math.log(2) / self.num_targets

    def bits(self, document: int) -> Float[np.ndarray, " tokens"]:
        """Bits of each token of a document, float64; 0 for its first token, which is not predicted."""
        return np.append(0.0, self.losses[document].astype(np.float64) / math.log(2))

    def details(self) -> dict[str, Any]:
        """Facts for the page and for JSON."""
        return self.studied.details() | {"bits per token": self.bits_per_token}


def make_reader(studied: StudiedModel, selection: Selection) -> Evaluator:
    """An evaluator that reads each of the documents from the beginning of a segment."""
    opened, options = studied.opened, {"documents": selection.documents, "whole_segments": True}
    return make_evaluator(opened.run, opened.model, selection.store, selection.split_name, opened.mesh, **options)


def read(studied: StudiedModel, selection: Selection) -> ModelLosses:
    """The losses of a model on the documents, each read from the beginning of a segment."""
    evaluate = make_reader(studied, selection)
    losses = with_progress(studied.label, lambda report: evaluate.token_losses(studied.opened.params, report))
    return ModelLosses(studied, losses, evaluate.counted_targets)
