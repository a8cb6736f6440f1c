"""What every reader does, and the fields that the configs of all readers have."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol

import numpy as np

from meliad_like.data.batch import Batch
from meliad_like.errors import UserError
from meliad_like.registry import Registry, resumable
from meliad_like.validation import check_positive

if TYPE_CHECKING:
    from meliad_like.data.token_store import TokenStore


class Split(Protocol):
    """The documents of one split of a token store."""

    @property
    def lengths(self) -> np.ndarray:
        """int64[documents]: tokens of each document, its end included."""
        ...

    @property
    def names(self) -> Sequence[str]: ...

    def tokens(self, document: int, start: int, stop: int) -> np.ndarray:
        """int32[stop - start]: these tokens of a document."""
        ...


class Reader(Protocol):
    """Batches by step. The batch of a step is a pure function of the reader's arguments and the step."""

    @property
    def num_lanes(self) -> int:
        """Lanes over all hosts."""
        ...

    @property
    def num_steps(self) -> int | None:
        """Steps until every document is read; None where reading has no end."""
        ...

    @property
    def padding_share(self) -> float:
        """Share of the positions that have no target."""
        ...

    def batch(self, step: int, lanes: Sequence[int]) -> Batch:
        """Rows `lanes` of the batch of a step (numpy), in this order. Called from several threads at once."""
        ...


def leaks_the_future(reader: Reader) -> bool:
    """Whether what a reader puts into windows was chosen by what reads the targets; few readers choose anything."""
    return getattr(reader, "leaks_the_future", False)


def label(name: str, leaks_the_future: bool) -> str:
    """A name for tables, files and lines; it says so where what it names was made by reading the targets."""
    return f"{name} (leaks the future)" if leaks_the_future else name


def check_tokens(tokens: np.ndarray, vocabulary_size: int, first: int, document: str) -> None:
    """
    Raises:
      UserError: one of these tokens, the first of which is at position `first` of its document, is out of range.
    """
    if tokens.max() >= vocabulary_size or tokens.min() < 0:
        place = int(np.flatnonzero((tokens >= vocabulary_size) | (tokens < 0))[0])
        raise UserError(
            f"token {tokens[place]} at position {first + place} of document {document} "
            f"is not in the vocabulary of {vocabulary_size}: prepare the token store again"
        )


class ReaderInputs(NamedTuple):
    """Everything but its config that a reader depends on."""

    documents: Split
    """All documents of a split of the store, or some of them."""
    store: "TokenStore"
    split: str
    """The name of the split."""
    num_lanes: int
    """Over all hosts."""
    window_length: int
    """Tokens in a block of the model (w)."""
    overlap: int = 0
    """Tokens that each of the model's windows repeats of the one before."""
    seed: int = 0
    """Decides the order of the documents, with the epoch's number."""
    shuffle: bool = True
    epochs: int | None = None
    """How often each document is read; None: without end."""


READERS = Registry("reader")


@dataclasses.dataclass(frozen=True)
class ReaderConfig:
    """How many tokens a step reads, and how far ahead of the step: what all kinds of readers have in common."""

    store: str = resumable("")
    """Folder of the token store that `python -m meliad_like.prepare` wrote."""
    segment_length: int = 4096
    """Tokens that each lane reads in a step; a multiple of the model's window_length."""
    tokens_per_step: int = 131072
    """Tokens of a step over all lanes and hosts, padding included; a multiple of segment_length."""
    num_threads: int = resumable(2)
    """Threads of each host that make batches in the background."""
    batches_ahead: int = resumable(4)
    """Batches that wait in the host's memory, at most."""
    device_batches_ahead: int = resumable(2)
    """Batches that wait in the devices' memory, at most."""

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
        """Lanes over all hosts."""
        return self.tokens_per_step // self.segment_length

    def check_model(self, model: Any) -> None:
        """
        Raises:
          UserError: it can't read for a model of this config.
        """
        if self.segment_length % model.window_length:
            raise UserError(
                f"segment_length={self.segment_length} must be a multiple of window_length={model.window_length}"
            )

    def training_overlap(self, overlap: int) -> int:
        """Tokens that windows repeat in training, where those of the model's evaluations repeat `overlap`."""
        return overlap

    def make(self, inputs: ReaderInputs) -> Reader:
        """The reader.

        Raises:
          UserError: the documents can't be read in this way.
        """
        if inputs.overlap and not self.repeats_windows:
            raise UserError(
                f"windows with overlap={inputs.overlap} need RunConfig.data='windows', not {READERS.name_of(self)!r}"
            )
        return self._make(inputs)

    def _make(self, inputs: ReaderInputs) -> Reader:
        raise NotImplementedError

    def evaluation_reader(
        self, store: "TokenStore", split: str, window_length: int
    ) -> Callable[[Split, int], Reader] | None:
        """(documents of a split, number of lanes) -> how an evaluation reads them; None: in order."""
        if not self.used_by_evaluations:
            return None
        return lambda documents, num_lanes: self.make(
            ReaderInputs(documents, store, split, num_lanes, window_length, shuffle=False, epochs=1)
        )
