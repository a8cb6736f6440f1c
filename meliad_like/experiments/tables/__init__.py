"""The tables, by the names of their subjects. Their rows are in tables beside the gin files."""

from meliad_like.experiments.tables import block_recurrent, melodi, own, recurrence, shortformer
from meliad_like.experiments.tables.table import Panel, Row, Scale, Settings, Table, configure, read_csv

__all__ = ["SUBJECTS", "TABLES", "Panel", "Row", "Scale", "Settings", "Table", "configure", "read_csv"]

TABLES = block_recurrent.TABLES
"""The tables of the Block-Recurrent paper."""
OTHERS = shortformer.TABLE, recurrence.TABLE, melodi.TABLE, *own.OWN
SUBJECTS = TABLES | {table.name: table for table in OTHERS}
"""All tables of the command."""
