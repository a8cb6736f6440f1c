"""The results of an evaluation of ancient history, with intervals over documents: tables, and JSON."""

import dataclasses
import json
import math
from typing import Any

import numpy as np
from etils import epath

from meliad_like.data.readers import label
from meliad_like.history.evaluation import BASELINE, Evaluation, Sums
from meliad_like.tables import Table

NUM_RESAMPLES = 10_000
LEVEL = 0.95
ORACLE = "score_oracle"
FORMS = {"change": "+.2%", "change_where_selected": "+.2%", "share_of_oracle": ".0%"}
"""Format specifications of the figures that are percentages."""

DOCUMENT_COLUMNS = ("num_tokens", "num_tokens_where_selected", "num_words", "num_bytes")


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
    """A figure over all documents, and its interval."""

    value: float
    low: float
    high: float

    def to_text(self, form: str = ".4g") -> str:
        """The value with its interval, if there is one; `form` is a format specification."""
        if math.isnan(self.value):
            return "-"
        if math.isnan(self.low):
            return f"{self.value:{form}}"
        return f"{self.value:{form}} ({self.low:{form}} to {self.high:{form}})"


def figures(evaluation: Evaluation, sums: Sums, bootstrap: Bootstrap) -> dict[str, Estimate]:
    """Perplexities of one selection, and their comparison with the baseline on the same documents.

    `change` is the relative change of the perplexity per token against the baseline; `change_where_selected` that of
    the targets for which spans are selected; `share_of_oracle` is the gain in nats divided by the score oracle's.
    """
    baseline = evaluation[BASELINE]

    def ratio(numerators: np.ndarray, denominators: np.ndarray) -> Estimate:
        total = denominators.sum()
        value = float(numerators.sum() / total) if total else math.nan
        return Estimate(value, *bootstrap(numerators, denominators))

    def exponential(estimate: Estimate, less: float = 0.0) -> Estimate:
        with np.errstate(over="ignore"):
            return Estimate(*(float(np.exp(x)) - less for x in dataclasses.astuple(estimate)))

    tokens, tokens_where_selected = evaluation.num_tokens, evaluation.num_tokens_where_selected
    found = {
        "perplexity": exponential(ratio(sums.nats, tokens)),
        "word_perplexity": exponential(ratio(sums.nats, evaluation.num_words)),
        "byte_perplexity": exponential(ratio(sums.nats, evaluation.num_bytes)),
        "perplexity_where_selected": exponential(ratio(sums.nats_where_selected, tokens_where_selected)),
        "change": exponential(ratio(sums.nats - baseline.nats, tokens), less=1.0),
        "change_where_selected": exponential(
            ratio(sums.nats_where_selected - baseline.nats_where_selected, tokens_where_selected), less=1.0
        ),
    }
    if any(other.name == ORACLE for other in evaluation.selections):
        found["share_of_oracle"] = ratio(baseline.nats - sums.nats, baseline.nats - evaluation[ORACLE].nats)
    return found


def costs(evaluation: Evaluation, sums: Sums) -> dict[str, float]:
    """Operations and seconds per predicted token: of the model that predicts, and of the selection."""
    tokens = int(evaluation.num_tokens.sum())
    return {
        "model_flops": sums.cost.num_windows * evaluation.flops_per_window / tokens,
        "selection_flops": sums.cost.flops / tokens,
        "model_seconds": sums.cost.num_windows * evaluation.seconds_per_window / tokens,
        "selection_seconds": sums.cost.seconds / tokens,
    }


def among(max_candidates: int | None) -> str:
    """A remark on `HistoryConfig.max_candidates` for the title of a table, beginning with a semicolon."""
    if max_candidates is None:
        return ""
    return f"; the score oracle and selectors choose among {max_candidates:,} random candidates of a stride"


def tables(evaluation: Evaluation) -> list[Table]:
    """Perplexities of all selections, their comparison with the baseline, and their costs."""
    bootstrap = Bootstrap(len(evaluation.names))
    found = {
        label(sums.name, sums.leaks_the_future): figures(evaluation, sums, bootstrap) for sums in evaluation.selections
    }

    def table(title: str, columns: dict[str, str]) -> Table:
        present = {name: header for name, header in columns.items() if all(name in row for row in found.values())}
        rows = [
            (name, *(row[column].to_text(FORMS.get(column, ".4g")) for column in present))
            for name, row in found.items()
        ]
        return Table(title, ("", *present.values()), rows)

    tokens, where = int(evaluation.num_tokens.sum()), int(evaluation.num_tokens_where_selected.sum())
    interval = f"{LEVEL:.0%} intervals over {len(evaluation.names)} documents"
    spent = {label(sums.name, sums.leaks_the_future): costs(evaluation, sums) for sums in evaluation.selections}
    return [
        table(
            f"perplexity on {tokens:,} tokens, {interval}",
            {"perplexity": "per token", "word_perplexity": "per word", "byte_perplexity": "per byte"},
        ),
        table(
            f"against the baseline on the same documents; spans are selected for {where:,} of the tokens"
            f"{among(evaluation.config.max_candidates)}",
            {
                "change": "change of the perplexity",
                "perplexity_where_selected": "perplexity where selected",
                "change_where_selected": "its change",
                "share_of_oracle": "share of the score oracle's gain",
            },
        ),
        Table(
            "cost per token: of the model that predicts it, and of the selection",
            ("", "model, FLOPs", "selection, FLOPs", "model, s", "selection, s"),
            [(name, *(f"{value:.3g}" for value in row.values())) for name, row in spent.items()],
        ),
    ]


def to_dict(evaluation: Evaluation) -> dict[str, Any]:
    """All figures, for JSON, in which NaN is null."""
    bootstrap = Bootstrap(len(evaluation.names))
    return evaluation.extra | {
        "config": dataclasses.asdict(evaluation.config),
        "level": LEVEL,
        "documents": [
            {"name": name, **{column: int(getattr(evaluation, column)[index]) for column in DOCUMENT_COLUMNS}}
            for index, name in enumerate(evaluation.names)
        ],
        "selections": [
            {
                "name": sums.name,
                "leaks_the_future": sums.leaks_the_future,
                **{
                    name: {key: _finite(value) for key, value in dataclasses.asdict(estimate).items()}
                    for name, estimate in figures(evaluation, sums, bootstrap).items()
                },
                "cost_per_token": costs(evaluation, sums),
                "nats": sums.nats.tolist(),
                "nats_where_selected": sums.nats_where_selected.tolist(),
            }
            for sums in evaluation.selections
        ],
    }


def write(evaluation: Evaluation, folder: epath.PathLike) -> None:
    """Writes evaluation.json and evaluation.md into a folder, which is made if needed."""
    folder = epath.Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "evaluation.json").write_text(json.dumps(to_dict(evaluation), indent=2) + "\n")
    (folder / "evaluation.md").write_text("\n".join(table.to_markdown() for table in tables(evaluation)))


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
