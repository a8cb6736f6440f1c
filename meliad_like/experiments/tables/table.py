"""The parts of a table: rows, which are runs, their figures, pictures of these, and the sizes in which it is made."""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from meliad_like import config
from meliad_like.config import RunConfig, with_changes
from meliad_like.errors import UserError
from meliad_like.planning.shrinking import Divisors


@dataclass(frozen=True)
class Row:
    """One model of a table; its fields are columns of the table's file (`config.read_table`)."""

    name: str
    """The name of the row for `--row`."""
    label: str
    """The name of the row in the paper."""
    gin_file: str
    """The name of the row for `--gin_file`, which is the run at the paper's size."""
    baseline: str = ""
    """The row that it is compared with: by step time, and by the table's `compared` figure within a seed."""
    trained_as: str = ""
    """The row whose training this row shares; it is evaluated by itself."""
    extra: bool = False
    """If true, scales below the paper's leave this row out unless it is named; `yes`, or an empty cell."""
    vocabulary_size: int = 0
    """The size of the row's own vocabulary; 0: it has the task's."""
    paper: Mapping[str, float] = field(default_factory=dict)
    """The paper's figures by the names of its columns, which are all other columns."""

    @property
    def run_name(self) -> str:
        """The name of its training."""
        return self.trained_as or self.name


def read_bindings(name: str) -> dict[str, Any]:
    """The values by `Class.field` in a gin file of this package."""
    return _values(config.read_changes([str(Path(__file__).with_name(f"{name}.gin"))]))


def bound_by(gin_params: Sequence[str]) -> dict[str, Any]:
    """The values that parameters bind, by `Class.field`; macros, which only files read, are left out."""
    return _values(config.read_changes((), [text for text in gin_params if "." in text.partition("=")[0]]))


def _values(changes: config.Changes) -> dict[str, Any]:
    return {key: binding.value for key, binding in changes.bindings.items()}


def read_rows(table: str) -> tuple[Row, ...]:
    """The rows of a table beside the gin files."""
    rows = []
    for name, row in config.read_table(table).items():
        cells = dict(row.cells)
        texts = {column: cells.pop(column, "") for column in ("name", "label", "baseline", "trained_as")}
        extra, size = bool(cells.pop("extra", "")), int(cells.pop("vocabulary_size", 0))
        paper = {column: float(cells[column]) for column in cells if column not in ("files", "bindings", "parameters")}
        rows.append(Row(**texts, gin_file=f"{table}/{name}", extra=extra, vocabulary_size=size, paper=paper))
    return tuple(rows)


def line(rows: Sequence[Row], pattern: str, x: str = "") -> dict[str, float]:
    """The names of the rows that match, with the paper's x: its figure in this column, or the number in the name that
    is the pattern's group."""
    matches = ((row, match) for row in rows if (match := re.fullmatch(pattern, row.name)))
    return {row.name: row.paper.get(x, math.nan) if x else float(match[1]) for row, match in matches}


@dataclass(frozen=True)
class Panel:
    """One plot: a measure of the rows."""

    measure: str
    """A column of `report.Results.means`."""
    paper: str
    """The paper's column of that measure; "": the paper gives no numbers."""
    x: str = ""
    """The measure on the horizontal axis; "": no lines, but one place for each row."""
    lines: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """The names of the rows on each line, by its label, with the paper's x, or NaN; a line of one row is a point."""
    reference: str = ""
    """A row whose measure is drawn as a horizontal line."""
    logarithmic: bool = True
    """Whether x has a logarithmic axis."""
    x_label: str = ""
    """The label of x; "": its name."""


@dataclass(frozen=True)
class Scale(Divisors):
    """The divisors by which the rows of a table are smaller than in the paper, all by the same rule."""

    bindings: Mapping[str, Any] = field(default_factory=dict)
    """Values by `Class.field` that replace those of the files."""
    largest_vocabulary: int | None = None
    """Rows with larger vocabularies of their own are only made if they are named."""
    keep_share_of_warmup: bool = False
    """Whether the warmup keeps its share of the steps, as stages do where the number of steps is not from `targets`."""
    lanes: int = 1
    """Divisor of the number of lanes; at least one lane is left."""
    targets: int = 0
    """The approximate number of targets of each training, if it is not 0: rows whose windows repeat more tokens have
    more steps."""
    max_tokens: int | None = None
    """The most tokens to evaluate, of the beginnings of documents; None: all."""
    timed_tokens: int = 1000
    """The number of tokens that are evaluated one by one, for the time alone."""


@dataclass(frozen=True)
class Table:
    """A table of a paper: its rows, figures and pictures."""

    name: str
    title: str
    rows: tuple[Row, ...]
    panels: tuple[Panel, ...] = ()
    compared: str = "bits_per_byte"
    """The figure whose `difference` is a row's value minus its baseline's."""
    scales: Mapping[str, Scale] = field(default_factory=dict)
    """The sizes in which it can be made."""
    by_protocol: bool = False
    """Whether rows are evaluated as in the Shortformer paper, with all documents as one stream, rather than by document
    (`evaluations`)."""
    against: str = ""
    """A description of the baselines, if every row has one of its own."""
    task: str = "task/standard_library.gin"
    """The gin file of the documents, unless the user names another."""
    is_map: bool = False
    """Whether its documents are those of `memory_tasks`, so that the report has a memory map of each row."""
    pretrained: bool = False
    """Whether training begins with a pretrained model, whose folder the user gives."""

    def row(self, name: str) -> Row:
        """The row of this name, or UserError."""
        if (row := next((row for row in self.rows if row.name == name), None)) is None:
            raise UserError(f"{self.name} has no row {name}; it has {', '.join(row.name for row in self.rows)}")
        return row

    @property
    def paper_columns(self) -> list[str]:
        return list(dict.fromkeys(column for row in self.rows for column in row.paper))


@dataclass(frozen=True)
class Settings:
    """The settings with which a table is made, common to all tables."""

    scale_name: str
    gin_files: tuple[str, ...]
    """The task, and options for all rows."""
    gin_params: tuple[str, ...]
    """Bindings for all rows; they are not scaled."""
    folder: Path
    """The folder of the runs and the results."""
    row_names: tuple[str, ...] = ()
    """Names of rows; none: all rows of the scale."""
    split: str = "test"
    max_tokens: int | None = None
    """The most tokens of the split to evaluate; None: as the scale says."""
    load_dir: str = ""
    """Checkpoint folder of the pretrained model, for a table whose rows begin with one."""

    def store(self, run: RunConfig) -> str:
        """The token store of a run. With a pretrained model, documents are in another vocabulary than the task's."""
        if not self.load_dir or "ReaderConfig.store" in bound_by(self.gin_params):
            return run.data.store
        return f"{run.data.store}_{Path(self.load_dir).name}"


def configure(
    row: Row,
    scale: Scale,
    gin_files: Sequence[str] = (),
    gin_params: Sequence[str] = (),
    fixed: Mapping[str, Any] | None = None,
) -> RunConfig:
    """The run of a row at a scale.

    `gin_files` are the task and options for all rows, with the lengths of the paper's size, as the row itself.
    Values in `fixed`, by `Class.field`, win over files, `gin_params` over everything; neither is scaled.
    """
    files, fixed, bound = [row.gin_file, *gin_files], dict(fixed or {}), bound_by(gin_params)
    if row.vocabulary_size:
        # A vocabulary that belongs to the row wins over the task's.
        values = config.bound_values(config.parse([row.gin_file]))
        fixed |= {key: value for key, value in values.items() if "Vocabulary" in key or key == "RunConfig.vocabulary"}
    # Macros are parts of files, and scaled with them.
    macros = [param for param in gin_params if "." not in param.partition("=")[0]]
    whole = config.parse(files, macros, fixed)
    values = scale.sizes(whole) | dict(scale.bindings)
    share = (values | bound).get("TrainingConfig.num_steps", whole.training.num_steps) / whole.training.num_steps
    values["StagesConfig.num_steps"] = tuple(max(round(steps * share), 1) for steps in whole.stages.num_steps)
    if scale.keep_share_of_warmup:
        values["ScheduleConfig.warmup_steps"] = int(whole.schedule.warmup_steps * share)
    if scale.segments > 1 or scale.lanes > 1:
        # A segment that the user bound is the one whose lanes count.
        segment = (values | bound)["ReaderConfig.segment_length"]
        values["ReaderConfig.tokens_per_step"] = segment * max(whole.data.num_lanes // scale.lanes, 1)
    run = config.parse(files, gin_params, values | fixed)
    if scale.targets and "TrainingConfig.num_steps" not in bound:
        window, overlap = run.model.window_length, run.data.training_overlap(run.model.overlap)
        new = run.data.tokens_per_step * (window - overlap) / window
        run = with_changes(run, {"training.num_steps": math.ceil(scale.targets / new)})
    return with_changes(run, {"data.store": f"{run.data.store}_{row.name}"}) if row.vocabulary_size else run
