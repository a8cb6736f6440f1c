"""A table as Markdown, as CSV, and as a picture, with the paper's own figures beside ours."""

import csv
import math
from collections.abc import Iterable, Sequence
from pathlib import Path

from meliad_like.experiments.pictures import draw
from meliad_like.experiments.results import RowResult, difference, standard_error
from meliad_like.experiments.tables import Grid, Table

__all__ = ["draw", "notes", "to_markdown", "write_csv"]

# Header of a measure, and how a number is written. What a run measures has a standard error beside it.
COLUMNS: dict[str, tuple[str, str]] = {
    "segment_length": ("segment", "{:,.0f}"),
    "window_length": ("window", "{:,.0f}"),
    "cache_length": ("cache", "{:,.0f}"),
    "overlap": ("overlap", "{:,.0f}"),
    "share_of_first_stage": ("first stage", "{:.0%}"),
    "num_states": ("states", "{:,.0f}"),
    "vocabulary_size": ("vocabulary", "{:,.0f}"),
    "parameters": ("parameters", "{:,.0f}"),
    "num_tokens": ("token count", "{:,.0f}"),
    "tokens_per_word": ("scale factor", "{:.4f}"),
    "bits_per_token": ("bits per token", "{:.4f}"),
    "word_perplexity": ("word perplexity", "{:,.2f}"),
    "perplexity": ("perplexity", "{:,.4g}"),
    "sliding_perplexity": ("perplexity, sliding", "{:,.4g}"),
    "bits_per_byte": ("bits per byte", "{:.4f}"),
    "sliding_bits_per_byte": ("bits per byte, sliding", "{:.4f}"),
    "difference": ("difference", "{:+.4f}"),
    "step_time": ("step time", "{:.3f}"),
    "milliseconds": ("ms a step", "{:,.1f}"),
    "share_of_peak": ("share of peak", "{:.1%}"),
    "training_flops_per_token": ("MFLOP a token", "{:,.2f}"),
    "memory_bytes": ("memory of a step, MB", "{:,.1f}"),
    "training_tokens_per_second": ("training, tokens/s", "{:,.0f}"),
    "logged_tokens_per_second": ("training, tokens/s", "{:,.0f}"),
    "tokens_per_second": ("tokens/s", "{:,.0f}"),
    "sliding_tokens_per_second": ("sliding, tokens/s", "{:,.0f}"),
    "single_tokens_per_second": ("token by token, tokens/s", "{:,.0f}"),
    "flops_by_the_paper": ("MFLOP a token by the paper's count", "{:,.4g}"),
    "flops_as_counted": ("MFLOP a token as counted", "{:,.4g}"),
    "seconds": ("run, s", "{:,.0f}"),
}
IN_MILLIONS = ("training_flops_per_token", "memory_bytes", "flops_by_the_paper", "flops_as_counted")
WITH_ERROR = (
    "bits_per_token",
    "bits_per_byte",
    "sliding_bits_per_byte",
    "word_perplexity",
    "perplexity",
    "sliding_perplexity",
    "difference",
)


def measures_of(table: Table) -> list[str]:
    return [name for name in COLUMNS if name in table.measures]


def figure(results: Sequence[RowResult], result: RowResult, measure: str) -> tuple[float, float]:
    """Mean and standard error; NaN for what is not known."""
    if measure == "difference":
        if result.row.baseline == result.row.name:
            return math.nan, math.nan
        values = difference(results, result, "bits_per_byte")
        return (float(values.mean()) if values.size else math.nan), standard_error(values)
    mean = result.mean(measure) / (1e6 if measure in IN_MILLIONS else 1)
    return mean, result.error(measure) if measure in WITH_ERROR else math.nan


def notes(results: Sequence[RowResult], scale: str) -> list[str]:
    """Which documents, how long, which seeds, and which machine: what is the same for all runs that are there."""
    runs = [run for result in results for run in result.runs.values()]
    lines = []
    if runs:
        one = runs[0]
        seeds = sorted({int(run["seed"]) for run in runs})
        whole = one.get("max_tokens") is None
        documents = f"{one['num_documents']:,} documents, " if whole else f"{one['num_tokens']:,} tokens, "
        lines += [
            f"Scale {scale}: {_span(run['num_steps'] for run in runs)} steps of "
            f"{_span(run['tokens_per_step'] for run in runs)} tokens; seeds {', '.join(map(str, seeds))}. Evaluated on "
            f"{'all' if whole else 'a part'} of {one['split']}: {documents}{one['num_bytes']:,} bytes.",
            f"Trained on {', '.join(sorted({str(run['device']) for run in runs}))}; a run took "
            f"{min(run['seconds'] for run in runs):,.0f} to {max(run['seconds'] for run in runs):,.0f} s.",
        ]
    if devices := {result.timed["device"] for result in results if result.timed}:
        lines.append(f"Steps were timed in turn on {', '.join(sorted(devices))}.")
    return lines


def to_markdown(table: Table, results: Sequence[RowResult], notes: Sequence[str]) -> str:
    """
    Args:
      table, results: as `gather` gave them.
      notes: said under the title, a line each: which documents, which machine.
    """
    measures = measures_of(table)
    header = ["model", *(COLUMNS[name][0] for name in measures), "runs"]
    header += [f"paper: {name}" for name in table.paper_columns]
    lines = [f"| {' | '.join(header)} |", "|" + "|".join(["---"] + ["---:"] * (len(header) - 1)) + "|"]
    for result in results:
        cells = [result.row.label]
        for measure in measures:
            mean, error = figure(results, result, measure)
            cells.append(_text(mean, COLUMNS[measure][1]) + (f" ± {error:.4f}" if math.isfinite(error) else ""))
        cells.append(str(len(result.runs)))
        paper = (result.row.paper.get(column) for column in table.paper_columns)
        cells += ["" if value is None else f"{value:,.10g}" for value in paper]
        lines.append(f"| {' | '.join(cells)} |")
    pairs = {r.row.name: r.row.baseline for r in results if r.row.baseline != r.row.name}
    labels = {r.row.name: r.row.label for r in results}
    if table.against:
        against = table.against
    elif len(set(pairs.values())) == 1:
        against = labels[next(iter(pairs.values()))]
    else:
        rows_of = {to: [labels[name] for name, other in pairs.items() if other == to] for to in pairs.values()}
        against = "; ".join(f"{labels[to]} ({' / '.join(names)})" for to, names in rows_of.items())
    times = " and step times" if "step_time" in measures else ""
    explained = [
        f"Differences in bits per byte (of runs with the same seed){times} are relative to: {against}.",
        "± is the standard error of the mean over the runs. What isn't there, or was not finite in one of them, is -.",
    ]
    grids = [text for grid in table.grids if (text := _grid(grid, results))]
    return "\n\n".join([f"# {table.title}", *notes, "\n".join(lines), " ".join(explained), *grids]) + "\n"


def write_csv(table: Table, results: Sequence[RowResult], path: Path) -> None:
    """One line for each row, numbers as they are; an empty field is a figure that isn't there."""
    measures = measures_of(table)
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        header = ["row", "model"]
        for measure in measures:
            header += [measure, f"{measure}_error"] if measure in WITH_ERROR else [measure]
        writer.writerow([*header, "runs", *(f"paper: {name}" for name in table.paper_columns)])
        for result in results:
            fields: list[object] = [result.row.name, result.row.label]
            for measure in measures:
                mean, error = figure(results, result, measure)
                numbers = (mean, error) if measure in WITH_ERROR else (mean,)
                fields += [number if math.isfinite(number) else "" for number in numbers]
            fields.append(len(result.runs))
            writer.writerow([*fields, *(result.row.paper.get(column, "") for column in table.paper_columns)])


def _grid(grid: Grid, results: Sequence[RowResult]) -> str:
    """As Markdown, without the lines and columns that have none of our figures; empty if none has any."""
    by_name = {result.row.name: result for result in results}
    form = COLUMNS[grid.measure][1]

    def known(name: str) -> bool:
        return name in by_name and math.isfinite(by_name[name].mean(grid.measure))

    def cell(name: str) -> str:
        if name not in by_name:
            return ""
        result = by_name[name]
        return f"{_text(result.mean(grid.measure), form)} ({result.row.paper[grid.paper]:,.10g})"

    lines = [line for line, cells in grid.rows.items() if any(map(known, cells.values()))]
    heads = next(iter(grid.rows.values()))
    columns = [head for head in heads if any(known(grid.rows[line][head]) for line in lines)]
    if not lines:
        return ""
    table = [["", *columns], ["---", *["---:"] * len(columns)]]
    table += [[line, *(cell(grid.rows[line][head]) for head in columns)] for line in lines]
    title = f"{grid.title} (in brackets the paper's)"
    return "\n\n".join([title, "\n".join(f"| {' | '.join(cells)} |" for cells in table)])


def _span(values: Iterable[int]) -> str:
    values = sorted(set(values))
    return f"{values[0]:,}" if len(values) == 1 else f"{values[0]:,} to {values[-1]:,}"


def _text(value: float, form: str) -> str:
    return form.format(value) if math.isfinite(value) else "-"
