"""`gin/mixer/table.csv` at the sizes of table 1, against a layer more and recurrent states; not a paper's table."""

from dataclasses import replace

from meliad_like.experiments.tables.block_recurrent import MIXERS, SCALES, TABLES
from meliad_like.experiments.tables.table import Panel, Table

BASELINES = [replace(TABLES["table1"].row(name), paper={}) for name in ("slide_13l", "fixed_skip", "lstm_skip")]
PANELS = Panel("bits_per_byte", ""), Panel("step_time", "")
TABLE = Table(
    "mixers", "Mixers and hybrid stacks at the sizes of table 1", (*BASELINES, *MIXERS), PANELS, scales=SCALES
)
