"""Spans of a document's past, and the strides in which the document is predicted.

Ancient History Language Models (Koncel-Kedziorski and Smith 2021), section 2. A window of k tokens (`window_length`) is
predicted s targets (`stride`) at a time. Where it no longer reaches back to the document's beginning, its first j
tokens (`history_length`) make room for the best spans of l tokens (`span_length`) out of all that was read before its
last k - j tokens:

    the document    0 ......................... begin ......... recent_start .......... first ......... end
    the window                                  [  j tokens, or spans  ][ necessary prefix ][ s targets ]

Everything here is arithmetic on lengths: which spans there are does not depend on any token.
"""

import dataclasses
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

import numpy as np
from jaxtyping import Float, Int

from meliad_like.errors import UserError
from meliad_like.validation import check_choices, check_not_negative, check_positive

if TYPE_CHECKING:
    from meliad_like.data.vocabulary import Vocabulary

Order = Literal["ascending", "document", "descending"]
Candidates = Literal["before_prefix", "before_window"]
Baseline = Literal["bare", "contiguous"]
FirstToken = Literal["left_out", "released_code"]
SelectorContext = Literal["prefix_only", "released_code"]
Overlap = Literal["multiset", "set", "jaccard"]


@dataclasses.dataclass(frozen=True)
class HistoryConfig:
    """What of a document's past may come into a window, and how; by default as the paper and its code have it."""

    window_length: int = 1024
    """Tokens of a window, its targets among them (k)."""
    history_length: int = 512
    """Tokens of a window that selected spans may fill (j), a multiple of span_length."""
    span_length: int = 64
    """Tokens of a span, its separator among them (l)."""
    span_stride: int | None = None
    """Tokens from the beginning of a candidate to that of the next; None: half a span."""
    stride: int = 256
    """Targets of a window (s), for which spans are selected once."""
    separator: str = "\n\n"
    """Text of one token, which takes the place of each span's last token; "": the span stays as it is."""
    order: Order = "ascending"
    """Of the spans in the window: `ascending` puts the best one nearest to the recent text, `descending` the worst one;
    `document` leaves them in their own order."""
    deduplicate: bool = False
    """Whether a span is left out where it shares tokens with a better one. The released code does not."""
    candidates: Candidates = "before_prefix"
    """`before_prefix`: all spans that end before the last k - j tokens, those in the window's first j tokens among
    them. `before_window`: only those that the window itself does not hold."""
    first_selection: int | None = None
    """Spans are selected for windows that begin at this position of the document or after it, never for its first
    window; None: at window_length, as in the released code."""
    max_candidates: int | None = None
    """The most candidates of a stride for which a model is run, to score them or to select by what it says: if there
    are more, so many of them by chance; None: all. Rankings without a model (`SpanScorer.runs_a_model`) see all."""
    baseline: Baseline = "bare"
    """What a span's worth is measured against (equation 2): the last k - j tokens alone, or, as in the released scores,
    those with the `contiguous` l tokens before them in the span's place."""
    selector_context: SelectorContext = "prefix_only"
    """What a learned selector reads beside the span: the necessary prefix, or, as the released code has it, also the
    targets. The latter leaks the future, and exists for comparison alone."""
    overlap: Overlap = "multiset"
    """How the overlap of a span with other text is measured: tokens in common, repetitions among them; different tokens
    in common; or those as a share of the different tokens in either."""
    first_token: FirstToken = "left_out"
    """A document's first token, which nothing precedes: not counted, or, as in the released code, counted with the mean
    loss of the document's first stride."""
    seed: int = 0
    """Of all that is done by chance."""

    def __post_init__(self):
        check_choices(self)
        check_positive(self, ("window_length", "history_length", "span_length", "stride"))
        check_not_negative(self, ("seed",))
        for name in ("span_stride", "first_selection", "max_candidates"):
            if getattr(self, name) is not None:
                check_positive(self, (name,))
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
        """Spans that a window has room for (j / l)."""
        return self.history_length // self.span_length

    @property
    def recent_length(self) -> int:
        """Tokens of a window that spans never replace (k - j)."""
        return self.window_length - self.history_length

    @property
    def prefix_length(self) -> int:
        """Tokens of the necessary prefix: those of `recent_length` that are no targets."""
        return self.recent_length - self.stride

    @property
    def scored_length(self) -> int:
        """Tokens that are read to score a span: itself and the recent text, targets among it (l + k - j)."""
        return self.span_length + self.recent_length


class Stride(NamedTuple):
    """Targets of a document that are predicted at once, and what is read for them; positions in the document."""

    document: int
    """Index of the document in its split."""
    number: int
    """Of this stride in its document."""
    begin: int
    """First token of the window, if nothing is selected."""
    first: int
    """First target."""
    end: int
    """One after the last target, where the window ends."""
    recent_start: int
    """First token of the window that spans never replace; 0 as long as the window begins with its document."""
    candidates_end: int
    """Candidates end before it: k - j tokens before `end`. It is recent_start where the window does not begin with its
    document and has all of its s targets. With fewer targets it comes before recent_start, as in the released code: the
    tokens between the two are no candidates, and not in a window with spans either."""
    selects: bool
    """Whether spans are selected for its window."""

    @property
    def num_targets(self) -> int:
        return self.end - self.first


class SpanScorer(Protocol):
    """Whatever ranks the spans that may come into a window.

    Tables of costs look for two attributes, sums over all calls so far: `flops`, the floating-point operations of one
    that multiplies matrices, and `compile_seconds` of one that compiles while it ranks, which are no cost of ranking.
    """

    name: str
    """For tables."""
    leaks_the_future: bool
    """Whether scores depend on the targets that the spans are to help to predict."""
    runs_a_model: bool
    """Whether candidates cost forward passes, so that `HistoryConfig.max_candidates` limits them."""

    def scores(
        self, document: Int[np.ndarray, " tokens"], stride: Stride, ends: Int[np.ndarray, " m"]
    ) -> Float[np.ndarray, " m"]:
        """One call for each stride for which spans are selected.

        Args:
            document: int32, all its tokens; whoever does not leak the future reads those before stride.first alone.
            stride: of the document.
            ends: of what `candidates_of` gives, ascending: candidate i is the tokens [ends[i] - span_length, ends[i]).

        Returns:
            float32, higher is better; no NaN.
        """
        ...


def index_in_split(documents: Any, document: int) -> int:
    """A document's index in its split, which chance goes by: a part of it, with `indices`, is read as the whole is."""
    return int(documents.indices[document]) if hasattr(documents, "indices") else document


def strides(length: int, config: HistoryConfig, document: int = 0) -> Iterator[Stride]:
    """The strides of a document, first to last. Every token is in exactly one; the first one's first is no target.

    Args:
        length: of the document, in tokens.
        document: its index in its split.
    """
    for number in range(num_strides(length, config)):
        yield stride_of(number, length, config, document)


def num_strides(length: int, config: HistoryConfig) -> int:
    """How many strides a document has."""
    return -(-length // config.stride)


def stride_of(number: int, length: int, config: HistoryConfig, document: int = 0) -> Stride:
    """One of the strides of a document; arguments as for `strides`."""
    k, s = config.window_length, config.stride
    first = number * s
    # A last stride of fewer targets has a shorter window with the same beginning, as in the released code.
    begin, end = max(first + s - k, 0), min(first + s, length)
    stride = Stride(
        document=document,
        number=number,
        begin=begin,
        first=first,
        end=end,
        recent_start=begin + config.history_length if begin else 0,
        candidates_end=max(end - config.recent_length, 0),
        selects=False,
    )
    starts = k if config.first_selection is None else config.first_selection
    return stride._replace(selects=begin >= starts and num_candidates(stride, config) > 0)


def scored_strides(length: int, config: HistoryConfig, document: int = 0) -> Iterator[Stride]:
    """The strides whose candidates are scored to train a selector: all of s targets that have a candidate.

    That is earlier than spans are selected. Arguments as for `strides`.
    """
    for stride in strides(length, config, document):
        if stride.num_targets == config.stride and num_candidates(stride, config):
            yield stride


def num_candidates(stride: Stride, config: HistoryConfig) -> int:
    """How many candidates of a stride a model is run for."""
    count = len(_all_candidates(stride, config))
    return count if config.max_candidates is None else min(count, config.max_candidates)


def candidates(stride: Stride, config: HistoryConfig) -> Int[np.ndarray, " m"]:
    """Where the candidates of a stride that a model is run for end (exclusive), int64 and ascending.

    A pure function of its arguments.
    """
    ends = np.asarray(_all_candidates(stride, config), np.int64)
    if config.max_candidates is None or len(ends) <= config.max_candidates:
        return ends
    chance = random_numbers(stride, config.seed, len(ends))
    return np.sort(ends[np.argsort(chance, kind="stable")[: config.max_candidates]])


def candidates_of(scorer: SpanScorer, stride: Stride, config: HistoryConfig) -> Int[np.ndarray, " m"]:
    """Where the candidates that a scorer ranks end: all of the stride, or `candidates` if it runs a model."""
    return candidates(stride, config) if scorer.runs_a_model else np.asarray(_all_candidates(stride, config), np.int64)


def rank(
    scorer: SpanScorer, name: str, document: Int[np.ndarray, " tokens"], stride: Stride, config: HistoryConfig
) -> tuple[Int[np.ndarray, " m"], Float[np.ndarray, " m"]]:
    """The candidates that a scorer ranks (`candidates_of`), and the scores that it gives them.

    Args:
        scorer, document, stride, config: as of `SpanScorer.scores`.
        name: of the document.

    Raises:
        UserError: a score is NaN.
        ValueError: not every span has a score.
    """
    ends = candidates_of(scorer, stride, config)
    scores = scorer.scores(document, stride, ends)
    if scores.shape != ends.shape:
        raise ValueError(f"{scorer.name} gave scores of shape {scores.shape} for {len(ends)} spans")
    if np.isnan(scores).any():
        raise UserError(f"{scorer.name} gives NaN to {where(stride, name)}")
    return ends, scores


def where(stride: Stride, name: str) -> str:
    """For errors: the spans of a stride that were scored with what is no number, and the way out."""
    return (
        f"spans for the tokens {stride.first:,} to {stride.end - 1:,} of {name} (stride {stride.number}): bind the "
        "model's activation_dtype = 'float32', or choose other documents with --document"
    )


def _all_candidates(stride: Stride, config: HistoryConfig) -> range:
    stop = stride.candidates_end
    if config.candidates == "before_window":
        stop = min(stop, stride.begin + 1)
    return range(config.span_length, stop, config.span_stride or max(config.span_length // 2, 1))


def random_numbers(stride: Stride, seed: int, count: int) -> Int[np.ndarray, " m"]:
    """uint64 by chance: a pure function of the seed and of the stride's place in its split."""
    # numpy promises the same raw bits of a bit generator in every version, but not the same draws of a Generator.
    return np.random.PCG64([seed, stride.document, stride.number]).random_raw(count)


def select(
    scores: Float[np.ndarray, " m"], ends: Int[np.ndarray, " m"], config: HistoryConfig
) -> Int[np.ndarray, " spans"]:
    """The best candidates, at most `num_spans`, in the order in which the window has them.

    Of equal scores the later span is better, as in the released code (a stable sort, of which the last are taken).

    Args:
        scores: higher is better; no NaN (`rank`).
        ends: of the candidates, ascending.

    Returns:
        Their ends; fewer than `num_spans` where there are fewer candidates, or fewer that share nothing.
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
) -> Int[np.ndarray, "spans l"]:
    """The tokens of spans, int32, each with the separator (`separator_token`) in its last place."""
    length = config.span_length
    tokens = np.asarray(document)[np.asarray(ends, np.int64)[:, None] + np.arange(-length, 0)].astype(np.int32)
    if separator is not None:
        tokens[:, -1] = separator
    return tokens


def necessary_prefix(
    document: Int[np.ndarray, " tokens"], stride: Stride, config: HistoryConfig
) -> Int[np.ndarray, " prefix"]:
    """The k - j - s tokens before the first target, which every selection may read; fewer near the beginning."""
    return np.asarray(document[max(stride.first - config.prefix_length, 0) : stride.first], np.int32)


def separator_token(config: HistoryConfig, vocabulary: "Vocabulary") -> int | None:
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
