"""Tables 1 to 5 and 8 and figure 3 of Shortformer (arXiv:2012.15832) on WikiText-103.

Perplexities and speeds are of the development set, by disjoint segments (the paper's N.o.) where a column doesn't say
otherwise, on a V100. The sliding window (S.W.) has a stride of 512.
"""

import functools

from meliad_like.experiments.tables.table import Panel, Scale, Table, line, read_bindings, read_rows

FIRST_LENGTHS = (32, 64, 128, 256, 512, 1024, 1536)

SCALES = {
    # Lengths shrink less than widths: so the baseline's step takes nearly twice as many operations as that of short
    # segments, about the ratio of the speeds that the paper measures (28,900 tokens a second against 13,900).
    "tiny": Scale(
        divisor=16,
        lengths=8,
        layers=4,
        bindings=read_bindings("shortformer_tiny"),
        keep_share_of_warmup=True,
        max_tokens=30_000,
        timed_tokens=200,
    ),
    "small": Scale(divisor=4, bindings=read_bindings("shortformer_small"), keep_share_of_warmup=True, timed_tokens=500),
    "paper": Scale(),
}
ROWS = read_rows("shortformer/tables")
BEST = {
    "baseline": "Baseline",
    "staged_128_50": "Staged training",
    "infused_cache_512": "PIA + cache",
    "shortformer_128": "Shortformer",
}
SPEEDS = (
    ("training_tokens_per_second", "training, tokens/s", "training, tokens a second (figure 3)"),
    ("tokens_per_second", "tokens/s", "evaluation by segments, tokens a second"),
    ("single_tokens_per_second", "token by token, tokens/s", "token by token, tokens a second"),
)
"""The measure, the paper's column and the label of each."""
FIRST = {f"first L {n}": line(ROWS, rf"staged_{n}_(\d+)") for n in FIRST_LENGTHS}
SHARES = {label: {name: epochs / 205 for name, epochs in points.items()} for label, points in FIRST.items()}
BY_LENGTH = {
    "PIA + cache, L' = L": line(ROWS, r"infused_cache_(\d+)"),
    "Baseline, L": {"baseline": 3072} | line(ROWS, r"baseline_(\d+)"),
}
STAGES, LENGTHS = "share of the steps at the first length (table 2)", "segment length L (tables 1 and 3)"
against = functools.partial(Panel, "perplexity", "perplexity", reference="baseline")
PANELS = (
    *(
        Panel("perplexity", "perplexity", x, {BEST[name]: line(ROWS, name, column) for name in BEST}, x_label=label)
        for x, column, label in SPEEDS
    ),
    against("share_of_first_stage", SHARES, logarithmic=False, x_label=STAGES),
    against("segment_length", BY_LENGTH, x_label=LENGTHS),
)
TITLE = "Shortformer: staged training, infused positions and caching"
TABLE = Table("shortformer", TITLE, ROWS, PANELS, scales=SCALES, by_protocol=True)
