"""From a checkpoint and a token store to what the commands of ancient history read."""

from typing import NamedTuple

import numpy as np
from jax.sharding import Mesh

from meliad_like.data.subset import Documents, Subset, beginnings, random_order
from meliad_like.data.token_store import TokenStore
from meliad_like.errors import UserError
from meliad_like.history.losses import TargetLosses
from meliad_like.history.scoring import SpanGains
from meliad_like.history.spans import HistoryConfig, separator_token
from meliad_like.run.opening import OpenedCheckpoint, open_store, open_with


class Request(NamedTuple):
    """What the flags of the command line ask for."""

    checkpoint: str
    step: int | None = None
    gin_files: tuple[str, ...] = ()
    gin_params: tuple[str, ...] = ()
    store: str | None = None
    split: str = "test"
    documents: tuple[str, ...] = ()
    """By name; none: all."""
    document_tokens: int | None = None
    """Of each document, so many tokens from its beginning; None: all."""
    max_tokens: int | None = None
    """In all: documents are drawn by chance, the same ones each time, as long as they fit; None: no limit."""
    batch_size: int = 16
    """Sequences that are read at once."""


class Opened(NamedTuple):
    """A frozen model, documents, and how the ones are read by the other."""

    checkpoint: OpenedCheckpoint
    mesh: Mesh
    store: TokenStore
    documents: Documents
    config: HistoryConfig
    separator: int | None
    batch_size: int

    def windows(self) -> TargetLosses:
        """The model that predicts the targets of windows."""
        return TargetLosses(
            self.checkpoint.model,
            self.checkpoint.params,
            self.mesh,
            length=self.config.window_length,
            max_targets=self.config.stride,
            batch_size=self.batch_size,
            loss_slice=self.checkpoint.run.training.loss_slice,
        )

    def gains(self, config: HistoryConfig | None = None) -> SpanGains:
        """The same model that scores spans; by another config, if one is given."""
        return SpanGains(
            self.checkpoint.model,
            self.checkpoint.params,
            self.mesh,
            self.config if config is None else config,
            self.separator,
            batch_size=self.batch_size,
            loss_slice=self.checkpoint.run.training.loss_slice,
        )


def open_request(request: Request) -> Opened:
    """Opens all that a command needs.

    Raises:
        UserError: as `open_with`, `open_store`, `choose` and `separator_token`.
    """
    checkpoint, mesh = open_with(request.checkpoint, request.gin_params, request.step, request.gin_files)
    store = open_store(checkpoint, request.checkpoint, request.store, prepare=False)
    config = checkpoint.run.history
    return Opened(
        checkpoint=checkpoint,
        mesh=mesh,
        store=store,
        documents=choose(store, request),
        config=config,
        separator=separator_token(config, checkpoint.vocabulary),
        batch_size=request.batch_size,
    )


def choose(store: TokenStore, request: Request) -> Documents:
    """The documents of a split that are asked for, or their beginnings.

    Raises:
        UserError: there is no document of a name, or max_tokens is less than the first that is drawn.
    """
    split = store.split(request.split)
    if unknown := set(request.documents) - set(split.names):
        raise UserError(f"there is no document {min(unknown)!r} in the split {request.split} of {store.folder}")
    chosen = random_order(len(split))
    if request.documents:
        chosen = np.asarray([index for index in chosen if split.names[index] in request.documents])
    used = np.minimum(split.lengths[chosen], request.document_tokens or split.lengths.max())
    if request.max_tokens is not None:
        chosen = chosen[np.cumsum(used) <= request.max_tokens]
        if not len(chosen):
            raise UserError(f"max_tokens={request.max_tokens} is less than the first document's {used[0]} tokens")
    documents = Subset(split, np.sort(chosen))
    if request.document_tokens is None:
        return documents
    limit = request.document_tokens
    return beginnings(documents, store.vocabulary, limit * len(chosen), shortest=limit)
