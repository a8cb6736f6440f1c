"""From a checkpoint and a token store to what the commands of ancient history read."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from jax.sharding import Mesh

from meliad_like.config import RunConfig, read_changes
from meliad_like.data.readers import LanesReaderConfig, ReaderConfig
from meliad_like.data.subset import Documents, Subset, beginnings, random_subset
from meliad_like.data.token_store import TokenStore
from meliad_like.errors import UserError
from meliad_like.history.config import HistorySettings
from meliad_like.history.gains import SpanGains, TargetLosses
from meliad_like.history.spans import HistoryConfig, separator_token
from meliad_like.history.stride_store import fingerprint
from meliad_like.run.opening import OpenedCheckpoint, open_as, open_store, saved_config


def choose(
    store: TokenStore,
    split_name: str,
    names: Sequence[str] = (),
    document_tokens: int | None = None,
    max_tokens: int | None = None,
) -> Documents:
    """Some documents of a split, or their beginnings.

    Args:
        names: names of the documents; none: all.
        document_tokens: tokens that are read of each document, from its beginning; None: all.
        max_tokens: largest number of tokens of a random subset of the documents, the same each time; None: all.

    Raises:
        UserError: there is no document of a name, or max_tokens is less than the shortest document.
    """
    split = store.split(split_name)
    if unknown := set(names) - set(split.names):
        raise UserError(f"there is no document {min(unknown)!r} in the split {split_name} of {store.folder}")
    chosen = np.flatnonzero(np.isin(split.names, names)) if names else np.arange(len(split))
    if max_tokens is not None:
        lengths = split.lengths[chosen]
        chosen = chosen[random_subset(np.minimum(lengths, document_tokens or lengths), max_tokens)]
    documents = Subset(split, chosen)
    if document_tokens is None:
        return documents
    return beginnings(documents, store.vocabulary, document_tokens * len(chosen), shortest=document_tokens)


class HistoryRequest(NamedTuple):
    """What the flags of the command line ask for."""

    checkpoint: str
    step: int | None = None
    changes: Callable[..., Any] = read_changes()
    """Changes of the checkpoint's config and of `HistorySettings`."""
    store: str | None = None
    split: str = "test"
    documents: tuple[str, ...] = ()
    """Names of the documents that are read, and how much of them: as for `choose`."""
    document_tokens: int | None = None
    max_tokens: int | None = None
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

    def open(self) -> "Opened":
        """Opens all that a command needs.

        Raises:
            UserError: as `open_as`, `open_store`, `choose` and `separator_token`.
        """
        run, settings = self.config()
        checkpoint, mesh = open_as(self.checkpoint, run, self.step)
        store = open_store(checkpoint, self.checkpoint, self.store, prepare=False)
        documents = choose(store, self.split, self.documents, self.document_tokens, self.max_tokens)
        separator = separator_token(settings.history, checkpoint.vocabulary)
        return Opened(self, checkpoint, mesh, store, documents, settings.history, separator)


@dataclasses.dataclass(frozen=True)
class Opened:
    """A frozen model and documents, and how the model reads them."""

    request: HistoryRequest
    checkpoint: OpenedCheckpoint
    mesh: Mesh
    store: TokenStore
    documents: Documents
    config: HistoryConfig
    separator: int | None

    @functools.cached_property
    def fingerprint(self) -> str:
        """Fingerprint of the model with its parameters."""
        return fingerprint(self.checkpoint.model.for_separate_sequences(1), self.checkpoint.params)

    def losses(self, length: int, max_targets: int) -> TargetLosses:
        """The model as a reader of windows of some length."""
        return TargetLosses(
            self.checkpoint.model,
            self.checkpoint.params,
            self.mesh,
            length=length,
            max_targets=max_targets,
            batch_size=self.request.batch_size,
            loss_slice=self.checkpoint.run.training.loss_slice,
        )

    def windows(self) -> TargetLosses:
        """The model, for predicting the targets of whole windows."""
        return self.losses(self.config.window_length, self.config.stride)

    def gains(self, config: HistoryConfig | None = None) -> SpanGains:
        """The model, for scoring spans; with another config, if one is given."""
        return SpanGains(self.losses, config or self.config, self.separator)
