"""The gated delta rule: a matrix for each head that forgets, and is corrected by every token (Yang et al. 2024).

Gated Delta Networks, section 3.1 and equation 10: the state of a head is a matrix S that maps keys to values,

    S_t = S_{t-1} alpha_t (I - beta_t k_t k_t^T) + beta_t v_t k_t^T,    o_t = S_t q_t / sqrt(k),

with a decay alpha_t between 0 and 1 and a writing strength beta_t between 0 and a largest one, usually 1, which are
read from the token. With a strength above 1 a state has negative eigenvalues (Grazzi et al. 2025). Queries, keys and
values pass a short convolution along the document and a SiLU, and queries and keys get unit length; the outputs of a
head pass an RMS norm and a gate (section 3.3). Several heads of values may share a query and a key, as in Qwen3-Next.

The factor 1 / sqrt(k) is as in the released code and in Qwen3-Next. The norm would remove it, but for its epsilon. In
shapes `p` is the size of a value, `g` the number of heads of queries and keys, `h` the number of heads of values, and
`taps` the length of the convolution.
"""

import dataclasses
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from meliad_like.errors import UserError
from meliad_like.layers.attention import merge_heads, split_heads, unit
from meliad_like.layers.basic import Linear, for_all, parameter, project
from meliad_like.layers.linear_recurrence import Rule, inverse_softplus_step, log_uniform_rate
from meliad_like.mixers.base import MIXERS, DecoderShape
from meliad_like.mixers.matrix_recurrence import ConvolvedMatrixConfig, MatrixRecurrence, Sizes
from meliad_like.registry import size
from meliad_like.validation import check_not_negative, check_positive


class DeltaRule(MatrixRecurrence):
    """Tokens write to and read from matrices. A kind of delta rule has its own decay and gate."""

    config: "DeltaRuleConfig"

    def __init__(
        self,
        config: "DeltaRuleConfig",
        shape: DecoderShape,
        decay: Callable[[Array], Array],
        gate: Callable[[Array], Array],
        *,
        rngs: nnx.Rngs,
    ):
        """`decay` and `gate` are the projections of the layer's input for `log_decay` and `gated`."""
        super().__init__(config, shape)
        self.norm_epsilon = config.norm_epsilon
        self.decay, self.gate = decay, gate
        d, h = shape.model_width, self.sizes.heads
        of_keys = self.sizes.groups * self.sizes.key_size
        widths = {"query": of_keys, "key": of_keys, "value": config.width(shape)}
        fan_in = jax.nn.initializers.variance_scaling(1.0, "fan_in", "truncated_normal", in_axis=0, out_axis=())
        self.query, self.key, self.value = (
            Linear(d, width, ("model", "heads"), rngs=rngs) for width in widths.values()
        )
        self.query_filter, self.key_filter, self.value_filter = (
            parameter(rngs.params(), fan_in, (config.conv_length, width), (None, "heads"), "filter")
            for width in widths.values()
        )
        self.strength = Linear(d, h, ("model", "heads"), rngs=rngs)
        self.log_rate = parameter(rngs.params(), log_uniform_rate, (h,), ("heads",), "rate")
        self.norm_scale = parameter(rngs.params(), jax.nn.initializers.ones, (self.sizes.value_size,), (None,), "scale")

    def log_decay(self, x: Array) -> Float[Array, "b h n e"]:
        """The logarithm of alpha, float32, for each head or each channel of its keys; `x` is the result of `decay`."""
        raise NotImplementedError

    def gated(self, y: Float[Array, "b n i"], x: Float[Array, "b n i"]) -> Float[Array, "b n i"]:
        """The outputs of the heads after their norm, times a gate; `x` is the result of `gate`, float32."""
        raise NotImplementedError

    def convolution(self):
        return [x[...] for x in (self.query_filter, self.key_filter, self.value_filter)]

    def project(self, x):
        projections = self.query, self.key, self.value, self.strength, self.decay, self.gate
        *inputs, strength, decay, gate = project(x, *projections)
        return inputs, (strength, decay, gate)

    def rule(self, inputs, others):
        strength, decay, gate = others
        groups, heads, key_size = self.sizes[:3]
        query, key, value = map(jax.nn.silu, inputs)
        query, key = (unit(split_heads(y, groups)) for y in (query, key))
        strength = jax.nn.sigmoid(strength.astype(jnp.float32)) * self.config.largest_strength
        value, strength = split_heads(value, heads), split_heads(strength, heads)
        return Rule(query / math.sqrt(key_size), key, value, self.log_decay(decay), strength), gate

    def output(self, y, needed):
        y = merge_heads(y)
        scale = for_all(jnp.tile(self.norm_scale[...], self.sizes.heads), y.shape)
        return self.gated(y * scale, needed.astype(jnp.float32)).astype(needed.dtype)


class GatedDeltaRuleMixer(DeltaRule):
    """The delta rule with one decay for each head, and a SiLU as gate."""

    def __init__(self, config: "GatedDeltaRule", shape: DecoderShape, *, rngs: nnx.Rngs):
        h = config.sizes(shape).heads
        widths = h, config.width(shape)
        decay, gate = (Linear(shape.model_width, width, ("model", "heads"), rngs=rngs) for width in widths)
        super().__init__(config, shape, decay, gate, rngs=rngs)
        self.step_bias = parameter(rngs.params(), inverse_softplus_step, (h,), ("heads",), "bias")

    def log_decay(self, x):
        step = jax.nn.softplus(x.astype(jnp.float32) + self.step_bias[...])
        return split_heads(-jnp.exp(self.log_rate[...]) * step, self.sizes.heads)

    def gated(self, y, x):
        return y * jax.nn.silu(x)


@dataclasses.dataclass(frozen=True)
class DeltaRuleConfig(ConvolvedMatrixConfig):
    """The config of a delta rule."""

    largest_strength: float = 1.0
    """The factor on the strength with which a token writes, at most 2: the sigmoid alone is at most 1."""
    norm_epsilon: float = 1e-6
    """The epsilon of the RMS norm of a head's outputs."""

    def __post_init__(self):
        super().__post_init__()
        if not 0 < self.largest_strength <= 2:
            name = f"{type(self).__name__}.largest_strength"
            raise UserError(f"{name}={self.largest_strength} must be above 0 and at most 2: states would grow")


@MIXERS.register("gated_delta_rule")
class GatedDeltaRule(DeltaRuleConfig):
    """Layers with matrices that are written to by the gated delta rule."""

    num_key_heads: int = size(0, "heads")
    """The number of heads of queries and keys; 0: `num_heads`."""
    key_size: int = size(0, "heads")
    """The size of a query and a key; 0: `head_size`."""
    values_per_key: int = size(1, "fixed")
    """The number of heads of values that share a query and a key."""
    value_size: int = size(0, "heads")
    """The size of a value; 0: the size of a key."""

    def __post_init__(self):
        super().__post_init__()
        check_positive(self, ("values_per_key",))
        check_not_negative(self, ("num_key_heads", "key_size", "value_size"))

    def build(self, shape, *, rngs):
        return GatedDeltaRuleMixer(self, shape, rngs=rngs)

    def sizes(self, shape):
        groups, key_size = self.num_key_heads or shape.num_heads, self.key_size or shape.head_size
        return Sizes(groups, groups * self.values_per_key, key_size, self.value_size or key_size, corrected=True)
