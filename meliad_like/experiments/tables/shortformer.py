"""Tables 1 to 5 and 8 and figure 3 of Shortformer (arXiv:2012.15832) on WikiText-103.

Perplexities and speeds are of the development set, by disjoint segments (the paper's N.o.) where a column doesn't say
otherwise, on a V100. The sliding window (S.W.) has a stride of 512.
"""

import functools

from meliad_like.experiments.tables.table import Grid, Panel, Row, Scale, Table, line, read_bindings, read_rows

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


def _panels(rows: tuple[Row, ...]) -> tuple[Panel, ...]:
    paper = {row.name: row.paper for row in rows}
    best = {
        "baseline": "Baseline",
        "staged_128_50": "Staged training",
        "infused_cache_512": "PIA + cache",
        "shortformer_128": "Shortformer",
    }

    def speed(x: str, column: str, label: str) -> Panel:
        points = {label: {name: paper[name][column]} for name, label in best.items()}
        return Panel("perplexity", "perplexity", x, points, x_label=label)

    first = {f"first L {n}": line(rows, rf"staged_{n}_(\d+)") for n in FIRST_LENGTHS}
    shares = {label: {name: epochs / 205 for name, epochs in points.items()} for label, points in first.items()}
    by_length = {
        "PIA + cache, L' = L": line(rows, r"infused_cache_(\d+)"),
        "Baseline, L": {"baseline": 3072} | line(rows, r"baseline_(\d+)"),
    }
    stages, lengths = "share of the steps at the first length (table 2)", "segment length L (tables 1 and 3)"
    against = functools.partial(Panel, "perplexity", "perplexity", reference="baseline")
    return (
        speed("training_tokens_per_second", "training, tokens/s", "training, tokens a second (figure 3)"),
        speed("tokens_per_second", "tokens/s", "evaluation by segments, tokens a second"),
        speed("single_tokens_per_second", "token by token, tokens/s", "token by token, tokens a second"),
        against("share_of_first_stage", shares, logarithmic=False, x_label=stages),
        against("segment_length", by_length, x_label=lengths),
    )


def _table() -> Table:
    rows, epochs = read_rows("shortformer/tables"), range(25, 201, 25)
    cells = {f"{some} epochs": {f"L {n}": f"staged_{n}_{some}" for n in FIRST_LENGTHS} for some in epochs}
    grids = (
        Grid("Table 2: perplexity by epochs and length of the first stage", "perplexity", "perplexity", cells),
        Grid("Table 8: time of training over the baseline's", "step_time", "step time", cells),
    )
    title = "Shortformer: staged training, infused positions and caching"
    return Table("shortformer", title, rows, _panels(rows), grids=grids, scales=SCALES, by_protocol=True)


TABLE = _table()
