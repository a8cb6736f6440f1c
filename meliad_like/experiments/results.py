"""What the runs of a table left in their folders, gathered by row."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from meliad_like.experiments.jobs import result_name
from meliad_like.experiments.step_time import relative_time
from meliad_like.experiments.tables import Row, Table

STEP_TIME_NAME = "step_time.json"
NOTHING: Mapping[str, Any] = {}


@dataclass(frozen=True)
class RowResult:
    """A row's figures, as far as they are there."""

    row: Row
    runs: Mapping[int, Mapping[str, float]]
    """By seed: the figures of the run's evaluation, and what is known of its config (`jobs.facts`)."""
    timed: Mapping[str, Any]
    """What `step_time.time_in_turn` found, and `step_time` relative to the baseline; may be empty."""

    def values(self, measure: str) -> np.ndarray:
        """float64[seeds]: of the runs that have it; NaN where it was not finite, which no mean leaves out."""
        return np.array([run[measure] for run in self.runs.values() if measure in run], np.float64)

    def mean(self, measure: str) -> float:
        """Over the seeds, or of the timing; NaN where there is neither."""
        values = self.values(measure)
        return float(values.mean()) if values.size else float(self.timed.get(measure, math.nan))

    def error(self, measure: str) -> float:
        """Standard error of the mean over the seeds; NaN of fewer than two."""
        return standard_error(self.values(measure))


def gather(table: Table, folder: Path, seeds: Sequence[int], split: str) -> list[RowResult]:
    """Reads every result that is there, for every row of the table.

    Args:
      table: which rows.
      folder: the table's, in which every run has one.
      seeds: whose runs to look for.
      split: whose evaluation.
    """
    timing = read_timing(folder)
    return [
        RowResult(
            row,
            {seed: figures for seed in seeds if (figures := _figures(folder, row, seed, split))},
            _timed(timing, row, table),
        )
        for row in table.rows
    ]


def read_timing(folder: Path) -> dict[str, Any]:
    """What `step_time.time_in_turn` found, by row; empty if nothing was timed."""
    return _read(folder / STEP_TIME_NAME).get("rows", {})


def run_folder(folder: Path, row: Row, seed: int) -> Path:
    """The working folder of a run."""
    return folder / f"{row.run_name}-{seed}"


def difference(results: Sequence[RowResult], result: RowResult, measure: str) -> np.ndarray:
    """float64[seeds]: a row minus its baseline, within every seed that both have."""
    baseline = next(other for other in results if other.row.name == result.row.baseline)
    pairs = [(run, baseline.runs[seed]) for seed, run in result.runs.items() if seed in baseline.runs]
    mine, theirs = (np.array([pair[i][measure] for pair in pairs], np.float64) for i in (0, 1))
    return mine - theirs


def standard_error(values: np.ndarray) -> float:
    """Of the mean; NaN of fewer than two."""
    return float(values.std(ddof=1) / math.sqrt(len(values))) if len(values) > 1 else math.nan


def _figures(folder: Path, row: Row, seed: int, split: str) -> dict[str, Any]:
    result = _read(run_folder(folder, row, seed) / result_name(row))
    if split not in result.get("splits", NOTHING):
        return {}
    return {key: value for key, value in result.items() if key != "splits"} | {"split": split} | result["splits"][split]


def _timed(timing: Mapping[str, Any], row: Row, table: Table) -> dict[str, Any]:
    mine, baseline = row.run_name, table.row(row.baseline).run_name
    if mine not in timing:
        return {}
    relative = {"step_time": relative_time(timing, mine, baseline)} if baseline in timing else {}
    milliseconds = 1e3 * float(np.median(timing[mine]["seconds"]))
    speed = {"training_tokens_per_second": 1e3 * timing[mine].get("tokens_per_step", math.nan) / milliseconds}
    return {**timing[mine], **relative, **speed, "milliseconds": milliseconds}


def _read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text()) if path.exists() else {}
