"""Functions of positions: sinusoids, and rotary embeddings."""

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


def rotate(
    x: Float[Array, "*batch s k"], position: Int[Array, "*#batch s"], wavelength: Float[np.ndarray, " half"]
) -> Float[Array, "*batch s k"]:
    """Rotary embedding (Su et al. 2021) of the two halves of each head by `position`. Only differences of positions
    matter, so callers count from wherever is convenient."""
    angle = jnp.asarray(position, jnp.float32)[..., None] / wavelength
    sine, cosine = jnp.sin(angle), jnp.cos(angle)
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    rotated = jnp.concatenate([first * cosine - second * sine, second * cosine + first * sine], axis=-1)
    return rotated.astype(x.dtype)
