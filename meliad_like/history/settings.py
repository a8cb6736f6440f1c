"""All settings of ancient history: windows and spans, the selector and its training."""

import dataclasses
from typing import Any, Literal

from meliad_like.errors import UserError
from meliad_like.models.config import ActivationDtype
from meliad_like.optimization.optimizers import OPTIMIZERS, Adam
from meliad_like.registry import kind_field, resumable, size
from meliad_like.validation import check_choices, check_not_negative, check_positive, check_seeds, check_shares


@dataclasses.dataclass(frozen=True)
class HistoryConfig:
    """The spans of a document's past that come into a window, and how; the defaults are those of the paper's code."""

    window_length: int = size(1024, "length")
    """Tokens of a window, targets included."""
    history_length: int = size(512, "length")
    """Tokens of a window that selected spans may fill, a multiple of span_length."""
    span_length: int = size(64, "length")
    """Tokens of a span, separator included. Candidates begin half a span apart."""
    stride: int = size(256, "length")
    """Targets of a window. Spans are selected once for all of them."""
    separator: str = "\n\n"
    """Text of one token that replaces the last token of each span; "": spans stay unchanged."""
    first_selection: int | None = None
    """Spans are selected for windows that begin at this position of the document or later, and never for the first
    window; None: at window_length, as in the released code."""
    max_candidates: int | None = None
    """Largest number of candidates of a stride that a model reads, a random subset; None: all. Rankings that run no
    model choose among all candidates."""
    baseline: Literal["bare", "contiguous"] = "bare"
    """The baseline of the gain of a span (equation 2): the recent text alone (`bare`), or the recent text and
    the span_length tokens before it (`contiguous`), as in the released scores."""
    overlap: Literal["multiset", "set", "jaccard"] = "multiset"
    """The measure of a span's overlap with other text, which the paper leaves open: number of common tokens with
    repetitions, number of different common tokens, or the latter divided by that of different tokens in either."""
    first_token: Literal["left_out", "released_code"] = "left_out"
    """The loss of a document's first token, which nothing precedes: left out, or, as in the released code,
    the mean loss of the document's first stride."""
    seed: int = size(0, "fixed")
    """Seed of random spans and of random subsets of candidates."""

    def __post_init__(self):
        check_choices(self)
        check_positive(self, ("window_length", "history_length", "span_length", "stride"))
        check_not_negative(self, ("seed",))
        optional = ("first_selection", "max_candidates")
        check_positive(self, [name for name in optional if getattr(self, name) is not None])
        if self.history_length % self.span_length:
            multiple = f"a multiple of span_length={self.span_length}"
            raise UserError(f"history_length={self.history_length} must be {multiple}")
        if self.history_length + self.stride > self.window_length:
            lengths = f"history_length={self.history_length} and stride={self.stride}"
            raise UserError(f"{lengths} must fit together into window_length={self.window_length}")

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
        """The number of tokens of the necessary prefix: the recent text before the targets."""
        return self.recent_length - self.stride


@dataclasses.dataclass(frozen=True)
class SelectorConfig:
    """The model that learns which spans help, by default the paper's."""

    context: Literal["prefix", "released_code"] = "prefix"
    """The text that is read in addition to the span: that before the targets, or, as in the released code, the
    recent text with its targets. The latter leaks the future, and exists for comparison only."""
    context_tokens: int | None = None
    """Number of tokens of `prefix`; None: the window's necessary prefix."""
    encoder_layers: int = 0
    """Number of layers of the pretrained decoder that are used, from the first one; 0: all."""
    head_width: int = 256
    """Width of the hidden layer of the head."""
    dropout_rate: float = 0.1
    """Dropout in the decoder, while it is trained."""
    activation_dtype: ActivationDtype = "float32"

    def __post_init__(self):
        check_choices(self)
        check_positive(self, ("head_width",) if self.context_tokens is None else ("head_width", "context_tokens"))
        check_not_negative(self, ("encoder_layers",))
        check_shares(self, ("dropout_rate",))
        if self.context == "released_code" and self.context_tokens is not None:
            reason = "SelectorConfig.context='released_code', which reads the window's own tokens: leave it out"
            raise UserError(f"SelectorConfig.context_tokens={self.context_tokens} has no effect on {reason}")


@dataclasses.dataclass(frozen=True)
class SelectorTrainingConfig:
    """The training of a selector, by default as in the authors' code. Each `..._every` counts steps; 0: at the end."""

    num_steps: int = resumable(45_541)
    """The number of steps, by default one epoch of the authors' 728,654 pairs; their number of epochs is not known."""
    batch_size: int = 16
    optimizer: Any = kind_field(
        OPTIMIZERS, lambda: Adam(base_rate=1e-5, weight_decay=0.0, second_decay=0.999, epsilon=1e-6)
    )
    """The optimizer; its `base_rate` is the learning rate of all steps (section 3)."""
    seed: int = 0
    """Seed of the head's initial parameters, of the order of the pairs, and of the dropout."""
    validation_every: int = 9
    """Documents whose index is a multiple of this are held out."""
    encode_batch: int = resumable(64)
    """Number of texts that are encoded at once in evaluations."""
    log_every: int = resumable(10)
    evaluate_every: int = resumable(1000)
    checkpoint_every: int = resumable(1000)
    checkpoints_kept: int = resumable(2)

    def __post_init__(self):
        positive = ("num_steps", "batch_size", "validation_every", "encode_batch", "log_every", "checkpoints_kept")
        check_positive(self, positive)
        if self.validation_every == 1:
            raise UserError("SelectorTrainingConfig.validation_every=1 holds all documents out: it must be at least 2")
        check_not_negative(self, ("evaluate_every", "checkpoint_every"))
        check_seeds(self, ("seed",))


@dataclasses.dataclass(frozen=True)
class HistorySettings:
    """The settings of the commands of ancient history, which are not part of a run's config."""

    history: HistoryConfig = dataclasses.field(default_factory=HistoryConfig)
    selector: SelectorConfig = dataclasses.field(default_factory=SelectorConfig)
    selector_training: SelectorTrainingConfig = dataclasses.field(default_factory=SelectorTrainingConfig)
