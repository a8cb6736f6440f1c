"""The table of MELODI (arXiv:2410.03156): memories of about the same size on PG19, and what they cost.

The paper's figures are perplexities of tokens (the T5 vocabulary, or one trained on the data set). It compares models
of about the same memory; operations and step times are columns here too, because its rows need 1.3 to 1.5 times the
operations of a sliding window with as many layers.
"""

from meliad_like.experiments.tables.block_recurrent import SCALES
from meliad_like.experiments.tables.table import Panel, Table, line, read_rows

ROWS = read_rows("melodi/table")
MEMORY = "memory, numbers"
LINES = {
    "MELODI, sizes of S and L": line(ROWS, r"base|s\d+_l\d+", MEMORY),
    "MELODI, coverage": line(ROWS, r"cover_(\d+)", MEMORY),
    "dense memory": line(ROWS, r"dense_\d+k", MEMORY),
    "Transformer-XL": line(ROWS, "xl", MEMORY),
    "Block-Recurrent": line(ROWS, "block_recurrent", MEMORY),
}
COSTS = ("memory_numbers", "training_flops_per_token")
PANELS = tuple(Panel("perplexity", "PG19 T5 perplexity", cost, LINES) for cost in COSTS)
TABLE = Table("melodi", "MELODI and memories of the same size", ROWS, PANELS, scales=SCALES)
