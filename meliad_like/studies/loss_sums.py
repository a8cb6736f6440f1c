"""Sums of losses by bins of tokens, whose means are compared between models, and bootstrap intervals (Efron 1979)."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
from jaxtyping import Bool, Float, Int, Num

RESAMPLES = 500
FEWEST_DOCUMENTS = 5  # below which no interval is shown


def intervals(
    numerators: Num[np.ndarray, "documents ..."],
    denominators: Num[np.ndarray, "documents ..."],
    drawn: Num[np.ndarray, "resamples documents"],
    level: float,
) -> Float[np.ndarray, "2 ..."]:
    """The ends of the intervals of sum(numerators) / sum(denominators) when documents are resampled with replacement.

    `drawn` is how often each document is in each resample, and `level` the share of the resamples that are in an
    interval. Resamples without a denominator are left out.
    """
    below = drawn @ denominators
    ratios = np.where(below != 0, drawn @ numerators / np.where(below != 0, below, 1), np.nan)
    return np.nanquantile(ratios, ((1 - level) / 2, (1 + level) / 2), axis=0)


@dataclass(frozen=True)
class LossSums:
    """Sums of losses by model, by document and by place, in bins that have tokens."""

    starts: Int[np.ndarray, " bins"]
    stops: Int[np.ndarray, " bins"]
    tokens: Int[np.ndarray, "documents bins"]
    bits: Float[np.ndarray, "models documents bins"]

    @classmethod
    def by_bin(
        cls,
        edges: Int[np.ndarray, " bins+1"],
        places: Sequence[Int[np.ndarray, " targets"]],
        counted: Sequence[Bool[np.ndarray, " targets"]],
        losses: Iterable[Iterable[Float[np.ndarray, " targets"]]],
    ) -> Self:
        """Sums of `losses`, nats by model and by document. `places` are where the targets of each document are on the
        axis of the bins, and `counted` is True for those that cost loss."""

        def sums(place, which, nats):
            return np.histogram(place[which], edges, weights=nats[which].astype(np.float64) / math.log(2))[0]

        tokens = np.stack([np.histogram(place[which], edges)[0] for place, which in zip(places, counted, strict=True)])
        bits = np.stack([[*map(sums, places, counted, model)] for model in losses])
        some = tokens.any(axis=0)
        return cls(edges[:-1][some], edges[1:][some], tokens[:, some], bits[..., some])

    @property
    def local(self) -> Float[np.ndarray, "models bins"]:
        """Bits per token in each bin."""
        return self.bits.sum(axis=1) / self.tokens.sum(axis=0)

    def gains(self, first: int, other: int) -> dict[str, Float[np.ndarray, " bins"]]:
        """The `gain` of the first model: the bits per token that it saves against the other one, over the same tokens.

        `low` and `high` are the ends of its 90 % interval; missing if the documents are too few for one.
        """
        saved, number = self.bits[other] - self.bits[first], len(self.tokens)
        gains = {"gain": self.local[other] - self.local[first]}
        if number < FEWEST_DOCUMENTS:
            return gains
        drawn = np.random.default_rng(0).multinomial(number, np.full(number, 1 / number), RESAMPLES)
        low, high = intervals(saved, self.tokens, drawn, level=0.9)
        return gains | {"low": low, "high": high}
