"""The scored places that a selector is trained on: which are held out, and in which order the others are read."""

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float, Int

from meliad_like.data.schedule import permutation
from meliad_like.errors import UserError
from meliad_like.history.selectors.config import Part
from meliad_like.history.selectors.inputs import Places

Inputs = dict[Part, Any]
"""What a selector reads, by part: vectors, or `Texts` where the encoder is trained."""


class Pairs(NamedTuple):
    """Scored places."""

    places: Places
    scores: Float[np.ndarray, " n"]
    """float32: the gains of equation 2, in nats."""

    def __len__(self) -> int:
        return len(self.scores)

    def take(self, rows: Int[np.ndarray, " n"]) -> "Pairs":
        return Pairs(self.places.take(rows), self.scores[rows])


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
        self._scores, self._inputs, self._seed = scores, inputs, seed
        # A batch may have rows of two epochs, and of more if there are few pairs.
        self._epoch = lru_cache(maxsize=2)(self._permutation)

    def rows(self, step: int) -> Int[np.ndarray, " batch"]:
        """Rows of the pairs in the batch after `step` steps."""
        index = step * self.num_lanes + np.arange(self.num_lanes)
        return np.array([self._epoch(i // len(self._scores))[i % len(self._scores)] for i in index.tolist()])

    def batch(self, step: int, lanes: Sequence[int]) -> PairsBatch:
        """Rows `lanes` of the batch of a step."""
        rows = self.rows(step)[list(lanes)]
        return PairsBatch(self._inputs(rows), self._scores[rows])

    def _permutation(self, epoch: int) -> Int[np.ndarray, " n"]:
        return permutation(len(self._scores), self._seed, epoch)


def held_out(pairs: Pairs, every: int) -> tuple[Pairs, Pairs]:
    """Pairs for training and for validation; the latter are those of the documents whose index `every` divides.

    Raises:
      UserError: one of them is empty.
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
    """The index of each pair's stride among the strides that occur, in the order of documents and strides."""
    places = np.stack([pairs.places.document, pairs.places.stride], axis=1)
    return np.unique(places, axis=0, return_inverse=True)[1].reshape(-1)


def some_strides(pairs: Pairs, most: int) -> Pairs:
    """All pairs of some evenly spaced strides: about `most` pairs, of at least one stride."""
    stride = stride_index(pairs)
    total = int(stride.max()) + 1
    count = min(max(round(total * most / len(pairs)), 1), total)
    return pairs.take(np.flatnonzero(np.isin(stride, np.arange(count) * total // count)))


def agreement(predicted: Float[np.ndarray, " n"], pairs: Pairs, num_spans: int) -> dict[str, float]:
    """How well predictions fit the scores of some places, and what choosing by them is worth.

    Args:
      predicted: predictions for the pairs.
      pairs: with the true scores.
      num_spans: number of spans that are chosen for each stride.

    Returns:
      `loss`: the mean squared error. `correlation` with the scores. And the mean score, over strides, of the spans that
      would be chosen (`chosen_gain`), of the best ones (`oracle_gain`) and of all (`random_gain`), in nats a span.
    """
    scores, stride = pairs.scores.astype(np.float64), stride_index(pairs)

    def mean_of_best(values: np.ndarray) -> float:
        order = np.lexsort((-values, stride))
        rank = np.arange(len(order)) - np.searchsorted(stride[order], stride[order])
        chosen = order[rank < num_spans]
        return float(np.mean(np.bincount(stride[chosen], scores[chosen]) / np.bincount(stride[chosen])))

    constant = not predicted.std() or not scores.std()
    return {
        "loss": float(np.mean(np.square(predicted - scores))),
        "correlation": 0.0 if constant else float(np.corrcoef(predicted, scores)[0, 1]),
        "chosen_gain": mean_of_best(predicted),
        "oracle_gain": mean_of_best(scores),
        "random_gain": float(np.mean(np.bincount(stride, scores) / np.bincount(stride))),
    }
