"""Sums of losses by bins of tokens, whose means are compared between models."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
from jaxtyping import Bool, Float, Int

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
          edges: of the bins.
          places: where the targets are on the axis of the bins, by document.
          counted: which of them cost loss, by document.
          losses: by model and by document.
        """
        chosen = [place[which] for place, which in zip(places, counted, strict=True)]
        tokens = np.stack([np.histogram(place, edges)[0] for place in chosen])

        def sums(place, which, nats):
            return np.histogram(place, edges, weights=nats[which].astype(np.float64) / math.log(2))[0]

        bits = np.stack([[*map(sums, chosen, counted, model)] for model in losses])
        some = tokens.any(axis=0)
        return cls(edges[:-1][some], edges[1:][some], tokens[:, some], bits[..., some])

    @property
    def local(self) -> Float[np.ndarray, "models bins"]:
        """Bits per token in each bin."""
        return self.bits.sum(axis=1) / self.tokens.sum(axis=0)

    @property
    def cumulative(self) -> Float[np.ndarray, "models bins"]:
        """Bits per token up to the end of each bin, over all documents; short ones count up to their ends."""
        return self.bits.sum(axis=1).cumsum(axis=1) / self.tokens.sum(axis=0).cumsum()

    @property
    def num_documents(self) -> Int[np.ndarray, " bins"]:
        """The number of documents with tokens in each bin."""
        return (self.tokens > 0).sum(axis=0)

    def gains(self, other: int) -> Float[np.ndarray, " bins"]:
        """Bits per token that model 0 saves against another one, over the same tokens."""
        return self.local[other] - self.local[0]

    def interval(self, other: int) -> Float[np.ndarray, "2 bins"]:
        """The 90% interval of the gains when the documents are resampled with replacement (bootstrap)."""
        saved, number = self.bits[other] - self.bits[0], len(self.tokens)
        drawn = np.random.default_rng(0).multinomial(number, np.full(number, 1 / number), RESAMPLES)
        tokens = drawn @ self.tokens
        gains = np.where(tokens > 0, drawn @ saved / np.maximum(tokens, 1), np.nan)
        return np.nanquantile(gains, (0.05, 0.95), axis=0)
