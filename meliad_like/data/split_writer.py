"""Writing of a split of a token store, and what is checked when it is written."""

import shutil
from array import array
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np
from etils import epath

from meliad_like.data.token_store import (
    DOCUMENTS_NAME,
    NAMES_NAME,
    TOKENS_NAME,
    UNSCORED_NAME,
    Totals,
    checksum,
    token_dtype,
)
from meliad_like.errors import UserError
from meliad_like.remote import CHUNK_BYTES, size_of
from meliad_like.vocabularies.base import Vocabulary


class SplitWriter:
    """Appends documents to a split. It keeps four numbers per document and two per range of tokens that cost no loss in
    memory, but no names and no tokens."""

    def __init__(self, folder: Path, vocabulary: Vocabulary):
        folder.mkdir(parents=True)
        self._folder = folder
        self._end_of_document, self._dtype = vocabulary.end_of_document, token_dtype(vocabulary.size)
        self._columns, self._unscored = [array("q") for _ in range(4)], [array("q") for _ in range(2)]
        self._tokens, self._names = (folder / TOKENS_NAME).open("wb"), (folder / NAMES_NAME).open("wb")

    def write(
        self,
        name: str,
        tokens: np.ndarray | Path,
        num_bytes: int,
        num_words: int,
        unscored: Sequence[tuple[int, int]] = (),
    ) -> None:
        """Appends a document; `tokens` is int32[n] without the end of the document, or a file in the store's type that
        is deleted; `unscored` are ranges of tokens."""
        begin = self._num_tokens
        for ends, column in zip(zip(*unscored, strict=True), self._unscored):
            column.extend(begin + end for end in ends)
        if isinstance(tokens, Path):
            with tokens.open("rb") as file:
                shutil.copyfileobj(file, self._tokens, CHUNK_BYTES)
            tokens.unlink()
        else:
            self._tokens.write(tokens.astype(self._dtype, copy=False).data)
        length = self._num_tokens + 1 - begin
        self._tokens.write(np.array([self._end_of_document], self._dtype).data)
        # Half of a surrogate pair can come from JSON.
        self._names.write(name.encode(errors="surrogatepass") + b"\n")
        for column, value in zip(self._columns, (length, num_bytes, num_words, self._names.tell()), strict=True):
            column.append(value)

    @property
    def _num_tokens(self) -> int:
        return self._tokens.tell() // np.dtype(self._dtype).itemsize

    def append(self, folder: Path, totals: Totals) -> None:
        """Appends all documents of another split. Raises a UserError if it is damaged."""
        num_bytes = size_of(epath.Path(folder / TOKENS_NAME))
        if checksum(folder) != totals.checksum or num_bytes != totals.size(self._dtype):
            raise UserError(f"{folder} is damaged: delete {folder.parent} and make it again")
        columns = np.load(folder / DOCUMENTS_NAME)
        columns[3] += self._names.tell()
        for column, values in zip(self._columns, columns, strict=True):
            column.frombytes(values.tobytes())
        if totals.unscored:
            for column, values in zip(self._unscored, np.load(folder / UNSCORED_NAME) + self._num_tokens, strict=True):
                column.frombytes(values.tobytes())
        for name, target in ((TOKENS_NAME, self._tokens), (NAMES_NAME, self._names)):
            with (folder / name).open("rb") as file:
                shutil.copyfileobj(file, target, CHUNK_BYTES)

    def close(self) -> Totals:
        """Writes the numbers of all documents, and returns their sums."""
        self._tokens.close()
        self._names.close()
        columns = np.array(self._columns)
        np.save(self._folder / DOCUMENTS_NAME, columns)
        sums, unscored = columns[:3].sum(axis=1).tolist(), np.array(self._unscored)
        if unscored.size:
            np.save(self._folder / UNSCORED_NAME, unscored)
        firsts = int(np.isin(np.cumsum(columns[0]) - columns[0], unscored[0]).sum())
        counts = {"unscored": int((unscored[1] - unscored[0]).sum()), "unscored_firsts": firsts}
        return Totals(columns.shape[1], *sums, checksum=checksum(self._folder), **counts)


def repeated_name(folders: Iterable[epath.Path | Path]) -> tuple[str, int, int] | None:
    """A name that two documents in folders of splits have, and their numbers in these, from 1; None: all differ."""
    folders = list(folders)

    def names() -> Iterator[bytes]:
        for folder in folders:
            with (folder / DOCUMENTS_NAME).open("rb") as columns, (folder / NAMES_NAME).open("rb") as text:
                for length in np.diff(np.load(columns)[3], prepend=0).tolist():
                    yield text.read(length)

    # A collection may have more names than fit into memory.
    hashes = np.fromiter(map(hash, names()), np.int64)
    values, counts = np.unique(hashes, return_counts=True)
    repeated, seen = set(values[counts > 1].tolist()), dict[bytes, int]()
    for number, name in enumerate(names() if repeated else (), 1):
        if hash(name) in repeated and (first := seen.setdefault(name, number)) != number:
            return name[:-1].decode(errors="surrogatepass"), first, number
    return None
