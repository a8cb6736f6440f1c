"""The config of a pretrained decoder, and its operations."""

import dataclasses
from typing import Literal

import numpy as np
from jaxtyping import Int

from meliad_like.errors import UserError
from meliad_like.families.pretrained.attention import WindowAttentionConfig
from meliad_like.families.pretrained.recurrence import RECURRENCES, WindowSummary
from meliad_like.layers.basic import Activation
from meliad_like.layers.feedforward import FeedForwardConfig, GatedFeedForward, PlainFeedForward
from meliad_like.layers.flops import Flops
from meliad_like.layers.rotary import ROTARY_SCALINGS, RotaryScaling
from meliad_like.mixers.base import DecoderShape
from meliad_like.mixers.positions import PositionConfig
from meliad_like.models.config import MODELS, ActivationDtype, ModelConfig, ModelTraits, Remat
from meliad_like.models.model import block_offset
from meliad_like.registry import bound_values, kind_field, resumable, size
from meliad_like.validation import check_positive, layer_indices

DECODER_FIELDS = (
    "architecture",
    "num_layers",
    "model_width",
    "num_heads",
    "num_key_value_heads",
    "head_size",
    "feedforward_width",
    "activation",
    "max_positions",
    "norm_epsilon",
    "rotary_base",
    "rotary_scaling",
    "sliding_window",
    "tied_embedding",
)
"""The fields that the file of a pretrained model determines."""

HOW_IT_BEGINS = ("WindowSummary.scale", "WindowSummary.rate")
"""The fields of a recurrence that determine only its training."""


@MODELS.register("pretrained")
class PretrainedConfig(ModelConfig):
    """A pretrained decoder, by default GPT-2 small, and how it reads documents.

    The recurrence is that of Adding Recurrence to Pretrained Transformers (Yoshida et al. 2020, section 3.1), whose
    defaults the fields have where the paper states them.
    """

    architecture: Literal["gpt2", "llama"] = "gpt2"
    """`gpt2`: layer norms, biases, learned positions, a plain feed-forward network. `llama`: RMS norms, no biases,
    rotary positions, a gated feed-forward network."""
    model_width: int = size(768, "width")
    num_heads: int = size(12, "heads")
    num_key_value_heads: int = size(12, "heads")
    """Heads of keys and values; each serves num_heads / num_key_value_heads heads of queries."""
    head_size: int = size(64, "heads")
    feedforward_width: int = size(3072, "width")
    activation: Activation = "gelu_tanh"
    """The activation of the feed-forward network's hidden layer."""
    max_positions: int = size(1024, "fixed")
    """The largest number of tokens in a window: the context length of pretraining."""
    norm_epsilon: float = 1e-5
    rotary_base: float = 10_000.0
    """`llama`: the longest wavelength of the rotary embedding, over 2 pi."""
    rotary_scaling: RotaryScaling = kind_field(ROTARY_SCALINGS, RotaryScaling)
    """`llama`: the scaling of these wavelengths, for longer windows than the model first learned."""
    sliding_window: int = size(0, "length")
    """`llama`: the number of tokens, itself included, that a token attends to, as in Mistral; 0: all up to itself."""
    tied_embedding: bool = True
    """Whether the softmax shares the embedding."""
    window_length: int = size(1024, "length")
    """The number of tokens in a window (the paper's T). Positions start again with every window."""
    overlap: int = size(0, "length")
    """The number of tokens at the end of the window before that a window repeats, without predictions (section 4.2)."""
    dropout_rate: float = 0.0
    """Dropout of embeddings, attention weights and the outputs of attention and feed-forward networks."""
    matmul_dtype: ActivationDtype | None = None
    """The dtype to which both factors of a linear map or of the logits are rounded; sums, and gradients of parameters,
    are of `activation_dtype`. None: no rounding. `bfloat16` is for CPUs that multiply it faster."""
    remat: Remat = resumable("none")
    """The part of the forward pass that the backward pass computes again: nothing (`none`), all but the linear maps
    (`dots`), or the inside of all layers (`layers`). With a recurrence `none` and `layers` keep nothing of a window,
    whose gradient then takes one more pass over it (section 3.2); `dots` keeps the outputs of linear maps for all
    windows of a sequence."""
    recurrence: tuple[WindowSummary, ...] = kind_field(RECURRENCES, tuple, many=True)
    """The recurrence by which a window sees the windows before it: none, or a `WindowSummary` of the last one."""
    train_decoder: bool = True
    """Whether the pretrained parameters are trained, or the recurrence alone."""

    def __post_init__(self):
        super().__post_init__()
        check_positive(self, ("num_key_value_heads", "max_positions"))
        if self.num_heads % self.num_key_value_heads:
            raise UserError(
                f"num_heads={self.num_heads} must be a multiple of num_key_value_heads={self.num_key_value_heads}"
            )
        if self.architecture == "llama" and self.head_size % 2:
            raise UserError(f"head_size={self.head_size} must be even for rotary positions")
        scaled = self.rotary_scaling != RotaryScaling()
        if self.architecture == "gpt2" and (scaled or self.sliding_window):
            raise UserError("rotary_scaling and sliding_window have no effect on a gpt2 model: leave them out")
        if self.sliding_window < 0:
            raise UserError(f"sliding_window={self.sliding_window} must be at least 1, or 0 for all tokens")
        if self.window_length > self.max_positions and not self.rotary_scaling.extends_windows:
            raise UserError(
                f"window_length={self.window_length} is more than the max_positions={self.max_positions} of the model"
            )
        if not 0 <= self.overlap < self.window_length:
            raise UserError(f"overlap={self.overlap} must be at least 0 and below window_length={self.window_length}")
        if self.summary is not None:
            layer_indices("WindowSummary.layers", self.summary.layers, self.num_layers)
        elif not self.train_decoder:
            raise UserError("train_decoder=False leaves nothing to train without a WindowSummary")

    def determined(self, other: "PretrainedConfig") -> list[str]:
        """The names of the fields of the other's decoder and recurrence, if it has one, that differ."""
        names = [f"PretrainedConfig.{name}" for name in DECODER_FIELDS] + list(bound_values(other.rotary_scaling))
        if other.summary is not None:
            names += ["PretrainedConfig.recurrence", *bound_values(other.summary)]
        ours, theirs = bound_values(self), bound_values(other)
        return [name for name in names if ours.get(name) != theirs[name] and name not in HOW_IT_BEGINS]

    def for_separate_sequences(self, num_tokens: int) -> "PretrainedConfig":
        if self.window_length > self.max_positions:
            # The rotary scaling depends on the length of such windows.
            return self
        return dataclasses.replace(self, window_length=num_tokens, overlap=0)

    @property
    def traits(self) -> ModelTraits:
        return ModelTraits(
            self._num_visible,
            memory=RECURRENCES.name_of(self.summary) if self.summary else None,
            rate_factor=self._rate_factor,
            flops_by_the_paper=self._flops_by_the_paper(),
        )

    def _num_visible(self, position: Int[np.ndarray, "..."]) -> Int[np.ndarray, "..."]:
        """The window up to the token, without the vectors of a recurrence."""
        offset = block_offset(position, self.window_length, self.overlap)
        return np.minimum(offset + 1, self.sliding_window or self.window_length)

    def _rate_factor(self, name: str) -> float:
        return self.summary.rate if self.summary and name == "recurrence" else float(self.train_decoder)

    @property
    def summary(self) -> WindowSummary | None:
        """The recurrence between windows, if there is one."""
        return next(iter(self.recurrence), None)

    @property
    def insertion_indices(self) -> frozenset[int]:
        """The layers with inserted vectors, counted from 0."""
        if self.summary is None:
            return frozenset()
        return layer_indices("WindowSummary.layers", self.summary.layers, self.num_layers)

    @property
    def attention(self) -> WindowAttentionConfig:
        """The attention of each layer."""
        bias = self.architecture == "gpt2"
        return WindowAttentionConfig(
            span=self.sliding_window or self.window_length,
            num_key_heads=self.num_key_value_heads,
            rotary_share=float(self.architecture == "llama"),
            rotary_base=self.rotary_base,
            rotary_scaling=self.rotary_scaling,
            input_bias=bias,
            output_bias=bias,
            overlap=self.overlap,
            longer=self.window_length / self.max_positions,
        )

    @property
    def network(self) -> FeedForwardConfig:
        """The feed-forward network of each layer."""
        kind = PlainFeedForward if self.architecture == "gpt2" else GatedFeedForward
        return kind(activation=self.activation)

    @property
    def shape(self) -> DecoderShape:
        """The sizes of the decoder."""
        layers, networks = ((self.attention,),) * self.num_layers, (self.network,) * self.num_layers
        bias, none = self.architecture == "gpt2", {"attention_kernel": "none", "recurrence_kernel": "none"}
        none |= {"position": PositionConfig(), "mask_empty_cache": True}
        return DecoderShape.of(self, layers=layers, feedforwards=networks, feedforward_bias=bias, **none)

    def flops(self, vocabulary_size: int) -> Flops:
        """The operations of one token of a window in all layers, of its logits, and of its share of the recurrence.

        Attention counts every key of the window, as it is computed, although a query sees half of them.

        A decoder that is not trained (`train_decoder=False`) has no gradients of kernels, and none at all below the
        first layer with inserted vectors, because nothing there depends on a trained parameter. In that layer the
        tokens' own queries, keys and values need none either; the gradients of attention's keys and values are computed
        for all.
        """
        d, w, queries = self.model_width, self.window_length, self.num_heads * self.head_size
        keys = self.num_key_value_heads * self.head_size
        feedforward = self.network.flops(d, self.feedforward_width).forward
        linear, attention = 2 * d * (2 * queries + 2 * keys) + feedforward, 2 * 2 * w * queries
        inserting = recurrence = 0.0
        if self.summary is not None:
            # The keys and values of the inserted vectors, and the window's attention to these.
            inserted = len(self.insertion_indices) * self.summary.num_inserted
            inserting = inserted * 2 * d * 2 * keys / w
            recurrence = self.summary.flops_per_window(self.num_layers, d, w) / w + inserting + inserted * 4 * queries
        logits = 2 * d * vocabulary_size
        forward = self.num_layers * (linear + attention) + logits + recurrence
        if self.train_decoder:
            return Flops.of_products(forward)
        # The attention's output, the feed-forward network, and the gradients of attention weights, keys and values.
        in_first = 2 * d * queries + feedforward + 1.5 * attention
        above = (self.num_layers - 1 - min(self.insertion_indices)) * (linear + 2 * attention)
        return Flops(forward, in_first + above + logits + 2 * recurrence - inserting)

    def _flops_by_the_paper(self) -> float:
        """The operations of a predicted token as counted by Yoshida et al. 2020 (tables 1 and 2).

        Two operations for each parameter that is not an embedding, and 2 l w d for attention (Kaplan et al. 2020, table
        1), rounded to three digits, times w / (w - overlap). Logits, biases, norms and the recurrence are not counted.
        For GPT-2 small and a window of 300, the paper's 1.75e8 at overlap 0.
        """
        d, queries = self.model_width, self.num_heads * self.head_size
        kernels = d * (2 * queries + 2 * self.num_key_value_heads * self.head_size)
        parameters = self.num_layers * (kernels + self.network.flops(d, self.feedforward_width).forward / 2)
        disjoint = 2 * parameters + 2 * self.num_layers * self.window_length * queries
        # The paper rounds first: of 1.754e8, three of table 2's figures would have another last digit.
        return self.window_length / (self.window_length - self.overlap) * float(f"{disjoint:.3g}")
