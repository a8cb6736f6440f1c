"""A window with selected spans in the place of its oldest tokens."""

from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Int

from meliad_like.history.spans import HistoryConfig, Stride, span_tokens


class Window(NamedTuple):
    """What a model reads to predict the targets of a stride; at most k tokens."""

    ids: Int[np.ndarray, " n"]
    """Tokens, int32."""
    positions: Int[np.ndarray, " n"]
    """What a model takes for their positions: from 0 on, whatever they are. Tokens of the document that stay in the
    window stay where they would be without spans."""
    scored: Bool[np.ndarray, " n"]
    """True where the token is a target: it is predicted from those before it."""

    @property
    def num_targets(self) -> int:
        """They are the window's last tokens."""
        return int(self.scored.sum())


def assemble(
    document: Int[np.ndarray, " tokens"],
    stride: Stride,
    ends: Int[np.ndarray, " spans"],
    config: HistoryConfig,
    separator: int | None,
) -> Window:
    """The window of a stride, in which spans stand where its first tokens were.

    Ancient History Language Models, section 2 and figure 1. Fewer spans than there is room for leave more of the recent
    text where it is, and no spans all of it.

    Args:
        document: all its tokens.
        stride: of the document.
        ends: of the spans in the order of the window (`select`); at most j / l of them, none unless the stride selects.
        separator: the token that ends each span; None: its own.

    Raises:
        ValueError: spans for a window that has no place for them.
    """
    if len(ends) > (config.num_spans if stride.selects else 0):
        raise ValueError(f"{len(ends)} spans for the window of {stride}")
    ids = np.array(document[stride.begin : stride.end], np.int32)
    ids[: len(ends) * config.span_length] = span_tokens(document, ends, config, separator).reshape(-1)
    positions = np.arange(len(ids), dtype=np.int32)
    # Nothing precedes a document's first token.
    return Window(ids, positions, positions >= max(stride.first - stride.begin, 1))
