"""The tables, by the names of their subjects. Their rows are in tables beside the gin files."""

from meliad_like.experiments.tables import (
    block_recurrent,
    melodi,
    memory_map,
    mixers,
    optimizers,
    recurrence,
    shortformer,
)
from meliad_like.experiments.tables.table import Grid, Panel, Row, Scale, Settings, Table, configure, read_csv

__all__ = ["SUBJECTS", "TABLES", "Grid", "Panel", "Row", "Scale", "Settings", "Table", "configure", "read_csv"]

TABLES = block_recurrent.TABLES
"""The tables of the Block-Recurrent paper."""
SUBJECTS = TABLES | {
    module.TABLE.name: module.TABLE for module in (shortformer, recurrence, melodi, memory_map, mixers, optimizers)
}
"""All tables of the command."""
