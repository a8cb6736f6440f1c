"""The rows of `gin/optimizer/table.csv`: optimizers and schedules for the quickstart's model; not a paper's table."""

from meliad_like.experiments.tables.table import Panel, Scale, Table, read_rows

TABLE = Table(
    "optimizers",
    "Optimizers of the quickstart's model",
    read_rows("optimizer/table"),
    (Panel("bits_per_byte", ""), Panel("step_time", "")),
    # The sizes of the gin files are those that are meant.
    scales={"tiny": Scale()},
    task="task/standard_library_tokens.gin",
)
