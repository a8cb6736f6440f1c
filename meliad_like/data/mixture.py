"""A mixture of token stores: each is read with its own share of the targets."""

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from meliad_like.data.batch import Reader
from meliad_like.data.readers import READERS, LanesReader, ReaderConfig
from meliad_like.data.schedule import Schedule, permutation
from meliad_like.data.split import Documents
from meliad_like.data.token_store import TokenStore
from meliad_like.errors import UserError
from meliad_like.registry import resumable


@dataclasses.dataclass(eq=False, kw_only=True)
class MixedSchedule(Schedule):
    """An endless schedule of the documents of several sources, each in random orders of its own, epoch after epoch.

    When a lane is free, it gets a document of the source that has the fewest blocks until then, measured by its share.
    """

    sizes: Sequence[int]
    """The number of documents of each source; in `document_blocks` one source follows the other."""
    shares: Sequence[float]
    """The shares of the sources in all blocks."""

    def __post_init__(self) -> None:
        super().__post_init__()
        parts = np.split(self.document_blocks, np.cumsum(self.sizes)[:-1])
        if empty := [source for source, blocks in enumerate(parts) if not blocks.any()]:
            raise UserError(f"no document of source {empty[0]} has a token to predict: leave it out of the mixture")
        begins = np.cumsum([0, *self.sizes])
        self._orders = [self._endless(i, int(begins[i]) + np.flatnonzero(part)) for i, part in enumerate(parts)]
        # By source: blocks of all assigned documents; lanes that read it, and the sum of the blocks at which they end.
        self._assigned, self._lanes, self._sum_of_ends = ([0] * len(self.sizes) for _ in range(3))
        self._source_of_lane: dict[int, int] = {}

    def _endless(self, source: int, documents: np.ndarray) -> Iterator[int]:
        for epoch in itertools.count():
            yield from map(int, documents[permutation(documents.size, self.seed, epoch, source)])

    def _deal(self) -> bool:
        """Assigns a document to each lane of those that are free first."""
        time = self._free[0] // self.num_lanes
        lanes = [place % self.num_lanes for place in self._free if place // self.num_lanes == time]
        for lane in lanes:
            if (source := self._source_of_lane.get(lane)) is not None:
                self._lanes[source] -= 1
                self._sum_of_ends[source] -= time
        for _ in lanes:
            source = min(range(len(self.sizes)), key=lambda source: self._read(source, time + 1) / self.shares[source])
            document = next(self._orders[source])
            blocks = int(self.document_blocks[document])
            self._source_of_lane[self._assign(document, blocks)] = source
            self._assigned[source] += blocks
            self._lanes[source] += 1
            self._sum_of_ends[source] += time + blocks
        return True

    def _read(self, source: int, block: int) -> int:
        """The number of blocks of a source before this block, which no lane that reads it has passed."""
        return self._assigned[source] - (self._sum_of_ends[source] - block * self._lanes[source])


@dataclasses.dataclass(eq=False, kw_only=True)
class MixtureReader(LanesReader):
    """A `LanesReader` of joined documents, with a share of the targets for each of the collections that were joined."""

    weights: Sequence[float]
    """The shares of the collections in all targets, or anything proportional to them."""

    def _schedule_of(self, windows: np.ndarray) -> Schedule:
        sizes = self.documents.sizes
        parts = np.split(np.arange(len(windows)), np.cumsum(sizes)[:-1])
        # Short documents need more blocks for a target, because their last block is not full.
        blocks = [
            weight * windows[part].sum() / max(self._targets[part].sum(), 1)
            for weight, part in zip(self.weights, parts, strict=True)
        ]
        self._targets_per_block = sum(self.weights) / sum(blocks)
        shares = [number / sum(blocks) for number in blocks]
        return MixedSchedule(windows, self.num_lanes, self.seed, sizes=sizes, shares=shares)

    @property
    def padding_share(self) -> float:
        return 1 - self._targets_per_block / self.window_length


@READERS.register("mixture")
class MixtureReaderConfig(ReaderConfig):
    """Like lanes, with the documents of several token stores, each with its share of the targets."""

    other_stores: tuple[str, ...] = resumable(())
    """Folders of further token stores, with the same vocabulary. When a run resumes, other folders may have them."""
    weights: tuple[float, ...] = ()
    """The shares in all targets, or anything proportional to them: of `store`, then of the others in their order."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(self.weights) != 1 + len(self.other_stores) or min(self.weights) <= 0:
            stores = f"ReaderConfig.store and for each of the MixtureReaderConfig.other_stores={self.other_stores}"
            raise UserError(f"MixtureReaderConfig.weights={self.weights} must have a number above 0 for {stores}")

    @property
    def shares(self) -> tuple[float, ...]:
        return tuple(weight / sum(self.weights) for weight in self.weights)

    def with_stores(self, folders: Sequence[str]) -> "MixtureReaderConfig":
        return dataclasses.replace(self, store=folders[0], other_stores=tuple(folders[1:]))

    def open_stores(self) -> list[TokenStore]:
        first, *further = stores = list(map(TokenStore, (self.store, *self.other_stores)))
        for other in further:
            if other.info.vocabulary != first.info.vocabulary:
                way_out = f"prepare the second with FileVocabularyConfig.model_file = '{first.folder}'"
                raise UserError(f"{first.folder} and {other.folder} have different vocabularies: {way_out}")
        for one, other in itertools.combinations(stores, 2):
            if one.infos[0].fingerprint == other.infos[0].fingerprint:
                way_out = "name one of them, with the sum of their MixtureReaderConfig.weights"
                raise UserError(f"{one.folder} and {other.folder} have the same documents: {way_out}")
        return stores

    def documents(self, stores: Sequence[TokenStore], split: str) -> Documents:
        return Documents.joined([store.split(split) for store in stores], [f"{store.folder}/" for store in stores])

    def _reader(self, store: TokenStore, split: str, overlap: int, fields: dict[str, Any]) -> Reader:
        return MixtureReader(**fields, weights=self.weights)
