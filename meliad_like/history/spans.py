"""Spans of a document's past, and the strides in which the document is predicted.

Ancient History Language Models (Koncel-Kedziorski and Smith 2021), section 2. A window of `window_length` tokens
predicts `stride` targets at a time. Where it no longer reaches back to the document's beginning, its first
`history_length` tokens make room for the best spans of `span_length` tokens out of all the text before its last
`recent_length` = `window_length - history_length` tokens:

    document    0 ......................... begin ............ recent_start ........... first ......... end
    window                                  [ history_length, or spans ][ necessary prefix ][ stride targets ]

Which spans there are is arithmetic on lengths, and does not depend on any token.
"""

import dataclasses
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any, Literal, NamedTuple

import numpy as np
from jaxtyping import Float, Int, UInt

from meliad_like.data.vocabulary import Vocabulary
from meliad_like.errors import UserError
from meliad_like.validation import check_choices, check_not_negative, check_positive


@dataclasses.dataclass(frozen=True)
class HistoryConfig:
    """Which spans of a document's past come into a window, and how; the defaults are those of the paper's code."""

    window_length: int = 1024
    """Tokens of a window, targets included."""
    history_length: int = 512
    """Tokens of a window that selected spans may fill, a multiple of span_length."""
    span_length: int = 64
    """Tokens of a span, separator included."""
    span_stride: int | None = None
    """Distance in tokens between the beginnings of successive candidates; None: half a span."""
    stride: int = 256
    """Targets of a window. Spans are selected once for all of them."""
    separator: str = "\n\n"
    """Text of one token that replaces the last token of each span; "": spans stay unchanged."""
    order: Literal["ascending", "document", "descending"] = "ascending"
    """Order of the spans in the window. `ascending`: the best one comes last, next to the recent text; `descending`: it
    comes first; `document`: spans keep their order in the document."""
    deduplicate: bool = False
    """Whether a span is left out when it shares tokens with a better one. The released code keeps it."""
    candidates: Literal["before_prefix", "before_window"] = "before_prefix"
    """`before_prefix`: all spans before the last recent_length tokens, also those in the window's first history_length
    tokens. `before_window`: only spans that are not in the window already."""
    first_selection: int | None = None
    """Spans are selected for windows that begin at this position of the document or later, and never for the first
    window; None: at window_length, as in the released code."""
    max_candidates: int | None = None
    """Largest number of candidates of a stride that a model reads, a random subset; None: all. Rankings that run no
    model choose among all candidates."""
    baseline: Literal["bare", "contiguous"] = "bare"
    """What the gain of a span is measured against (equation 2): the recent text alone (`bare`), or the recent text and
    the span_length tokens before it (`contiguous`), as in the released scores."""
    selector_context: Literal["prefix_only", "released_code"] = "prefix_only"
    """What a learned selector reads beside a span: the necessary prefix, or, as in the released code, the recent text
    with its targets. The latter leaks the future, and exists for comparison only."""
    overlap: Literal["multiset", "set", "jaccard"] = "multiset"
    """How the overlap of a span with other text is measured: number of common tokens with repetitions, number of
    different common tokens, or the latter divided by the number of different tokens in either."""
    first_token: Literal["left_out", "released_code"] = "left_out"
    """How a document's first token, which nothing precedes, is counted: not at all, or, as in the released code, with
    the mean loss of the document's first stride."""
    seed: int = 0
    """Seed of random spans and of random subsets of candidates."""

    def __post_init__(self):
        check_choices(self)
        check_positive(self, ("window_length", "history_length", "span_length", "stride"))
        check_not_negative(self, ("seed",))
        optional = ("span_stride", "first_selection", "max_candidates")
        check_positive(self, [name for name in optional if getattr(self, name) is not None])
        if self.history_length % self.span_length:
            raise UserError(
                f"history_length={self.history_length} must be a multiple of span_length={self.span_length}"
            )
        if self.history_length + self.stride > self.window_length:
            raise UserError(
                f"history_length={self.history_length} and stride={self.stride} must fit together into "
                f"window_length={self.window_length}"
            )
        if self.span_length == 1 and self.separator:
            raise UserError("span_length=1 leaves nothing but the separator: bind HistoryConfig.separator = ''")

    @property
    def num_spans(self) -> int:
        """Largest number of spans in a window."""
        return self.history_length // self.span_length

    @property
    def recent_length(self) -> int:
        """Tokens at the end of a window that spans never replace, targets included."""
        return self.window_length - self.history_length

    @property
    def prefix_length(self) -> int:
        """Tokens of the necessary prefix: those of the recent text before the targets."""
        return self.recent_length - self.stride


class Stride(NamedTuple):
    """Targets of a document that are predicted together, and what is read for them; positions are in the document.

    The same fields hold arrays where a table of strides is computed at once (`stride_table`).
    """

    document: int
    """Index of the document in its split."""
    number: int
    """Index of this stride in its document."""
    begin: int
    """First token of the window when no span is selected."""
    first: int
    """First target."""
    end: int
    """One after the last target, where the window ends."""
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


def index_in_split(documents: Any, document: int) -> int:
    """A document's index in its split: random choices depend on it, so that a subset is read as the whole split is."""
    return int(documents.indices[document]) if hasattr(documents, "indices") else document


def whole_documents(documents: Any, most: int = 2) -> Callable[[int], Int[np.ndarray, " tokens"]]:
    """A function from a document's index to all its tokens, which keeps the `most` documents that were read last."""
    return lru_cache(maxsize=most)(lambda document: documents.tokens(document, 0, int(documents.lengths[document])))


def num_strides(length: int, config: HistoryConfig) -> int:
    """Number of strides of a document."""
    return -(-length // config.stride)


def stride_table(
    length: int, config: HistoryConfig, document: int = 0, numbers: Int[np.ndarray, " n"] | None = None
) -> Stride:
    """Strides of a document: a `Stride` whose fields are arrays, with one entry for each.

    Every token is in exactly one stride; the first token of the first stride is no target.

    Args:
        length: number of tokens of the document.
        document: index of the document in its split.
        numbers: which strides; None: all.
    """
    number = np.arange(num_strides(length, config)) if numbers is None else numbers
    first = number * config.stride
    # A last stride with fewer targets has a shorter window with the same beginning, as in the released code.
    begin = np.maximum(first + config.stride - config.window_length, 0)
    end = np.minimum(first + config.stride, length)
    table: Any = Stride(
        document=np.full_like(number, document),
        number=number,
        begin=begin,
        first=first,
        end=end,
        recent_start=np.where(begin > 0, begin + config.history_length, 0),
        candidates_end=np.maximum(end - config.recent_length, 0),
        selects=False,
    )
    earliest = config.window_length if config.first_selection is None else config.first_selection
    return table._replace(selects=(begin >= earliest) & (num_candidates(table, config) > 0))


def strides(
    length: int, config: HistoryConfig, document: int = 0, numbers: Int[np.ndarray, " n"] | None = None
) -> Iterator[Stride]:
    """The strides of a document, first to last; arguments as for `stride_table`."""
    table: Any = stride_table(length, config, document, numbers)
    return map(Stride._make, zip(*(column.tolist() for column in table)))


def stride_of(number: int, length: int, config: HistoryConfig, document: int = 0) -> Stride:
    """One stride of a document, without a table of those before it."""
    return next(strides(length, config, document, np.array([number])))


def is_scored(stride: Stride, config: HistoryConfig) -> Any:
    """Whether the candidates of a stride are scored to train a selector; an array for a table of strides.

    These are the strides with a full number of targets and a candidate; they begin earlier than selection does.
    """
    return (stride.num_targets == config.stride) & (num_candidates(stride, config) > 0)


def _candidate_range(stride: Stride, config: HistoryConfig) -> tuple[Any, Any, Any]:
    """Arguments of `np.arange` for the ends of the candidates of a stride, without the limit of max_candidates."""
    stop = stride.candidates_end
    if config.candidates == "before_window":
        stop = np.minimum(stop, stride.begin + 1)
    return config.span_length, stop, config.span_stride or max(config.span_length // 2, 1)


def num_candidates(stride: Stride, config: HistoryConfig) -> Any:
    """Number of candidates of a stride that a model reads; an array for a table of strides."""
    first, stop, step = _candidate_range(stride, config)
    count = np.maximum(-(-(stop - first) // step), 0)
    return count if config.max_candidates is None else np.minimum(count, config.max_candidates)


def candidates(stride: Stride, config: HistoryConfig, *, all_of_them: bool = False) -> Int[np.ndarray, " m"]:
    """Where at most `max_candidates` candidates of a stride end (exclusive), or all of them; int64, ascending."""
    ends = np.arange(*_candidate_range(stride, config))
    if all_of_them or config.max_candidates is None or len(ends) <= config.max_candidates:
        return ends
    drawn = random_numbers(stride, config.seed, len(ends))
    return np.sort(ends[np.argsort(drawn, kind="stable")[: config.max_candidates]])


def random_numbers(stride: Stride, seed: int, count: int) -> UInt[np.ndarray, " m"]:
    """Random uint64 numbers: a pure function of the seed and of the stride's place in its split."""
    # numpy promises the same raw bits of a bit generator in every version, but not the same draws of a Generator.
    return np.random.PCG64([seed, stride.document, stride.number]).random_raw(count)


def select(
    scores: Float[np.ndarray, " m"], ends: Int[np.ndarray, " m"], config: HistoryConfig
) -> Int[np.ndarray, " spans"]:
    """The ends of the best candidates, at most `num_spans`, in their order in the window.

    Of equal scores the later span is better, as in the released code (a stable sort, of which the last are taken).
    """
    best_first = ends[np.argsort(scores, kind="stable")[::-1]]
    if config.deduplicate:
        chosen: list[int] = []
        for end in best_first.tolist():
            if len(chosen) < config.num_spans and all(abs(end - other) >= config.span_length for other in chosen):
                chosen.append(end)
        best_first = np.asarray(chosen, np.int64)
    best_first = best_first[: config.num_spans]
    return {"ascending": best_first[::-1], "descending": best_first, "document": np.sort(best_first)}[config.order]


def span_tokens(
    document: Int[np.ndarray, " tokens"],
    ends: Int[np.ndarray, " spans"],
    config: HistoryConfig,
    separator: int | None,
) -> Int[np.ndarray, "spans span_length"]:
    """The tokens of spans, int32, each with the separator (`separator_token`) in its last place."""
    length = config.span_length
    tokens = np.asarray(document)[np.asarray(ends, np.int64)[:, None] + np.arange(-length, 0)].astype(np.int32)
    if separator is not None:
        tokens[:, -1] = separator
    return tokens


def window(
    document: Int[np.ndarray, " tokens"],
    stride: Stride,
    ends: Int[np.ndarray, " spans"],
    config: HistoryConfig,
    separator: int | None,
) -> Window:
    """The window of a stride, with the spans of `select` in place of its first tokens (section 2, figure 1).

    Fewer spans than there is room for leave more of the recent text where it is, and no spans all of it.
    """
    tokens = np.array(document[stride.begin : stride.end], np.int32)
    tokens[: len(ends) * config.span_length] = span_tokens(document, ends, config, separator).reshape(-1)
    # Nothing precedes a document's first token.
    return Window(tokens, min(stride.num_targets, len(tokens) - 1))


def necessary_prefix(
    document: Int[np.ndarray, " tokens"], stride: Stride, config: HistoryConfig
) -> Int[np.ndarray, " prefix"]:
    """The tokens of the recent text before the first target; fewer than `prefix_length` near the beginning."""
    return np.asarray(document[max(stride.first - config.prefix_length, 0) : stride.first], np.int32)


def separator_token(config: HistoryConfig, vocabulary: Vocabulary) -> int | None:
    """The separator's token; None where there is no separator.

    Raises:
        UserError: it is not exactly one token of this vocabulary.
    """
    if not config.separator:
        return None
    tokens = vocabulary.encode(config.separator)
    if len(tokens) != 1:
        raise UserError(
            f"HistoryConfig.separator={config.separator!r} is {len(tokens)} tokens of this vocabulary and must be one: "
            r"bind HistoryConfig.separator = '\n', or '' for none"
        )
    return int(tokens[0])
