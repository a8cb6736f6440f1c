"""The gated delta rule: a matrix for each head that forgets, and is corrected by every token (Yang et al. 2024).

Gated Delta Networks, section 3.1 and equation 10: the state of a head is a matrix S that maps keys to values,

    S_t = S_{t-1} alpha_t (I - beta_t k_t k_t^T) + beta_t v_t k_t^T,    o_t = S_t q_t / sqrt(k),

with a decay alpha_t between 0 and 1 and a writing strength beta_t between 0 and a largest one, usually 1, which are
read from the token. With a strength above 1 a state has negative eigenvalues (Grazzi et al. 2025). Queries, keys and
values pass a short convolution along the document and a SiLU, and queries and keys get unit length; the outputs of a
head pass an RMS norm and a gate (section 3.3). Segments are read in chunks (`layers/linear_recurrence.py`). The states
start at zero with every document. Several heads of values may share a query and a key, as in Qwen3-Next.

The factor 1 / sqrt(k) is that of the released code and of Qwen3-Next. The norm would remove it, but for its epsilon. In
shapes `p` is the size of a value, `g` the number of heads of queries and keys, `h` that of heads of values, and `taps`
the length of the convolution.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from meliad_like.errors import UserError
from meliad_like.layers.attention import merge_heads, split_heads, unit
from meliad_like.layers.basic import Linear, over_root_mean_square, parameter, project
from meliad_like.layers.flops import Flops
from meliad_like.layers.linear_recurrence import (
    Rule,
    check_chunks,
    convolve_segment,
    convolve_token,
    flops_of_rule,
    inverse_softplus_step,
    log_uniform_rate,
    read_chunks,
    read_token,
)
from meliad_like.mixers.base import MIXERS, Mixer, Shape, StatesConfig, Traits, check_taps
from meliad_like.registry import size
from meliad_like.validation import check_not_negative, check_positive

ones = jax.nn.initializers.ones


class DeltaCarry(NamedTuple):
    """What passes from token to token."""

    matrix: Float[Array, "b h p k"]
    """The states, float32: from keys (last axis) to values."""
    recent: Float[Array, "b recent channels"]
    """The last inputs of the convolutions: queries, keys and values of the last `conv_length - 1` tokens."""


class DeltaRule(Mixer):
    """Tokens write to and read from matrices. A kind of delta rule has its own decay and gate."""

    def __init__(
        self,
        config: "DeltaRuleConfig",
        shape: Shape,
        decay: Callable[[Array], Array],
        gate: Callable[[Array], Array],
        *,
        rngs: nnx.Rngs,
    ):
        """`decay` and `gate` are the projections of the layer's input for `log_decay` and `gated`."""
        self.decay, self.gate = decay, gate
        self.config, self.w = config, shape.window_length
        self.groups, self.head_size = config.key_shape(shape)
        self.num_heads, self.value_size = config.value_shape(shape)
        d, of_keys, of_values = shape.model_width, self.groups * self.head_size, self.num_heads * self.value_size
        widths = {"query": of_keys, "key": of_keys, "value": of_values}
        fan_in = jax.nn.initializers.variance_scaling(1.0, "fan_in", "truncated_normal", in_axis=0, out_axis=())
        self.query, self.key, self.value = (
            Linear(d, width, ("model", "heads"), rngs=rngs) for width in widths.values()
        )
        self.query_filter, self.key_filter, self.value_filter = (
            parameter(rngs.params(), fan_in, (config.conv_length, width), (None, "heads")) for width in widths.values()
        )
        self.strength = Linear(d, self.num_heads, ("model", "heads"), rngs=rngs)
        # As in Mamba-2: rates between 1 and 16, steps between 0.001 and 0.1.
        self.log_rate = parameter(rngs.params(), log_uniform_rate, (self.num_heads,), ("heads",))
        self.norm_scale = parameter(rngs.params(), ones, (self.value_size,), (None,))

    def log_decay(self, x: Array) -> Float[Array, "b h n e"]:
        """The logarithm of alpha, float32, for each head or each channel of its keys; `x` is the result of `decay`."""
        raise NotImplementedError

    def gated(self, y: Float[Array, "b h n p"], x: Array) -> Float[Array, "b h n p"]:
        """The outputs of the heads after their norm, times a gate; `x` is the result of `gate`."""
        raise NotImplementedError

    def init_carry(self, b, dtype):
        matrix = jnp.zeros((b, self.num_heads, self.value_size, self.head_size), jnp.float32)
        return DeltaCarry(matrix, jnp.zeros((b, self.config.conv_length - 1, self._filters().shape[1]), dtype))

    def _project(self, x: Float[Array, "b n d"]) -> tuple[Float[Array, "b n channels"], Array, Array, Array]:
        """What the convolutions read, and the projections to strengths, decays and gates."""
        *inputs, strength, decay, gate = project(
            x, self.query, self.key, self.value, self.strength, self.decay, self.gate
        )
        return jnp.concatenate(inputs, axis=-1), strength, decay, gate

    def _filters(self) -> Float[Array, "taps channels"]:
        filters = (self.query_filter, self.key_filter, self.value_filter)
        return jnp.concatenate([x[...] for x in filters], axis=-1)

    def _rule(self, convolved: Float[Array, "b n channels"], strength: Float[Array, "b n h"], decay: Array) -> Rule:
        of_keys = self.groups * self.head_size
        query, key, value = jnp.split(jax.nn.silu(convolved), [of_keys, 2 * of_keys], axis=-1)
        query, key = (unit(split_heads(y, self.groups)) for y in (query, key))
        strength = jax.nn.sigmoid(strength.astype(jnp.float32)) * self.config.largest_strength
        value, strength = split_heads(value, self.num_heads), split_heads(strength, self.num_heads)
        return Rule(query / math.sqrt(self.head_size), key, value, self.log_decay(decay), strength)

    def _output(self, y: Float[Array, "b h n p"], gate: Array) -> Float[Array, "b n i"]:
        y = over_root_mean_square(y, self.config.norm_epsilon) * self.norm_scale[...]
        return merge_heads(self.gated(y, gate).astype(gate.dtype))

    def __call__(self, x, at, carry, dropout_key):
        inputs, strength, decay, gate = self._project(x)
        convolved, recent = convolve_segment(inputs, carry.recent, self._filters(), at.start)
        chunk = math.gcd(self.w, self.config.chunk_length)
        matrix, y = read_chunks(self._rule(convolved, strength, decay), carry.matrix, at.start, chunk)
        return self._output(y, gate), DeltaCarry(matrix, recent)

    def step(self, x, at, carry):
        inputs, strength, decay, gate = self._project(x[:, None])
        convolved, recent = convolve_token(inputs, carry.recent, self._filters())
        rule = jax.tree.map(lambda z: z[:, :, 0], self._rule(convolved, strength, decay))
        matrix, y = read_token(carry.matrix, rule)
        return self._output(y[:, :, None], gate)[:, 0], DeltaCarry(matrix, recent)


class GatedDeltaRuleMixer(DeltaRule):
    """The delta rule with one decay for each head, and a SiLU as gate."""

    def __init__(self, config: "GatedDeltaRule", shape: Shape, *, rngs: nnx.Rngs):
        d, (h, p) = shape.model_width, config.value_shape(shape)
        decay, gate = (Linear(d, width, ("model", "heads"), rngs=rngs) for width in (h, h * p))
        super().__init__(config, shape, decay, gate, rngs=rngs)
        self.step_bias = parameter(rngs.params(), inverse_softplus_step, (h,), ("heads",))

    def log_decay(self, x):
        step = jax.nn.softplus(x.astype(jnp.float32) + self.step_bias[...])
        return split_heads(-jnp.exp(self.log_rate[...]) * step, self.num_heads)

    def gated(self, y, x):
        return y * jax.nn.silu(split_heads(x, self.num_heads).astype(jnp.float32))


@dataclasses.dataclass(frozen=True)
class DeltaRuleConfig(StatesConfig):
    """The fields of all kinds of delta rules."""

    conv_length: int = size(4, "fixed")
    """The number of tokens that the short convolutions see, the token itself included."""
    chunk_length: int = size(64, "fixed")
    """The number of tokens that are read in parallel, a power of two; at most the largest one that divides a block."""

    largest_strength: float = 1.0
    """The factor on the strength with which a token writes, at most 2: the sigmoid alone is at most 1."""
    norm_epsilon: float = 1e-6
    """Added to the mean square in the norm of a head's outputs."""

    def __post_init__(self):
        check_positive(self, ("conv_length",))
        if not 0 < self.largest_strength <= 2:
            name = f"{type(self).__name__}.largest_strength"
            raise UserError(f"{name}={self.largest_strength} must be above 0 and at most 2: states would grow")
        check_chunks(self)

    def check(self, shape):
        check_taps(self, shape)

    def key_shape(self, shape: Shape) -> tuple[int, int]:
        """The number of heads of queries and keys, and their size."""
        return shape.num_heads, shape.head_size

    def value_shape(self, shape: Shape) -> tuple[int, int]:
        """The number of heads of values, and their size."""
        return self.key_shape(shape)

    def width(self, shape):
        return math.prod(self.value_shape(shape))

    def flops_of(self, shape: Shape, *, by_channel: bool) -> float:
        """The operations of one token: projections to queries, keys, values and strengths, and the rule."""
        (g, k), (h, p) = self.key_shape(shape), self.value_shape(shape)
        sizes = math.gcd(shape.window_length, self.chunk_length), g, h, k, p
        projections = 2 * shape.model_width * (2 * g * k + h * p + h)
        return projections + flops_of_rule(*sizes, by_channel=by_channel, corrected=True)

    def traits(self, shape):
        return Traits(states=("matrix",), needs_segments=self.needs_segments)


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
    """The size of a value; 0: that of a key."""

    def __post_init__(self):
        super().__post_init__()
        check_positive(self, ("values_per_key",))
        check_not_negative(self, ("num_key_heads", "key_size", "value_size"))

    def key_shape(self, shape):
        return self.num_key_heads or shape.num_heads, self.key_size or shape.head_size

    def value_shape(self, shape):
        g, k = self.key_shape(shape)
        return g * self.values_per_key, self.value_size or k

    def build(self, shape, *, rngs):
        return GatedDeltaRuleMixer(self, shape, rngs=rngs)

    def flops(self, shape):
        """The rule, and projections to decays and gates."""
        h, p = self.value_shape(shape)
        return Flops.of_products(self.flops_of(shape, by_channel=False) + 2 * shape.model_width * (h + h * p))
