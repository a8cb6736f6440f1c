"""The schedule of documents: which lane reads which blocks when, computed from the documents' lengths and a seed.

Documents form a stream, epoch after epoch, and each is assigned to the lane that is free first. The schedule does not
depend on the order of queries, so every host computes the same one, and a resumed run continues at the right place.
"""

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
    epoch: int


class Schedule:
    """Assigns documents to lanes, lazily, as far as queries need.

    It stores 16 bytes for each assigned document, is thread-safe, and can be queried in any order.
    """

    def __init__(
        self,
        document_blocks: np.ndarray,
        num_lanes: int,
        seed: int,
        *,
        shuffle: bool = True,
        epochs: int | None = None,
    ):
        """
        Args:
          document_blocks: int64[documents], the documents' lengths in blocks; documents of 0 blocks are left out.
          seed: non-negative seed; with the epoch's number it determines the order of that epoch.
          shuffle: a new random order each epoch; otherwise the longest documents come first, which lets the lanes of a
            finite schedule finish at nearly the same time.
          epochs: how often each document is read; None: endlessly.
        """
        self.num_lanes = num_lanes
        self._document_blocks = document_blocks
        self._documents = np.flatnonzero(document_blocks)
        if not self._documents.size:
            raise UserError("no document has a token to predict: prepare a token store from longer documents")
        self._seed = seed
        self._shuffle = shuffle
        self._epochs = epochs
        self._epochs_dealt = 0
        # One integer per lane, (block at which it is free) * num_lanes + lane, so that ties go to the lowest lane.
        self._free = list(range(num_lanes))
        self._starts = [array("q") for _ in range(num_lanes)]
        # Assigned documents are stored as epoch * number of documents + document.
        self._dealt = [array("q") for _ in range(num_lanes)]
        self._ends = [0] * num_lanes
        self._lock = threading.Lock()

    def num_steps(self, blocks_in_step: int) -> int | None:
        """The number of steps, of `blocks_in_step` blocks per lane, until the last lane is done; None: endless."""
        if self._epochs is None:
            return None
        with self._lock:
            while self._epochs_dealt < self._epochs:
                self._deal_epoch()
            return -(-max(self._ends) // blocks_in_step)

    def runs(self, lane: int, first: int, count: int) -> list[Run]:
        """The runs in the lane's blocks [first, first + count), in order; idle blocks have none."""
        with self._lock:
            # Later assignments never change a lane's past, so the progress of other lanes does not matter.
            while self._ends[lane] < first + count and self._epochs_dealt != self._epochs:
                self._deal_epoch()
            starts, dealt = self._starts[lane], self._dealt[lane]
            found = []
            for index in range(max(bisect_right(starts, first) - 1, 0), len(starts)):
                if starts[index] >= first + count:
                    break
                epoch, document = divmod(dealt[index], len(self._document_blocks))
                block = max(first, starts[index])
                end = min(first + count, starts[index] + int(self._document_blocks[document]))
                if block < end:
                    found.append(Run(block, end - block, document, block - starts[index], epoch))
            return found

    def _deal_epoch(self) -> None:
        order = self._order(self._epochs_dealt)
        first = self._epochs_dealt * len(self._document_blocks)
        free, num_lanes = self._free, self.num_lanes
        for document, blocks in zip(order.tolist(), self._document_blocks[order].tolist(), strict=True):
            start, lane = divmod(free[0], num_lanes)
            heapq.heapreplace(free, free[0] + blocks * num_lanes)
            self._starts[lane].append(start)
            self._dealt[lane].append(first + document)
            self._ends[lane] = start + blocks
        self._epochs_dealt += 1

    def _order(self, epoch: int) -> np.ndarray:
        if not self._shuffle:
            return self._documents[np.argsort(-self._document_blocks[self._documents], kind="stable")]
        return self._documents[permutation(self._documents.size, self._seed, epoch)]
