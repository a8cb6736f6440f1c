"""Tables 1, 3, 4 and 5 of Block-Recurrent Transformers (arXiv:2203.07852), at three scales
(docs/experiments.md).

Lengths are those of windows, segments, states and memories, so XL:2048 keeps four times the window of XL:512, and a
memory 128 windows. The 12-layer model of table 1 has at tiny 6 layers of width 64 with 2 heads of 32, feed-forward 256,
32 states and a window of 32 in segments of 256; at small 12 layers of width 256 with 4 heads of 64, window 128. A
13-layer baseline keeps one layer more.
"""

from meliad_like.experiments.tables.table import Panel, Scale, Table, line, read_bindings, read_rows

SCALES = {
    "tiny": Scale(16, layers=2, bindings=read_bindings("block_recurrent_tiny"), largest_vocabulary=8_000),
    "small": Scale(divisor=4, bindings=read_bindings("block_recurrent_small"), largest_vocabulary=32_000),
    "paper": Scale(),
}

MIXERS = read_rows("mixer/table")
"""Mixers that came after the paper, at the same sizes as table 1."""
ROWS = {i: read_rows(f"block_recurrent/table{i}") for i in (1, 3, 4, 5)}
TOKENS = "PG19 tokens"
BY_WINDOW = {
    "Rec:fixed:skip, by window": line(ROWS[3], r"recurrent_window_(\d+)"),
    "Slide:12L, by window": line(ROWS[3], r"slide_window_(\d+)"),
}
BY_STATES = {"Rec:fixed:skip, by states": line(ROWS[3], r"states_(\d+)")}
BY_SIZE = {
    "Rec:fixed:skip": line(ROWS[4], "recurrent_.*", "model size"),
    "XL:512": line(ROWS[4], "xl_.*", "model size"),
}
BY_VOCABULARY = {"Rec:fixed:skip": {row.name: row.vocabulary_size for row in ROWS[5]}}
PANELS = {
    "Table 1: recurrence and its baselines": (Panel("bits_per_byte", "PG19 bytes"), Panel("step_time", "step time")),
    "Table 3: the window's size and the number of states": (
        Panel("bits_per_token", TOKENS, "window_length", BY_WINDOW),
        Panel("bits_per_token", TOKENS, "num_states", BY_STATES),
    ),
    "Table 4 and figure 3: sizes": (Panel("bits_per_token", TOKENS, "parameters_without_embedding", BY_SIZE),),
    "Table 5 and figure 7: vocabularies": (
        Panel("tokens_per_word", "scale factor", "vocabulary_size", BY_VOCABULARY),
        Panel("bits_per_token", "bits per token", "vocabulary_size", BY_VOCABULARY),
    ),
}
TABLES = {
    f"table{i}": Table(f"table{i}", title, rows + MIXERS if i == 1 else rows, panels, scales=SCALES)
    for (i, rows), (title, panels) in zip(ROWS.items(), PANELS.items(), strict=True)
}
