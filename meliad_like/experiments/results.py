"""What the runs of a table left in their folders, gathered by row: means and standard errors over the seeds."""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from meliad_like.experiments.step_time import relative_time
from meliad_like.experiments.tables import Row, Table

RESULT_NAME = "result.json"
STEP_TIME_NAME = "step_time.json"


class Results(NamedTuple):
    """The figures of a table's rows, as far as they are known."""

    rows: Sequence[Row]
    runs: pd.DataFrame
    """One line for each row and seed (the index): figures of the evaluation, and facts of the config."""
    means: pd.DataFrame
    """Over the seeds, by row and measure; of measures that runs don't have, those of the timed steps."""
    errors: pd.DataFrame
    """Standard errors of the means; NaN of fewer than two runs."""
    timed_on: Sequence[str]
    """The devices that steps were timed on."""

    def mean(self, row: Row, measure: str) -> float:
        """NaN for what is not known, or was not finite in one of the runs."""
        return _cell(self.means, row, measure)

    def error(self, row: Row, measure: str) -> float:
        """The standard error of the mean; NaN for what is not known."""
        return _cell(self.errors, row, measure)

    def num_runs(self, row: Row) -> int:
        return list(self.runs.index.get_level_values("row")).count(row.name)


def gather(table: Table, folder: Path, seeds: Iterable[int], split: str) -> Results:
    """Reads every result that is there, for every row of the table, of runs with these seeds evaluated on the split."""
    places = [(row, seed) for seed in seeds for row in table.rows]
    found = {(row.name, seed): _figures(folder, row, seed, split) for row, seed in places}
    found = {place: figures for place, figures in found.items() if figures}
    runs = pd.DataFrame(list(found.values()), index=pd.MultiIndex.from_tuples(found, names=["row", "seed"]))
    by_row = runs.select_dtypes("number").groupby(level="row")
    # A figure that was not finite in one of the runs is NaN there, and so is its mean.
    # Of pandas a type checker sees a union of all that a method may return.
    means: Any
    errors: Any
    means, errors = by_row.mean(skipna=False), by_row.sem(skipna=False)
    if not runs.empty:
        difference = _differences(runs["bits_per_byte"].astype(float), table).groupby(level="row")
        means["difference"], errors["difference"] = difference.mean(skipna=False), difference.sem(skipna=False)
    timing = read_timing(folder)
    timed = pd.DataFrame({row.name: _timed(timing, row, table) for row in table.rows}).T
    devices = sorted({timing[row.run_name]["device"] for row in table.rows if row.run_name in timing})
    return Results(table.rows, runs, means.combine_first(timed), errors, devices)


def _differences(values: pd.Series, table: Table) -> pd.Series:
    """The values of runs minus those of their baselines, for each row and seed for which there are both."""
    baselines = {row.name: row.baseline for row in table.rows}
    names, seeds = (values.index.get_level_values(level) for level in ("row", "seed"))
    compared = pd.MultiIndex.from_arrays([names.map(baselines), seeds])
    known = compared.isin(values.index) & (compared != values.index)
    own: Any = values[known]
    return own - values.reindex(compared[known]).to_numpy()


def read_timing(folder: Path) -> dict[str, Any]:
    """What `step_time.time_in_turn` found, by row; empty if nothing was timed."""
    return _read(folder / STEP_TIME_NAME).get("rows", {})


def result_file(folder: Path, row: Row, seed: int) -> Path:
    """The file of a row's figures, in the folder of its run."""
    return folder / f"{row.run_name}-{seed}" / (f"{row.name}.json" if row.trained_as else RESULT_NAME)


def _figures(folder: Path, row: Row, seed: int, split: str) -> dict[str, Any]:
    result = _read(result_file(folder, row, seed))
    if split not in result.get("splits", {}):
        return {}
    known = {key: value for key, value in result.items() if key not in ("splits", "seed")}
    return known | {"split": split, "max_tokens": None} | result["splits"][split]


def _timed(timing: Mapping[str, Any], row: Row, table: Table) -> Mapping[str, float]:
    mine, baseline = row.run_name, table.row(row.baseline).run_name
    if mine not in timing:
        return {}
    seconds = float(np.median(timing[mine]["seconds"]))
    numbers: dict[str, float] = {name: value for name, value in timing[mine].items() if isinstance(value, int | float)}
    speed = numbers.get("tokens_per_step", math.nan) / seconds
    relative = relative_time(timing, mine, baseline) if baseline in timing else math.nan
    return numbers | {"training_tokens_per_second": speed, "milliseconds": 1e3 * seconds, "step_time": relative}


def _cell(frame: pd.DataFrame, row: Row, measure: str) -> float:
    return float(frame.at[row.name, measure]) if row.name in frame.index and measure in frame else math.nan


def _read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text()) if path.exists() else {}
