"""The table of MELODI (arXiv:2410.03156): memories of about the same size on PG19, and what they cost.

The paper's figures are perplexities of tokens (the T5 vocabulary, or one trained on the data set). It compares models
of about the same memory; operations and step times are columns here too, because its rows need 1.3 to 1.5 times the
operations of a sliding window with as many layers.
"""

from meliad_like.experiments.tables.block_recurrent import SCALES
from meliad_like.experiments.tables.table import Panel, Table, line, read_rows


def _table() -> Table:
    rows = read_rows("melodi/table")
    lines = {
        "MELODI, sizes of S and L": line(rows, r"base|s\d+_l\d+", "memory, numbers"),
        "MELODI, coverage": line(rows, r"cover_(\d+)", "memory, numbers"),
        "dense memory": line(rows, r"dense_\d+k", "memory, numbers"),
        "Transformer-XL": line(rows, "xl", "memory, numbers"),
        "Block-Recurrent": line(rows, "block_recurrent", "memory, numbers"),
    }
    panels = (
        Panel("perplexity", "PG19 T5 perplexity", "memory_numbers", lines),
        Panel("perplexity", "PG19 T5 perplexity", "training_flops_per_token", lines),
    )
    return Table("melodi", "MELODI and memories of the same size", rows, panels, scales=SCALES)


TABLE = _table()
