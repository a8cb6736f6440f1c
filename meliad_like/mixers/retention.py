"""Retention: a matrix for each head that decays at a constant rate, and to which every token adds (Sun et al. 2023).

    S_t = gamma S_{t-1} + v_t k_t^T,    y_t = S_t q_t

Section 2.1: the head j, counted from 0, has gamma = 1 - 2^(-5-j), queries and keys with rotary positions, queries over
sqrt(k), values of twice the width, an RMS norm without weights for each head, and a SiLU as gate. In shapes `i` is the
width of all values.
"""

import math

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float

from meliad_like.errors import UserError
from meliad_like.layers.attention import merge_heads, split_heads
from meliad_like.layers.basic import Linear, project
from meliad_like.layers.linear_recurrence import Rule
from meliad_like.layers.rotary import rotate, wavelengths
from meliad_like.layers.sharding import num_parts, own_blocks
from meliad_like.mixers.base import MIXERS, DecoderShape
from meliad_like.mixers.matrix_recurrence import MatrixConfig, MatrixRecurrence, Sizes
from meliad_like.registry import size
from meliad_like.validation import check_positive

NORM_EPSILON = 1e-5


class ConstantDecay(MatrixRecurrence):
    """Tokens add to and read from matrices that forget at constant rates."""

    def __init__(self, config: MatrixConfig, shape: DecoderShape, *, rngs: nnx.Rngs):
        super().__init__(config, shape)
        i = config.width(shape)
        self.query, self.key, self.value, self.gate = (
            Linear(shape.model_width, width, ("model", "heads"), rngs=rngs)
            for width in (shape.inner_width, shape.inner_width, i, i)
        )

    def log_decay(self) -> Float[np.ndarray, " h"]:
        """The logarithm of gamma for each head."""
        raise NotImplementedError

    def heads(self, *projected: Float[Array, "b n _"]) -> list[Float[Array, "b h n _"]]:
        """Queries, keys and values as the rule has them; float32."""
        raise NotImplementedError

    def gated(self, y: Float[Array, "b n i"], gate: Float[Array, "b n i"]) -> Float[Array, "b n i"]:
        """The results of the heads times a gate, float32."""
        raise NotImplementedError

    def project(self, x):
        *inputs, gate = project(x, self.query, self.key, self.value, self.gate)
        return inputs, gate

    def rule(self, inputs, others):
        query, key, value = self.heads(*(y.astype(jnp.float32) for y in inputs))
        log_decay = jnp.asarray(self.log_decay(), jnp.float32)[:, None, None]
        return Rule(query, key, value, jnp.broadcast_to(log_decay, (*value.shape[:3], 1)), None), others

    def output(self, y, needed):
        return self.gated(merge_heads(y), needed.astype(jnp.float32)).astype(needed.dtype)


class RetentionMixer(ConstantDecay):
    """The module of retention, with several scales."""

    norm_epsilon = NORM_EPSILON

    def log_decay(self):
        return np.log1p(-(2.0 ** (-5 - np.arange(self.sizes.heads))))

    def heads(self, *projected):
        query, key, value = (split_heads(x, self.sizes.heads) for x in projected)
        # Only differences of positions matter, so they count from the segment's first token.
        positions = own_blocks(jnp.arange(num_parts() * query.shape[2])[None])[0]
        query, key = (self._placed(x, positions) for x in (query / math.sqrt(self.sizes.key_size), key))
        return [query, key, value]

    def _placed(self, x, positions):
        return rotate(x, positions, wavelengths(self.sizes.key_size))

    def moved(self, matrix, n):
        return self._placed(matrix, jnp.zeros(matrix.shape[2], int) - n[:, None, None])

    def gated(self, y, gate):
        return y * jax.nn.silu(gate)


@MIXERS.register("retention")
class Retention(MatrixConfig):
    """Layers with retention."""

    expand: int = size(2, "fixed")
    """The size of a value over that of a key."""

    def __post_init__(self):
        super().__post_init__()
        check_positive(self, ("expand",))

    def check(self, shape):
        if shape.head_size % 2:
            raise UserError(f"head_size={shape.head_size} must be even for Retention, whose positions are rotary")

    def build(self, shape, *, rngs):
        return RetentionMixer(self, shape, rngs=rngs)

    def sizes(self, shape):
        return Sizes(shape.num_heads, shape.num_heads, shape.head_size, self.expand * shape.head_size)
