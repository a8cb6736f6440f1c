"""Documents that measure a memory: something to remember, filler, and a question whose answer alone costs loss.

Each character of a document is one token of the vocabulary `memory_symbols`. What is written, the filler and the
questions cost no loss; answers have symbols of their own, and only these do.

A key and its value are one symbol together, so that attention finds an item in one step. Written as two symbols, an
item needs two layers, one that joins them and one that finds the key, and models of minutes of training do not learn
that at any distance (docs/studies.md): their maps would show this and not the memory.
"""

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial, reduce
from itertools import permutations, starmap
from typing import NamedTuple

import numpy as np

from meliad_like.errors import UserError
from meliad_like.sources.base import SOURCES, Document, Reference, Source, SourceConfig
from meliad_like.validation import check_positive
from meliad_like.vocabularies.base import VOCABULARIES, Vocabulary, VocabularyConfig

FILLER, QUESTION = "abcdefgh", "?"
KEYS = "".join(chr(code) for code in range(0x0410, 0x0450))
"""A key alone is the question for its value."""
VALUES = "0123456789ABCDEF"
PAIRS = "".join(chr(code) for code in range(0x4E00, 0x4E00 + len(KEYS) * len(VALUES)))
"""Each key with each value, ordered by keys."""
ANSWERS = "".join(chr(code) for code in range(0x24B6, 0x24B6 + len(VALUES)))
"""The answer that belongs to each value: a symbol that is never written before a question."""
SYMBOLS = FILLER + QUESTION + KEYS + VALUES + PAIRS + ANSWERS
ATTEMPTS = 2000


class Problem(NamedTuple):
    """The text and the questions of a document."""

    written: str
    """The items that have to be remembered."""
    content: str
    """The content on which the answers depend: documents with the same content are in the same split."""
    questions: list[tuple[str, str]]
    """Pairs (question, answer); `MemoryTasksSource.document` draws some of them."""
    filler: Sequence[str] = FILLER
    """The symbols from which filler is drawn independently of the answers."""


def pair(key: str, value: str) -> str:
    """The symbol of a key with its value."""
    return PAIRS[KEYS.index(key) * len(VALUES) + VALUES.index(value)]


def _with_values(rng: random.Random, keys: Sequence[str], filler: Sequence[str] = FILLER) -> Problem:
    """A problem of keys, each with a random value, written in this order: the last value of a key is the answer."""
    written = [(key, rng.choice(VALUES)) for key in keys]
    mapping = dict(written)
    content = "".join(key + mapping[key] for key in sorted(mapping))
    questions = [(key, ANSWERS[VALUES.index(value)]) for key, value in mapping.items()]
    return Problem("".join(starmap(pair, written)), content, questions, filler)


def _recall(rng: random.Random, num_items: int) -> Problem:
    return _with_values(rng, rng.sample(KEYS, num_items))


def _overwritten(rng: random.Random, num_items: int) -> Problem:
    """A problem of keys that are written twice, in random order, each time with a new value."""
    keys = rng.sample(KEYS, num_items) * 2
    rng.shuffle(keys)
    return _with_values(rng, keys)


def _induction(rng: random.Random, num_items: int) -> Problem:
    """A problem of keys with values; the filler is made of the other keys with values."""
    keys = rng.sample(KEYS, len(KEYS))
    return _with_values(rng, keys[:num_items], [pair(key, value) for key in keys[num_items:] for value in VALUES])


def _parity(rng: random.Random, num_items: int) -> Problem:
    """Flags: the answer is the parity of the number of odd ones."""
    written = "".join(rng.choices(VALUES, k=num_items))
    return Problem(written, written, [(QUESTION, ANSWERS[sum(map(VALUES.index, written)) % 2])])


PERMUTATIONS = list(permutations(range(5)))[::8]
"""The permutations that the values stand for; together they generate all permutations of five."""


def _permutations(rng: random.Random, num_items: int) -> Problem:
    """Permutations of five places, one after the other: the answer is the place to which one of them is moved."""
    moves = [rng.randrange(len(PERMUTATIONS)) for _ in range(num_items)]
    written = "".join(VALUES[move] for move in moves)
    places = [reduce(lambda place, move: PERMUTATIONS[move][place], moves, first) for first in range(5)]
    return Problem(written, written, [(QUESTION + VALUES[i], ANSWERS[place]) for i, place in enumerate(places)])


class Task(NamedTuple):
    """A kind of problem."""

    make: Callable[[random.Random, int], Problem]
    """(random numbers, number of items) -> a problem."""
    num_answers: int = len(VALUES)
    """The number of answers, all equally likely, or nearly so."""
    independent: bool = True
    """Whether each item has an answer of its own, so that all answers together are as many as the items."""
    has_filler: bool = True
    """Whether there is filler between the items and the questions."""


TASKS = {
    "recall": Task(_recall),
    "overwritten": Task(_overwritten),
    "phone_book": Task(_recall, has_filler=False),
    "induction": Task(_induction),
    "parity": Task(_parity, 2, independent=False),
    "permutations": Task(_permutations, 5, independent=False),
}


class Cell(NamedTuple):
    """The settings that the documents of a cell of the map have in common. A document's name begins with it."""

    task: str
    items: int
    distance: int
    """Blocks of filler between the items and the first question."""

    @classmethod
    def of_name(cls, name: str) -> "Cell":
        """The cell of a document."""
        task, items, distance, _ = name.split("/")
        return cls(task, int(items), int(distance))


@SOURCES.register("memory_tasks")
class MemoryTasksSource(SourceConfig):
    """Documents made from random numbers: validation and test have a question each and the same number of documents in
    all cells of the grid of items and distances; training has the first cells of the grid.

    What a document's answers depend on decides its split, by a hash, so that no split repeats what another one asks.
    """

    tasks: tuple[str, ...] = ("recall",)
    """Names of tasks: recall, overwritten, phone_book, induction, parity, permutations."""
    items: tuple[int, ...] = (1, 2, 4, 8, 16)
    """Numbers of pairs, flags or permutations."""
    distances: tuple[int, ...] = (0, 1, 2, 4, 8, 16)
    """Numbers of blocks of filler."""
    trained_distance: int = 4
    """The largest distance of a training document; longer ones are only evaluated."""
    block_length: int = 32
    """Tokens in a block of filler."""
    train_documents: int = 60_000
    """The number of documents for training."""
    cell_documents: int = 64
    """The number of documents of each cell for validation, and as many for test."""
    train_questions: int = len(KEYS)
    """The largest number of questions of a training document."""
    short_first: int = 3
    """The ratio of the numbers of training documents with one distance and with the next longer one."""
    seed: int = 0
    """The seed of all documents."""

    def __post_init__(self) -> None:
        super().__post_init__()
        counts = ("block_length", "train_documents", "cell_documents", "train_questions", "short_first")
        check_positive(self, counts)
        if unknown := set(self.tasks) - set(TASKS):
            raise UserError(f"MemoryTasksSource.tasks names {min(unknown)!r}; the tasks are {', '.join(TASKS)}")
        if not self.items or not all(1 <= number < len(KEYS) for number in self.items):
            raise UserError(f"MemoryTasksSource.items={self.items} must be numbers from 1 to {len(KEYS) - 1}")
        if not any(0 <= distance <= self.trained_distance for distance in self.distances):
            raise UserError(f"no MemoryTasksSource.distances={self.distances} is up to trained_distance")

    def open(self) -> Source:
        """The documents of training, then those of validation and test."""
        cells = self.cells(max(self.distances))
        return Source((self._references,), self.train_documents + 2 * len(cells) * self.cell_documents, ())

    def cells(self, longest: int) -> list[Cell]:
        """All cells up to a distance."""
        return [
            Cell(task, items, distance)
            for task in self.tasks
            for items in self.items
            for distance in (self.distances if TASKS[task].has_filler else (0,))
            if distance <= longest
        ]

    def _references(self) -> Iterator[Reference]:
        trained = self.cells(self.trained_distance)
        ranks = {distance: rank for rank, distance in enumerate(sorted({cell.distance for cell in trained}))}
        weights = [self.short_first ** -ranks[cell.distance] for cell in trained]
        cells = random.Random(f"{self.seed}").choices(trained, weights, k=self.train_documents)
        yield from (partial(self.document, "train", cell, number) for number, cell in enumerate(cells))
        for split in ("validation", "test"):
            for cell in self.cells(max(self.distances)):
                yield from (partial(self.document, split, cell, number) for number in range(self.cell_documents))

    def document(self, split: str, cell: Cell, number: int) -> Document:
        """A document of a cell. Raises a UserError if the cell has too few problems to divide them into splits."""
        rng = random.Random("/".join(map(str, (self.seed, split, *cell, number))))
        for _ in range(ATTEMPTS):
            problem = TASKS[cell.task].make(rng, cell.items)
            if self.split_of(f"{cell.task}/{problem.content}", None) == split:
                break
        else:
            raise UserError(
                f"{cell.task} with {cell.items} items has no problem for {split}: leave {cell.items} out of "
                "MemoryTasksSource.items, or raise SourceConfig.validation_share and test_share"
            )
        filler = rng.choices(problem.filler, k=cell.distance * self.block_length)
        num_questions = min(len(problem.questions), self.train_questions if split == "train" else 1)
        questions = ["".join(pair) for pair in rng.sample(problem.questions, num_questions)]
        return Document("/".join(map(str, (*cell, number))), split, "".join([problem.written, *filler, *questions]))


@VOCABULARIES.register("memory_symbols")
class MemorySymbolsConfig(VocabularyConfig):
    """The symbols of the documents of `memory_tasks`."""

    def make(self, texts: Iterable[str] = ()) -> Vocabulary:
        return MemorySymbols(self.size_multiple)


class MemorySymbols(Vocabulary):
    """One token for each symbol, and the end of a document. Only answers cost loss."""

    kind = "memory_symbols"
    free = (*(i for i, symbol in enumerate(SYMBOLS) if symbol not in ANSWERS), len(SYMBOLS))

    def __init__(self, size_multiple: int = 1):
        super().__init__([symbol.encode() for symbol in SYMBOLS], len(SYMBOLS), size_multiple)

    def encode(self, text: str) -> np.ndarray:
        """Raises a UserError for a character that is not a symbol."""
        if other := set(text) - set(SYMBOLS):
            raise UserError(f"{min(other)!r} is not a symbol of the vocabulary memory_symbols")
        return np.array([SYMBOLS.index(symbol) for symbol in text], np.int32)
