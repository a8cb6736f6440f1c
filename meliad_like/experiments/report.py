"""The report of a table's runs, from their folders: means over the seeds, as Markdown, CSV and for the terminal."""

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from meliad_like.errors import UserError
from meliad_like.experiments.step_time import relative_time
from meliad_like.experiments.tables import Row, Table
from meliad_like.resumable import read_json
from meliad_like.studies.frames import table_of, with_error
from meliad_like.tables import Table as TextTable

RESULT_NAME, TIMING_NAME = "result.json", "step_time.json"
COLUMNS = pd.read_csv(Path(__file__).parent / "tables" / "columns.csv", index_col="measure")
"""The header of each measure, the format of its numbers, whether it is in millions, whether it has a standard error,
and the names of the tables that have it as a column."""


class Results(NamedTuple):
    """The figures of a table's rows, as far as they are known."""

    table: Table
    rows: Sequence[Row]
    """The rows to report."""
    runs: pd.DataFrame
    """One line for each row and seed (the index): figures of the evaluation, and facts of the config."""
    means: pd.DataFrame
    """The mean over the seeds of each measure (column) and row (index). Measures that only timed steps have come from
    these. NaN where a figure is missing, or was not finite in one of the runs."""
    errors: pd.DataFrame
    """Standard errors of the means; NaN of fewer than two runs."""
    timed_on: Sequence[str]
    """The devices that steps were timed on."""

    @property
    def measures(self) -> list[str]:
        """The columns of figures, in the order of COLUMNS."""
        return [str(name) for name, names in COLUMNS["tables"].items() if self.table.name in str(names).split()]

    @property
    def frame(self) -> pd.DataFrame:
        """One line for each row, with numbers: means of the measures, their standard errors, the paper's figures."""
        names = [row.name for row in self.rows]
        frame = pd.DataFrame({"row": names, "model": [row.label for row in self.rows]}, index=names)
        for measure in self.measures:
            frame[measure] = self.means[measure]
            if COLUMNS["with_error"][measure]:
                frame[f"{measure}_error"] = self.errors[measure]
        frame["runs"] = self.runs.groupby(level="row").size().reindex(names, fill_value=0)
        papers = pd.DataFrame([row.paper for row in self.rows], names, self.table.paper_columns)
        return pd.concat([frame, papers.add_prefix("paper: ")], axis=1)

    def for_terminal(self) -> TextTable:
        """The rows that have figures, and of these the losses and times: few enough columns for a terminal."""
        few = [name for name in self.measures if COLUMNS["with_error"][name] or name == "step_time"]
        frame = self.frame[lambda rows: (rows["runs"] > 0) | rows[few].notna().any(axis=1)]
        return _text(frame, [name for name in few if frame[name].notna().any()], [])._replace(title=self.table.title)

    def to_markdown(self, scale: str) -> str:
        """All figures, below the settings that the runs have in common."""
        explained = (
            "± is the standard error of the mean over the runs. `-` is a figure that is missing, or that was not "
            "finite in one of the runs."
        )
        if baselines := _baselines(self):
            times = " and step times" if "step_time" in self.measures else ""
            differences = f"Differences in {COLUMNS['header'][self.table.compared]} (of runs with the same seed){times}"
            explained = f"{differences} are relative to: {baselines}. {explained}"
        table = _text(self.frame, self.measures, self.table.paper_columns).to_markdown().rstrip()
        return "\n\n".join([f"# {self.table.title}", *self.notes(scale), table, explained]) + "\n"

    def notes(self, scale: str) -> list[str]:
        """The documents, steps, seeds and machines that all runs have in common."""
        runs, lines = self.runs, []
        if not runs.empty:
            one, whole = runs.iloc[0], pd.isna(runs["max_tokens"].iloc[0])
            documents = f"{one['num_documents']:,} documents" if whole else f"{one['num_tokens']:,} tokens"
            size = f", {one['num_bytes']:,} bytes" if one["num_bytes"] else ""
            seeds = ", ".join(map(str, sorted(runs.index.unique("seed"))))
            lengths = [
                f"{steps:,} steps of {tokens:,} tokens: {', '.join(group.index.unique('row'))}"
                for (steps, tokens), group in runs.groupby(["num_steps", "tokens_per_step"])
            ]
            lines += [
                f"Scale {scale}: {_span(runs['num_steps'])} steps of {_span(runs['tokens_per_step'])} tokens; "
                f"seeds {seeds}. Evaluated on {'all' if whole else 'a part'} of {one['split']}: {documents}{size}.",
                f"Trained on {', '.join(sorted(runs['device'].unique()))}; a run took {_span(runs['seconds'])} s.",
                *([f"**Not all rows were trained for as long:** {'; '.join(lengths)}."] if len(lengths) > 1 else []),
            ]
        return lines + ([f"Step times: {', '.join(self.timed_on)}."] if self.timed_on else [])


def gather(table: Table, folder: Path, seeds: Iterable[int], split: str, requested: Sequence[Row] = ()) -> Results:
    """Reads every result that is there, for every row of the table, of runs with these seeds evaluated on the split.

    Rows that have no result are reported as missing if they are `requested`; by default all but the extra ones are.
    """
    figures = {}
    for row, seed in [(row, seed) for seed in seeds for row in table.rows]:
        result = read_result(folder, row, seed)
        if split in (splits := result.pop("splits")):
            del result["seed"]
            figures[row.name, seed] = result | {"split": split, "max_tokens": None} | splits[split]
    if len({store for each in figures.values() if (store := each.pop("store", None))}) > 1:
        raise UserError(f"rows in {folder} have read different versions of a token store: train all of them with one")
    runs = pd.DataFrame(list(figures.values()), index=pd.MultiIndex.from_tuples(figures, names=["row", "seed"]))
    if not runs.empty:
        values = runs[table.compared].astype(float)
        baselines = [(table.row(name).baseline, seed) for name, seed in figures]
        difference = values - values.reindex(baselines).to_numpy()
        runs["difference"] = difference.where([place != baseline for place, baseline in zip(figures, baselines)])
    # Of pandas a type checker sees a union of all that a method may return.
    by_row: Any = runs.select_dtypes("number").groupby(level="row")
    # A figure that was not finite in one of the runs is NaN there, and so is its mean.
    means, errors = by_row.mean(skipna=False), by_row.sem(skipna=False)
    timing = read_timing(folder)
    means = means.combine_first(pd.DataFrame({row.name: _timed(timing, row, table) for row in table.rows}).T)
    names = [row.name for row in table.rows]
    means, errors = (
        each.reindex(names, columns=each.columns.union(COLUMNS.index)).astype(float) for each in (means, errors)
    )
    means[COLUMNS.index[COLUMNS["in_millions"]]] /= 1e6
    trained = {row for row, _ in figures}
    rows = [row for row in table.rows if row.name in trained or (row in requested if requested else not row.extra)]
    devices = sorted({timing[row.run_name]["device"] for row in table.rows if row.run_name in timing})
    return Results(table, rows, runs, means, errors, devices)


def read_timing(folder: Path) -> dict[str, Any]:
    """The measured step times by row; empty if nothing was timed."""
    path = folder / TIMING_NAME
    return read_json(path)["rows"] if path.exists() else {}


def result_file(folder: Path, row: Row, seed: int) -> Path:
    """The file of a row's figures, in the folder of its run."""
    return folder / f"{row.run_name}-{seed}" / (f"{row.name}.json" if row.trained_as else RESULT_NAME)


def scores_file(folder: Path, row: Row, seed: int, split: str) -> Path:
    """The file of the evaluation of a row's documents, one by one."""
    return folder / f"{row.run_name}-{seed}" / (f"{split}_{row.name}.json" if row.trained_as else f"{split}.json")


def read_result(folder: Path, row: Row, seed: int) -> dict[str, Any]:
    """The contents of `result_file`; without one, no `splits`."""
    path = result_file(folder, row, seed)
    return read_json(path) if path.exists() else {"splits": {}}


def _timed(timing: Mapping[str, Any], row: Row, table: Table) -> Mapping[str, float]:
    run, baseline = row.run_name, table.row(row.baseline).run_name
    if run not in timing:
        return {}
    seconds = float(np.median(timing[run]["seconds"]))
    numbers: dict[str, float] = {name: value for name, value in timing[run].items() if isinstance(value, int | float)}
    speed = numbers.get("tokens_per_step", math.nan) / seconds
    relative = relative_time(timing, run, baseline) if baseline in timing else math.nan
    return numbers | {"training_tokens_per_second": speed, "milliseconds": 1e3 * seconds, "step_time": relative}


def _text(frame: pd.DataFrame, measures: Sequence[str], papers: Sequence[str]) -> TextTable:
    columns = {"model": frame["model"]}
    for measure in measures:
        errors = frame.get(f"{measure}_error", pd.Series(math.nan, frame.index))
        pairs, form = zip(frame[measure], errors, strict=True), COLUMNS["form"][measure]
        columns[COLUMNS["header"][measure]] = [with_error(*pair, form) for pair in pairs]
    columns["runs"] = frame["runs"]
    columns |= {f"paper: {name}": frame[f"paper: {name}"] for name in papers}
    return table_of(pd.DataFrame(columns), formats={f"paper: {name}": ",.10g" for name in papers})


def _baselines(results: Results) -> str:
    """The baselines with which rows are compared, by the labels of both where there are several."""
    labels = {row.name: row.label for row in results.table.rows}
    compared: dict[str, list[str]] = {}
    for row in results.rows:
        if row.baseline != row.name:
            compared.setdefault(labels[row.baseline], []).append(row.label)
    if results.table.against or len(compared) == 1:
        return results.table.against or next(iter(compared))
    return "; ".join(f"{baseline} ({' / '.join(names)})" for baseline, names in compared.items())


def _span(values: pd.Series) -> str:
    low, high = values.min(), values.max()
    return f"{low:,.0f}" if low == high else f"{low:,.0f} to {high:,.0f}"
