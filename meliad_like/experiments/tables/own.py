"""Tables of no paper: mixers at the sizes of table 1, the quickstart's optimizers, and maps of memories.

The rows of mixers stand against a layer more and recurrent states; the documents of maps are made (`docs/studies.md`).
"""

from dataclasses import replace

from meliad_like.experiments.tables.block_recurrent import MIXERS, SCALES, TABLES
from meliad_like.experiments.tables.table import Panel, Scale, Table, read_rows

BASELINES = [replace(TABLES["table1"].row(name), paper={}) for name in ("slide_13l", "fixed_skip", "lstm_skip")]
PANELS = Panel("bits_per_byte", ""), Panel("step_time", "")
AS_IN_FILES = {"tiny": Scale()}
"""The sizes of the gin files are those that are meant."""
OWN = (
    Table("memory_map", "What is remembered, by number and distance", read_rows("memory_map/table"),
          compared="accuracy", scales=AS_IN_FILES, task="task/memory_map.gin", is_map=True),
    Table("mixers", "Mixers and hybrid stacks at the sizes of table 1", (*BASELINES, *MIXERS), PANELS, scales=SCALES),
    Table("optimizers", "Optimizers of the quickstart's model", read_rows("optimizer/table"), PANELS,
          scales=AS_IN_FILES, task="task/standard_library_tokens.gin"),
)  # fmt: skip
