"""Tables 1 and 2 and figures 4 and 5 of Adding Recurrence to Pretrained Transformers (arXiv:2008.07027).

The model is GPT-2 small. There are also windows of 128 tokens, which the paper doesn't have.

What is not recurrent is trained once for each window, and evaluated at every overlap. The paper's figures are
perplexities by word, and operations for a token in millions.
"""

from meliad_like.experiments.tables.table import Panel, Scale, Table, line, read_bindings, read_rows

SCALES = {
    # Nothing of the model and its windows is made smaller. One sequence of 5 windows a step instead of 4 or 8 of 20,
    # because 40,000 targets would otherwise be a handful of steps, in which no recurrence learns anything.
    "tiny": Scale(segments=4, lanes=8, targets=40_000, bindings=read_bindings("recurrence_tiny"), max_tokens=24_000),
    "small": Scale(targets=4_000_000, bindings=read_bindings("recurrence_small")),
    "paper": Scale(),
}
ROWS, COLUMN = read_rows("recurrent_pretrained/tables"), "MFLOP a token"
KINDS = (("no recurrence", "baseline"), ("recurrence", "recurrent"))
BY_OVERLAP = {
    f"{label}, overlap {n}": line(ROWS, rf"{kind}_\d+_{n}", COLUMN) for label, kind in KINDS for n in (0, 30, 50)
}
BY_WINDOW = {f"{label}, T {n}": line(ROWS, rf"{kind}_{n}_\d+", COLUMN) for label, kind in KINDS for n in (128, 300)}
BY_FLOPS = {"x": "flops_by_the_paper", "logarithmic": False}
LABEL = "MFLOP a token by the paper's count"
PANELS = (
    # Figures 4 and 5, which the paper has as pictures alone, and table 2 as a picture.
    Panel("word_perplexity", "", "window_length", BY_OVERLAP, logarithmic=False, x_label="window T (figure 4)"),
    Panel("word_perplexity", "", lines=BY_OVERLAP, x_label=f"{LABEL} (figure 5)", **BY_FLOPS),
    Panel("word_perplexity", "PG-19 validation", lines=BY_WINDOW, x_label=f"{LABEL} (table 2)", **BY_FLOPS),
)
TITLE = "Tables 1 and 2, figures 4 and 5: a recurrence for a pretrained model"
AGAINST = "the model without a recurrence at the same window and overlap"
TABLE = Table("recurrence", TITLE, ROWS, PANELS, scales=SCALES, against=AGAINST, pretrained=True)
