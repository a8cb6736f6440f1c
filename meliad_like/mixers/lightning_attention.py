"""Lightning attention: retention with other rates, activations and norm (Qin et al. 2024, MiniMax-01 2025).

The head j of h, counted from 0, has gamma = exp(-2^(-8 (j+1) / h)). Queries, keys and values pass a SiLU, without
positions; one RMS norm of all heads and a sigmoid gate follow. MiniMax-01 also lowers the rates from layer to layer;
here all layers have the rates of its first one.
"""

import jax
import numpy as np
from flax import nnx

from meliad_like.layers.attention import split_heads
from meliad_like.layers.basic import for_all, over_root_mean_square, parameter
from meliad_like.mixers.base import MIXERS, DecoderShape
from meliad_like.mixers.matrix_recurrence import MatrixConfig, Sizes
from meliad_like.mixers.retention import NORM_EPSILON, ConstantDecay


class LightningMixer(ConstantDecay):
    """The module of lightning attention."""

    def __init__(self, config: "LightningAttention", shape: DecoderShape, *, rngs: nnx.Rngs):
        super().__init__(config, shape, rngs=rngs)
        ones, width = jax.nn.initializers.ones, config.width(shape)
        self.norm_scale = parameter(rngs.params(), ones, (width,), ("heads",), "scale")

    def log_decay(self):
        return -(2.0 ** (-8 * np.arange(1, self.sizes.heads + 1) / self.sizes.heads))

    def heads(self, *projected):
        return [split_heads(jax.nn.silu(x), self.sizes.heads) for x in projected]

    def gated(self, y, gate):
        y = over_root_mean_square(y, NORM_EPSILON)
        return y * for_all(self.norm_scale[...], y.shape) * jax.nn.sigmoid(gate)


@MIXERS.register("lightning_attention")
class LightningAttention(MatrixConfig):
    """Layers with lightning attention."""

    def build(self, shape, *, rngs):
        return LightningMixer(self, shape, rngs=rngs)

    def sizes(self, shape):
        return Sizes(shape.num_heads, shape.num_heads, shape.head_size, shape.head_size)
