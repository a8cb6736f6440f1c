"""The batch of a training step, and the interfaces of the readers that make batches and of what they read."""

import abc
import dataclasses
from collections.abc import Sequence
from typing import NamedTuple, Protocol, TypeAlias

import jax
import numpy as np
from jaxtyping import Bool, Int32

from meliad_like.errors import UserError

AnyArray: TypeAlias = np.ndarray | jax.Array


class Batch(NamedTuple):
    """One segment of every lane: numpy arrays on the host, jax arrays on the devices; the lane axis comes first."""

    inputs: Int32[AnyArray, "b n"]
    """Token ids; 0 at padding."""
    targets: Int32[AnyArray, "b n"]
    """The token after each input; 0 if there is none."""
    loss_mask: Bool[AnyArray, "b n"]
    """True where the target counts."""
    start: Bool[AnyArray, "b c"]
    """True where a document begins with this block, so that the lane's carry is reset."""
    document: Int32[AnyArray, "b c"]
    """Index of the block's document in its split; -1 if the lane is idle."""
    position: Int32[AnyArray, "b c"]
    """Offset, in tokens, of the block's first input in its document."""


class Documents(Protocol):
    """The interface of a split of a token store, and of the views of it (`subset.py`)."""

    @property
    def lengths(self) -> np.ndarray:
        """int64[documents]: the number of tokens of each document, its end included."""
        ...

    @property
    def num_bytes(self) -> np.ndarray: ...

    @property
    def num_words(self) -> np.ndarray: ...

    @property
    def names(self) -> Sequence[str]: ...

    def tokens(self, document: int, start: int, stop: int) -> np.ndarray:
        """int32[stop - start]: the tokens of a document in this range."""
        ...


@dataclasses.dataclass(eq=False)
class Reader(abc.ABC):
    """Batches by step. The batch of a step is a pure function of the reader's fields and the step."""

    documents: Documents
    num_lanes: int
    """The number of lanes over all hosts."""
    segment_length: int
    """Tokens that each lane reads in a step (n); a multiple of window_length."""
    window_length: int
    """Tokens in a block (w)."""
    seed: int = 0
    """The seed that, with the epoch's number, determines the order."""
    _: dataclasses.KW_ONLY
    vocabulary_size: int
    """Token ids must be below it."""
    epochs: int | None = None
    """How often each document is read; None: endlessly."""

    leaks_the_future = False
    """Whether the reader's choices depend on the targets; most readers choose nothing."""

    @property
    @abc.abstractmethod
    def num_steps(self) -> int | None:
        """The number of steps until every document is read; None if reading is endless."""

    @property
    @abc.abstractmethod
    def padding_share(self) -> float:
        """The share of the positions without a target: of all steps, or of an epoch if reading is endless."""

    @abc.abstractmethod
    def batch(self, step: int, lanes: Sequence[int]) -> Batch:
        """Rows `lanes` of the batch of a step (numpy), in this order. Called from several threads at once.

        Raises:
          UserError: a token id is not in the vocabulary.
        """


def empty_batch(num_lanes: int, segment_length: int, window_length: int) -> Batch:
    """A batch of numpy arrays with only padding."""
    tokens, blocks = (num_lanes, segment_length), (num_lanes, segment_length // window_length)
    return Batch(
        inputs=np.zeros(tokens, np.int32),
        targets=np.zeros(tokens, np.int32),
        loss_mask=np.zeros(tokens, bool),
        start=np.zeros(blocks, bool),
        document=np.full(blocks, -1, np.int32),
        position=np.zeros(blocks, np.int32),
    )


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
