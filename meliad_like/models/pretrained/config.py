"""The config of a pretrained decoder and of the recurrence that is added to it."""

import dataclasses
from typing import Literal

from meliad_like.errors import UserError
from meliad_like.layers.named_layers import check_layers, layer_indices
from meliad_like.models.decoder_config import ActivationDtype
from meliad_like.registry import resumable
from meliad_like.sizes import size
from meliad_like.validation import check_choices, check_not_negative, check_positive, check_shares

Architecture = Literal["gpt2", "llama"]
Activation = Literal["gelu_tanh", "gelu", "relu", "silu", "tanh"]
Pooling = Literal["mean", "sum", "max", "attention"]
PooledLayers = Literal["blocks", "final_norm"]
InsertionPoint = Literal["before_norm", "after_norm"]
Remat = Literal["none", "dots", "layers"]

POSITIVE = (
    "num_layers",
    "model_width",
    "num_heads",
    "num_key_value_heads",
    "head_size",
    "feedforward_width",
    "max_positions",
    "window_length",
    "num_inserted",
    "recurrence_width",
)

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
    "tied_embedding",
)
"""What a pretrained model is; the other fields say what is made of it."""
RECURRENCE_FIELDS = (
    "insertion_layers",
    "insertion_point",
    "num_inserted",
    "pooling",
    "pooled_layers",
    "recurrence_width",
    "recurrence_depth",
    "recurrence_activation",
    "normalise_pooled",
)


@dataclasses.dataclass(frozen=True)
class PretrainedConfig:
    """A pretrained decoder, by default GPT-2 small, and how it reads documents.

    The recurrence is that of Adding Recurrence to Pretrained Transformers (Yoshida et al. 2020, section 3.1), whose
    defaults the fields have where the paper states them.
    """

    architecture: Architecture = "gpt2"
    """`gpt2`: layer norms, biases, learned positions, a plain feed-forward network. `llama`: RMS norms, no biases,
    rotary positions, a gated feed-forward network."""
    num_layers: int = size(12, "layers")
    model_width: int = size(768, "width")
    num_heads: int = size(12, "heads")
    num_key_value_heads: int = size(12, "heads")
    """Heads of keys and values; each serves num_heads / num_key_value_heads heads of queries."""
    head_size: int = size(64, "heads")
    feedforward_width: int = size(3072, "width")
    activation: Activation = "gelu_tanh"
    """Width of the feed-forward network."""
    max_positions: int = size(1024, "fixed")
    """The largest number of tokens in a window: the context length of pretraining."""
    norm_epsilon: float = 1e-5
    rotary_base: float = 10_000.0
    """`llama`: the longest wavelength of the rotary embedding, over 2 pi."""
    tied_embedding: bool = True
    """Whether the softmax shares the embedding."""
    window_length: int = size(1024, "length")
    """The number of tokens in a window (the paper's T). Positions start again with every window."""
    overlap: int = size(0, "length")
    """The number of tokens at the end of the window before that a window repeats, without predictions (section 4.2)."""
    dropout_rate: float = 0.0
    """Dropout of embeddings, attention weights and the outputs of attention and feed-forward networks."""
    activation_dtype: ActivationDtype = "float32"
    matmul_dtype: ActivationDtype | None = None
    """What the two sides of a linear map or of the logits are rounded to; sums, and gradients of parameters, are of
    `activation_dtype`. None: that as well. With float32 activations, `bfloat16` is for CPUs that multiply it faster."""
    remat: Remat = resumable("none")
    """What the backward pass computes again: nothing (`none`), all but the linear maps (`dots`), or the inside of all
    layers (`layers`). With a recurrence `none` and `layers` keep nothing of a window, whose gradient then takes one
    more pass over it (section 3.2); `dots` keeps the outputs of linear maps for all windows of a sequence."""

    insertion_layers: tuple[int, ...] = ()
    """Layers, counted from 0, whose attention gets what was pooled from the window before; negative numbers count from
    the end. None: no recurrence. The paper's layer 2 is (1,)."""
    insertion_point: InsertionPoint = "before_norm"
    """Whether the inserted vectors pass that layer's attention norm, as the tokens do."""
    num_inserted: int = size(1, "fixed")
    """The number of inserted vectors."""
    pooling: Pooling = "mean"
    """How the hidden vectors of a window become one: `attention` has one learned key."""
    pooled_layers: PooledLayers = "blocks"
    """What the last layer's output is: that of its `blocks`, or after the model's `final_norm`."""
    normalise_pooled: bool = False
    """Whether each token's output of each layer is divided by its root mean square before it is weighed. Pretrained
    decoders have first tokens with outputs a hundred times those of others, and last layers with ten times those of
    the first; what is pooled is otherwise mostly these."""
    recurrence_width: int = size(200, "width")
    """Width of the hidden layers of the feed-forward network between windows."""
    recurrence_depth: int = size(3, "fixed")
    """Number of those hidden layers."""
    recurrence_activation: Activation = "relu"
    recurrence_scale: float = 1.0
    """Factor on the initial weights of that network's last layer. With 0, and inserted `after_norm`, training begins
    with vectors of zeros, which change the least."""
    recurrence_rate: float = 1.0
    """Factor on the learning rate of the recurrence, whose parameters are new."""
    train_decoder: bool = True
    """Whether the pretrained parameters are trained, or the recurrence alone."""

    def __post_init__(self):
        check_choices(self)
        check_positive(self, POSITIVE)
        if self.num_heads % self.num_key_value_heads:
            raise UserError(
                f"num_heads={self.num_heads} must be a multiple of num_key_value_heads={self.num_key_value_heads}"
            )
        if self.architecture == "llama" and self.head_size % 2:
            raise UserError(f"head_size={self.head_size} must be even for rotary positions")
        if self.window_length > self.max_positions:
            raise UserError(
                f"window_length={self.window_length} is more than the max_positions={self.max_positions} of the model"
            )
        if not 0 <= self.overlap < self.window_length:
            raise UserError(f"overlap={self.overlap} must be at least 0 and below window_length={self.window_length}")
        check_shares(self, ("dropout_rate",))
        check_not_negative(self, ("recurrence_depth", "recurrence_scale"))
        if not self.recurrence_rate > 0:
            raise UserError(f"recurrence_rate={self.recurrence_rate} must be positive")
        check_layers(self, "insertion_layers", self.num_layers)
        if not self.train_decoder and not self.recurrent:
            raise UserError("train_decoder=False leaves nothing to train without insertion_layers")

    def extends(self, other: object) -> bool:
        """Whether training may begin with the parameters of a model of the config `other`.

        It is the same decoder, with the same recurrence if it has one; how it reads may differ.
        """
        if not isinstance(other, PretrainedConfig):
            return False
        names = DECODER_FIELDS + (RECURRENCE_FIELDS if other.recurrent else ())
        return all(getattr(self, name) == getattr(other, name) for name in names)

    @property
    def insertion_indices(self) -> frozenset[int]:
        """The layers with insertions, counted from 0."""
        return layer_indices(self.insertion_layers, self.num_layers)

    @property
    def recurrent(self) -> bool:
        """Whether there is a recurrence between windows."""
        return bool(self.insertion_layers)

    @property
    def stride(self) -> int:
        """Tokens from the beginning of a window to that of the next."""
        return self.window_length - self.overlap

    @property
    def needs_segments(self) -> bool:
        """Nothing depends on where segments end."""
        return False
