"""Numbers for strides of documents, on disk.

    store.json     what decides the numbers: settings, model, documents
    numbers.bin    the numbers of all strides, in the order of documents and strides

Where the numbers of a stride lie follows from the documents' lengths and the settings. Missing numbers are marked, so
that making them can be interrupted at any time and resumed with the same command.
"""

import dataclasses
import hashlib
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np
import pandas as pd
from jaxtyping import Int

from meliad_like.config.saved import from_plain
from meliad_like.data.subset import Documents, Subset
from meliad_like.data.token_store import TokenStore, short
from meliad_like.errors import UserError
from meliad_like.history.selection import check_finite
from meliad_like.history.spans import (
    HistoryConfig,
    Stride,
    candidates,
    index_in_split,
    is_scored,
    num_candidates,
    stride_of,
    stride_table,
)
from meliad_like.resumable import check_same, write_json
from meliad_like.saved_json import read_json

What = Literal["scores", "selections"]
FORMAT_VERSION = 1
INFO_NAME = "store.json"
DATA_NAME = "numbers.bin"
DTYPES: dict[What, str] = {"scores": "<f4", "selections": "<i4"}
MISSING: dict[What, float] = {"scores": np.nan, "selections": -1}
WITHOUT_EFFECT = ("order", "deduplicate", "first_selection", "selector_context", "overlap", "first_token")
"""Fields of HistoryConfig on which scores don't depend."""


@dataclasses.dataclass(frozen=True)
class StoreInfo:
    """What decides the numbers."""

    what: What
    """`scores`: the gains (equation 2) of all candidates of the strides that a selector is trained on, float32, in
    nats. `selections`: where the spans of the strides that select end, int32, in the window's order, then zeros."""
    config: HistoryConfig
    maker: str
    """Fingerprint of the model that gave the scores (`fingerprint`), or what made the selections."""
    store: str
    """Fingerprint of the token store."""
    split: str
    documents: tuple[str, ...]
    """Names of the documents."""
    lengths: tuple[int, ...]
    """Number of tokens that are used of each document, from its beginning."""
    indices: tuple[int, ...]
    """Indices of the documents in their split, where several may have the same name."""
    leaks_the_future: bool = False
    """Whether selections were made by reading the targets."""
    version: int = FORMAT_VERSION

    def numbers_by_stride(self) -> Int[np.ndarray, "3 n"]:
        """The strides that have numbers, as int32: document, number of the stride in it, how many numbers it has."""
        columns = []
        for document, length in enumerate(self.lengths):
            table: Any = stride_table(length, self.config, document)
            scores = self.what == "scores"
            kept = is_scored(table, self.config) if scores else table.selects
            counts = num_candidates(table, self.config) if scores else np.full_like(table.number, self.config.num_spans)
            columns.append(np.stack([table.document, table.number, counts])[:, kept].astype(np.int32))
        return np.concatenate(columns, axis=1)

    @property
    def documents_fingerprint(self) -> str:
        """SHA-256 of which documents they are, and how much of each is used."""
        return hashlib.sha256(json.dumps([self.documents, self.lengths, self.indices]).encode()).hexdigest()

    @property
    def identity(self) -> dict[str, Any]:
        """What must be the same for making numbers to be resumed."""
        saved = {name: getattr(self, name) for name in ("what", "maker", "store", "split")}
        return saved | {"HistoryConfig": dataclasses.asdict(self.config), "documents": self.documents_fingerprint}


def info_of(documents: Documents, store: TokenStore, split: str, config: HistoryConfig, **what: Any) -> StoreInfo:
    """The `StoreInfo` of documents of a split, as `choose` returns them; `what` are its other fields."""
    return StoreInfo(
        config=config,
        store=store.fingerprint,
        split=split,
        documents=tuple(documents.names),
        lengths=tuple(int(length) for length in documents.lengths),
        indices=tuple(index_in_split(documents, i) for i in range(len(documents.lengths))),
        **what,
    )


class StrideStore:
    """A store that is read, or made."""

    def __init__(self, folder: str | Path, info: StoreInfo | None = None):
        """Opens a store.

        Args:
            folder: folder of the store.
            info: contents of the store, to write to it; it is made if there is none. None: to read it.

        Raises:
            UserError: there is none, it holds something else, or it is damaged.
        """
        self.folder = folder = Path(folder).expanduser()
        saved = _read_info(folder)
        if saved is None and info is None:
            raise UserError(f"there is no store of scores or selections at {folder}")
        if saved is not None and info is not None:
            without_effect = WITHOUT_EFFECT if info.what == "scores" else ()
            check_same(folder, saved.identity, info.identity, [f"HistoryConfig.{name}" for name in without_effect])
        self.info: StoreInfo = info or saved  # type: ignore[assignment]  # one of them is there
        self.document, self.number, counts = self.info.numbers_by_stride()
        """int32: document and number of each stride that has numbers."""
        self.offsets: Int[np.ndarray, " strides+1"] = np.concatenate([[0], np.cumsum(counts, dtype=np.int64)])
        """int64: where each stride's numbers begin."""
        if not len(self):
            raise UserError(
                f"no document of {self.info.split} is long enough for a window of "
                f"window_length={self.info.config.window_length} with spans of its past"
            )
        path, dtype, size = folder / DATA_NAME, np.dtype(DTYPES[self.info.what]), int(self.offsets[-1])
        if saved is None:
            folder.mkdir(parents=True, exist_ok=True)
            np.full(size, MISSING[self.info.what], dtype).tofile(path)
            write_json(folder / INFO_NAME, dataclasses.asdict(self.info))
        found = path.stat().st_size if path.exists() else 0
        if found != size * dtype.itemsize:
            raise UserError(f"{path} has {found} bytes and should have {size * dtype.itemsize}: make {folder} again")
        self.numbers = np.memmap(path, dtype, "r" if info is None else "r+")
        """The numbers of all strides."""

    def __len__(self) -> int:
        """Number of strides that have numbers."""
        return len(self.document)

    def __getitem__(self, index: int) -> np.ndarray:
        """The numbers of a stride."""
        return self.numbers[self.offsets[index] : self.offsets[index + 1]]

    def stride(self, index: int) -> Stride:
        """A stride that has numbers."""
        document = int(self.document[index])
        return stride_of(int(self.number[index]), self.info.lengths[document], self.info.config, document)

    def rows(self) -> pd.DataFrame:
        """All scores as `score`, with the `document`, the number of the `stride` in it, and the `end` of the span."""
        ends = [candidates(self.stride(index), self.info.config) for index in range(len(self))]
        strides = pd.DataFrame({"document": self.document, "stride": self.number}, dtype=np.int64)
        rows = strides.loc[np.repeat(strides.index, np.diff(self.offsets))].reset_index(drop=True)
        return rows.assign(end=np.concatenate(ends), score=np.array(self.numbers))

    def missing(self) -> Int[np.ndarray, " strides"]:
        """Indices of the strides that lack numbers, ascending."""
        mark = MISSING[self.info.what]
        lacking = np.isnan(self.numbers) if np.isnan(mark) else self.numbers == mark
        return np.flatnonzero(np.add.reduceat(lacking, self.offsets[:-1]))

    def check_complete(self) -> None:
        """
        Raises:
            UserError: numbers are missing.
        """
        if missing := len(self.missing()):
            raise UserError(
                f"{missing:,} of {len(self):,} strides have no {self.info.what} yet in {self.folder}: "
                "run the command that makes them again"
            )

    def fill(
        self,
        make: Callable[[Iterable[Stride]], Iterable[np.ndarray]],
        on_progress: Callable[[int, int], None] = lambda done, total: None,
    ) -> None:
        """Makes the missing numbers, in order.

        Args:
            make: from strides to their numbers, in the same order; missing ones at the end of a stride become 0.
            on_progress: callback with the numbers of strides that are done, and of all.

        Raises:
            UserError: a score is not finite. The numbers made before are kept.
        """
        missing = self.missing()
        made = make(self.stride(index) for index in missing)
        for done, (index, numbers) in enumerate(zip(missing, made, strict=True), len(self) - len(missing) + 1):
            stride, place = self.stride(index), self[index]
            check_finite(numbers, "the model", stride, self.info.documents[stride.document])
            # Written at once, so that an interruption leaves either a stride's numbers or their mark.
            place[:] = np.pad(numbers, (0, len(place) - len(numbers)))
            on_progress(done, len(self))
        self.numbers.flush()

    def documents(self, store: TokenStore) -> Subset:
        """The documents of the strides.

        Raises:
            UserError: it is another token store.
        """
        info = self.info
        if store.fingerprint != info.store:
            raise UserError(
                f"the {info.what} in {self.folder} are of the token store {short(info.store)}, and "
                f"{store.folder} is {short(store.fingerprint)}"
            )
        subset = Subset(store.split(info.split), np.array(info.indices))
        subset.lengths = np.array(info.lengths)
        return subset


def fingerprint(model: Any, params: Any) -> str:
    """SHA-256 of the representation of a model and of its parameters."""
    digest = hashlib.sha256(repr(model).encode())
    for path, leaf in jax.tree.leaves_with_path(params):
        digest.update(jax.tree_util.keystr(path).encode())
        digest.update(np.ascontiguousarray(jax.device_get(leaf)))
    return digest.hexdigest()


def _read_info(folder: Path) -> StoreInfo | None:
    path = folder / INFO_NAME
    try:
        saved = read_json(path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    if saved["version"] != FORMAT_VERSION:
        raise UserError(f"{folder} has format version {saved['version']}, this program reads {FORMAT_VERSION}")
    try:
        return from_plain(StoreInfo, saved)
    except UserError as error:
        raise UserError(f"{path} is damaged, or of another version: {error}: make it again") from None
