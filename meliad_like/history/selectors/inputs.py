"""What a selector reads: spans, contexts, or both together, as token arrays of a fixed width."""

import dataclasses
from functools import cached_property
from typing import NamedTuple

import numpy as np
import pandas as pd
from jaxtyping import Int

from meliad_like.data.subset import Documents
from meliad_like.data.vocabulary import Vocabulary
from meliad_like.errors import UserError
from meliad_like.history.documents import whole_documents
from meliad_like.history.selectors.config import Part, SelectorConfig
from meliad_like.history.spans import HistoryConfig, Stride, separator_token, span_tokens, stride_of


class Texts(NamedTuple):
    """Texts for the encoder, all of the same width."""

    tokens: Int[np.ndarray, "m t"]
    """int32, filled up with 0."""
    length: Int[np.ndarray, " m"]
    """int32: number of tokens of each text."""


@dataclasses.dataclass(frozen=True)
class SelectorInputs:
    """From places in documents to what a selector reads."""

    history: HistoryConfig
    separator: int | None
    """`spans.separator_token` of the vocabulary."""
    context_length: int
    """Largest number of tokens that are read beside a span."""

    @property
    def leaks_the_future(self) -> bool:
        """Whether the selector sees the targets."""
        return self.history.selector_context == "released_code"

    @cached_property
    def widths(self) -> dict[Part, int]:
        """Largest number of tokens of each part."""
        span = self.history.span_length
        return {"pair": span + self.context_length, "span": span, "context": self.context_length}

    def num_tokens(self, selector: SelectorConfig) -> int:
        """Largest number of tokens that a selector reads at once."""
        return max(self.widths[part] for part in selector.parts)

    def texts(
        self, part: Part, document: Int[np.ndarray, " tokens"], stride: Stride, ends: Int[np.ndarray, " m"]
    ) -> Texts:
        """The texts of a part for some candidates of a stride; only one of `context`, which all candidates share.

        The context is the last `context_length` tokens before the targets (`prefix_only`) or, as the authors' code
        reads them in training and in inference, before the end of the targets (`released_code`), also where a
        document's last stride has fewer targets.
        """
        rows = [np.zeros((1 if part == "context" else len(ends), 0), np.int32)]
        if part != "context":
            rows.append(span_tokens(document, ends, self.history, self.separator))
        if part != "span":
            stop = stride.end if self.leaks_the_future else stride.first
            context = document[max(stop - self.context_length, 0) : stop].astype(np.int32)
            rows.append(np.broadcast_to(context, (len(rows[0]), len(context))))
        tokens = np.concatenate(rows, axis=1)
        padded = np.pad(tokens, ((0, 0), (0, self.widths[part] - tokens.shape[1])))
        return Texts(padded, np.full(len(tokens), tokens.shape[1], np.int32))


def make_inputs(history: HistoryConfig, selector: SelectorConfig, vocabulary: Vocabulary) -> SelectorInputs:
    """What a selector of this config reads.

    Raises:
      UserError: the separator is not one token of the vocabulary, or there is nothing to read beside a span.
    """
    length = history.prefix_length if selector.context_tokens is None else selector.context_tokens
    if history.selector_context == "released_code":
        if selector.context_tokens is not None:
            raise UserError(
                f"SelectorConfig.context_tokens={selector.context_tokens} has no effect on "
                "HistoryConfig.selector_context='released_code', which reads the window's own tokens: leave it out"
            )
        length = history.recent_length
    if not length:
        raise UserError(
            f"history_length={history.history_length} and stride={history.stride} leave no prefix in "
            f"window_length={history.window_length} for the selector to read: bind SelectorConfig.context_tokens"
        )
    return SelectorInputs(history, separator_token(history, vocabulary), length)


class DocumentTexts:
    """Texts at any places of some documents, for training; called from several threads at once."""

    def __init__(self, inputs: SelectorInputs, documents: Documents):
        self._inputs = inputs
        # Each row of a batch may be of another document.
        self._document = whole_documents(documents, most=64)

    def __call__(self, part: Part, places: pd.DataFrame) -> Texts:
        """One text of this part for each place: `document`, number of the `stride`, `end` of the span."""
        read = []
        for document, number, end in places[["document", "stride", "end"]].to_numpy().tolist():
            tokens = self._document(document)
            stride = stride_of(number, len(tokens), self._inputs.history, document)
            read.append(self._inputs.texts(part, tokens, stride, np.array([end])))
        return Texts(*(np.concatenate(column) for column in zip(*read, strict=True)))
