"""Spans of a document's past, and the strides in which the document is predicted.

Ancient History Language Models (Koncel-Kedziorski and Smith 2021), section 2. A window of `window_length` tokens
predicts `stride` targets at a time. Where it no longer reaches back to the document's beginning, its first
`history_length` tokens are replaced by the best spans of `span_length` tokens out of all the text before its last
`recent_length` = `window_length - history_length` tokens:

    document    0 ......................... begin ............ recent_start ........... first ......... end
    window                                  [ history_length, or spans ][ necessary prefix ][ stride targets ]

Which spans there are is arithmetic on lengths, and does not depend on any token.
"""

import dataclasses
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float, Int, UInt

from meliad_like.data.split import Documents
from meliad_like.errors import UserError
from meliad_like.history.settings import HistoryConfig
from meliad_like.vocabularies.base import Vocabulary

Tokens = Int[np.ndarray, " tokens"]
"""A document, or its beginning up to the end of a stride."""
Ends = Int[np.ndarray, " m"]
"""The place of each span of a document: the position after its last token."""
Scores = Float[np.ndarray, " m"]
"""The score of each span."""


class Stride(NamedTuple):
    """Targets of a document that are predicted together, and the window read for them, by positions in the document."""

    document: int
    """Index of the document in its split."""
    number: int
    """Index of this stride in its document."""
    begin: int
    """First token of the window when no span is selected."""
    first: int
    """The position of the first target."""
    end: int
    """The position after the last target, where the window ends."""
    recent_start: int
    """First token of the window that spans never replace; 0 as long as the window begins with its document."""
    candidates_end: int
    """Candidates end before it: recent_length tokens before `end`. It equals recent_start where the window does not
    begin with its document and has all of its targets. A last stride with fewer targets has it before recent_start, as
    in the released code: the tokens between the two are neither candidates nor in a window with spans."""
    selects: bool
    """Whether spans are selected for its window."""

    @property
    def num_targets(self) -> int:
        return self.end - self.first


class Window(NamedTuple):
    """Tokens that a model reads with nothing before them; its positions for them begin at 0."""

    tokens: Int[np.ndarray, " n"]
    num_targets: int
    """Number of the last tokens that are predicted; less than n, because nothing precedes the first."""


def whole_documents(documents: Documents, most: int = 2) -> Callable[[int], Tokens]:
    """A function from a document's index to all its tokens, which keeps the `most` documents that were read last."""
    return lru_cache(maxsize=most)(lambda document: documents.tokens(document, 0, int(documents.lengths[document])))


def num_strides(length: Any, config: HistoryConfig) -> Any:
    """Number of strides of a document, or of each of several documents."""
    return -(-length // config.stride)


def stride_of(number: int, length: int, config: HistoryConfig, document: int = 0) -> Stride:
    """A stride of a document of `length` tokens, of which every token is in exactly one stride."""
    first = number * config.stride
    # A last stride with fewer targets has a shorter window with the same beginning, as in the released code.
    begin = max(first + config.stride - config.window_length, 0)
    end = min(first + config.stride, length)
    recent_start = begin + config.history_length if begin else 0
    stride = Stride(document, number, begin, first, end, recent_start, max(end - config.recent_length, 0), False)
    earliest = config.window_length if config.first_selection is None else config.first_selection
    return stride._replace(selects=begin >= earliest and bool(_candidate_range(stride, config)))


def strides(length: int, config: HistoryConfig, document: int = 0) -> Iterator[Stride]:
    """The strides of a document, first to last; `document` is its index in its split."""
    return (stride_of(number, length, config, document) for number in range(num_strides(length, config)))


def is_scored(stride: Stride, config: HistoryConfig) -> bool:
    """Whether a selector is trained on a stride: one with all targets and a candidate, also before any selection."""
    return stride.num_targets == config.stride and bool(_candidate_range(stride, config))


def _candidate_range(stride: Stride, config: HistoryConfig) -> range:
    """The ends of all spans before the last recent_length tokens of a stride, also of those that its window has."""
    return range(config.span_length, stride.candidates_end, max(config.span_length // 2, 1))


def candidates(stride: Stride, config: HistoryConfig, *, all_of_them: bool = False) -> Ends:
    """The candidates of a stride, at most `max_candidates` or all of them; int64, ascending."""
    ends = np.array(_candidate_range(stride, config), np.int64)
    if all_of_them or config.max_candidates is None or len(ends) <= config.max_candidates:
        return ends
    order = np.argsort(random_numbers(stride, config.seed, len(ends)), kind="stable")
    return np.sort(ends[order[: config.max_candidates]])


def random_numbers(stride: Stride, seed: int, count: int) -> UInt[np.ndarray, " m"]:
    """Random uint64 numbers: a pure function of the seed and of the stride's place in its split."""
    # numpy promises the same raw bits of a bit generator in every version, but not the same draws of a Generator.
    return np.random.PCG64([seed, stride.document, stride.number]).random_raw(count)


def select(scores: Scores, ends: Ends, config: HistoryConfig) -> Int[np.ndarray, " spans"]:
    """The ends of the best candidates, at most `num_spans`, in their order in the window: the best next to the text.

    Of equal scores the later span is better, as in the released code (a stable sort, of which the last are taken).
    """
    best_first = ends[np.argsort(scores, kind="stable")[::-1]][: config.num_spans]
    return best_first[::-1]


def necessary_prefix(document: Tokens, stride: Stride, config: HistoryConfig) -> Int[np.ndarray, " prefix"]:
    """The tokens of the recent text before the first target; fewer than `prefix_length` near the beginning."""
    return np.asarray(document[max(stride.first - config.prefix_length, 0) : stride.first], np.int32)


@dataclasses.dataclass(frozen=True)
class Layout:
    """The contents of spans and windows, in the tokens of a vocabulary."""

    config: HistoryConfig
    separator: int | None
    """The token of `HistoryConfig.separator`; None: spans stay unchanged."""

    @classmethod
    def of(cls, config: HistoryConfig, vocabulary: Vocabulary) -> "Layout":
        """Raises a UserError if the separator is not exactly one token of this vocabulary."""
        if not config.separator:
            return cls(config, None)
        tokens = vocabulary.encode_continuation(config.separator)
        if len(tokens) != 1:
            problem = f"is {len(tokens)} tokens of this vocabulary and must be one"
            way_out = r"bind HistoryConfig.separator = '\n', or '' for none"
            raise UserError(f"HistoryConfig.separator={config.separator!r} {problem}: {way_out}")
        return cls(config, int(tokens[0]))

    def span_tokens(self, document: Tokens, ends: Ends) -> Int[np.ndarray, "m span_length"]:
        """The tokens of spans, int32, each with the separator in its last place."""
        places = np.asarray(ends, np.int64)[:, None] + np.arange(-self.config.span_length, 0)
        tokens = np.asarray(document)[places].astype(np.int32)
        if self.separator is not None:
            tokens[:, -1] = self.separator
        return tokens

    def window(self, document: Tokens, stride: Stride, ends: Ends) -> Window:
        """The window of a stride, with the spans of `select` in place of its first tokens (section 2, figure 1).

        Fewer spans than `num_spans` leave more of the recent text where it is, and no spans all of it.
        """
        tokens = np.array(document[stride.begin : stride.end], np.int32)
        tokens[: len(ends) * self.config.span_length] = self.span_tokens(document, ends).reshape(-1)
        # Nothing precedes a document's first token.
        return Window(tokens, min(stride.num_targets, len(tokens) - 1))
