"""The scored places that a selector is trained on: which are held out, in which order they come, and their vectors."""

import math
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from meliad_like.errors import UserError
from meliad_like.history.selectors.config import Part
from meliad_like.history.selectors.inputs import DocumentTexts, Places, Texts
from meliad_like.history.selectors.model import Params, Selector
from meliad_like.remote import write_whole


class Pairs(NamedTuple):
    """Scored places."""

    places: Places
    scores: Float[np.ndarray, " n"]
    """float32: the gains of Equation 2, in nats."""

    def __len__(self) -> int:
        return len(self.scores)

    def take(self, rows: Int[np.ndarray, " n"]) -> "Pairs":
        return Pairs(self.places.take(rows), self.scores[rows])


def held_out(pairs: Pairs, every: int) -> tuple[Pairs, Pairs]:
    """Pairs for training and for validation, which has the documents whose index `every` divides.

    Raises:
      UserError: one of them has none.
    """
    held = pairs.places.document % every == 0
    parts = pairs.take(np.flatnonzero(~held)), pairs.take(np.flatnonzero(held))
    for name, part in zip(("train on", "hold out"), parts, strict=True):
        if not len(part):
            raise UserError(
                f"of {len(np.unique(pairs.places.document)):,} scored documents there is none to {name} with "
                f"SelectorTrainingConfig.validation_every={every}: score more documents, or bind another number"
            )
    return parts


def stride_index(pairs: Pairs) -> Int[np.ndarray, " n"]:
    """Which of the strides that occur each pair belongs to, counted from 0 in the order of documents and strides."""
    places = np.stack([pairs.places.document, pairs.places.stride], axis=1)
    return np.unique(places, axis=0, return_inverse=True)[1].reshape(-1)


def some_strides(pairs: Pairs, most: int) -> Pairs:
    """All pairs of some strides, which are evenly spread: about `most` pairs, of one stride at least."""
    stride = stride_index(pairs)
    total = int(stride.max()) + 1
    count = min(max(round(total * most / len(pairs)), 1), total)
    return pairs.take(np.flatnonzero(np.isin(stride, np.arange(count) * total // count)))


class Order:
    """Which rows a step has: every epoch all of them in another order, a pure function of seed and step."""

    def __init__(self, num_rows: int, batch_size: int, seed: int):
        self._num_rows, self._batch_size, self._seed = num_rows, batch_size, seed
        # A batch may have rows of two epochs, and more if there are few.
        self._epoch = lru_cache(maxsize=2)(self._permutation)

    def rows(self, step: int) -> Int[np.ndarray, " batch"]:
        """Those of the step after `step` steps; the batch goes on in the next epoch where one ends."""
        index = step * self._batch_size + np.arange(self._batch_size)
        return np.array([self._epoch(i // self._num_rows)[i % self._num_rows] for i in index.tolist()])

    def _permutation(self, epoch: int) -> Int[np.ndarray, " n"]:
        # numpy promises the same raw bits of a bit generator in every version, but not the same permutation.
        return np.argsort(np.random.PCG64([self._seed, epoch]).random_raw(self._num_rows), kind="stable")


class Vectors(NamedTuple):
    """What a fixed encoder makes of some places: each different text once, and which of them each place has."""

    values: dict[Part, Float[np.ndarray, "texts e"]]
    index: dict[Part, Int[np.ndarray, " n"]]

    def take(self, rows: Int[np.ndarray, " n"]) -> dict[Part, Float[np.ndarray, "n e"]]:
        """The vectors of some places."""
        return {part: np.asarray(self.values[part][index[rows]]) for part, index in self.index.items()}

    def standard(self) -> Params:
        """`moments` of every part, over its different texts."""
        return {part: moments(values) for part, values in self.values.items()}


def moments(values: Float[np.ndarray, "n *e"], rows_at_once: int = 10_000) -> dict[str, Array]:
    """Mean and deviation over the rows, float32; these may be on a disk, and more than memory holds."""

    def mean_of(function: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
        total = np.zeros(values.shape[1:])
        for start in range(0, len(values), rows_at_once):
            total += function(values[start : start + rows_at_once].astype(np.float64)).sum(axis=0)
        return total / len(values)

    mean = mean_of(lambda rows: rows)
    deviation = np.sqrt(mean_of(lambda rows: np.square(rows - mean)))
    # What never changes stays out, at whatever size.
    deviation = np.where(deviation > 1e-6, deviation, 1.0)
    return {"mean": jnp.asarray(mean, jnp.float32), "deviation": jnp.asarray(deviation, jnp.float32)}


def encode_places(
    selector: Selector,
    params: Params,
    places: Places,
    texts: DocumentTexts,
    folder: Path,
    batch_size: int,
    told: Callable[[int, int], None],
) -> Vectors:
    """Encodes every text that the places need; those that an earlier call has left in the folder are read from there.

    Args:
      params: the encoder's.
      places: what the folder's files belong to.
      texts: makes the texts.
      folder: gets a file for each part, made in order and from beginning to end, and how far that is.
      batch_size: texts that are encoded at once.
      told: how many texts of how many are there.
    """
    folder.mkdir(parents=True, exist_ok=True)
    # Of a span the stride doesn't matter, and of a context the span.
    columns: dict[Part, tuple[int, ...]] = {"pair": (0, 1, 2), "span": (0, 2), "context": (0, 1)}
    found = {}
    for part in selector.parts:
        keys = np.stack([places[column] for column in columns[part]], axis=1)
        found[part] = np.unique(keys, axis=0, return_index=True, return_inverse=True)[1:]
    total, done = sum(len(first) for first, _ in found.values()), 0
    encode = jax.jit(selector.encode)
    values = {}
    for part, (first, _) in found.items():
        path, progress = folder / f"{part}.npy", folder / f"{part}.done"
        shape = (len(first), selector.vector_width)
        begun = int(progress.read_text()) if progress.exists() else 0
        file = np.lib.format.open_memmap(path, "r+" if begun else "w+", np.float32, None if begun else shape)
        for start in range(begun, len(first), batch_size):
            told(done + start, total)
            rows = first[start : start + batch_size]
            file[start : start + len(rows)] = encode_batch(encode, params, texts(part, places.take(rows)), batch_size)
            file.flush()
            write_whole(progress, str(start + len(rows)))
        done += len(first)
        values[part] = np.load(path, mmap_mode="r")
    told(done, total)
    return Vectors(values, {part: inverse.reshape(-1) for part, (_, inverse) in found.items()})


def encode_batch(encode: Callable[..., jax.Array], params: Params, texts: Texts, most: int) -> Float[np.ndarray, "m e"]:
    """At most `most` texts as vectors; sizes are powers of two, so that few programs are compiled."""
    count = len(texts.length)
    size = min(most, 2 ** math.ceil(math.log2(count)))
    tokens = np.pad(texts.tokens, ((0, size - count), (0, 0)))
    length = np.pad(texts.length, (0, size - count), constant_values=1)
    return np.asarray(encode(params, jnp.asarray(tokens), jnp.asarray(length)))[:count]
