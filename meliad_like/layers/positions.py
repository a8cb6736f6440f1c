"""Positions: T5's bias by distance, rotary embeddings, and sinusoids.

All of them take distances or places in a window, never positions in a document, which may therefore be of any length.
"""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from meliad_like.layers.basic import parameter

NUM_BUCKETS = 32
MAX_DISTANCE = 128
# Fairseq counts positions from this number, and its checkpoints were trained with it.
FIRST_POSITION = 2


def t5_bucket(distance: Int[np.ndarray, "*shape"]) -> Int[np.ndarray, "*shape"]:
    """T5's bucket of a distance (query position minus key position; the future counts as 0).

    Half of the buckets are exact, the others grow logarithmically up to `MAX_DISTANCE` (Raffel et al. 2020, section
    2.1). Computed in float32 because the boundaries of the reference come from that precision.
    """
    exact = NUM_BUCKETS // 2
    distance = np.maximum(distance, 0)
    ratio = (distance / np.float32(exact) + np.finfo(np.float32).eps).astype(np.float32)
    logarithmic = exact + (np.log(ratio) / np.log(np.float32(MAX_DISTANCE / exact)) * (NUM_BUCKETS - exact)).astype(int)
    return np.where(distance < exact, distance, np.minimum(logarithmic, NUM_BUCKETS - 1)).astype(np.int32)


class T5Bias(nnx.Module):
    """T5's learned bias: one number per head and bucket of distances."""

    def __init__(self, num_heads: int, *, rngs: nnx.Rngs):
        initializer = jax.nn.initializers.variance_scaling(1.0, "fan_in", "normal", in_axis=1, out_axis=0)
        self.table = parameter(rngs.params(), initializer, (num_heads, NUM_BUCKETS), ("heads", None))

    def __call__(self, distance: Int[np.ndarray, " s"]) -> Float[Array, "h s"]:
        """The bias of each distance, float32."""
        # A product with a constant 0/1 matrix: the transpose of a gather would be a slow scatter.
        one_hot = np.eye(NUM_BUCKETS, dtype=np.float32)[t5_bucket(distance)]
        return jnp.einsum("hi,si->hs", self.table[...], one_hot, precision="highest")


def sinusoids(num_positions: int, model_width: int) -> Float[np.ndarray, "s d"]:
    """Sines, then cosines, of each position; wavelengths from 2 pi to 20,000 pi (Vaswani et al. 2017, section 3.5)."""
    half = model_width // 2
    frequency = np.exp(np.arange(half) * (-np.log(10_000) / (half - 1)))
    angle = (np.arange(num_positions) + FIRST_POSITION)[:, None] * frequency
    return np.concatenate([np.sin(angle), np.cos(angle)], axis=1).astype(np.float32)


def wavelengths(head_size: int, base: float = 10_000.0) -> Float[np.ndarray, " half"]:
    """The wavelengths of rotary embeddings over 2 pi, in tokens: from 1 to almost `base`, one for each pair."""
    half = head_size // 2
    return base ** (np.arange(half, dtype=np.float32) / half)


def rotate(
    x: Float[Array, "*batch s k"],
    position: Int[Array, "*#batch s"],
    wavelength: Float[np.ndarray, " half"],
) -> Float[Array, "*batch s k"]:
    """Rotary embedding (Su et al. 2021) of the two halves of each head by `position`.

    Only differences of positions matter, so callers count from wherever is convenient.
    """
    angle = jnp.asarray(position, jnp.float32)[..., None] / wavelength
    sine, cosine = jnp.sin(angle), jnp.cos(angle)
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    rotated = jnp.concatenate([first * cosine - second * sine, second * cosine + first * sine], axis=-1)
    return rotated.astype(x.dtype)
