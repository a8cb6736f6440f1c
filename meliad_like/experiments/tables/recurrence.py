"""The rows of tables 1 and 2 and the points of figures 4 and 5 of Adding Recurrence to Pretrained Transformers
(arXiv:2008.07027), of GPT-2 small, and the paper's own figures; and windows of 128 tokens, which it doesn't have.

What is not recurrent is trained once for each window, and evaluated at every overlap.
"""

import fnmatch
import functools
import math

from meliad_like.experiments.scales import Scale
from meliad_like.experiments.tables.table import Panel, Row, Table

FOLDER = "recurrent_pretrained"
COLUMNS = ("WikiText-103 validation", "WikiText-103 test", "PG-19 validation", "PG-19 test")
VALIDATION, FLOPS = "PG-19 validation", "MFLOP a token"
KINDS = {"baseline": "no recurrence", "recurrent": "recurrence"}
# Perplexities by word of windows of 300 tokens, by overlap, in the order of COLUMNS.
BASELINE = {
    0: (29.00, 30.47, 172.25, 147.71),
    5: (27.99, 29.36, 165.93, 142.30),
    10: (27.58, 28.88, 162.66, 139.49),
    30: (26.72, 27.96, 156.21, 134.30),
    50: (26.17, 27.31, 152.64, 131.25),
    75: (None, None, 149.54, 128.46),
    100: (None, None, 147.05, 126.51),
    150: (None, None, 143.62, 123.53),
    200: (None, None, 141.14, 121.40),
}
RECURRENT = {
    0: (27.70, 29.01, 155.27, 133.02),
    5: (26.88, 28.12, 150.00, 128.78),
    10: (26.51, 27.77, 147.53, 127.05),
    30: (25.90, 27.12, 142.35, 122.22),
    50: (25.53, 26.73, 140.10, 119.93),
}
# Operations for a token in millions, by overlap.
MEGAFLOPS = {0: 175, 5: 178, 10: 181, 30: 194, 50: 210, 75: 233, 100: 262, 150: 350, 200: 525}
OF_THE_FIGURES = {"baseline": (0, 30, 50), "recurrent": (0,)}
# By window and kind.
OVERLAPS = {
    128: {"baseline": (0, 30), "recurrent": (0, 30)},
    200: OF_THE_FIGURES,
    300: {"baseline": tuple(BASELINE), "recurrent": tuple(RECURRENT)},
    400: OF_THE_FIGURES,
    500: OF_THE_FIGURES,
    600: OF_THE_FIGURES,
}

MEASURES = (
    *("window_length", "overlap", "parameters", "word_perplexity", "perplexity", "bits_per_byte", "difference"),
    *("flops_by_the_paper", "flops_as_counted", "logged_tokens_per_second", "tokens_per_second", "seconds"),
)

SCALES = {
    # Nothing of the model and its windows is made smaller. One sequence of 5 windows a step instead of 4 or 8 of 20,
    # because 40,000 targets would otherwise be a handful of steps, in which no recurrence learns anything.
    "tiny": Scale(
        segments=4,
        lanes=8,
        targets=40_000,
        bindings={
            "PretrainedConfig.dropout_rate": 0.0,
            # One gradient of 20 times the usual norm would make Adam's steps small for the rest of so short a run.
            "OptimizerConfig.clip_norm": 1.0,
            "ConstantSchedule.rate": 1e-4,
            "ScheduleConfig.warmup_steps": 10,
            "TrainingConfig.log_every": 5,
            # In so few steps the last parameters are the best ones.
            "TrainingConfig.evaluate_every": 0,
            "TrainingConfig.keep_best": False,
            "TrainingConfig.checkpoint_every": 20,
            "TrainingConfig.checkpoints_kept": 1,
        },
        max_tokens=24_000,
    ),
    "small": Scale(
        targets=4_000_000,
        bindings={
            "ScheduleConfig.warmup_steps": 50,
            "TrainingConfig.evaluate_every": 40,
            "TrainingConfig.checkpoint_every": 40,
            "TrainingConfig.checkpoints_kept": 1,
        },
    ),
    "paper": Scale(),
}


def _row(kind: str, window: int, overlap: int) -> Row:
    name, first = f"{kind}_{window}_{overlap}", f"baseline_{window}_0"
    paper: dict[str, float] = {}
    if window == 300:
        figures = (BASELINE if kind == "baseline" else RECURRENT)[overlap]
        paper = {column: value for column, value in zip(COLUMNS, figures) if value is not None}
        paper[FLOPS] = MEGAFLOPS[overlap]
    # Windows that the paper doesn't have are made of parts.
    files = tuple(f"{FOLDER}/{part}.gin" for part in (kind, f"window_{window}", f"overlap_{overlap}"))
    if window == 300:
        files = (f"{FOLDER}/tables/{kind}_overlap_{overlap}.gin",)
    elif window != 128:
        files = (f"{FOLDER}/figures/{kind}_window_{window}_overlap_{overlap}.gin",)
    return Row(
        name,
        f"{KINDS[kind]}, T {window}, overlap {overlap}",
        files,
        f"baseline_{window}_{overlap}",
        paper,
        trained_as=first if kind == "baseline" and name != first else "",
        extra=window not in (128, 300) or overlap not in (0, 30),
    )


def _table() -> Table:
    rows = tuple(
        _row(kind, window, overlap)
        for window, kinds in OVERLAPS.items()
        for kind, overlaps in kinds.items()
        for overlap in overlaps
    )

    def line(pattern: str) -> dict[str, float]:
        return {row.name: row.paper.get(FLOPS, math.nan) for row in rows if fnmatch.fnmatch(row.name, pattern)}

    kinds = KINDS.items()
    by_overlap = {f"{label}, overlap {n}": line(f"{kind}_*_{n}") for kind, label in kinds for n in (0, 30, 50)}
    by_window = {f"{label}, T {n}": line(f"{kind}_{n}_*") for kind, label in kinds for n in (128, 300)}
    by_flops = functools.partial(Panel, "word_perplexity", x="flops_by_the_paper", front=True, logarithmic=False)
    label = "MFLOP a token by the paper's count"
    panels = (
        # Figures 4 and 5, which the paper has as pictures alone, and table 2 as a picture.
        Panel("word_perplexity", "", "window_length", by_overlap, logarithmic=False, x_label="window T (figure 4)"),
        by_flops("", lines=by_overlap, x_label=f"{label} (figure 5)"),
        by_flops(VALIDATION, lines=by_window, x_label=f"{label} (table 2)"),
    )
    title = "Tables 1 and 2, figures 4 and 5: a recurrence for a pretrained model"
    against = "the model without a recurrence at the same window and overlap"
    return Table("recurrence", title, rows, panels, MEASURES, scales=SCALES, against=against, pretrained=True)


TABLE = _table()
