"""The texts that a selector reads, and the examples that it learns from: scored places in documents.

Places are rows of a frame (`StrideStore.rows`): `document`, number of the `stride` in it, `end` of the span, and
`score`, the gain of equation 2, in nats.
"""

import dataclasses
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import pandas as pd
from jaxtyping import Float, Int

from meliad_like.data.schedule import permutation
from meliad_like.data.split import Documents
from meliad_like.errors import UserError
from meliad_like.history.settings import HistoryConfig, SelectorConfig
from meliad_like.history.spans import Ends, Layout, Stride, Tokens, stride_of, whole_documents
from meliad_like.vocabularies.base import Vocabulary

STRIDE = ["document", "stride"]


class Texts(NamedTuple):
    """Texts for the encoder, all of the same width."""

    tokens: Int[np.ndarray, "m t"]
    """The tokens of each text, int32, filled up with 0."""
    length: Int[np.ndarray, " m"]
    """The number of tokens of each text, int32."""


@dataclasses.dataclass(frozen=True)
class SelectorInputs:
    """The conversion of places in documents to the inputs of a selector."""

    layout: Layout
    context_length: int
    """Largest number of tokens that are read in addition to a span."""
    leaks_the_future: bool
    """Whether the selector sees the targets."""

    @property
    def text_length(self) -> int:
        """Largest number of tokens of a text."""
        return self.layout.config.span_length + self.context_length

    def texts(self, document: Tokens, stride: Stride, ends: Ends) -> Texts:
        """The texts of some candidates of a stride: each span, and then the context.

        The context is the last `context_length` tokens before the targets (`prefix`) or, as in the authors' code, up to
        the end of the targets (`released_code`), also where a document's last stride has fewer targets.
        """
        stop = stride.end if self.leaks_the_future else stride.first
        context = document[max(stop - self.context_length, 0) : stop].astype(np.int32)
        spans = self.layout.span_tokens(document, ends)
        tokens = np.concatenate([spans, np.broadcast_to(context, (len(spans), len(context)))], axis=1)
        padded = np.pad(tokens, ((0, 0), (0, self.text_length - tokens.shape[1])))
        return Texts(padded, np.full(len(tokens), tokens.shape[1], np.int32))


def make_inputs(history: HistoryConfig, selector: SelectorConfig, vocabulary: Vocabulary) -> SelectorInputs:
    """The inputs of a selector. Raises a UserError if the separator is not one token of the vocabulary, or there is no
    text besides the span."""
    leaks = selector.context == "released_code"
    own_length = history.recent_length if leaks else history.prefix_length
    length = own_length if selector.context_tokens is None else selector.context_tokens
    if not length:
        lengths = f"history_length={history.history_length} and stride={history.stride} leave no prefix"
        way_out = "for the selector to read: bind SelectorConfig.context_tokens"
        raise UserError(f"{lengths} in window_length={history.window_length} {way_out}")
    return SelectorInputs(Layout.of(history, vocabulary), length, leaks)


def document_texts(inputs: SelectorInputs, documents: Documents) -> Callable[[pd.DataFrame], Texts]:
    """A function from some places to one text for each place; it can be called from several threads."""
    # Each row of a batch may be of another document.
    whole, config = whole_documents(documents, most=64), inputs.layout.config

    def text(document: int, number: int, end: int) -> Texts:
        tokens = whole(document)
        return inputs.texts(tokens, stride_of(number, len(tokens), config, document), np.array([end]))

    def read(places: pd.DataFrame) -> Texts:
        texts = [text(*place) for place in places[[*STRIDE, "end"]].to_numpy().tolist()]
        return Texts(*map(np.concatenate, zip(*texts, strict=True)))

    return read


class PairsBatch(NamedTuple):
    """A batch of pairs; the first axis of all arrays is the pair."""

    texts: Texts
    scores: Float[np.ndarray, " b"]


class PairsReader:
    """Batches of pairs as `data.loading` reads them: each epoch has all pairs in another random order.

    The batch of a step is a pure function of the seed and the step.
    """

    num_steps = None

    def __init__(self, pairs: pd.DataFrame, texts: Callable[[pd.DataFrame], Texts], batch_size: int, seed: int):
        """`pairs`: scored places; `texts`: the function from places to their texts."""
        self.num_lanes, self._pairs, self._texts = batch_size, pairs, texts
        # A batch may have rows of two epochs, and of more if there are few pairs.
        self._epoch = lru_cache(maxsize=2)(lambda epoch: permutation(len(pairs), seed, epoch))

    def rows(self, step: int) -> Int[np.ndarray, " batch"]:
        """Rows of the pairs in the batch after `step` steps."""
        index = step * self.num_lanes + np.arange(self.num_lanes)
        return np.array([self._epoch(i // len(self._pairs))[i % len(self._pairs)] for i in index.tolist()])

    def batch(self, step: int, lanes: Sequence[int]) -> PairsBatch:
        """Rows `lanes` of the batch of a step."""
        places = self._pairs.iloc[self.rows(step)[list(lanes)]]
        return PairsBatch(self._texts(places), places["score"].to_numpy())


def held_out(pairs: pd.DataFrame, every: int) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Pairs for training and for validation; the latter are those of the documents whose index `every` divides. Raises
    a UserError if one part is empty."""
    held = pairs["document"] % every == 0
    if held.nunique() < 2:
        what = f"{'train on' if held.all() else 'hold out'} with SelectorTrainingConfig.validation_every={every}"
        number = f"{pairs['document'].nunique():,} scored documents"
        raise UserError(f"of {number} there is none to {what}: score more documents, or bind another number")
    return pairs[~held], pairs[held]


def agreement(predicted: Float[np.ndarray, " n"], pairs: pd.DataFrame, num_spans: int) -> dict[str, float]:
    """The fit of predictions to the scores of some places, and the gain of choosing by them.

    `loss` is the mean squared error. The gains are mean scores over strides, in nats, of the num_spans spans that would
    be chosen (`chosen_gain`), of the best ones (`oracle_gain`) and of all (`random_gain`).
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
