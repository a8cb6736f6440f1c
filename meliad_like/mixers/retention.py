"""Retention and lightning attention: a matrix for each head that decays at a constant rate, and to which tokens add.

    S_t = gamma S_{t-1} + v_t k_t^T,    y_t = S_t q_t

Retention (Sun et al. 2023, section 2.1): the head j, counted from 0, has gamma = 1 - 2^(-5-j), queries and keys with
rotary positions, queries over sqrt(k), values of twice the width, an RMS norm without weights for each head, and a SiLU
as gate. Lightning attention (Qin et al. 2024, MiniMax-01 2025): gamma = exp(-2^(-8 (j+1) / h)), a SiLU of queries, keys
and values, one RMS norm of all heads, and a sigmoid as gate. MiniMax-01 also lowers the rates from layer to layer; here
all layers have those of its first one. In shapes `p` is the size of a value, and `i` the width of all values.
"""

import dataclasses
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from meliad_like.errors import UserError
from meliad_like.layers.attention import split_heads
from meliad_like.layers.basic import Linear, over_root_mean_square, parameter, project
from meliad_like.layers.flops import Flops
from meliad_like.layers.linear_recurrence import Rule, check_chunks, flops_of_rule, read_chunks, read_token
from meliad_like.layers.positions import rotate, wavelengths
from meliad_like.layers.sharding import num_parts, own_blocks
from meliad_like.mixers.base import MIXERS, Mixer, Shape, StatesConfig, Traits
from meliad_like.registry import size
from meliad_like.validation import check_positive

NORM_EPSILON = 1e-5


class DecayingCarry(NamedTuple):
    """What passes from token to token."""

    matrix: Float[Array, "b h p k"]
    """The states, float32. Positions of their keys count from the next token."""


class ConstantDecay(Mixer):
    """Tokens add to and read from matrices that forget at constant rates."""

    def __init__(self, config: "ConstantDecayConfig", shape: Shape, *, rngs: nnx.Rngs):
        self.config, self.w = config, shape.window_length
        self.num_heads, self.head_size, i = shape.num_heads, shape.head_size, config.width(shape)
        self.query, self.key, self.value, self.gate = (
            Linear(shape.model_width, width, ("model", "heads"), rngs=rngs)
            for width in (shape.inner_width, shape.inner_width, i, i)
        )

    def log_decay(self) -> Float[np.ndarray, " h"]:
        """The logarithm of gamma for each head."""
        raise NotImplementedError

    def heads(self, *projected: Float[Array, "b n _"]) -> list[Float[Array, "b h n _"]]:
        """Queries, keys and values as the rule has them, but without positions; float32."""
        raise NotImplementedError

    def placed(
        self, x: Float[Array, "b h s k"], place: Int[np.ndarray, " s"] | Int[Array, " s"]
    ) -> Float[Array, "b h s k"]:
        """Queries or keys, or states along the axis of their keys, moved by the places."""
        return x

    def gated(self, y: Float[Array, "b n h p"], gate: Float[Array, "b n i"]) -> Float[Array, "b n i"]:
        """The results of the heads after their norm, times a gate, float32."""
        raise NotImplementedError

    def init_carry(self, b, dtype):
        value_size = self.config.value_size(self.head_size)
        return DecayingCarry(jnp.zeros((b, self.num_heads, value_size, self.head_size), jnp.float32))

    def _rule(self, x: Float[Array, "b n d"], place: Int[Array, " n"]) -> tuple[Rule, Float[Array, "b n i"]]:
        """What the tokens do with the states, and their gates. Only differences of positions matter, so that places
        count from the segment's first token."""
        *projected, gate = project(x, self.query, self.key, self.value, self.gate)
        query, key, value = self.heads(*(y.astype(jnp.float32) for y in projected))
        log_decay = jnp.asarray(self.log_decay(), jnp.float32)[:, None, None]
        log_decay = jnp.broadcast_to(log_decay, (*value.shape[:3], 1))
        return Rule(self.placed(query, place), self.placed(key, place), value, log_decay, None), gate

    def _moved(self, matrix: Float[Array, "b h p k"], n: int) -> Float[Array, "b h p k"]:
        """The states with positions that count from `n` tokens later."""
        return self.placed(matrix, np.full(matrix.shape[2], -n))

    def _output(self, y: Float[Array, "b h n p"], gate: Float[Array, "b n i"]) -> Float[Array, "b n i"]:
        return self.gated(jnp.swapaxes(y, 1, 2), gate.astype(jnp.float32)).astype(gate.dtype)

    def __call__(self, x, at, carry, dropout_key):
        n = num_parts() * x.shape[1]
        rule, gate = self._rule(x, own_blocks(jnp.arange(n)[None])[0])
        chunk = math.gcd(self.w, self.config.chunk_length)
        matrix, y = read_chunks(rule, carry.matrix, at.start, chunk)
        return self._output(y, gate), DecayingCarry(self._moved(matrix, n))

    def step(self, x, at, carry):
        rule, gate = self._rule(x[:, None], jnp.zeros(1, int))
        matrix, y = read_token(carry.matrix, jax.tree.map(lambda z: z[:, :, 0], rule))
        return self._output(y[:, :, None], gate)[:, 0], DecayingCarry(self._moved(matrix, 1))


class RetentionMixer(ConstantDecay):
    """Retention of several scales."""

    def log_decay(self):
        return np.log1p(-(2.0 ** (-5 - np.arange(self.num_heads))))

    def heads(self, *projected):
        query, key, value = (split_heads(x, self.num_heads) for x in projected)
        return [query / math.sqrt(self.head_size), key, value]

    def placed(self, x, place):
        return rotate(x, place, wavelengths(self.head_size))

    def gated(self, y, gate):
        y = over_root_mean_square(y, NORM_EPSILON)
        return y.reshape(gate.shape) * jax.nn.silu(gate)


class LightningMixer(ConstantDecay):
    """Lightning attention."""

    def __init__(self, config: "LightningAttention", shape: Shape, *, rngs: nnx.Rngs):
        super().__init__(config, shape, rngs=rngs)
        self.norm_scale = parameter(rngs.params(), jax.nn.initializers.ones, (config.width(shape),), ("heads",))

    def log_decay(self):
        return -(2.0 ** (-8 * np.arange(1, self.num_heads + 1) / self.num_heads))

    def heads(self, *projected):
        return [split_heads(jax.nn.silu(x), self.num_heads) for x in projected]

    def gated(self, y, gate):
        y = over_root_mean_square(y.reshape(gate.shape), NORM_EPSILON)
        return y * self.norm_scale[...] * jax.nn.sigmoid(gate)


@dataclasses.dataclass(frozen=True)
class ConstantDecayConfig(StatesConfig):
    """The fields of both kinds."""

    chunk_length: int = size(64, "fixed")
    """The number of tokens that are read in parallel, a power of two; at most the largest one that divides a block."""

    def __post_init__(self):
        check_chunks(self)

    def value_size(self, head_size: int) -> int:
        """The size of a head's values."""
        return head_size

    def width(self, shape):
        return shape.num_heads * self.value_size(shape.head_size)

    def flops(self, shape):
        """Projections, and the recurrence."""
        h, k, chunk = shape.num_heads, shape.head_size, math.gcd(shape.window_length, self.chunk_length)
        projections = 4 * shape.model_width * (shape.inner_width + self.width(shape))
        return Flops.of_products(projections + flops_of_rule(chunk, h, h, k, self.value_size(k), corrected=False))

    def traits(self, shape):
        return Traits(states=("matrix",), needs_segments=self.needs_segments)


@MIXERS.register("retention")
class Retention(ConstantDecayConfig):
    """Layers with retention."""

    expand: int = size(2, "fixed")
    """The size of a value over that of a key."""

    def __post_init__(self):
        super().__post_init__()
        check_positive(self, ("expand",))

    def check(self, shape):
        if shape.head_size % 2:
            raise UserError(f"head_size={shape.head_size} must be even for Retention, whose positions are rotary")

    def value_size(self, head_size):
        return self.expand * head_size

    def build(self, shape, *, rngs):
        return RetentionMixer(self, shape, rngs=rngs)


@MIXERS.register("lightning_attention")
class LightningAttention(ConstantDecayConfig):
    """Layers with lightning attention."""

    def build(self, shape, *, rngs):
        return LightningMixer(self, shape, rngs=rngs)
