"""Functions of positions: sinusoids, and rotary embeddings."""

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

# Fairseq counts positions from this number, and its checkpoints were trained with it.
FIRST_POSITION = 2


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


class Turns(NamedTuple):
    """The cosines and sines of the angles of some places, float32."""

    cosine: Float[Array, "*batch half"]
    sine: Float[Array, "*batch half"]


def turned(x: Float[Array, "*batch k"], turns: Turns) -> Float[Array, "*batch k"]:
    """The vectors of heads, rotated by their turns; channels that have no turns stay as they are."""
    half = turns.cosine.shape[-1]
    first, second, rest = (y.astype(jnp.float32) for y in jnp.split(x, [half, 2 * half], axis=-1))
    parts = first * turns.cosine - second * turns.sine, second * turns.cosine + first * turns.sine, rest
    return jnp.concatenate(parts, axis=-1).astype(x.dtype)


def rotate(
    x: Float[Array, "*batch s k"], position: Int[Array, "*#batch s"], wavelength: Float[np.ndarray, " half"]
) -> Float[Array, "*batch s k"]:
    """Rotary embedding (Su et al. 2021) of the two halves of each head by `position`. Only differences of positions
    matter, so callers count from wherever is convenient."""
    angle = jnp.asarray(position, jnp.float32)[..., None] / wavelength
    return turned(x, Turns(jnp.cos(angle), jnp.sin(angle)))
