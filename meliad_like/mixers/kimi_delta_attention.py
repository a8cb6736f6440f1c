"""Kimi Delta Attention: the gated delta rule with a decay for each channel of a key (Kimi Linear, 2025).

    S_t = S_{t-1} Diag(alpha_t) (I - beta_t k_t k_t^T) + beta_t v_t k_t^T,    o_t = S_t q_t / sqrt(k),

with alpha_t = exp(-exp(a) softplus(f_t + b)), where f_t and the sigmoid gate of a head's normed outputs are projections
of the token of low rank. All else is as in `gated_delta_rule.py`; with equal decays in all channels of a head the two
rules are the same.
"""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from meliad_like.layers.attention import split_heads
from meliad_like.layers.basic import Linear, parameter
from meliad_like.layers.linear_recurrence import inverse_softplus_step
from meliad_like.mixers.base import MIXERS, DecoderShape
from meliad_like.mixers.gated_delta_rule import DeltaRule, DeltaRuleConfig
from meliad_like.mixers.matrix_recurrence import Sizes


class LowRank(nnx.Module):
    """Two projections, one after the other: `d` to the size of a head, and from there to all heads."""

    def __init__(self, shape: DecoderShape, *, rngs: nnx.Rngs):
        self.first = Linear(shape.model_width, shape.head_size, ("model", None), rngs=rngs)
        self.second = Linear(shape.head_size, shape.inner_width, (None, "heads"), rngs=rngs)

    def __call__(self, x: Float[Array, "b n d"]) -> Float[Array, "b n i"]:
        return self.second(self.first(x))


class KimiDelta(DeltaRule):
    """The delta rule with a decay for each channel, and a sigmoid as gate."""

    def __init__(self, config: "KimiDeltaAttention", shape: DecoderShape, *, rngs: nnx.Rngs):
        super().__init__(config, shape, LowRank(shape, rngs=rngs), LowRank(shape, rngs=rngs), rngs=rngs)
        channels = (shape.num_heads, shape.head_size)
        self.step_bias = parameter(rngs.params(), inverse_softplus_step, channels, ("heads", None), "bias")

    def log_decay(self, x):
        x = split_heads(x, self.sizes.heads)
        step = jax.nn.softplus(x.astype(jnp.float32) + self.step_bias[...][:, None])
        return -jnp.exp(self.log_rate[...])[:, None, None] * step

    def gated(self, y, x):
        return y * jax.nn.sigmoid(x)


@MIXERS.register("kimi_delta_attention")
class KimiDeltaAttention(DeltaRuleConfig):
    """Layers with matrices that are written to by the delta rule and forget channel by channel."""

    norm_epsilon: float = 1e-5

    def build(self, shape, *, rngs):
        return KimiDelta(self, shape, rngs=rngs)

    def sizes(self, shape):
        heads, head_size = shape.num_heads, shape.head_size
        return Sizes(heads, heads, head_size, head_size, by_channel=True, corrected=True)
