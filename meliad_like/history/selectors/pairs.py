"""The scored places that a selector is trained on: which are held out, and in which order the others are read.

They are lines of a frame (`StrideStore.rows`): `document`, number of the `stride` in it, `end` of the span, and
`score`, the gain of equation 2, in nats.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from jaxtyping import Float, Int

from meliad_like.data.schedule import permutation
from meliad_like.errors import UserError
from meliad_like.history.selectors.config import Part

Inputs = dict[Part, Any]
"""What a selector reads, by part: vectors, or `Texts` where the encoder is trained."""
STRIDE = ["document", "stride"]


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


def held_out(pairs: pd.DataFrame, every: int, most: int | None = None) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Pairs for training and for validation; the latter are those of the documents whose index `every` divides.

    With `most` only some of the latter, as `some_strides`.

    Raises:
      UserError: there are none for one of them.
    """
    held = pairs["document"] % every == 0
    parts = pairs[~held], pairs[held]
    for name, part in zip(("train on", "hold out"), parts, strict=True):
        if part.empty:
            raise UserError(
                f"of {pairs['document'].nunique():,} scored documents there is none to {name} with "
                f"SelectorTrainingConfig.validation_every={every}: score more documents, or bind another number"
            )
    return parts[0], parts[1] if most is None else some_strides(parts[1], most)


def some_strides(pairs: pd.DataFrame, most: int) -> pd.DataFrame:
    """All pairs of some evenly spaced strides: about `most` pairs, of at least one stride."""
    stride = pairs.groupby(STRIDE).ngroup()
    total = int(stride.max()) + 1
    count = min(max(round(total * most / len(pairs)), 1), total)
    return pairs[stride.isin(np.arange(count) * total // count)]


def agreement(predicted: Float[np.ndarray, " n"], pairs: pd.DataFrame, num_spans: int) -> dict[str, float]:
    """How well predictions fit the scores of some places, and what choosing by them is worth.

    Args:
      predicted: predictions for the pairs.
      pairs: with the true scores.
      num_spans: number of spans that are chosen for each stride.

    Returns:
      `loss`: the mean squared error. `correlation` with the scores. And the mean score, over strides, of the spans that
      would be chosen (`chosen_gain`), of the best ones (`oracle_gain`) and of all (`random_gain`), in nats a span.
    """
    pairs = pairs.astype({"score": np.float64}).assign(predicted=predicted)

    def mean_of_best(by: str, count: int) -> float:
        best = pairs.sort_values(by, ascending=False, kind="stable").groupby(STRIDE).head(count)
        return float(best.groupby(STRIDE)["score"].mean().mean())

    correlation = pairs["score"].corr(pairs["predicted"])
    return {
        "loss": float(np.square(pairs["predicted"] - pairs["score"]).mean()),
        # There is none with a constant.
        "correlation": 0.0 if np.isnan(correlation) else float(correlation),
        "chosen_gain": mean_of_best("predicted", num_spans),
        "oracle_gain": mean_of_best("score", num_spans),
        "random_gain": mean_of_best("score", len(pairs)),
    }
