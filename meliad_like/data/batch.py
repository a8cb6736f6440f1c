"""The batch of a training step, and the interface of the readers that make batches."""

import abc
import dataclasses
from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

import jax
import numpy as np
from jaxtyping import Bool, Int32

from meliad_like.data.split import Documents

AnyArray: TypeAlias = np.ndarray | jax.Array


class Batch(NamedTuple):
    """One segment of every lane: numpy arrays on the host, jax arrays on the devices; the lane axis comes first."""

    inputs: Int32[AnyArray, "b n"]
    """The token ids that are read; 0 at padding."""
    targets: Int32[AnyArray, "b n"]
    """The token after each input; 0 if there is none."""
    loss_mask: Bool[AnyArray, "b n"]
    """True where the target counts."""
    start: Bool[AnyArray, "b c"]
    """True where a document begins with this block, so that the lane's carry is reset."""
    document: Int32[AnyArray, "b c"]
    """The index of the block's document in its split; -1 if the lane is idle."""
    position: Int32[AnyArray, "b c"]
    """Offset, in tokens, of the block's first input in its document."""


@dataclasses.dataclass(eq=False)
class Reader(abc.ABC):
    """Batches by step. The batch of a step is a pure function of the reader's fields and the step."""

    documents: Documents
    num_lanes: int
    """The number of lanes over all hosts."""
    segment_length: int
    """The number of tokens that each lane reads in a step (n); a multiple of window_length."""
    window_length: int
    """The number of tokens in a block (w)."""
    seed: int = 0
    """The seed that, with the epoch's number, determines the order."""
    _: dataclasses.KW_ONLY
    epochs: int | None = None
    """The number of times that each document is read; None: endlessly."""

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
        """Rows `lanes` of the batch of a step (numpy), in this order. Called from several threads at once."""


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
