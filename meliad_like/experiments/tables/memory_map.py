"""Maps of the contents of memories, with documents made for it (`docs/studies.md`); no paper has this table."""

from meliad_like.experiments.tables.table import Scale, Table, read_rows

TABLE = Table(
    "memory_map",
    "What is remembered, by number and distance",
    read_rows("memory_map/table"),
    (),
    compared="accuracy",
    # The sizes of the gin files are those that are meant.
    scales={"tiny": Scale()},
    task="task/memory_map.gin",
    is_map=True,
)
