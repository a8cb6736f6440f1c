"""Journals, from which interrupted work is resumed, and those of numbers for the strides of documents."""

import dataclasses
import hashlib
import itertools
import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np
import pandas as pd
from rich.console import Console
from rich.progress import track

from meliad_like.config import bound_values, rebuild
from meliad_like.data.split import Documents
from meliad_like.data.token_store import TokenStore, short
from meliad_like.errors import UserError
from meliad_like.history.selection import check_finite
from meliad_like.history.settings import HistoryConfig
from meliad_like.history.spans import Stride, candidates, is_scored, strides
from meliad_like.remote import write_whole
from meliad_like.resumable import check_same, parse_json

FILE_NAME = "numbers.jsonl"
WITHOUT_EFFECT = ("first_selection", "overlap", "first_token")
"""Fields of HistoryConfig on which scores don't depend."""


@dataclasses.dataclass(frozen=True)
class StoreInfo:
    """The facts that determine the numbers."""

    what: Literal["scores", "selections"]
    """`scores`: the gains (equation 2) of all candidates of the strides that a selector is trained on, in nats.
    `selections`: where the spans of the strides that select end, in the window's order."""
    config: HistoryConfig
    maker: str
    """Fingerprint of the model that gave the scores (`fingerprint`), or name and fingerprint of the ranking."""
    store: str
    """Fingerprint of the token store."""
    split: str
    documents: tuple[str, ...]
    """Names of the documents."""
    lengths: tuple[int, ...]
    """Number of tokens that are used of each document, from its beginning."""
    indices: tuple[int, ...]
    """Indices of the documents in their split."""
    leaks_the_future: bool = False
    """Whether selections were made by reading the targets."""

    @classmethod
    def of(cls, documents: Documents, store: TokenStore, split: str, **fields: Any) -> "StoreInfo":
        """The `StoreInfo` of documents of a split of a token store; `fields` are its other fields."""
        lengths, indices = (tuple(map(int, column)) for column in (documents.lengths, documents.indices))
        place = {"documents": tuple(documents.names), "lengths": lengths, "indices": indices}
        return cls(store=store.fingerprint, split=split, **place, **fields)

    def strides(self) -> list[Stride]:
        """The strides that have numbers, whose `document` is an index in `documents`."""
        every = itertools.chain(*(strides(length, self.config, i) for i, length in enumerate(self.lengths)))
        return [s for s in every if (is_scored(s, self.config) if self.what == "scores" else s.selects)]

    @property
    def identity(self) -> dict[str, Any]:
        """The values that must be the same for making numbers to be resumed; the rest has its defaults."""
        without_effect = [f"HistoryConfig.{name}" for name in (WITHOUT_EFFECT if self.what == "scores" else ())]
        return {name: value for name, value in bound_values(self).items() if name not in without_effect}


class Journal:
    """A file of finished parts of some work, one line of JSON each, after a line that identifies the work."""

    def __init__(self, path: Path, identity: Mapping[str, Any], *, replace: bool = False):
        """Opens the file or creates it. `identity` is everything that determines the results, for JSON.

        Results of other settings are an error, unless `replace` is true.
        """
        self._path = path
        lines, rows = read_json_lines(path)
        first = json.dumps(identity) + "\n"
        if rows and not replace:
            check_same(path, rows[0], identity)
        if not rows or rows[0] != json.loads(first):
            lines, rows = [first], [identity]
        write_whole(path, "".join(lines))
        self.rows: list[Any] = rows[1:]
        """The parts that were finished before."""

    def write(self, row: Any) -> None:
        """Adds a finished part."""
        with self._path.open("a") as file:
            file.write(json.dumps(row) + "\n")


def read_json_lines(path: Path) -> tuple[list[str], list[Any]]:
    """The complete lines of a file, and their values; no lines if the file does not exist.

    A last line without a newline, which a killed process has not completed, is left out. A line that is not JSON is a
    UserError with its number.
    """
    text = path.read_text() if path.exists() else ""
    lines = [line for line in text.splitlines(keepends=True) if line.endswith("\n")]
    return lines, [parse_json(line, f"{path}:{number}") for number, line in enumerate(lines, 1)]


class StrideStore:
    """A folder with numbers for strides, to read or to make: a journal with those of each stride, in order."""

    def __init__(self, folder: str | Path, info: StoreInfo | None = None):
        """Opens the store to read it or, with its `info`, to make it or to resume that. Raises a UserError if there is
        none, it holds something else, or it is damaged."""
        self.folder = Path(folder).expanduser()
        path = self.folder / FILE_NAME
        self.info = info or _read_info(path)
        self.strides = self.info.strides()
        """The strides that have numbers."""
        if not self.strides:
            window = f"a window of window_length={self.info.config.window_length} with spans of its past"
            raise UserError(f"no document of {self.info.split} is long enough for {window}")
        self._journal = None if info is None else Journal(path, info.identity)
        self.numbers: list[list[float]] = read_json_lines(path)[1][1:]
        """The numbers of the first strides, as far as they were made."""

    def rows(self) -> pd.DataFrame:
        """All scores as `score`, with the `document`, the number of the `stride` in it, and the `end` of the span.
        Raises a UserError if numbers are missing."""
        self.check_complete()
        places = [(each.document, each.number, candidates(each, self.info.config)) for each in self.strides]
        rows = pd.DataFrame(places, columns=["document", "stride", "end"]).assign(score=self.numbers)
        return rows.explode(["end", "score"], ignore_index=True).astype({"end": np.int64, "score": np.float32})

    def check_complete(self) -> None:
        """Raises a UserError if numbers are missing."""
        if missing := len(self.strides) - len(self.numbers):
            problem = f"{missing:,} of {len(self.strides):,} strides have no {self.info.what} yet in {self.folder}"
            raise UserError(f"{problem}: run the command that makes them again")

    def fill(self, make: Callable[[Iterable[Stride]], Iterable[np.ndarray]]) -> None:
        """Makes the missing numbers in order; `make`: from strides to their numbers, in the same order. Raises a
        UserError if a score is not finite; the numbers made before are kept."""
        missing, journal = self.strides[len(self.numbers) :], self._journal
        assert journal is not None, "the store was opened to be read"
        pairs = zip(missing, make(missing) if missing else (), strict=True)
        for stride, numbers in track(pairs, self.info.what, len(missing), console=Console(stderr=True), transient=True):
            check_finite(numbers, "the model", stride, self.info.documents[stride.document])
            self.numbers.append(numbers.tolist())
            journal.write(self.numbers[-1])

    def documents(self, store: TokenStore) -> Documents:
        """The documents of the strides. Raises a UserError if it is another token store."""
        info = self.info
        if store.fingerprint != info.store:
            problem = f"the {info.what} in {self.folder} are of the token store {short(info.store)}"
            raise UserError(f"{problem}, and {store.folder} is {short(store.fingerprint)}")
        subset = store.split(info.split).subset(np.array(info.indices))
        subset.lengths = np.array(info.lengths)
        return subset


def fingerprint(model: Any, params: Any) -> str:
    """SHA-256 of the representation of a model and of its parameters."""
    digest = hashlib.sha256(repr(model).encode())
    for path, leaf in jax.tree.leaves_with_path(params):
        digest.update(jax.tree_util.keystr(path).encode())
        digest.update(np.ascontiguousarray(jax.device_get(leaf)))
    return digest.hexdigest()


def _read_info(path: Path) -> StoreInfo:
    if not (rows := read_json_lines(path)[1]):
        way_out = "make them with meliad_like history score or select"
        raise UserError(f"scores or selections are missing at {path.parent}: {way_out}")
    try:
        return rebuild(StoreInfo, rows[0])
    except UserError as error:
        raise UserError(f"{path} is damaged, or of another version: {error}: make it again") from None
