"""Intervals of ratios of sums over documents, by bootstrap (Efron 1979)."""

import numpy as np
from jaxtyping import Float, Num


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
