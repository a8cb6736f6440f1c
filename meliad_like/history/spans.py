"""Spans of a document's past, and the strides in which the document is predicted.

Ancient History Language Models (Koncel-Kedziorski and Smith 2021), section 2. A window of `window_length` tokens (k in
the paper) predicts `stride` targets (s) at a time. Where it no longer reaches back to the document's beginning, its
first `history_length` tokens (j) make room for the best spans of `span_length` tokens (l) out of all the text before
its last `recent_length` = `window_length - history_length` tokens:

    document    0 ......................... begin ............ recent_start ........... first ......... end
    window                                  [ history_length, or spans ][ necessary prefix ][ stride targets ]

Everything here is arithmetic on lengths: which spans there are does not depend on any token.
"""

import dataclasses
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

import numpy as np
from jaxtyping import Float, Int, UInt

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
    """Which spans of a document's past come into a window, and how; the defaults are those of the paper's code."""

    window_length: int = 1024
    """Tokens of a window, targets included (k in the paper)."""
    history_length: int = 512
    """Tokens of a window that selected spans may fill (j), a multiple of span_length."""
    span_length: int = 64
    """Tokens of a span, separator included (l)."""
    span_stride: int | None = None
    """Distance in tokens between the beginnings of successive candidates; None: half a span."""
    stride: int = 256
    """Targets of a window (s). Spans are selected once for all of them."""
    separator: str = "\n\n"
    """Text of one token that replaces the last token of each span; "": spans stay unchanged."""
    order: Order = "ascending"
    """Order of the spans in the window. `ascending`: the best one comes last, next to the recent text; `descending`: it
    comes first; `document`: spans keep their order in the document."""
    deduplicate: bool = False
    """Whether a span is left out when it shares tokens with a better one. The released code keeps it."""
    candidates: Candidates = "before_prefix"
    """`before_prefix`: all spans before the last recent_length tokens, also those in the window's first history_length
    tokens. `before_window`: only spans that are not in the window already."""
    first_selection: int | None = None
    """Spans are selected for windows that begin at this position of the document or later, and never for the first
    window; None: at window_length, as in the released code."""
    max_candidates: int | None = None
    """Largest number of candidates of a stride that a model reads, to score them or to select among them. Where there
    are more, a random subset is used; None: all. Rankings that run no model choose among all candidates."""
    baseline: Baseline = "bare"
    """What the gain of a span is measured against (equation 2): the recent text alone (`bare`), or the recent text and
    the span_length tokens before it (`contiguous`), as in the released scores."""
    selector_context: SelectorContext = "prefix_only"
    """What a learned selector reads beside a span: the necessary prefix, or, as in the released code, the recent text
    with its targets. The latter leaks the future, and exists for comparison only."""
    overlap: Overlap = "multiset"
    """How the overlap of a span with other text is measured: number of common tokens with repetitions, number of
    different common tokens, or the latter divided by the number of different tokens in either."""
    first_token: FirstToken = "left_out"
    """How a document's first token, which nothing precedes, is counted: not at all, or, as in the released code, with
    the mean loss of the document's first stride."""
    seed: int = 0
    """Seed of random spans and of random subsets of candidates."""

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


class SpanScorer(Protocol):
    """A ranking of the spans that may come into a window.

    Tables of costs look for two optional attributes, which are sums over all calls so far: `flops`, the floating-point
    operations of a scorer that runs a model, and `compile_seconds`, which do not count as time spent on ranking.
    """

    name: str
    """Name in tables."""
    leaks_the_future: bool
    """Whether the scores depend on the targets that the spans help to predict."""
    runs_a_model: bool
    """Whether candidates cost forward passes, so that `HistoryConfig.max_candidates` limits their number."""
    fingerprint: str
    """Fingerprint of the model that is run; "" where the config alone decides the scores."""

    def scores(
        self, document: Int[np.ndarray, " tokens"], stride: Stride, ends: Int[np.ndarray, " m"]
    ) -> Float[np.ndarray, " m"]:
        """Scores the candidates of one stride for which spans are selected.

        Args:
            document: int32, all its tokens; a scorer that does not leak the future reads those before stride.first.
            stride: stride of the document.
            ends: result of `candidates_of`, ascending: candidate i is the tokens [ends[i] - span_length, ends[i]).

        Returns:
            float32, higher is better, finite.
        """
        ...


def index_in_split(documents: Any, document: int) -> int:
    """A document's index in its split: random choices depend on it, so that a subset is read as the whole split is."""
    return int(documents.indices[document]) if hasattr(documents, "indices") else document


def num_strides(length: int, config: HistoryConfig) -> int:
    """Number of strides of a document."""
    return -(-length // config.stride)


def stride_table(length: int, config: HistoryConfig, document: int = 0) -> Stride:
    """All strides of a document at once: a `Stride` whose fields are arrays, one entry a stride.

    Every token is in exactly one stride; the first token of the first stride is no target.

    Args:
        length: number of tokens of the document.
        config: lengths and rules.
        document: index of the document in its split.
    """
    return _table(np.arange(num_strides(length, config)), length, config, document)


def stride_of(number: int, length: int, config: HistoryConfig, document: int = 0) -> Stride:
    """One stride of a document; arguments as for `stride_table`."""
    return next(_rows(_table(np.array([number]), length, config, document)))


def strides(length: int, config: HistoryConfig, document: int = 0) -> Iterator[Stride]:
    """The strides of a document, first to last; arguments as for `stride_table`."""
    return _rows(stride_table(length, config, document))


def is_scored(stride: Stride, config: HistoryConfig) -> Any:
    """Whether the candidates of a stride are scored to train a selector; an array for a table of strides.

    These are the strides with a full number of targets and a candidate; they begin earlier than selection does.
    """
    return (stride.num_targets == config.stride) & (num_candidates(stride, config) > 0)


def num_candidates(stride: Stride, config: HistoryConfig) -> Any:
    """Number of candidates of a stride that a model reads; an array for a table of strides."""
    first, stop, step = _candidate_range(stride, config)
    count = np.maximum(-(-(stop - first) // step), 0)
    return count if config.max_candidates is None else np.minimum(count, config.max_candidates)


def candidates(stride: Stride, config: HistoryConfig) -> Int[np.ndarray, " m"]:
    """Where the candidates of a stride that a model reads end (exclusive), int64, ascending; a pure function."""
    ends = np.arange(*_candidate_range(stride, config))
    if config.max_candidates is None or len(ends) <= config.max_candidates:
        return ends
    drawn = random_numbers(stride, config.seed, len(ends))
    return np.sort(ends[np.argsort(drawn, kind="stable")[: config.max_candidates]])


def candidates_of(scorer: SpanScorer, stride: Stride, config: HistoryConfig) -> Int[np.ndarray, " m"]:
    """Where the candidates that a scorer ranks end: all of the stride, or `candidates` if it runs a model."""
    return candidates(stride, config) if scorer.runs_a_model else np.arange(*_candidate_range(stride, config))


def rank(
    scorer: SpanScorer, name: str, document: Int[np.ndarray, " tokens"], stride: Stride, config: HistoryConfig
) -> tuple[Int[np.ndarray, " m"], Float[np.ndarray, " m"]]:
    """The candidates that a scorer ranks (`candidates_of`), and their scores.

    Args:
        scorer, document, stride, config: as for `SpanScorer.scores`.
        name: name of the document.

    Raises:
        UserError: a score is not finite.
        ValueError: not every span has a score.
    """
    ends = candidates_of(scorer, stride, config)
    scores = scorer.scores(document, stride, ends)
    if scores.shape != ends.shape:
        raise ValueError(f"{scorer.name} gave scores of shape {scores.shape} for {len(ends)} spans")
    check_finite(scores, scorer.name, stride, name)
    return ends, scores


def check_finite(scores: np.ndarray, scorer: str, stride: Stride, document: str) -> None:
    """
    Raises:
        UserError: a score is not finite.
    """
    if not np.isfinite(scores).all():
        raise UserError(
            f"{scorer} gives no finite scores to spans for the tokens {stride.first:,} to {stride.end - 1:,} of "
            f"{document} (stride {stride.number}): bind the model's activation_dtype = 'float32', or choose other "
            "documents with --document"
        )


def random_numbers(stride: Stride, seed: int, count: int) -> UInt[np.ndarray, " m"]:
    """Random uint64 numbers: a pure function of the seed and of the stride's place in its split."""
    # numpy promises the same raw bits of a bit generator in every version, but not the same draws of a Generator.
    return np.random.PCG64([seed, stride.document, stride.number]).random_raw(count)


def select(
    scores: Float[np.ndarray, " m"], ends: Int[np.ndarray, " m"], config: HistoryConfig
) -> Int[np.ndarray, " spans"]:
    """The best candidates, at most `num_spans`, in their order in the window.

    Of equal scores the later span is better, as in the released code (a stable sort, of which the last are taken).

    Args:
        scores: higher is better.
        ends: where the candidates end, ascending.

    Returns:
        Where the spans end; fewer than `num_spans` where there are fewer candidates, or fewer of them that share
        no token.
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


def necessary_prefix(
    document: Int[np.ndarray, " tokens"], stride: Stride, config: HistoryConfig
) -> Int[np.ndarray, " prefix"]:
    """The tokens of the recent text before the first target; fewer than `prefix_length` near the beginning."""
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


def _candidate_range(stride: Stride, config: HistoryConfig) -> tuple[Any, Any, Any]:
    """Arguments of `np.arange` for where the candidates of a stride end, without the limit of max_candidates."""
    stop = stride.candidates_end
    if config.candidates == "before_window":
        stop = np.minimum(stop, stride.begin + 1)
    return config.span_length, stop, config.span_stride or max(config.span_length // 2, 1)


def _table(number: Int[np.ndarray, " n"], length: int, config: HistoryConfig, document: int) -> Stride:
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


def _rows(table: Any) -> Iterator[Stride]:
    return map(Stride._make, zip(*(column.tolist() for column in table)))
