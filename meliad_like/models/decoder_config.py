"""The shape of a decoder: sliding window, Transformer-XL and block-recurrent models differ in these fields alone."""

import dataclasses
from typing import Literal, get_args

from meliad_like.errors import UserError
from meliad_like.layers.recurrence import CellKind, GateKind

Position = Literal["t5", "rotary", "none"]
ActivationDtype = Literal["float32", "bfloat16"]
Remat = Literal["none", "dots", "layers"]


@dataclasses.dataclass(frozen=True)
class DecoderConfig:
    """A stack of windowed attention layers, some of them recurrent. The defaults are the paper's 12-layer model."""

    num_layers: int = 12
    """Layers of the size, before `extra_layers`."""
    extra_layers: int = 0
    """Added to `num_layers`: the paper's 13-layer baselines are 1, whatever the size."""
    model_width: int = 1024
    num_heads: int = 8
    head_size: int = 128
    feedforward_width: int = 4096
    window_length: int = 512
    """Tokens that a token sees, and tokens in a block."""
    position: Position = "t5"
    """Relative positions inside the window."""
    recurrent_layers: tuple[int, ...] = ()
    """Which layers are recurrent; negative numbers count from the end (-3 of 12 is the paper's layer 10)."""
    num_states: int = 512
    """State vectors of a recurrent layer."""
    gate: GateKind = "fixed"
    cell: CellKind = "skip"
    clear_states: bool = False
    """Start every segment with the initial states: what is the recurrence worth beyond a segment?"""
    dropout_rate: float = 0.0
    logit_scale: float | None = None
    """What hidden states are multiplied with before the softmax; by default 1 / sqrt(model_width)."""
    mask_empty_cache: bool = True
    """Whether a document's first tokens ignore the empty cache. The reference lets them see zeros instead."""
    activation_dtype: ActivationDtype = "float32"
    remat: Remat = "none"
    """What the backward pass computes again: nothing, all but matrix products (`dots`), or whole layers."""

    def __post_init__(self):
        for field, choices in (
            ("position", Position),
            ("gate", GateKind),
            ("cell", CellKind),
            ("activation_dtype", ActivationDtype),
            ("remat", Remat),
        ):
            if getattr(self, field) not in get_args(choices):
                raise UserError(f"{field}={getattr(self, field)!r} is not one of {', '.join(get_args(choices))}")
        for field in (
            "num_layers",
            "model_width",
            "num_heads",
            "head_size",
            "feedforward_width",
            "window_length",
            "num_states",
        ):
            if getattr(self, field) < 1:
                raise UserError(f"{field}={getattr(self, field)} must be at least 1")
        if self.extra_layers < 0:
            raise UserError(f"extra_layers={self.extra_layers} must not be negative")
        if not 0.0 <= self.dropout_rate < 1.0:
            raise UserError(f"dropout_rate={self.dropout_rate} must be at least 0 and below 1")
        if self.position == "rotary" and self.head_size % 2:
            raise UserError(f"head_size={self.head_size} must be even for position=rotary")
        object.__setattr__(self, "recurrent_layers", tuple(self.recurrent_layers))
        for layer in self.recurrent_layers:
            if not -self.total_layers <= layer < self.total_layers:
                raise UserError(
                    f"recurrent_layers={self.recurrent_layers} names a layer that {self.total_layers} layers lack"
                )
        if len(self.recurrent_indices) != len(self.recurrent_layers):
            raise UserError(f"recurrent_layers={self.recurrent_layers} names a layer twice")

    @property
    def total_layers(self) -> int:
        return self.num_layers + self.extra_layers

    @property
    def recurrent_indices(self) -> frozenset[int]:
        """The recurrent layers, counted from 0."""
        return frozenset(layer % self.total_layers for layer in self.recurrent_layers)
