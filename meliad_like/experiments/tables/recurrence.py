"""Tables 1 and 2 and figures 4 and 5 of Adding Recurrence to Pretrained Transformers (arXiv:2008.07027).

The model is GPT-2 small. There are also windows of 128 tokens, which the paper doesn't have.

What is not recurrent is trained once for each window, and evaluated at every overlap. The paper's figures are
perplexities by word, and operations for a token in millions.
"""

import functools

from meliad_like.experiments.tables.table import Panel, Scale, Table, line, read_bindings, read_rows

SCALES = {
    # Nothing of the model and its windows is made smaller. One sequence of 5 windows a step instead of 4 or 8 of 20,
    # because 40,000 targets would otherwise be a handful of steps, in which no recurrence learns anything.
    "tiny": Scale(segments=4, lanes=8, targets=40_000, bindings=read_bindings("recurrence_tiny"), max_tokens=24_000),
    "small": Scale(targets=4_000_000, bindings=read_bindings("recurrence_small")),
    "paper": Scale(),
}


def _table() -> Table:
    rows, column = read_rows("recurrent_pretrained/tables"), "MFLOP a token"
    kinds = (("no recurrence", "baseline"), ("recurrence", "recurrent"))
    by_overlap = {
        f"{label}, overlap {n}": line(rows, rf"{kind}_\d+_{n}", column) for label, kind in kinds for n in (0, 30, 50)
    }
    by_window = {f"{label}, T {n}": line(rows, rf"{kind}_{n}_\d+", column) for label, kind in kinds for n in (128, 300)}
    by_flops = functools.partial(Panel, "word_perplexity", x="flops_by_the_paper", logarithmic=False)
    label = "MFLOP a token by the paper's count"
    panels = (
        # Figures 4 and 5, which the paper has as pictures alone, and table 2 as a picture.
        Panel("word_perplexity", "", "window_length", by_overlap, logarithmic=False, x_label="window T (figure 4)"),
        by_flops("", lines=by_overlap, x_label=f"{label} (figure 5)"),
        by_flops("PG-19 validation", lines=by_window, x_label=f"{label} (table 2)"),
    )
    title = "Tables 1 and 2, figures 4 and 5: a recurrence for a pretrained model"
    against = "the model without a recurrence at the same window and overlap"
    return Table("recurrence", title, rows, panels, scales=SCALES, against=against, pretrained=True)


TABLE = _table()
