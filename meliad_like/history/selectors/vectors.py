"""The vectors that a fixed encoder makes of texts, computed once and kept on disk."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from meliad_like.history.selectors.config import Part
from meliad_like.history.selectors.inputs import DocumentTexts, Places, Texts
from meliad_like.history.selectors.model import Params, Selector
from meliad_like.remote import write_whole

PLACE_OF: dict[Part, tuple[int, ...]] = {"pair": (0, 1, 2), "span": (0, 2), "context": (0, 1)}
"""The columns of `Places` on which a text depends: that of a span does not on the stride, that of a context not on the
span."""


class Vectors(NamedTuple):
    """The vectors for some places: of each different text once, and the index of each place's text."""

    values: dict[Part, Float[np.ndarray, "texts e"]]
    index: dict[Part, Int[np.ndarray, " n"]]

    def take(self, rows: Int[np.ndarray, " n"]) -> dict[Part, Float[np.ndarray, "n e"]]:
        """The vectors of some places."""
        return {part: np.asarray(self.values[part][index[rows]]) for part, index in self.index.items()}

    def standard(self) -> Params:
        """`moments` of every part, over its different texts."""
        return {part: moments(values) for part, values in self.values.items()}


def moments(values: Float[np.ndarray, "n *e"], rows_at_once: int = 10_000) -> dict[str, Array]:
    """Mean and standard deviation over the rows, float32; the rows may be a memory map larger than the memory."""

    def mean_of(function: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
        total = np.zeros(values.shape[1:])
        for start in range(0, len(values), rows_at_once):
            total += function(values[start : start + rows_at_once].astype(np.float64)).sum(axis=0)
        return total / len(values)

    mean = mean_of(lambda rows: rows)
    deviation = np.sqrt(mean_of(lambda rows: np.square(rows - mean)))
    # A constant feature becomes 0, whatever its size.
    deviation = np.where(deviation > 1e-6, deviation, 1.0)
    return {"mean": jnp.asarray(mean, jnp.float32), "deviation": jnp.asarray(deviation, jnp.float32)}


def encode_places(
    selector: Selector,
    params: Params,
    places: Places,
    texts: DocumentTexts,
    folder: Path,
    batch_size: int,
    on_progress: Callable[[int, int], None],
) -> Vectors:
    """Encodes every text that the places need; those that an earlier call left in the folder are read from there.

    Args:
      selector: its encoder is used.
      params: parameters of the encoder.
      places: the places to which the folder's files belong.
      texts: makes the texts.
      folder: gets a file for each part, which is filled from beginning to end, and one that counts what is done.
      batch_size: texts that are encoded at once.
      on_progress: callback with the numbers of texts that are done, and of all.
    """
    folder.mkdir(parents=True, exist_ok=True)
    found = {}
    for part in selector.parts:
        keys = np.stack([places[column] for column in PLACE_OF[part]], axis=1)
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
            on_progress(done + start, total)
            rows = first[start : start + batch_size]
            file[start : start + len(rows)] = encode_batch(encode, params, texts(part, places.take(rows)), batch_size)
            file.flush()
            write_whole(progress, str(start + len(rows)))
        done += len(first)
        values[part] = np.load(path, mmap_mode="r")
    on_progress(done, total)
    return Vectors(values, {part: inverse.reshape(-1) for part, (_, inverse) in found.items()})


def encode_batch(encode: Callable[..., jax.Array], params: Params, texts: Texts, most: int) -> Float[np.ndarray, "m e"]:
    """At most `most` texts as vectors; sizes are powers of two, so that few programs are compiled."""
    count = len(texts.length)
    size = min(most, 2 ** math.ceil(math.log2(count)))
    tokens = np.pad(texts.tokens, ((0, size - count), (0, 0)))
    length = np.pad(texts.length, (0, size - count), constant_values=1)
    return np.asarray(encode(params, tokens, length))[:count]
