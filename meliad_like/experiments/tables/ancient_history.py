"""The rows of table 1 of Ancient History Language Models (Koncel-Kedziorski and Smith 2021), further controls, the
paper's figures (validation perplexities by token), and smaller scales (docs/experiments.md)."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from meliad_like.config import read_table
from meliad_like.experiments.tables.table import Row, Table, read_rows
from meliad_like.history.settings import HistoryConfig

NAME = "ancient_history/table1"
TABLE = Table("ancient_history", "Table 1: ancient history in the context window", read_rows(NAME))
"""The table, whose rows are ways of selecting spans, by their names in the evaluation."""
# Whether the published figures come from a selector that saw the future is not known: the released one does.
SELECTORS = {name: row.bindings for name, row in read_table(NAME).items() if row.bindings}
"""The bindings of the rows that train a selector."""
ALWAYS = ("baseline", "random", "overlap_oracle")
"""Rows that every evaluation has."""


@dataclass(frozen=True)
class HistoryScale:
    """The amounts of text that are read, and how."""

    settings: Mapping[str, Any]
    """Changes of `HistorySettings`, by their paths."""
    scored_tokens: int | None = None
    """Largest number of tokens of training documents that are scored; None: all."""
    scored_document_tokens: int | None = None
    evaluated_document_tokens: int | None = None
    """Tokens that are read of each document, from its beginning; None: all."""
    batch_size: int = 16


SHORT = HistoryConfig(window_length=256, history_length=128, span_length=32, stride=64, max_candidates=16)
SCALES = {
    # For two cores and a model of 135M parameters, of which only the first layers are used and trained.
    "tiny": HistoryScale(
        {
            "history": SHORT,
            "selector.encoder_layers": 4,
            "selector_training.num_steps": 500,
            "selector_training.optimizer.base_rate": 1e-4,
            "selector_training.validation_every": 5,
            "selector_training.evaluate_every": 100,
            "selector_training.log_every": 100,
            "selector_training.checkpoints_kept": 1,
        },
        scored_tokens=20_480,
        scored_document_tokens=2048,
        evaluated_document_tokens=1536,
    ),
    "small": HistoryScale(
        {"history.max_candidates": 64, "selector_training.num_steps": 15_000}, scored_tokens=1_000_000, batch_size=64
    ),
    "paper": HistoryScale({}, batch_size=64),
}


def rows_of(scale: str, names: tuple[str, ...]) -> list[Row]:
    """The rows of these names and those that every evaluation has, or all rows of the scale.

    Raises a UserError if there is no row of a name.
    """
    if names:
        requested = [TABLE.row(name) for name in (*names, *ALWAYS)]
        return [row for row in TABLE.rows if row in requested]
    return [row for row in TABLE.rows if scale != "tiny" or not row.extra]
