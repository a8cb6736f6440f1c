"""The config of a Shortformer, of its ablations and of the baseline, which differ only in these fields."""

import dataclasses
from typing import ClassVar, Literal

from meliad_like.errors import UserError
from meliad_like.models.decoder_config import ActivationDtype, Remat
from meliad_like.registry import resumable
from meliad_like.sizes import size
from meliad_like.validation import check_choices, check_not_negative, check_positive, check_shares

Position = Literal["infused", "input"]
DROPOUT_RATES = ("dropout_rate", "attention_dropout_rate", "activation_dropout_rate", "softmax_dropout_rate")


@dataclasses.dataclass(frozen=True)
class ShortformerConfig:
    """A transformer of Baevski & Auli 2018, with the two parts of Shortformer (section 5): positions that are infused
    into attention, and a cache of the tokens before. The defaults are the paper's best model for WikiText-103."""

    num_layers: int = size(16, "layers")
    model_width: int = size(1024, "width")
    num_heads: int = size(8, "heads")
    head_size: int = size(128, "heads")
    feedforward_width: int = size(4096, "width")
    window_length: int = size(512, "length")
    """The number of tokens in a block (the paper's L): a token sees itself and the earlier tokens of its block."""
    cache_length: int = size(512, "length")
    """The number of tokens before the block that a token sees as well (the paper's L'); 0: none."""
    position: Position = "infused"
    """Where sinusoidal positions are added: `infused`, to the inputs of the query and key projections of every layer
    (section 5.1); or `input`, to the scaled word embeddings, counted from the beginning of each block."""
    cutoffs: tuple[int, ...] = (20_000, 60_000)
    """First ids of the vocabulary's narrower bands (`layers/adaptive.py`); (): one table, shared with the softmax."""
    band_factor: int = size(4, "fixed")
    """The ratio of the widths of a band's vectors and those of the next band."""
    dropout_rate: float = 0.3
    """Dropout of the embeddings, and of the outputs of attention and feed-forward networks."""
    attention_dropout_rate: float = 0.1
    """Dropout of the attention weights."""
    activation_dropout_rate: float = 0.1
    """Dropout of the feed-forward network's hidden layer."""
    softmax_dropout_rate: float = 0.2
    """Dropout of the input of the softmax, and of the inputs of its narrower bands."""
    activation_dtype: ActivationDtype = "float32"
    remat: Remat = resumable("none")
    """What the backward pass computes again: nothing, all but matrix products (`dots`), or whole layers."""

    needs_segments: ClassVar[bool] = False

    def __post_init__(self):
        check_choices(self)
        sizes = ("num_layers", "model_width", "num_heads", "head_size", "feedforward_width", "window_length")
        check_positive(self, (*sizes, "band_factor"))
        check_not_negative(self, ("cache_length",))
        check_shares(self, DROPOUT_RATES)
        # Half of the channels are sines, whose frequencies are spaced by 1 / (model_width / 2 - 1).
        if self.model_width % 2 or self.model_width < 4:
            raise UserError(f"model_width={self.model_width} must be even, and at least 4")
        object.__setattr__(self, "cutoffs", tuple(self.cutoffs))
        if any(low >= high for low, high in zip((0, *self.cutoffs), self.cutoffs)):
            raise UserError(f"cutoffs={self.cutoffs} must be positive and ascend")
        if self.model_width < self.band_factor ** len(self.cutoffs):
            raise UserError(
                f"model_width={self.model_width} leaves nothing for the last of {len(self.cutoffs) + 1} bands, each "
                f"band_factor={self.band_factor} times narrower than the one before"
            )
