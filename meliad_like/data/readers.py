"""The kinds of readers, which turn the documents of a split into batches; what differs between the papers is the
reader."""

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

from meliad_like.data.batch import Documents, Reader
from meliad_like.data.lanes import LanesReader
from meliad_like.data.stream import StreamReader
from meliad_like.data.token_store import TokenStore
from meliad_like.errors import UserError
from meliad_like.registry import Registry, resumable
from meliad_like.validation import check_positive


def label(name: str, leaks_the_future: bool) -> str:
    """A name for tables, files and lines, marked if its results depend on the targets."""
    return f"{name} (leaks the future)" if leaks_the_future else name


class ReaderInputs(NamedTuple):
    """The arguments of a reader besides its config."""

    documents: Documents
    """All documents of a split of the store, or some of them."""
    store: TokenStore
    split: str
    """The name of the split."""
    num_lanes: int
    """Over all hosts."""
    window_length: int
    """Tokens in a block of the model (w)."""
    overlap: int = 0
    """Tokens that each of the model's windows repeats of the one before."""
    seed: int = 0
    """The seed that, with the epoch's number, determines the order of the documents."""
    shuffle: bool = True
    epochs: int | None = None
    """How often each document is read; None: endlessly."""


READERS = Registry("reader")


@dataclasses.dataclass(frozen=True)
class ReaderConfig:
    """The fields of all readers: the number of tokens in a step, and how far ahead batches are made."""

    store: str = resumable("")
    """Folder of the token store that `python -m meliad_like.prepare` wrote."""
    segment_length: int = 4096
    """Tokens that each lane reads in a step; a multiple of the model's window_length."""
    tokens_per_step: int = 131072
    """Tokens of a step over all lanes and hosts, padding included; a multiple of segment_length."""
    num_threads: int = resumable(2)
    """The number of threads of each host that make batches in the background."""
    batches_ahead: int = resumable(4)
    """The largest number of batches that wait in the host's memory."""
    device_batches_ahead: int = resumable(2)
    """The largest number of batches that wait in the devices' memory."""

    repeats_windows: ClassVar[bool] = False
    """Whether it reads for models whose windows overlap."""
    first_tokens_are_targets: ClassVar[bool] = False
    """Whether a document's first token is predicted, too."""
    used_by_evaluations: ClassVar[bool] = False
    """Whether evaluations read in this way as well; otherwise they read documents in order."""

    def __post_init__(self) -> None:
        waiting = ("num_threads", "batches_ahead", "device_batches_ahead")
        check_positive(self, ("segment_length", "tokens_per_step", *waiting))
        if self.tokens_per_step % self.segment_length:
            raise UserError(
                f"tokens_per_step={self.tokens_per_step} must be a multiple of segment_length={self.segment_length}"
            )

    @property
    def num_lanes(self) -> int:
        """The number of lanes over all hosts."""
        return self.tokens_per_step // self.segment_length

    def check_model(self, model: Any) -> None:
        """Raises a UserError if it can't read for a model of this config."""
        if self.segment_length % model.window_length:
            raise UserError(
                f"segment_length={self.segment_length} must be a multiple of window_length={model.window_length}"
            )

    def training_overlap(self, overlap: int) -> int:
        """Tokens that windows repeat in training, where those of the model's evaluations repeat `overlap`."""
        return overlap

    def make(self, inputs: ReaderInputs) -> Reader:
        """The reader. Raises a UserError if the documents can't be read in this way."""
        raise NotImplementedError

    def _fields(self, inputs: ReaderInputs) -> dict[str, Any]:
        """The fields that all readers have."""
        if inputs.overlap and not self.repeats_windows:
            raise UserError(
                f"windows with overlap={inputs.overlap} need RunConfig.data='windows', not {READERS.name_of(self)!r}"
            )
        return {
            "documents": inputs.documents,
            "num_lanes": inputs.num_lanes,
            "segment_length": self.segment_length,
            "window_length": inputs.window_length,
            "seed": inputs.seed,
            "vocabulary_size": inputs.store.vocabulary.size,
            "epochs": inputs.epochs,
        }

    def evaluation_reader(
        self, store: TokenStore, split: str, window_length: int
    ) -> Callable[[Documents, int], Reader] | None:
        """(documents of a split, number of lanes) -> how an evaluation reads them; None: in order."""
        if not self.used_by_evaluations:
            return None
        return lambda documents, num_lanes: self.make(
            ReaderInputs(documents, store, split, num_lanes, window_length, shuffle=False, epochs=1)
        )


@READERS.register("lanes")
@dataclasses.dataclass(frozen=True)
class LanesReaderConfig(ReaderConfig):
    """Each lane reads whole documents, and is reset when a document begins."""

    def make(self, inputs: ReaderInputs) -> Reader:
        return LanesReader(**self._fields(inputs), shuffle=inputs.shuffle)


@READERS.register("windows")
@dataclasses.dataclass(frozen=True)
class WindowsReaderConfig(ReaderConfig):
    """Like lanes, but each segment is a separate sequence, whose windows repeat the last tokens of the window before
    (the model's `overlap`)."""

    segments_follow: bool = False
    """Whether a lane remembers the segment before, where its next segment continues the same document."""
    train_disjoint: bool = False
    """Training windows repeat nothing, whatever overlap the model is evaluated with."""

    repeats_windows = True

    def training_overlap(self, overlap: int) -> int:
        return 0 if self.train_disjoint else overlap

    def make(self, inputs: ReaderInputs) -> Reader:
        return LanesReader(
            **self._fields(inputs),
            overlap=self.training_overlap(inputs.overlap),
            shuffle=inputs.shuffle,
            separate=not self.segments_follow,
        )


@READERS.register("stream")
@dataclasses.dataclass(frozen=True)
class StreamReaderConfig(ReaderConfig):
    """Each lane reads its own contiguous shard of all documents, and is reset only at the end of an epoch."""

    first_tokens_are_targets = True

    def make(self, inputs: ReaderInputs) -> Reader:
        return StreamReader(**self._fields(inputs), end_of_document=inputs.store.vocabulary.end_of_document)


@READERS.register("shuffled")
@dataclasses.dataclass(frozen=True)
class ShuffledReaderConfig(ReaderConfig):
    """Segments of the stream in a random order, with a reset before each segment."""

    first_tokens_are_targets = True

    def make(self, inputs: ReaderInputs) -> Reader:
        end = inputs.store.vocabulary.end_of_document
        return StreamReader(**self._fields(inputs), end_of_document=end, shuffle=True)
