"""Numbers for strides of documents, on disk.

    store.json     what decides the numbers: settings, model, documents
    numbers.bin    all strides' numbers, one after the other, in the order of documents and strides

Where the numbers of a stride stand follows from the documents' lengths and the settings. Those that are not there yet
have a mark, so that making them can be stopped at any time and goes on with the same command.
"""

import dataclasses
import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np
from jaxtyping import Int

from meliad_like.config.fields import field_types, fit
from meliad_like.data.token_store import Split, TokenStore, short
from meliad_like.errors import UserError
from meliad_like.history.spans import (
    HistoryConfig,
    Stride,
    candidates,
    num_candidates,
    scored_strides,
    strides,
    where,
)
from meliad_like.models.model import Model
from meliad_like.remote import write_whole
from meliad_like.saved_json import check_fields, read_json

What = Literal["scores", "selections"]
FORMAT_VERSION = 1
INFO_NAME = "store.json"
DATA_NAME = "numbers.bin"
DTYPES: dict[What, str] = {"scores": "<f4", "selections": "<i4"}
NOT_YET: dict[What, float] = {"scores": np.nan, "selections": -1}
WITHOUT_EFFECT = ("order", "deduplicate", "first_selection", "selector_context", "overlap", "first_token")
"""Fields of HistoryConfig on which scores don't depend."""


@dataclasses.dataclass(frozen=True)
class StoreInfo:
    """What decides the numbers."""

    what: What
    """`scores`: the gains of all candidates of the strides that a selector is trained on, float32, in nats (equation
    2). `selections`: where the spans of the strides that select end, int32, in the window's order; after the last of
    them 0."""
    config: HistoryConfig
    maker: str
    """Of scores the model's fingerprint (`fingerprint`), of selections the name of what selects, and with what."""
    store: str
    """The token store's fingerprint."""
    split: str
    documents: tuple[str, ...]
    """Names of the documents."""
    lengths: tuple[int, ...]
    """How many tokens of each are used, from its beginning."""
    indices: tuple[int, ...] = ()
    """Of the documents in their split, where several may have the same name. Earlier stores have none."""
    leaks_the_future: bool = False
    """Of selections: whether what selects reads the targets."""
    version: int = FORMAT_VERSION

    def strides(self) -> list[Stride]:
        """Those that have numbers, in their order."""
        found = []
        for document, length in enumerate(self.lengths):
            if self.what == "scores":
                found += scored_strides(length, self.config, document)
            else:
                found += (stride for stride in strides(length, self.config, document) if stride.selects)
        return found

    def count(self, stride: Stride) -> int:
        """How many numbers it has."""
        return num_candidates(stride, self.config) if self.what == "scores" else self.config.num_spans

    @property
    def documents_fingerprint(self) -> str:
        """SHA-256 of which documents they are, and how much of each is used."""
        return hashlib.sha256(json.dumps([self.documents, self.lengths, self.indices]).encode()).hexdigest()

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self), indent=2) + "\n"


class StrideStore:
    """A store that is read, or made."""

    def __init__(self, folder: str | Path, info: StoreInfo | None = None):
        """Opens a store.

        Args:
            folder: of the store.
            info: to write to it, what is to be in it; it is made if there is none. None: to read it.

        Raises:
            UserError: there is none, it holds something else, or it is damaged.
        """
        folder = Path(folder).expanduser()
        self.folder = folder
        saved = _read_info(folder)
        if saved is None and info is None:
            raise UserError(f"there is no store of scores or selections at {folder}")
        if saved is not None and info is not None:
            _check_same(folder, saved, info)
        self.info: StoreInfo = info or saved  # type: ignore[assignment]  # one of them is there
        self.strides: Sequence[Stride] = self.info.strides()
        """That have numbers."""
        counts = [self.info.count(stride) for stride in self.strides]
        self.offsets: Int[np.ndarray, " strides+1"] = np.concatenate([[0], np.cumsum(counts, dtype=np.int64)])
        """int64: where each stride's numbers begin."""
        if not self.strides:
            raise UserError(
                f"no document of {self.info.split} is long enough for a window of "
                f"window_length={self.info.config.window_length} with spans of its past"
            )
        path, dtype, size = folder / DATA_NAME, np.dtype(DTYPES[self.info.what]), int(self.offsets[-1])
        if saved is None:
            folder.mkdir(parents=True, exist_ok=True)
            np.full(size, NOT_YET[self.info.what], dtype).tofile(path)
            write_whole(folder / INFO_NAME, self.info.to_json())
        found = path.stat().st_size if path.exists() else 0
        if found != size * dtype.itemsize:
            raise UserError(f"{path} has {found} bytes and should have {size * dtype.itemsize}: make {folder} again")
        self.numbers = np.memmap(path, dtype, "r" if info is None else "r+")
        """All of them."""

    def __getitem__(self, index: int) -> np.ndarray:
        """The numbers of a stride (`strides[index]`)."""
        return self.numbers[self.offsets[index] : self.offsets[index + 1]]

    def rows(self) -> tuple[Int[np.ndarray, " n"], Int[np.ndarray, " n"], Int[np.ndarray, " n"]]:
        """Of all scores, int64: the document, the stride's number in it, and where the span ends."""
        counts = np.diff(self.offsets)
        document, number = (
            np.repeat([getattr(s, name) for s in self.strides], counts) for name in ("document", "number")
        )
        return document, number, np.concatenate([candidates(stride, self.info.config) for stride in self.strides])

    def missing(self) -> Int[np.ndarray, " strides"]:
        """Indices of the strides that lack numbers, ascending."""
        mark = NOT_YET[self.info.what]
        lacking = np.isnan(self.numbers) if np.isnan(mark) else self.numbers == mark
        return np.flatnonzero(np.add.reduceat(lacking, self.offsets[:-1]))

    def check_complete(self) -> None:
        """
        Raises:
            UserError: numbers are missing.
        """
        if missing := len(self.missing()):
            raise UserError(
                f"{missing:,} of {len(self.strides):,} strides have no {self.info.what} yet in {self.folder}: "
                "give the command that makes them again"
            )

    def fill(
        self,
        make: Callable[[Iterable[Stride]], Iterable[np.ndarray]],
        on_progress: Callable[[int, int], None] | None = None,
    ) -> None:
        """Makes what is missing, in order.

        Args:
            make: from strides to their numbers, in the same order; shorter ones are filled up with 0.
            on_progress: told how many numbers there are, and how many there will be.

        Raises:
            UserError: a score is not finite. What is made before is kept.
        """
        missing, total = self.missing(), int(self.offsets[-1])
        done = total - int(sum(self.offsets[missing + 1] - self.offsets[missing]))
        for index, numbers in zip(missing, make(self.strides[index] for index in missing), strict=True):
            if not np.isfinite(numbers).all():
                stride = self.strides[index]
                name = self.info.documents[stride.document]
                raise UserError(f"the model gives no finite scores to {where(stride, name)}")
            place = self[index]
            # At once, so that a stop leaves a stride's numbers or their mark.
            place[:] = np.concatenate([numbers, np.zeros(len(place) - len(numbers))])
            done += len(place)
            if on_progress is not None:
                on_progress(done, total)
        self.numbers.flush()

    def documents(self, store: TokenStore) -> "PartOfSplit":
        """The documents whose strides these are.

        Raises:
            UserError: it is another token store; or names alone, which earlier stores have, don't tell the documents.
        """
        info = self.info
        if store.fingerprint != info.store:
            raise UserError(
                f"the {info.what} in {self.folder} are of the token store {short(info.store)}, and "
                f"{store.folder} is {short(store.fingerprint)}"
            )
        split = store.split(info.split)
        indices = info.indices or self._by_name(split.names)
        return PartOfSplit(split, info.documents, info.lengths, indices)

    def _by_name(self, names: Sequence[str]) -> list[int]:
        several = Counter(names)
        if unclear := [name for name in self.info.documents if several[name] > 1]:
            raise UserError(
                f"{several[unclear[0]]} documents are called {unclear[0]!r}, and the {self.info.what} in {self.folder} "
                "don't say of which one they are: make them anew in another folder"
            )
        place = {name: index for index, name in enumerate(names)}
        return [place[name] for name in self.info.documents]


class PartOfSplit:
    """Some documents of a split, or their beginnings."""

    def __init__(self, split: Split, names: Sequence[str], lengths: Sequence[int], indices: Sequence[int]):
        self._split = split
        self._indices = indices
        self.names = list(names)
        self.lengths = np.asarray(lengths, np.int64)

    def tokens(self, document: int, start: int, stop: int) -> np.ndarray:
        return self._split.tokens(self._indices[document], start, stop)


def whole_documents(documents: Any) -> Callable[[int], Int[np.ndarray, " tokens"]]:
    """A function from a document's index to all its tokens, that keeps the last ones: strides come in order."""

    @lru_cache(maxsize=2)
    def tokens(document: int) -> np.ndarray:
        return documents.tokens(document, 0, int(documents.lengths[document]))

    return tokens


def fingerprint(model: Model, params: Any) -> str:
    """SHA-256 of a model and its parameters, however long the sequences are that it reads."""
    digest = hashlib.sha256(repr(model.reading_apart(1)).encode())
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
    check_fields(saved, {"version": int, "config": dict}, str(path))
    if saved["version"] != FORMAT_VERSION:
        raise UserError(f"{folder} has format version {saved['version']}, this program reads {FORMAT_VERSION}")
    config = HistoryConfig(**_fitting(HistoryConfig, saved["config"], path))
    return StoreInfo(**_fitting(StoreInfo, saved | {"config": config}, path))


def _fitting(kind: type, saved: dict[str, Any], path: Path) -> dict[str, Any]:
    types = field_types(kind)
    needed = {field.name for field in dataclasses.fields(kind) if field.default is dataclasses.MISSING}
    if strange := (needed - saved.keys()) | (saved.keys() - types.keys()):
        raise UserError(f"{path} is damaged, or of another version, which differs in {min(strange)}: make it again")
    return {name: fit(value, types[name], f"{path}: {name}") for name, value in saved.items()}


def _check_same(folder: Path, saved: StoreInfo, wanted: StoreInfo) -> None:
    pairs = {
        f"HistoryConfig.{name}": (getattr(saved.config, name), getattr(wanted.config, name))
        for name in HistoryConfig.__dataclass_fields__
        if wanted.what == "selections" or name not in WITHOUT_EFFECT
    }
    names = ("what", "maker", "store", "split", "documents", "lengths", *(("indices",) if saved.indices else ()))
    pairs = {name: (getattr(saved, name), getattr(wanted, name)) for name in names} | pairs
    for name, (old, new) in pairs.items():
        if old != new:
            if isinstance(old, tuple) and len(old) == len(new):
                old, new = next((a, b) for a, b in zip(old, new) if a != b)
            raise UserError(
                f"{folder} is of another {name}: {_text(old)} there, {_text(new)} here; choose another folder, or "
                "delete it"
            )


def _text(value: Any) -> str:
    if isinstance(value, tuple):
        return f"{len(value)} from {value[0]}" if value else "none"
    return short(value) if isinstance(value, str) and len(value) == 64 else repr(value)
