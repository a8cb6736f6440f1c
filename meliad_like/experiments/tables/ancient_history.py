"""The rows of table 1 of Ancient History Language Models (Koncel-Kedziorski and Smith 2021), further controls, the
paper's figures, and smaller scales (docs/experiments.md)."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from meliad_like.errors import UserError
from meliad_like.history.config import HistoryConfig, JointSelectorConfig, LightSelectorConfig

NAME = "ancient_history"
PAPER = ("WikiText-2, GPT2 large", "WikiText-2, GPT2 small", "S2ORC, GPT2 large", "S2ORC, GPT2 small")
"""Validation perplexities by token."""


@dataclass(frozen=True)
class HistoryRow:
    """One way to select spans."""

    name: str
    """Value of `--row`, and name in the evaluation."""
    label: str
    paper: Mapping[str, float] = field(default_factory=dict)
    """The paper's figures, by the names of PAPER."""
    selector: Mapping[str, Any] | None = None
    """Changes of `HistorySettings`, by their paths, for a row that trains a selector."""
    extra: bool = False
    """Whether the scale tiny has this row only when it is named."""


ROWS = (
    HistoryRow("baseline", "original: the most recent text", dict(zip(PAPER, (16.56, 26.45, 14.12, 21.01)))),
    HistoryRow("random", "random spans"),
    HistoryRow("recent", "the most recent spans"),
    HistoryRow("prefix_overlap", "overlap with the prefix"),
    HistoryRow("overlap_oracle", "overlap oracle", dict(zip(PAPER[:2], (16.43, 25.93)))),
    HistoryRow("learned_selector", "learned selector", selector={"selector": JointSelectorConfig()}),
    HistoryRow("light_selector", "light selector", selector={"selector": LightSelectorConfig()}),
    HistoryRow(
        "learned_selector_released_code",
        "learned selector as in the released code",
        # Whether the published figures come from a selector that saw the future is not known: the released one does.
        dict(zip(PAPER, (15.64, 24.82, 12.62, 18.42))),
        selector={"selector": JointSelectorConfig(), "history.selector_context": "released_code"},
        extra=True,
    ),
    HistoryRow("score_oracle", "score oracle", {PAPER[1]: 24.74}),
)
ALWAYS = ("baseline", "random", "overlap_oracle")
"""Rows that every evaluation has."""


@dataclass(frozen=True)
class HistoryScale:
    """How much is read, and how."""

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
    # For two cores and a model of 135M parameters: the decoder is not trained, and only its first layers are used.
    "tiny": HistoryScale(
        {
            "history": SHORT,
            "selector.train_encoder": False,
            "selector.encoder_layers": 10,
            "selector_training.num_steps": 4000,
            "selector_training.optimizer.base_rate": 3e-4,
            "selector_training.validation_every": 5,
            "selector_training.evaluate_every": 200,
            "selector_training.log_every": 200,
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


def rows_of(scale: str, chosen: tuple[str, ...]) -> list[HistoryRow]:
    """The chosen rows and those that every evaluation has, or all rows of the scale.

    Raises a UserError if there is no row of a name.
    """
    by_name = {row.name: row for row in ROWS}
    if unknown := [name for name in chosen if name not in by_name]:
        raise UserError(f"{NAME} has no row {unknown[0]}; it has {', '.join(by_name)}")
    if chosen:
        return [row for row in ROWS if row.name in (*chosen, *ALWAYS)]
    return [row for row in ROWS if scale != "tiny" or not row.extra]
