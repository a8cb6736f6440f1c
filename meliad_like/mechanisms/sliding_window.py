"""Sliding-window attention: every token sees the `w` tokens before it (Block-Recurrent Transformers, section 3)."""

import dataclasses
from typing import ClassVar, Literal

import jax.numpy as jnp
import numpy as np
from einops import rearrange

from meliad_like.errors import UserError
from meliad_like.layers.attention import attend, attend_window
from meliad_like.layers.attention_kernel import ROWS, attend_window_in_kernel
from meliad_like.layers.backend import compiles_tpu_kernels, platform
from meliad_like.layers.basic import dropout_multiplier
from meliad_like.layers.flops import Flops
from meliad_like.mechanisms.base import MECHANISMS, Mechanism, MechanismConfig, Shape
from meliad_like.registry import resumable, size
from meliad_like.validation import check_choices


class WindowAttention(Mechanism):
    """Attention of the layer's queries to the keys of the window; it has no parameters and no carry of its own."""

    def __init__(self, shape: Shape, kernel: str):
        self.dropout_rate, self.mask_empty_cache, self.kernel = shape.dropout_rate, shape.mask_empty_cache, kernel
        self.reads_projected = kernel != "none"

    def __call__(self, tokens, carry, dropout_key):
        tile, multiplier = tokens.tile, None
        h, w = tile.bias.shape
        if dropout_key is not None and self.dropout_rate > 0.0:
            multiplier = dropout_multiplier(dropout_key, self.dropout_rate, (h, w, w), jnp.float32)
        if self.kernel == "none":
            placed = tile.placed
            blocks = (placed.query, placed.key, tile.value, placed.previous_key, tile.previous_value)
            return attend_window(*blocks, tile.bias, tile.previous_valid, multiplier), carry
        interpret = self.kernel == "interpreted"
        head_size = tile.value.shape[-1]
        instead = "set it to 'none' (--gin_param=\"SlidingWindow.kernel = 'none'\")"
        if tile.projected is None:
            raise UserError(
                f"SlidingWindow.kernel={self.kernel!r} needs a DecoderConfig.position that is none, t5, alibi or "
                f"another bias, because the others change keys: {instead}"
            )
        if not interpret and (not compiles_tpu_kernels() or w % ROWS or head_size % ROWS):
            raise UserError(
                f"SlidingWindow.kernel='tpu' needs a TPU, and a window and heads of multiples of {ROWS}, not "
                f"{platform()}, window_length={w} and head_size={head_size}: {instead}"
            )
        mixed = attend_window_in_kernel(
            tile.projected,
            tile.scale,
            tile.bias,
            tokens.positions > 0,
            multiplier,
            mask_previous=self.mask_empty_cache,
            interpret=interpret,
        )
        return rearrange(mixed, "b (c w) (h k) -> b c h w k", h=h, w=w), carry

    def decode_step(self, token, carry):
        tile = token.tile
        attended = attend(
            tile.placed_query, tile.placed_key, tile.value, tile.bias[:, :, None], tile.seen[:, None, None]
        )
        return attended, carry


@MECHANISMS.register("sliding_window")
@dataclasses.dataclass(frozen=True)
class SlidingWindow(MechanismConfig):
    """Attention to the `window_length` tokens before each token."""

    layers: tuple[int, ...] | None = size(None, "layer_indices")
    """The layers that attend to the window; negative numbers count from the end. None: all layers."""
    except_layers: tuple[int, ...] = size((), "layer_indices")
    """Layers of these that don't. In a smaller model they stay what another mechanism has instead of a window."""

    kernel: Literal["none", "tpu", "interpreted"] = resumable("none")
    """The kernel that computes the attention of a segment without its scores in memory (`layers/attention_kernel.py`):
    none, one compiled for TPUs, or the same interpreted, which is slow, for tests on other platforms."""

    rank: ClassVar[int] = 0

    def __post_init__(self):
        check_choices(self)
        object.__setattr__(self, "except_layers", tuple(self.except_layers))

    def check(self, shape, others):
        super().check(shape, others)
        if not all(-shape.num_layers <= layer < shape.num_layers for layer in self.except_layers):
            raise UserError(
                f"SlidingWindow.except_layers={self.except_layers} names a layer that {shape.num_layers} layers lack"
            )

    def indices(self, num_layers):
        return super().indices(num_layers) - {layer % num_layers for layer in self.except_layers}

    def build(self, shape, index, *, rngs):
        return WindowAttention(shape, self.kernel)

    def flops(self, shape, index):
        """The operations of full tiles of `w` queries by `2w` keys, although a query sees half of its tile."""
        return Flops.of_products(2 * 2 * (2 * shape.window_length) * shape.inner_width)

    def num_visible(self, shape, position):
        """At most w tokens before a token, and the token itself through the residual stream."""
        return np.minimum(position, shape.window_length) + 1
