"""A window with selected spans in place of its oldest tokens."""

from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Int

from meliad_like.history.spans import HistoryConfig, Stride, span_tokens


class Window(NamedTuple):
    """What a model reads to predict the targets of a stride; at most `HistoryConfig.window_length` tokens."""

    ids: Int[np.ndarray, " n"]
    """Tokens, int32; the model's positions for them begin at 0."""
    scored: Bool[np.ndarray, " n"]
    """True where the token is a target: it is predicted from those before it. Targets are the window's last tokens."""


def assemble(
    document: Int[np.ndarray, " tokens"],
    stride: Stride,
    ends: Int[np.ndarray, " spans"],
    config: HistoryConfig,
    separator: int | None,
) -> Window:
    """The window of a stride, with spans in place of its first tokens.

    Ancient History Language Models, section 2 and figure 1. Fewer spans than there is room for leave more of the recent
    text where it is, and no spans all of it.

    Args:
        document: all its tokens.
        stride: stride of the document.
        ends: where the spans end, in the order of the window (`select`); none unless the stride selects.
        config: lengths of windows and spans.
        separator: the token that ends each span; None: the span's own.

    Raises:
        ValueError: more spans than the window has room for.
    """
    if len(ends) > (config.num_spans if stride.selects else 0):
        raise ValueError(f"{len(ends)} spans for the window of {stride}")
    ids = np.array(document[stride.begin : stride.end], np.int32)
    ids[: len(ends) * config.span_length] = span_tokens(document, ends, config, separator).reshape(-1)
    # Nothing precedes a document's first token.
    return Window(ids, np.arange(len(ids)) >= max(stride.first - stride.begin, 1))
