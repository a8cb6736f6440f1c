"""The schedule of documents: which lane reads which blocks when, computed from the documents' lengths and a seed.

Documents form a stream, epoch after epoch, and each is assigned to the lane that is free first. The schedule does not
depend on the order of queries, so every host computes the same one, and a resumed run continues at the right place.
"""

import dataclasses
import heapq
import itertools
import math
import threading
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from meliad_like.errors import UserError

PIECE = 2**12
"""The largest number of documents that are assigned at once."""


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

    It stores 12 bytes for each assigned document, is thread-safe, and can be queried in any order.
    """

    document_blocks: np.ndarray
    """int64[documents]: the documents' lengths in blocks. Documents of 0 blocks are left out."""
    num_lanes: int
    seed: int
    """The seed, not negative, which determines the order of an epoch together with the epoch's number."""
    _: dataclasses.KW_ONLY
    shuffle: bool = True
    """A new random order each epoch; otherwise the longest documents come first, which lets the lanes of a finite
    schedule finish at nearly the same time."""
    epochs: int | None = None
    """The number of times that each document is read; None: endlessly."""

    def __post_init__(self) -> None:
        if not self.document_blocks.any():
            raise UserError("no document has a token to predict: prepare a token store from longer documents")
        self._pieces = self._in_order()
        # A heap with (block at which it is free) * num_lanes + lane of each lane: of equals, the lowest lane is first.
        self._free = list(range(self.num_lanes))
        self._starts = [array("q") for _ in range(self.num_lanes)]
        self._documents = [array("i") for _ in range(self.num_lanes)]
        self._lock = threading.Lock()

    def num_steps(self, blocks_in_step: int) -> int | None:
        """The number of steps, of `blocks_in_step` blocks per lane, until the last lane is done; None: endless."""
        if self.epochs is None:
            return None
        with self._lock:
            self._deal_until(math.inf)
            return -(-(max(self._free) // self.num_lanes) // blocks_in_step)

    def runs(self, lane: int, first: int, count: int) -> list[Run]:
        """The runs in the lane's blocks [first, first + count), in order; idle blocks have none."""
        with self._lock:
            # Later assignments never change the past.
            self._deal_until(first + count)
            starts, documents = self._starts[lane], self._documents[lane]
            runs = []
            for index in range(max(bisect_right(starts, first) - 1, 0), len(starts)):
                if starts[index] >= first + count:
                    break
                document = documents[index]
                block = max(first, starts[index])
                end = min(first + count, starts[index] + int(self.document_blocks[document]))
                if block < end:
                    runs.append(Run(block, end - block, document, block - starts[index]))
            return runs

    def documents(self, count: int) -> np.ndarray:
        """int32[...]: the documents that begin in the first `count` blocks of any lane, each of them once."""
        with self._lock:
            self._deal_until(count)
            lanes = zip(self._starts, self._documents, strict=True)
            return np.unique(np.concatenate([documents[: bisect_left(starts, count)] for starts, documents in lanes]))

    def _deal_until(self, block: float) -> None:
        """Assigns documents until no lane is free before `block`, or all documents are assigned."""
        while self._free[0] < block * self.num_lanes and self._deal():
            pass

    def _deal(self) -> bool:
        """Assigns the next documents. Returns whether there were any."""
        if (documents := next(self._pieces, None)) is None:
            return False
        for document, blocks in zip(documents.tolist(), self.document_blocks[documents].tolist(), strict=True):
            self._assign(document, blocks)
        return True

    def _assign(self, document: int, blocks: int) -> int:
        """Assigns a document to the lane that is free first, and returns the lane."""
        start, lane = divmod(place := self._free[0], self.num_lanes)
        heapq.heapreplace(self._free, place + blocks * self.num_lanes)
        self._starts[lane].append(start)
        self._documents[lane].append(document)
        return lane

    def _in_order(self) -> Iterator[np.ndarray]:
        """The documents of all epochs in the order in which they are assigned, some at a time."""
        documents = np.flatnonzero(self.document_blocks).astype(np.int32)
        for epoch in itertools.count() if self.epochs is None else range(self.epochs):
            if self.shuffle:
                order = permutation(documents.size, self.seed, epoch)
            else:
                order = np.argsort(-self.document_blocks[documents], kind="stable")
            yield from np.split(documents[order], range(PIECE, documents.size, PIECE))
