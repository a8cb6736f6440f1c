"""Sums of losses by bins of tokens, whose means are compared between models."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
from jaxtyping import Bool, Float, Int

from meliad_like.studies.bootstrap import intervals

RESAMPLES = 500
FEWEST_DOCUMENTS = 5  # below which no interval is shown


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
        """Sums of losses in nats.

        Args:
          edges: the edges of the bins.
          places: where the targets are on the axis of the bins, by document.
          counted: which targets cost loss, by document.
          losses: by model and by document.
        """

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
