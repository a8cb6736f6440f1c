"""Tables 1, 3, 4 and 5 of Block-Recurrent Transformers (arXiv:2203.07852), at three scales
(docs/experiments.md).

Lengths are those of windows, segments, states and memories, so XL:2048 keeps four times the window of XL:512, and a
memory 128 windows. The 12-layer model of table 1 has at tiny 6 layers of width 64 with 2 heads of 32, feed-forward 256,
32 states and a window of 32 in segments of 256; at small 12 layers of width 256 with 4 heads of 64, window 128. A
13-layer baseline keeps one layer more.
"""

from meliad_like.experiments.tables.table import Panel, Scale, Table, line, read_bindings, read_rows

SCALES = {
    "tiny": Scale(
        divisor=16,
        layers=2,
        bindings=read_bindings("block_recurrent_tiny"),
        largest_vocabulary=8_000,
    ),
    "small": Scale(divisor=4, bindings=read_bindings("block_recurrent_small"), largest_vocabulary=32_000),
    "paper": Scale(),
}

MIXERS = read_rows("mixer/table")
"""Mixers that came after the paper, at the same sizes as table 1."""


def _table1() -> Table:
    panels = (Panel("bits_per_byte", "PG19 bytes"), Panel("step_time", "step time"))
    return Table(
        "table1",
        "Table 1: recurrence and its baselines",
        (*read_rows("block_recurrent/table1"), *MIXERS),
        panels,
        scales=SCALES,
    )


def _table3() -> Table:
    rows, column = read_rows("block_recurrent/table3"), "PG19 tokens"
    by_window = {
        "Rec:fixed:skip, by window": line(rows, r"recurrent_window_(\d+)"),
        "Slide:12L, by window": line(rows, r"slide_window_(\d+)"),
    }
    by_states = {"Rec:fixed:skip, by states": line(rows, r"states_(\d+)")}
    panels = (
        Panel("bits_per_token", column, "window_length", by_window),
        Panel("bits_per_token", column, "num_states", by_states),
    )
    return Table("table3", "Table 3: the window's size and the number of states", rows, panels, scales=SCALES)


def _table4() -> Table:
    rows, models = read_rows("block_recurrent/table4"), {"Rec:fixed:skip": "recurrent", "XL:512": "xl"}
    lines = {label: line(rows, f"{kind}_.*", "model size") for label, kind in models.items()}
    panel = Panel("bits_per_token", "PG19 tokens", "parameters_without_embedding", lines)
    return Table("table4", "Table 4 and figure 3: sizes", rows, (panel,), scales=SCALES)


def _table5() -> Table:
    rows = read_rows("block_recurrent/table5")
    lines = {"Rec:fixed:skip": {row.name: row.vocabulary_size for row in rows}}
    panels = (
        Panel("tokens_per_word", "scale factor", "vocabulary_size", lines),
        Panel("bits_per_token", "bits per token", "vocabulary_size", lines),
    )
    return Table("table5", "Table 5 and figure 7: vocabularies", rows, panels, scales=SCALES)


TABLES = {table.name: table for table in (_table1(), _table3(), _table4(), _table5())}
