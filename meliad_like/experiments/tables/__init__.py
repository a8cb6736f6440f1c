"""The tables, by the names of their subjects. Their rows are in tables beside the gin files.

Three are of no paper: mixers at the sizes of table 1, against a layer more and recurrent states; the quickstart's
optimizers; and maps of memories, with documents made for them (`docs/studies.md`).
"""

from dataclasses import replace

from meliad_like.experiments.tables import block_recurrent, melodi, recurrence, shortformer
from meliad_like.experiments.tables.block_recurrent import MIXERS, SCALES
from meliad_like.experiments.tables.table import Panel, Row, Scale, Settings, Table, configure, read_rows

__all__ = ["SUBJECTS", "TABLES", "Panel", "Row", "Scale", "Settings", "Table", "configure"]

TABLES = block_recurrent.TABLES
"""The tables of the Block-Recurrent paper."""
BASELINES = [replace(TABLES["table1"].row(name), paper={}) for name in ("slide_13l", "fixed_skip", "lstm_skip")]
PANELS = Panel("bits_per_byte", ""), Panel("step_time", "")
AS_IN_FILES = {"tiny": Scale()}
"""The sizes of the gin files are those that are meant."""
OTHERS = (
    shortformer.TABLE,
    recurrence.TABLE,
    melodi.TABLE,
    Table("memory_map", "What is remembered, by number and distance", read_rows("memory_map/table"),
          compared="accuracy", scales=AS_IN_FILES, task="task/memory_map.gin", is_map=True),
    Table("mixers", "Mixers and hybrid stacks at the sizes of table 1", (*BASELINES, *MIXERS), PANELS, scales=SCALES),
    Table("optimizers", "Optimizers of the quickstart's model", read_rows("optimizer/table"), PANELS,
          scales=AS_IN_FILES, task="task/standard_library_tokens.gin"),
)  # fmt: skip
SUBJECTS = TABLES | {table.name: table for table in OTHERS}
"""All tables of the command."""
