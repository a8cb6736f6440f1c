"""Documents as tokens: a split of a token store, a subset of it, the beginnings of its documents, or all as one."""

import dataclasses
import hashlib
from collections.abc import Callable, Sequence

import numpy as np
from jaxtyping import Bool, Int

from meliad_like.data.schedule import permutation
from meliad_like.errors import UserError
from meliad_like.vocabularies.base import PIECE, Vocabulary


class Names(Sequence[str]):
    """Names of documents, which are read on demand: a store may have millions of them."""

    def __init__(self, number: int, name_of: Callable[[int], str]):
        self._indices, self._name_of = range(number), name_of

    def __len__(self) -> int:
        return len(self._indices)

    def __getitem__(self, index):
        """The name at an index, or the list of those in a slice."""
        members = self._indices[index]
        return self._name_of(members) if isinstance(members, int) else [self._name_of(member) for member in members]


@dataclasses.dataclass(eq=False)
class Documents:
    """Documents of a split, which are read on demand."""

    names: Sequence[str]
    lengths: Int[np.ndarray, " documents"]
    """The number of tokens of each document, its end included."""
    num_bytes: Int[np.ndarray, " documents"]
    """The number of bytes of each document's text in UTF-8."""
    num_words: Int[np.ndarray, " documents"]
    """The number of words of each document (`count_words`)."""
    read: Callable[[int, int, int], np.ndarray]
    """The function (document, start, stop) -> the document's tokens in this range, int32."""
    indices: Int[np.ndarray, " documents"]
    """The index of each document in its split of the token store. Random choices depend on it."""
    sizes: tuple[int, ...] = ()
    """The number of documents of each collection, if several were joined."""
    free: tuple[int, ...] = ()
    """The ids that cost no loss as targets (`Vocabulary.free`)."""
    scored: Callable[[int, int, int], np.ndarray] | None = None
    """The function (document, start, stop) -> whether each token costs loss as a target, bool; None: all but `free`."""

    def __len__(self) -> int:
        return len(self.lengths)

    def tokens(self, document: int, start: int, stop: int) -> np.ndarray:
        """int32[stop - start]: the tokens of a document in this range."""
        if not (0 <= document < len(self) and 0 <= start <= stop <= self.lengths[document]):
            raise IndexError(f"tokens {start} to {stop} of document {document}")
        return self.read(document, start, stop)

    def costs_loss(self, document: int, start: int, targets: Int[np.ndarray, " n"]) -> Bool[np.ndarray, " n"]:
        """True for each of these targets that costs loss: tokens of a document from position `start` on."""
        counted = np.isin(targets, self.free, invert=True)
        return counted if self.scored is None else counted & self.scored(document, start, start + len(targets))

    def counted_targets(self) -> list[Bool[np.ndarray, " targets"]]:
        """True for each target of each document that costs loss: number `i` of a document is its token `i + 1`."""
        lengths = self.lengths.tolist()
        if not (self.free or self.scored):
            return [np.ones(max(length - 1, 0), bool) for length in lengths]
        return [self.costs_loss(i, 1, self.tokens(i, min(1, length), length)) for i, length in enumerate(lengths)]

    def subset(self, members: Int[np.ndarray, " members"]) -> "Documents":
        """The documents with these indices."""
        columns = (column[members] for column in (self.lengths, self.num_bytes, self.num_words))
        scored = self.scored
        return Documents(
            Names(len(members), lambda document: self.names[members[document]]),
            *columns,
            read=lambda document, start, stop: self.tokens(int(members[document]), start, stop),
            indices=self.indices[members],
            free=self.free,
            scored=scored and (lambda document, start, stop: scored(int(members[document]), start, stop)),
        )

    def concatenated(self, end_of_document: int) -> "Documents":
        """All documents as one: first the end of a document, which none precedes, then their tokens."""
        ends = 1 + np.cumsum(self.lengths)
        begins = ends - self.lengths

        def along(first: np.int32 | bool, part: Callable[[int, int, int], np.ndarray]):
            def read(_: int, start: int, stop: int) -> np.ndarray:
                parts = [np.full(int(start == 0 < stop), first)]
                for document in range(int(np.searchsorted(ends, start, "right")), int(np.searchsorted(begins, stop))):
                    begin, end = int(begins[document]), int(ends[document])
                    parts.append(part(document, max(start, begin) - begin, min(stop, end) - begin))
                return np.concatenate(parts)

            return read

        read, scored = along(np.int32(end_of_document), self.tokens), self.scored and along(True, self.scored)
        num_bytes, num_words = (np.sum(column, keepdims=True) for column in (self.num_bytes, self.num_words))
        names = ["all documents, one after the other"]
        columns = (ends[-1:], num_bytes, num_words)
        return Documents(names, *columns, read, np.zeros(1, np.int64), free=self.free, scored=scored)

    @staticmethod
    def joined(members: Sequence["Documents"], prefixes: Sequence[str] = ()) -> "Documents":
        """The documents of several collections, one collection after the other; each may have a prefix of its names."""
        begins = np.cumsum([0, *map(len, members)])

        def place(document: int) -> tuple[int, int]:
            part = int(np.searchsorted(begins, document, "right")) - 1
            return part, document - int(begins[part])

        def name_of(document: int) -> str:
            part, index = place(document)
            return (prefixes[part] if prefixes else "") + members[part].names[index]

        def read(document: int, start: int, stop: int) -> np.ndarray:
            part, index = place(document)
            return members[part].tokens(index, start, stop)

        def scored(document: int, start: int, stop: int) -> np.ndarray:
            part, index = place(document)
            member = members[part].scored
            return member(index, start, stop) if member else np.ones(stop - start, bool)

        columns = ([getattr(each, column) for each in members] for column in ("lengths", "num_bytes", "num_words"))
        number = int(begins[-1])
        return Documents(
            Names(number, name_of),
            *map(np.concatenate, columns),
            read=read,
            indices=np.arange(number),
            sizes=tuple(map(len, members)),
            free=members[0].free,  # They have one vocabulary.
            scored=scored if any(member.scored for member in members) else None,
        )

    def beginnings(self, vocabulary: Vocabulary, max_tokens: int, shortest: int = 1000) -> "Documents":
        """The beginnings of the first documents, because an evaluation of the whole split would take too long.

        Args:
          vocabulary: gives the number of bytes and words of a beginning.
          max_tokens: number of tokens of all beginnings together; long documents have equal shares.
          shortest: a further document is taken only if the share of each is at least this number of tokens.
        """
        num_documents = min(max(max_tokens // shortest, 1), len(self))
        part = self.subset(np.arange(num_documents))
        whole = part.lengths
        part.lengths = np.minimum(whole, max(max_tokens // num_documents, 2))
        # Bytes and words are not counted where some tokens cost no loss.
        for document in np.flatnonzero((part.lengths < whole) & (not self.free)).tolist():
            tokens = part.tokens(document, 0, int(part.lengths[document]))
            counted = part.costs_loss(document, 0, tokens)
            edges = np.flatnonzero(np.diff(counted)) + 1
            texts = [vocabulary.decode_bytes(run) for run in np.split(tokens, edges)]
            texts[0] = texts[0].removeprefix(vocabulary.prefix)
            texts = texts[not counted[0] :: 2]
            part.num_bytes[document] = sum(map(len, texts))
            part.num_words[document] = sum(count_words(text.decode(errors="replace")) for text in texts)
        return part


def count_words(text: str) -> int:
    """The number of words, separated by whitespace.

    PG-19's authors publish counts (train 1,973,136,207, validation 3,007,061, test 6,966,499: Rae et al.,
    arXiv:1911.05507, Table 2) but not their code. Their word-level perplexity divides by "the number of tokens" of
    untokenised text, and Appendix I of arXiv:2203.07852 says that "the word count ignores whitespace".
    """
    # Some at a time, because a list of words takes several times the memory of a large text.
    begins = range(0, len(text), PIECE)
    in_two = sum(not (text[begin - 1].isspace() or text[begin].isspace()) for begin in begins[1:])
    return sum(len(text[begin : begin + PIECE].split()) for begin in begins) - in_two


SHORTEST_COPY = 256
"""The number of tokens from which on equal documents count as copies: short ones, such as notices, may be equal."""


def copies(documents: Documents, others: Documents) -> list[tuple[int, int]]:
    """The indices of each document that is also one of the others, token for token, and of the last such other."""

    def sizes(part: Documents) -> Int[np.ndarray, " documents"]:
        return np.where(part.lengths < SHORTEST_COPY, -1, part.lengths << 24 ^ part.num_words)

    def hashes(part: Documents, sought: Int[np.ndarray, " documents"]) -> dict[int, bytes]:
        # Only documents of equal sizes are read.
        members = np.flatnonzero(np.isin(sizes(part), sought[sought >= 0])).tolist()
        return {i: hashlib.sha256(part.tokens(i, 0, int(part.lengths[i])).data).digest() for i in members}

    places = {value: i for i, value in hashes(others, sizes(documents)).items()}
    return [(i, places[value]) for i, value in hashes(documents, sizes(others)).items() if value in places]


def random_subset(lengths: np.ndarray, max_tokens: int) -> Int[np.ndarray, " documents"]:
    """Indices of random whole documents, the same ones each time, that have at most `max_tokens` tokens together."""
    members, total = [], 0
    for document in permutation(len(lengths), 0).tolist():
        if total + lengths[document] <= max_tokens:
            members.append(document)
            total += lengths[document]
    if not members:
        raise UserError(f"max_tokens={max_tokens} is less than the shortest document, which has {lengths.min()} tokens")
    return np.sort(np.asarray(members))
