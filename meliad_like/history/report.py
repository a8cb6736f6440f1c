"""The results of an evaluation of ancient history, with intervals over documents: tables, and JSON."""

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from meliad_like.data.readers import label
from meliad_like.history.evaluation import BASELINE, Evaluation
from meliad_like.tables import Table

NUM_RESAMPLES = 10_000
LEVEL = 0.95
ORACLE = "score_oracle"
FORMATS = {"change": "+.2%", "change_where_selected": "+.2%", "share_of_oracle": ".0%"}
"""Format specifications of the figures that are percentages."""
PERPLEXITIES = {"perplexity": "per token", "word_perplexity": "per word", "byte_perplexity": "per byte"}
COMPARISONS = {
    "change": "change of the perplexity",
    "perplexity_where_selected": "perplexity where selected",
    "change_where_selected": "its change",
    "share_of_oracle": "share of the score oracle's gain",
}


class Bootstrap:
    """Confidence intervals of ratios of sums over documents, by bootstrap (Efron 1979).

    The same resampled documents serve all ratios, so that differences between selections are paired by document.
    """

    def __init__(self, num_documents: int, seed: int = 0):
        raw = np.random.PCG64(seed).random_raw(NUM_RESAMPLES * num_documents)
        self._drawn = (raw % np.uint64(num_documents)).astype(np.int64).reshape(NUM_RESAMPLES, num_documents)

    def __call__(self, numerators: np.ndarray, denominators: np.ndarray) -> tuple[float, float]:
        """The percentile interval of sum(numerators) / sum(denominators).

        NaN where only one document has a denominator: all resamples would agree with it.
        """
        if np.count_nonzero(denominators) < 2:
            return math.nan, math.nan
        below = denominators[self._drawn].sum(axis=1)
        ratios = numerators[self._drawn].sum(axis=1)[below != 0] / below[below != 0]
        low, high = np.quantile(ratios, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
        return float(low), float(high)


@dataclasses.dataclass(frozen=True)
class Estimate:
    """A figure over all documents, and its interval; NaN where there is none."""

    value: float
    low: float = math.nan
    high: float = math.nan

    def to_text(self, form: str = ".4g") -> str:
        """The value with its interval, if there is one; `form` is a format specification."""
        if math.isnan(self.value):
            return "-"
        if math.isnan(self.low):
            return f"{self.value:{form}}"
        return f"{self.value:{form}} ({self.low:{form}} to {self.high:{form}})"


def figures(evaluation: Evaluation, name: str, bootstrap: Bootstrap) -> dict[str, Estimate]:
    """Perplexities of one selection, and their comparison with the baseline on the same documents.

    `change` is the relative change of the perplexity per token against the baseline; `change_where_selected` that of
    the targets for which spans are selected; `share_of_oracle` is the gain in nats divided by the score oracle's, where
    that is above zero.
    """
    sums, baseline = evaluation.of(name), evaluation.of(BASELINE)

    def ratio(numerators: pd.Series, denominators: pd.Series) -> Estimate:
        above, below = numerators.to_numpy(float), denominators.to_numpy(float)
        return Estimate(float(above.sum() / below.sum()) if below.sum() else math.nan, *bootstrap(above, below))

    def exponential(numerators: pd.Series, denominators: pd.Series, less: float = 0.0) -> Estimate:
        with np.errstate(over="ignore"):
            return Estimate(*(float(np.exp(x)) - less for x in dataclasses.astuple(ratio(numerators, denominators))))

    gains, tokens, there = baseline - sums, sums["num_tokens"], sums["num_tokens_where_selected"]
    found = {
        "perplexity": exponential(sums["nats"], tokens),
        "word_perplexity": exponential(sums["nats"], evaluation.documents["num_words"]),
        "byte_perplexity": exponential(sums["nats"], evaluation.documents["num_bytes"]),
        "perplexity_where_selected": exponential(sums["nats_where_selected"], there),
        "change": exponential(-gains["nats"], tokens, less=1.0),
        "change_where_selected": exponential(-gains["nats_where_selected"], there, less=1.0),
    }
    if ORACLE in evaluation.selections:
        most = baseline["nats"] - evaluation.of(ORACLE)["nats"]
        # Of a loss there is no share.
        found["share_of_oracle"] = ratio(gains["nats"], most) if most.sum() > 0 else Estimate(math.nan)
    return found


def among(max_candidates: int | None) -> str:
    """A remark on `HistoryConfig.max_candidates` for the title of a table, beginning with a semicolon."""
    if max_candidates is None:
        return ""
    return f"; the score oracle and selectors choose among {max_candidates:,} random candidates of a stride"


def tables(evaluation: Evaluation) -> list[Table]:
    """Perplexities of all selections, their comparison with the baseline, and their costs."""
    bootstrap = Bootstrap(len(evaluation.documents))
    labels = {name: label(name, leaks) for name, leaks in evaluation.selections.items()}
    found = {labels[name]: figures(evaluation, name, bootstrap) for name in labels}

    def table(title: str, columns: dict[str, str]) -> Table:
        present = {name: header for name, header in columns.items() if all(name in row for row in found.values())}
        rows = [
            (name, *(row[column].to_text(FORMATS.get(column, ".4g")) for column in present))
            for name, row in found.items()
        ]
        return Table(title, ("", *present.values()), rows)

    tokens, where = evaluation.of(BASELINE)[["num_tokens", "num_tokens_where_selected"]].sum().astype(int)
    interval = f"{LEVEL:.0%} intervals over {len(evaluation.documents)} documents"
    return [
        table(f"perplexity on {tokens:,} tokens, {interval}", PERPLEXITIES),
        table(
            f"against the baseline on the same documents; spans are selected for {where:,} of the tokens"
            f"{among(evaluation.config.max_candidates)}",
            COMPARISONS,
        ),
        Table(
            "cost per token: of the model that predicts it, and of the selection",
            ("", "model, FLOPs", "selection, FLOPs", "model, s", "selection, s"),
            [(labels[name], *(f"{cost:.3g}" for cost in evaluation.costs(name))) for name in labels],
        ),
    ]


def to_dict(evaluation: Evaluation) -> dict[str, Any]:
    """All figures, for JSON, in which NaN is null."""
    bootstrap = Bootstrap(len(evaluation.documents))
    counts = evaluation.of(BASELINE)[["num_tokens", "num_tokens_where_selected"]].astype(int)

    def saved(name: str) -> dict[Any, Any]:
        found = {key: dataclasses.asdict(value) for key, value in figures(evaluation, name, bootstrap).items()}
        return {
            "name": name,
            "leaks_the_future": evaluation.selections[name],
            **{key: {end: x if math.isfinite(x) else None for end, x in ends.items()} for key, ends in found.items()},
            "cost_per_token": evaluation.costs(name).to_dict(),
            **evaluation.of(name)[["nats", "nats_where_selected"]].to_dict("list"),
        }

    return evaluation.extra | {
        "config": dataclasses.asdict(evaluation.config),
        "level": LEVEL,
        "documents": evaluation.documents.join(counts).to_dict("records"),
        "selections": list(map(saved, evaluation.selections)),
    }


def write(evaluation: Evaluation, folder: Path) -> None:
    """Writes evaluation.json and evaluation.md into a folder, which is made if needed."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "evaluation.json").write_text(json.dumps(to_dict(evaluation), indent=2) + "\n")
    (folder / "evaluation.md").write_text("\n".join(table.to_markdown() for table in tables(evaluation)))
