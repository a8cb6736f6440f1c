"""Opens a checkpoint and a token store for the commands of ancient history."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from meliad_like.config import RunConfig, read_changes
from meliad_like.data.readers import LanesReaderConfig, ReaderConfig
from meliad_like.data.split import Documents, random_subset
from meliad_like.data.token_store import TokenStore
from meliad_like.errors import UserError
from meliad_like.history.gains import SpanGains, TargetLosses
from meliad_like.history.settings import HistoryConfig, HistorySettings
from meliad_like.history.spans import Layout
from meliad_like.history.stride_store import fingerprint
from meliad_like.run.opening import OpenedCheckpoint, open_checkpoint, open_store, saved_config


class HistoryRequest(NamedTuple):
    """The request that the flags of the command line make."""

    checkpoint: str
    step: int | None = None
    changes: Callable[..., Any] = read_changes()
    """Changes of the checkpoint's config and of `HistorySettings`."""
    store: str | None = None
    split: str = "test"
    documents: tuple[str, ...] = ()
    """Names of the documents that are read; none: all."""
    document_tokens: int | None = None
    """Tokens that are read of each document, from its beginning; None: all."""
    max_tokens: int | None = None
    """Largest number of tokens of a random subset of the documents, the same each time; None: all."""
    batch_size: int = 16
    """Windows that are read at once."""

    def config(self, history: HistoryConfig | None = None) -> tuple[RunConfig, HistorySettings]:
        """The config of the checkpoint and the settings of the command, with the changes.

        `history`: the defaults of HistoryConfig; None: those that the checkpoint was trained with, if it was.
        """
        saved = saved_config(self.checkpoint, self.step)
        settings = HistorySettings(history or getattr(saved.data, "history", HistoryConfig()))
        # The checkpoint's reader is not used, and may have had other windows.
        common = {field.name: getattr(saved.data, field.name) for field in dataclasses.fields(ReaderConfig)}
        return self.changes(dataclasses.replace(saved, data=LanesReaderConfig(**common)), settings)

    def choose_documents(self, store: TokenStore) -> Documents:
        """The documents of a store that are read, or their beginnings."""
        documents = store.split(self.split)
        if self.documents:
            if unknown := set(self.documents) - set(documents.names):
                raise UserError(f"there is no document {min(unknown)!r} in the split {self.split} of {store.folder}")
            documents = documents.subset(np.flatnonzero(np.isin(documents.names, self.documents)))
        if self.max_tokens is not None:
            lengths = np.minimum(documents.lengths, self.document_tokens or documents.lengths)
            documents = documents.subset(random_subset(lengths, self.max_tokens))
        if self.document_tokens is None:
            return documents
        most = self.document_tokens * len(documents)
        return documents.beginnings(store.vocabulary, most, shortest=self.document_tokens)

    def open(self) -> "Opened":
        """Opens all that a command needs."""
        run, settings = self.config()
        checkpoint = open_checkpoint(self.checkpoint, step=self.step, changes=lambda _: run, mesh="config")
        store = open_store(checkpoint, self.checkpoint, self.store, prepare=False)
        layout = Layout.of(settings.history, checkpoint.vocabulary)
        return Opened(self, checkpoint, store, self.choose_documents(store), layout)


@dataclasses.dataclass(frozen=True)
class Opened:
    """A frozen model and documents, and how the model reads them."""

    request: HistoryRequest
    checkpoint: OpenedCheckpoint
    store: TokenStore
    documents: Documents
    layout: Layout

    @functools.cached_property
    def fingerprint(self) -> str:
        """Fingerprint of the model with its parameters."""
        return fingerprint(self.checkpoint.model.for_separate_sequences(1), self.checkpoint.params)

    def losses(self, **lengths: int) -> TargetLosses:
        """The model as a reader of windows; `lengths`: `length` and `max_targets` of `TargetLosses`."""
        run, model, params, *_ = self.checkpoint
        limits = {"batch_size": self.request.batch_size, "loss_slice": run.training.loss_slice}
        return TargetLosses(model, params, self.checkpoint.mesh, **limits, **lengths)

    def gains(self) -> SpanGains:
        """The model, for scoring spans."""
        return SpanGains(self.losses, self.layout, self.fingerprint)
