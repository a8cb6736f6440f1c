"""The tables, by the names of their subjects. Rows with their gin files and published figures: TABLE.csv.

table            the classes of a row, a picture and a table
block_recurrent  tables 1, 3, 4 and 5 of Block-Recurrent Transformers
shortformer      tables 1 to 5 and figure 3 of Shortformer
melodi           the table of MELODI, and ablations
memory_map       maps of what memories hold
recurrence       tables 1 and 2 and figures 4 and 5 of Adding Recurrence to Pretrained Transformers
"""

from meliad_like.experiments.tables import block_recurrent, melodi, memory_map, recurrence, shortformer
from meliad_like.experiments.tables.table import Grid, Panel, Row, Scale, Table, configure, read_csv

__all__ = ["SUBJECTS", "TABLES", "Grid", "Panel", "Row", "Scale", "Table", "configure", "read_csv"]

TABLES = block_recurrent.TABLES
"""The tables of the Block-Recurrent paper."""
SUBJECTS = TABLES | {module.TABLE.name: module.TABLE for module in (shortformer, recurrence, melodi, memory_map)}
"""All tables of the command."""
