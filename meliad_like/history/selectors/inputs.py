"""What a selector reads and learns from: texts, the vectors of a fixed encoder, and scored places in documents.

Places are lines of a frame (`StrideStore.rows`): `document`, number of the `stride` in it, `end` of the span, and
`score`, the gain of equation 2, in nats.
"""

import dataclasses
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd
from jaxtyping import Array, Float, Int

from meliad_like.data.schedule import permutation
from meliad_like.data.split import Documents
from meliad_like.data.vocabulary import Vocabulary
from meliad_like.errors import UserError
from meliad_like.history.config import HistoryConfig, Part, SelectorConfig
from meliad_like.history.selectors.model import Params, Selector
from meliad_like.history.spans import Ends, Layout, Stride, Tokens, stride_of, whole_documents
from meliad_like.remote import write_whole

STRIDE = ["document", "stride"]
PLACE_OF: dict[Part, list[str]] = {"pair": [*STRIDE, "end"], "span": ["document", "end"], "context": STRIDE}
"""The columns of a place on which the text of each part depends."""
Inputs = dict[Part, Any]
"""What a selector reads, by part: vectors, or `Texts` where the encoder is trained."""


class Texts(NamedTuple):
    """Texts for the encoder, all of the same width."""

    tokens: Int[np.ndarray, "m t"]
    """int32, filled up with 0."""
    length: Int[np.ndarray, " m"]
    """int32: number of tokens of each text."""


@dataclasses.dataclass(frozen=True)
class SelectorInputs:
    """The conversion of places in documents to what a selector reads."""

    layout: Layout
    context_length: int
    """Largest number of tokens that are read in addition to a span."""
    leaks_the_future: bool
    """Whether the selector sees the targets."""

    @property
    def widths(self) -> dict[Part, int]:
        """Largest number of tokens of each part."""
        span = self.layout.config.span_length
        return {"pair": span + self.context_length, "span": span, "context": self.context_length}

    def texts(self, part: Part, document: Tokens, stride: Stride, ends: Ends) -> Texts:
        """The texts of a part for some candidates of a stride; only one of `context`, which all candidates share.

        The context is the last `context_length` tokens before the targets (`prefix`) or, as the authors' code
        reads them in training and in inference, before the end of the targets (`released_code`), also where a
        document's last stride has fewer targets.
        """
        rows = [np.zeros((1 if part == "context" else len(ends), 0), np.int32)]
        if part != "context":
            rows.append(self.layout.span_tokens(document, ends))
        if part != "span":
            stop = stride.end if self.leaks_the_future else stride.first
            context = document[max(stop - self.context_length, 0) : stop].astype(np.int32)
            rows.append(np.broadcast_to(context, (len(rows[0]), len(context))))
        tokens = np.concatenate(rows, axis=1)
        padded = np.pad(tokens, ((0, 0), (0, self.widths[part] - tokens.shape[1])))
        return Texts(padded, np.full(len(tokens), tokens.shape[1], np.int32))


def make_inputs(history: HistoryConfig, selector: SelectorConfig, vocabulary: Vocabulary) -> SelectorInputs:
    """What a selector of this config reads.

    Raises a UserError if the separator is not one token of the vocabulary, or a span is all that it could read.
    """
    leaks = selector.context == "released_code"
    own_length = history.recent_length if leaks else history.prefix_length
    length = own_length if selector.context_tokens is None else selector.context_tokens
    if not length:
        raise UserError(
            f"history_length={history.history_length} and stride={history.stride} leave no prefix in "
            f"window_length={history.window_length} for the selector to read: bind SelectorConfig.context_tokens"
        )
    return SelectorInputs(Layout.of(history, vocabulary), length, leaks)


def document_texts(inputs: SelectorInputs, documents: Documents) -> Callable[[Part, pd.DataFrame], Texts]:
    """A function from a part and some places to one text for each place; it can be called from several threads."""
    # Each row of a batch may be of another document.
    whole, config = whole_documents(documents, most=64), inputs.layout.config

    def text(part: Part, document: int, number: int, end: int) -> Texts:
        tokens = whole(document)
        return inputs.texts(part, tokens, stride_of(number, len(tokens), config, document), np.array([end]))

    def read(part: Part, places: pd.DataFrame) -> Texts:
        texts = [text(part, *place) for place in places[[*STRIDE, "end"]].to_numpy().tolist()]
        return Texts(*map(np.concatenate, zip(*texts, strict=True)))

    return read


class PairsBatch(NamedTuple):
    """A batch of pairs; the first axis of all arrays is the pair."""

    inputs: Inputs
    scores: Float[np.ndarray, " b"]


class PairsReader:
    """Batches of pairs as `data.loading` reads them: each epoch has all pairs in another random order.

    The batch of a step is a pure function of the seed and the step.
    """

    num_steps = None

    def __init__(
        self, scores: Float[np.ndarray, " n"], inputs: Callable[[np.ndarray], Inputs], batch_size: int, seed: int
    ):
        """`inputs`: from rows of the pairs to what the selector reads."""
        self.num_lanes = batch_size
        self._scores, self._inputs = scores, inputs
        # A batch may have rows of two epochs, and of more if there are few pairs.
        self._epoch = lru_cache(maxsize=2)(lambda epoch: permutation(len(scores), seed, epoch))

    def rows(self, step: int) -> Int[np.ndarray, " batch"]:
        """Rows of the pairs in the batch after `step` steps."""
        index = step * self.num_lanes + np.arange(self.num_lanes)
        return np.array([self._epoch(i // len(self._scores))[i % len(self._scores)] for i in index.tolist()])

    def batch(self, step: int, lanes: Sequence[int]) -> PairsBatch:
        """Rows `lanes` of the batch of a step."""
        rows = self.rows(step)[list(lanes)]
        return PairsBatch(self._inputs(rows), self._scores[rows])


def held_out(pairs: pd.DataFrame, every: int) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Pairs for training and for validation; the latter are those of the documents whose index `every` divides.

    Raises a UserError if one part is empty.
    """
    held = pairs["document"] % every == 0
    if held.nunique() < 2:
        raise UserError(
            f"of {pairs['document'].nunique():,} scored documents there is none to "
            f"{'train on' if held.all() else 'hold out'} with SelectorTrainingConfig.validation_every={every}: score "
            "more documents, or bind another number"
        )
    return pairs[~held], pairs[held]


def agreement(predicted: Float[np.ndarray, " n"], pairs: pd.DataFrame, num_spans: int) -> dict[str, float]:
    """How well predictions fit the scores of some places, and what choosing by them is worth.

    Returns:
      `loss`: the mean squared error. `correlation` with the scores. And the mean score, over strides, of the num_spans
      spans that would be chosen (`chosen_gain`), of the best ones (`oracle_gain`) and of all (`random_gain`), in nats.
    """
    pairs = pairs.astype({"score": np.float64}).assign(predicted=predicted)

    def mean_of_best(by: str, count: int) -> float:
        best = pairs.sort_values(by, ascending=False, kind="stable").groupby(STRIDE).head(count)
        return float(best.groupby(STRIDE)["score"].mean().mean())

    return {
        "loss": float(np.square(pairs["predicted"] - pairs["score"]).mean()),
        # There is none with a constant.
        "correlation": float(np.nan_to_num(pairs["score"].corr(pairs["predicted"]))),
        "chosen_gain": mean_of_best("predicted", num_spans),
        "oracle_gain": mean_of_best("score", num_spans),
        "random_gain": mean_of_best("score", len(pairs)),
    }


Vectors = dict[Part, tuple[Float[np.ndarray, "texts e"], Int[np.ndarray, " n"]]]
"""The vectors for some places: of each different text once, and the index of each place's text."""


def take(vectors: Vectors, rows: Int[np.ndarray, " n"]) -> Inputs:
    """The vectors of some of the places."""
    return {part: np.asarray(values[index[rows]]) for part, (values, index) in vectors.items()}


def moments(values: Float[np.ndarray, "n *e"]) -> dict[str, Array]:
    """Mean and standard deviation over the rows, float32."""
    mean = np.mean(values, axis=0, dtype=np.float64)
    # In pieces, because the rows may be a memory map larger than the memory.
    pieces = np.array_split(values, len(values) // 10_000 + 1)
    deviation = np.sqrt(sum(np.square(piece - mean).sum(axis=0) for piece in pieces) / len(values))
    # A constant feature becomes 0, whatever its size.
    deviation = np.where(deviation > 1e-6, deviation, 1.0)
    return {"mean": jnp.asarray(mean, jnp.float32), "deviation": jnp.asarray(deviation, jnp.float32)}


def encode_places(
    selector: Selector,
    params: Params,
    places: pd.DataFrame,
    texts: Callable[[Part, pd.DataFrame], Texts],
    folder: Path,
    batch_size: int,
    on_progress: Callable[[int, int], None],
) -> Vectors:
    """Encodes every text that the places need; those that an earlier call left in the folder are read from there.

    Args:
      params: parameters of the encoder.
      folder: gets a file for each part, which is filled from beginning to end, and one that counts what is done.
      batch_size: texts that are encoded at once.
      on_progress: callback with the numbers of texts that are done, and of all.
    """
    folder.mkdir(parents=True, exist_ok=True)
    different = {part: places.drop_duplicates(PLACE_OF[part]) for part in selector.config.parts}
    total, done = sum(map(len, different.values())), 0
    encode, vectors = partial(_encode, selector), {}
    for part, rows in different.items():
        path, progress = folder / f"{part}.npy", folder / f"{part}.done"
        begun = int(progress.read_text()) if progress.exists() else 0
        shape = (len(rows), selector.vector_width)
        file = np.lib.format.open_memmap(path, "r+" if begun else "w+", np.float32, shape)
        for start in range(begun, len(rows), batch_size):
            on_progress(done + start, total)
            batch = rows[start : start + batch_size]
            file[start : start + len(batch)] = encode_batch(encode, params, texts(part, batch), batch_size)
            file.flush()
            write_whole(progress, str(start + len(batch)))
        done += len(rows)
        index = places.groupby(PLACE_OF[part], sort=False).ngroup().to_numpy()
        vectors[part] = np.load(path, mmap_mode="r"), index
    on_progress(done, total)
    return vectors


_encode = jax.jit(Selector.encode, static_argnums=0)


def encode_batch(encode: Callable[..., jax.Array], params: Params, texts: Texts, most: int) -> Float[np.ndarray, "m e"]:
    """At most `most` texts as vectors; sizes are powers of two, so that few programs are compiled."""
    count = len(texts.length)
    size = min(most, 1 << (count - 1).bit_length())
    tokens = np.pad(texts.tokens, ((0, size - count), (0, 0)))
    length = np.pad(texts.length, (0, size - count), constant_values=1)
    return np.asarray(encode(params, tokens, length))[:count]
