"""Views of the documents of a split, with its interface: a subset of them, their beginnings, or all as one stream."""

import numpy as np
from jaxtyping import Int

from meliad_like.data.batch import Documents, check_tokens
from meliad_like.data.schedule import permutation
from meliad_like.data.token_store import count_words
from meliad_like.data.vocabulary import Vocabulary
from meliad_like.errors import UserError

SHORTEST_BEGINNING = 1000
"""The default number of tokens of `beginnings`."""


class Subset:
    """A subset of the documents of a split."""

    def __init__(self, split: Documents, members: Int[np.ndarray, " documents"]):
        """
        Args:
          split: the documents; may itself be a subset.
          members: indices in `split` of the documents of this subset.
        """
        self._split, self._members = split, members
        self.indices = split.indices[members] if isinstance(split, Subset) else np.asarray(members)
        """Indices of the documents in the split of the token store, through any nested subsets."""
        self.lengths, self.num_bytes, self.num_words = (
            np.asarray(values)[members] for values in (split.lengths, split.num_bytes, split.num_words)
        )
        self.names = [split.names[int(document)] for document in members]

    def tokens(self, document: int, start: int, stop: int) -> np.ndarray:
        return self._split.tokens(int(self._members[document]), start, stop)


class Concatenated:
    """A split's documents as the only one of a split: first the end of a document, then their tokens."""

    def __init__(self, split: Documents, vocabulary_size: int, end_of_document: int):
        """Tokens must be below vocabulary_size; the first is end_of_document."""
        self._split = split
        self._vocabulary_size = vocabulary_size
        self._end_of_document = end_of_document
        self.ends = np.cumsum(np.asarray(split.lengths, np.int64))
        """Where documents end, counted without the first token."""
        self.lengths = self.ends[-1:] + 1
        self.num_bytes, self.num_words = (np.sum(x, keepdims=True) for x in (split.num_bytes, split.num_words))
        self.names = ["all documents, one after the other"]

    def tokens(self, document: int, start: int, stop: int) -> np.ndarray:
        """int32[stop - start]: tokens from `start` on; there is one document, 0."""
        parts = [np.full(1, self._end_of_document, np.int32)] if start == 0 else []
        place, last = max(start - 1, 0), stop - 1
        while place < last:
            index, offset = (int(x) for x in self.place(np.asarray(place)))
            end = min(last, int(self.ends[index]))
            tokens = self._split.tokens(index, offset, offset + end - place)
            check_tokens(tokens, self._vocabulary_size, offset, self._split.names[index])
            parts.append(tokens)
            place = end
        return np.concatenate(parts)

    def place(self, place: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(document, position in it) of tokens, counted without the first one."""
        document = np.searchsorted(self.ends, place, side="right")
        return document, place - (self.ends[document] - np.asarray(self._split.lengths, np.int64)[document])


def beginnings(split: Documents, vocabulary: Vocabulary, max_tokens: int, shortest: int = SHORTEST_BEGINNING) -> Subset:
    """The beginnings of the first documents of a split, because an evaluation of the whole split would take too long.

    Args:
      vocabulary: gives the number of bytes and words of a beginning.
      max_tokens: number of tokens of all beginnings together; long documents have equal shares.
      shortest: a further document is taken only if the share of each is at least this number of tokens.
    """
    num_documents = min(max(max_tokens // shortest, 1), len(split.lengths))
    subset = Subset(split, np.arange(num_documents))
    whole = subset.lengths
    subset.lengths = np.minimum(whole, max(max_tokens // num_documents, 2))
    for document in np.flatnonzero(subset.lengths < whole).tolist():
        text = vocabulary.decode_bytes(subset.tokens(document, 0, int(subset.lengths[document])))
        subset.num_bytes[document] = len(text)
        subset.num_words[document] = count_words(text.decode(errors="replace"))
    return subset


def random_order(num_documents: int) -> Int[np.ndarray, " documents"]:
    """A random order of the documents of a split, the same one each time."""
    return permutation(num_documents, 0)


def random_subset(lengths: np.ndarray, max_tokens: int) -> Int[np.ndarray, " documents"]:
    """Indices of random whole documents, the same ones each time, with at most `max_tokens` tokens together; documents
    that no longer fit are skipped."""
    chosen, total = [], 0
    for document in random_order(len(lengths)).tolist():
        if total + lengths[document] <= max_tokens:
            chosen.append(document)
            total += lengths[document]
    if not chosen:
        raise UserError(f"max_tokens={max_tokens} is less than the shortest document, which has {lengths.min()} tokens")
    return np.sort(np.asarray(chosen))
