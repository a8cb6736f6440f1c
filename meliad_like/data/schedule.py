"""The schedule of documents: which lane reads which blocks when, computed from the documents' lengths and a seed.

Documents form a stream, epoch after epoch, and each is assigned to the lane that is free first. The schedule does not
depend on the order of queries, so every host computes the same one, and a resumed run continues at the right place.
"""

import dataclasses
import heapq
import threading
from array import array
from bisect import bisect_right
from typing import NamedTuple

import numpy as np

from meliad_like.errors import UserError


def permutation(size: int, *seed: int) -> np.ndarray:
    """A random permutation that depends only on the seed, and is the same in every version of numpy."""
    # numpy guarantees the raw bits of a bit generator across versions, but not the permutations.
    return np.argsort(np.random.PCG64(seed).random_raw(size), kind="stable")


class Run(NamedTuple):
    """Consecutive blocks of one document in one lane."""

    block: int
    """The index of the first block in the lane."""
    num_blocks: int
    document: int
    offset: int
    """The index of the first block in the document."""


@dataclasses.dataclass(eq=False)
class Schedule:
    """Assigns documents to lanes, lazily, as far as queries need.

    It stores 16 bytes for each assigned document, is thread-safe, and can be queried in any order.
    """

    document_blocks: np.ndarray
    """int64[documents]: the documents' lengths in blocks. Documents of 0 blocks are left out."""
    num_lanes: int
    seed: int
    """With the epoch's number, the seed determines the order of that epoch; it is not negative."""
    _: dataclasses.KW_ONLY
    shuffle: bool = True
    """A new random order each epoch; otherwise the longest documents come first, which lets the lanes of a finite
    schedule finish at nearly the same time."""
    epochs: int | None = None
    """How often each document is read; None: endlessly."""

    def __post_init__(self) -> None:
        self._documents = np.flatnonzero(self.document_blocks)
        if not self._documents.size:
            raise UserError("no document has a token to predict: prepare a token store from longer documents")
        self._epochs_dealt = 0
        # One integer per lane, (block at which it is free) * num_lanes + lane, so that ties go to the lowest lane.
        self._free = list(range(self.num_lanes))
        self._starts = [array("q") for _ in range(self.num_lanes)]
        self._dealt = [array("q") for _ in range(self.num_lanes)]
        self._ends = [0] * self.num_lanes
        self._lock = threading.Lock()

    def num_steps(self, blocks_in_step: int) -> int | None:
        """The number of steps, of `blocks_in_step` blocks per lane, until the last lane is done; None: endless."""
        if self.epochs is None:
            return None
        with self._lock:
            while self._epochs_dealt < self.epochs:
                self._deal()
            return -(-max(self._ends) // blocks_in_step)

    def runs(self, lane: int, first: int, count: int) -> list[Run]:
        """The runs in the lane's blocks [first, first + count), in order; idle blocks have none."""
        with self._lock:
            # Later assignments never change a lane's past, so the progress of other lanes does not matter.
            while self._ends[lane] < first + count and self._epochs_dealt != self.epochs:
                self._deal()
            starts, dealt = self._starts[lane], self._dealt[lane]
            found = []
            for index in range(max(bisect_right(starts, first) - 1, 0), len(starts)):
                if starts[index] >= first + count:
                    break
                document = dealt[index]
                block = max(first, starts[index])
                end = min(first + count, starts[index] + int(self.document_blocks[document]))
                if block < end:
                    found.append(Run(block, end - block, document, block - starts[index]))
            return found

    def _deal(self) -> None:
        """Assigns the documents of another epoch."""
        if self.shuffle:
            order = self._documents[permutation(self._documents.size, self.seed, self._epochs_dealt)]
        else:
            order = self._documents[np.argsort(-self.document_blocks[self._documents], kind="stable")]
        free, num_lanes = self._free, self.num_lanes
        for document, blocks in zip(order.tolist(), self.document_blocks[order].tolist(), strict=True):
            start, lane = divmod(free[0], num_lanes)
            heapq.heapreplace(free, free[0] + blocks * num_lanes)
            self._assign(lane, start, document, blocks)
        self._epochs_dealt += 1

    def _assign(self, lane: int, start: int, document: int, blocks: int) -> None:
        self._starts[lane].append(start)
        self._dealt[lane].append(document)
        self._ends[lane] = start + blocks
