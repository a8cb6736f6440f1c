"""The interface of readers, and the fields that the configs of all readers have."""

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
        """int64[documents]: the number of tokens of each document, its end included."""
        ...

    @property
    def names(self) -> Sequence[str]: ...

    def tokens(self, document: int, start: int, stop: int) -> np.ndarray:
        """int32[stop - start]: the tokens of a document in this range."""
        ...


class Reader(Protocol):
    """Batches by step. The batch of a step is a pure function of the reader's arguments and the step."""

    @property
    def num_lanes(self) -> int:
        """The number of lanes over all hosts."""
        ...

    @property
    def num_steps(self) -> int | None:
        """The number of steps until every document is read; None if reading is endless."""
        ...

    @property
    def padding_share(self) -> float:
        """The share of the positions without a target."""
        ...

    def batch(self, step: int, lanes: Sequence[int]) -> Batch:
        """Rows `lanes` of the batch of a step (numpy), in this order. Called from several threads at once."""
        ...


def leaks_the_future(reader: Reader) -> bool:
    """Whether the choices of a reader depend on the targets; most readers choose nothing."""
    return getattr(reader, "leaks_the_future", False)


def label(name: str, leaks_the_future: bool) -> str:
    """A name for tables, files and lines, marked if its results depend on the targets."""
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
    """The arguments of a reader besides its config."""

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
