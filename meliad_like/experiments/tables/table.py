"""What a table is made of: rows that are runs, figures of each, and pictures of them."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from meliad_like.errors import UserError
from meliad_like.experiments.scales import SCALES, Scale

MEASURES = (
    *("segment_length", "window_length", "num_states", "parameters", "bits_per_token", "bits_per_byte", "difference"),
    *("step_time", "milliseconds", "share_of_peak", "training_flops_per_token", "memory_bytes"),
)
"""Figures that a table has if it doesn't say otherwise, by their names in `report.COLUMNS`."""


@dataclass(frozen=True)
class Row:
    """One model of a table."""

    name: str
    """As `--row` takes it."""
    label: str
    """As the paper calls it."""
    file: str
    """Its gin file, at the paper's size."""
    baseline: str
    """The row that it is compared with: by step time, and by bits per byte within a seed."""
    paper: Mapping[str, float] = field(default_factory=dict)
    """The paper's figures by the names of its columns."""
    shares: str = ""
    """The row whose runs are this one's as well, because it is the same model."""
    series: str = ""
    """The line of the picture that it is a point of."""
    vocabulary_size: int = 0
    """Of a row that has a vocabulary of its own; 0: the task's."""
    more_files: tuple[str, ...] = ()
    """Further gin files, of a row that is made of several."""
    trained_as: str = ""
    """The row whose training is this one's as well; it is evaluated in its own way."""
    extra: bool = False
    """Whether it is a row of the whole paper alone: at smaller scales it is made when it is named."""

    @property
    def run_name(self) -> str:
        """Of the training."""
        return self.trained_as or self.shares or self.name

    @property
    def files(self) -> tuple[str, ...]:
        """All its gin files."""
        return (self.file, *self.more_files)


@dataclass(frozen=True)
class Panel:
    """One picture: a measure of some series of rows."""

    measure: str
    """A figure of `results.RowResult`."""
    paper: str
    """The paper's column of that measure; "": it gives no numbers."""
    x: str = ""
    """What the series run over: a figure as well; "": no lines, but one place for each row."""
    series: tuple[str, ...] = ()
    paper_x: Mapping[str, float] = field(default_factory=dict)
    """Where the paper's rows lie; those that it says nothing of are not here."""
    comparable: bool = False
    """Whether the paper's figures and ours are of the same thing."""
    lines: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Further series: the names of their rows."""
    points: Mapping[str, str] = field(default_factory=dict)
    """Rows that are drawn beside the series, each for itself, and how they are called there."""
    reference: str = ""
    """A row whose height is a line across the picture."""
    front: bool = False
    """Whether to mark the rows that no other row beats both in x and in the measure (less is better)."""
    logarithmic: bool = True
    """The axis of x."""
    x_label: str = ""
    """What x is called there; "": by its name."""
    unit: float = 1.0
    """What our x is divided by."""


@dataclass(frozen=True)
class Grid:
    """Figures of some rows by two of their properties, the paper's in brackets."""

    title: str
    measure: str
    paper: str
    rows: Mapping[str, Mapping[str, str]]
    """By the heads of line and column: the row's name."""


@dataclass(frozen=True)
class Table:
    name: str
    title: str
    rows: tuple[Row, ...]
    panels: tuple[Panel, ...]
    measures: tuple[str, ...] = MEASURES
    """Its figures."""
    grids: tuple[Grid, ...] = ()
    scales: Mapping[str, Scale] = field(default_factory=lambda: SCALES)
    """How it is made smaller."""
    by_protocol: bool = False
    """Whether rows are evaluated as the Shortformer paper does, all documents as one stream, rather than by document
    (`evaluations`)."""
    against: str = ""
    """What rows are compared with, in words, where every row has a baseline of its own."""
    pretrained: bool = False
    """Whether training begins with a pretrained model, whose folder the user names."""

    def row(self, name: str) -> Row:
        """
        Raises:
          UserError: there is none of this name.
        """
        for row in self.rows:
            if row.name == name:
                return row
        raise UserError(f"{self.name} has no row {name}; it has {', '.join(row.name for row in self.rows)}")

    @property
    def paper_columns(self) -> list[str]:
        return list(dict.fromkeys(column for row in self.rows for column in row.paper))
