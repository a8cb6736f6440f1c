"""The vectors that a fixed encoder makes of texts, computed once and kept on disk."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd
from jaxtyping import Array, Float, Int

from meliad_like.history.selectors.config import Part
from meliad_like.history.selectors.inputs import DocumentTexts, Texts
from meliad_like.history.selectors.model import Params, Selector
from meliad_like.remote import write_whole

PLACE_OF: dict[Part, list[str]] = {
    "pair": ["document", "stride", "end"],
    "span": ["document", "end"],
    "context": ["document", "stride"],
}
"""The columns of a place on which a text depends."""


class Vectors(NamedTuple):
    """The vectors for some places: of each different text once, and the index of each place's text."""

    values: dict[Part, Float[np.ndarray, "texts e"]]
    index: dict[Part, Int[np.ndarray, " n"]]

    def take(self, rows: Int[np.ndarray, " n"]) -> dict[Part, Float[np.ndarray, "n e"]]:
        """The vectors of some places."""
        return {part: np.asarray(self.values[part][index[rows]]) for part, index in self.index.items()}


def moments(values: Float[np.ndarray, "n *e"], rows_at_once: int = 10_000) -> dict[str, Array]:
    """Mean and standard deviation over the rows, float32; the rows may be a memory map larger than the memory."""
    mean = np.mean(values, axis=0, dtype=np.float64)
    starts = range(0, len(values), rows_at_once)
    squares = sum(np.square(values[start : start + rows_at_once] - mean).sum(axis=0) for start in starts)
    deviation = np.sqrt(squares / len(values))
    # A constant feature becomes 0, whatever its size.
    deviation = np.where(deviation > 1e-6, deviation, 1.0)
    return {"mean": jnp.asarray(mean, jnp.float32), "deviation": jnp.asarray(deviation, jnp.float32)}


def encode_places(
    selector: Selector,
    params: Params,
    places: pd.DataFrame,
    texts: DocumentTexts,
    folder: Path,
    batch_size: int,
    on_progress: Callable[[int, int], None],
) -> Vectors:
    """Encodes every text that the places need; those that an earlier call left in the folder are read from there.

    Args:
      selector: its encoder is used, with these parameters.
      places: the places to which the folder's files belong.
      texts: makes the texts.
      folder: gets a file for each part, which is filled from beginning to end, and one that counts what is done.
      batch_size: texts that are encoded at once.
      on_progress: callback with the numbers of texts that are done, and of all.
    """
    folder.mkdir(parents=True, exist_ok=True)
    different = {part: places.drop_duplicates(PLACE_OF[part]) for part in selector.parts}
    index = {part: places.groupby(PLACE_OF[part], sort=False).ngroup().to_numpy() for part in selector.parts}
    total, done = sum(map(len, different.values())), 0
    encode = jax.jit(selector.encode)
    values = {}
    for part, rows in different.items():
        path, progress = folder / f"{part}.npy", folder / f"{part}.done"
        shape = (len(rows), selector.vector_width)
        begun = int(progress.read_text()) if progress.exists() else 0
        file = np.lib.format.open_memmap(path, "r+" if begun else "w+", np.float32, None if begun else shape)
        for start in range(begun, len(rows), batch_size):
            on_progress(done + start, total)
            batch = rows[start : start + batch_size]
            file[start : start + len(batch)] = encode_batch(encode, params, texts(part, batch), batch_size)
            file.flush()
            write_whole(progress, str(start + len(batch)))
        done += len(rows)
        values[part] = np.load(path, mmap_mode="r")
    on_progress(done, total)
    return Vectors(values, index)


def encode_batch(encode: Callable[..., jax.Array], params: Params, texts: Texts, most: int) -> Float[np.ndarray, "m e"]:
    """At most `most` texts as vectors; sizes are powers of two, so that few programs are compiled."""
    count = len(texts.length)
    size = min(most, 2 ** math.ceil(math.log2(count)))
    tokens = np.pad(texts.tokens, ((0, size - count), (0, 0)))
    length = np.pad(texts.length, (0, size - count), constant_values=1)
    return np.asarray(encode(params, tokens, length))[:count]
