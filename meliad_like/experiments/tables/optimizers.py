"""The files of `gin/optimizer/`: optimizers and schedules for the quickstart's model; not a paper's table."""

from meliad_like.config import about, shipped_files
from meliad_like.experiments.tables.table import Panel, Row, Scale, Table

ROWS = tuple(
    Row(name, about(file), (file,), "adafactor")
    for file in shipped_files()
    if file.startswith("optimizer/") and (name := file.removeprefix("optimizer/").removesuffix(".gin"))
)
TABLE = Table(
    "optimizers",
    "Optimizers of the quick start's model",
    ROWS,
    (Panel("bits_per_byte", ""), Panel("step_time", "")),
    # The sizes of the gin files are those that are meant.
    scales={"tiny": Scale(side_by_side=True)},
    task="task/standard_library_tokens.gin",
)
