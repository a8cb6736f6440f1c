"""The batch of a training step, which all readers produce."""

from typing import NamedTuple, TypeAlias

import jax
import numpy as np
from jaxtyping import Bool, Int32

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
