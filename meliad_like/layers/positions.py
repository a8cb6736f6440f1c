"""Positions: biases by distance, rotary embeddings, and sinusoids.

All of them take distances or places in a window, never positions in a document, which may therefore be of any length.
Biases other than T5's are those of the reference's newer code (google-research/meliad, `position*.py`).
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
        self.table = parameter(rngs.params(), initializer, (num_heads, NUM_BUCKETS), ("heads", None), "bias")

    def __call__(self, distance: Int[np.ndarray, " s"]) -> Float[Array, "h s"]:
        """The bias of each distance, float32."""
        # A product with a constant 0/1 matrix: the transpose of a gather would be a slow scatter.
        one_hot = np.eye(NUM_BUCKETS, dtype=np.float32)[t5_bucket(distance)]
        return jnp.einsum("hi,si->hs", self.table[...], one_hot, precision="highest")


class FourierBias(nnx.Module):
    """A Fourier series of the distance for each head, whose 64 wavelengths grow from 2 tokens to nearly 4 windows."""

    num_waves = 64

    def __init__(self, w: int, num_heads: int, *, rngs: nnx.Rngs):
        self.w = w
        self.amplitudes = parameter(
            rngs.params(), _first_half, (num_heads, 2 * self.num_waves), ("heads", None), "bias"
        )

    def __call__(self, distance: Int[np.ndarray, " s"]) -> Float[Array, "h s"]:
        """`sum_j a_j cos(pi D / L_j) - b_j sin(pi D / L_j)` with `L_j = (2 w)^(j / 64)`, float32."""
        length = (2 * self.w) ** (np.arange(self.num_waves) / self.num_waves)
        angle = np.pi * distance[:, None] / length
        waves = np.concatenate([np.cos(angle), -np.sin(angle)], axis=1).astype(np.float32)
        return jnp.einsum("hj,sj->hs", self.amplitudes[...], waves, precision="highest")


def _first_half(key, shape, dtype):
    """Cosines of equal weights that add up to 1 at distance 0, and no sines."""
    half = shape[1] // 2
    return jnp.concatenate([jnp.full((shape[0], half), 1 / half), jnp.zeros((shape[0], half))], axis=1).astype(dtype)


class AlibiBias(nnx.Module):
    """ALiBi (Press et al. 2022): a bias that falls with the distance, by a slope of each head.

    `learned_slope`: a common factor on all slopes is learned. The bias falls to minus the `bound`: `none`, a number
    learned for the layer (`learned`) or for each head (`by_head`), or `fixed_bound` (`fixed`).
    """

    def __init__(self, num_heads: int, learned_slope: bool, bound: str, fixed_bound: float, *, rngs: nnx.Rngs):
        ones, num_bounds = jax.nn.initializers.ones, {"learned": 1, "by_head": num_heads}.get(bound)
        self.num_heads, self.constant = num_heads, fixed_bound if bound == "fixed" else None
        self.slope = parameter(rngs.params(), ones, (), (), "scale") if learned_slope else None
        self.bound = parameter(rngs.params(), ones, (num_bounds,), (None,), "bias") if num_bounds else None

    def __call__(self, distance: Int[np.ndarray, " s"]) -> Float[Array, "h s"]:
        """`max(-|slope| 2^(-8 (j + 1) / h) |D|, -|bound|)` for head j, float32."""
        slopes = 2.0 ** (-8 * np.arange(1, self.num_heads + 1) / self.num_heads)
        bias = jnp.asarray(-slopes[:, None] * np.abs(distance), jnp.float32)
        if self.slope is not None:
            bias = jnp.abs(self.slope[...]) * bias
        bound = self.constant if self.bound is None else self.bound[...][:, None]
        return bias if bound is None else jnp.maximum(bias, -jnp.abs(bound))


class NetworkBias(nnx.Module):
    """A small network of the distance with one hidden layer of 128 units, whose outputs are a bias for each head."""

    width = 128

    def __init__(self, num_heads: int, *, rngs: nnx.Rngs):
        ones, normal = jax.nn.initializers.ones, jax.nn.initializers.normal
        # The reference takes the number of heads for the fan-in.
        output = jax.nn.initializers.lecun_normal()
        self.hidden_scale = parameter(rngs.params(), ones, (self.width,), (None,), "scale")
        self.hidden_bias = parameter(rngs.params(), normal(10.0), (self.width,), (None,), "bias")
        self.output = parameter(rngs.params(), output, (num_heads, self.width), ("heads", None), "bias")

    def __call__(self, distance: Int[np.ndarray, " s"]) -> Float[Array, "h s"]:
        """`sum_j 3 sin(w2_j / 3) asinh(-w1_j D + c_j)`, float32."""
        hidden = jnp.arcsinh(self.hidden_bias[...] - distance.astype(np.float32)[:, None] * self.hidden_scale[...])
        return jnp.einsum("hj,sj->hs", 3 * jnp.sin(self.output[...] / 3), hidden, precision="highest")


class OrthogonalBias(nnx.Module):
    """A combination of functions of the distance for each head, which are orthogonal on the distances below 1024."""

    num_functions = 7
    farthest = 64

    def __init__(self, num_heads: int, *, rngs: nnx.Rngs):
        zeros = jax.nn.initializers.zeros
        self.coefficients = parameter(rngs.params(), zeros, (self.num_functions, num_heads), (None, "heads"), "bias")

    def _functions(self, distance: np.ndarray) -> np.ndarray:
        """`asinh(D - (beta^j - 1))`, the last of them centred at `farthest`."""
        centres = (self.farthest + 1.0) ** (np.arange(self.num_functions) / (self.num_functions - 1)) - 1
        return np.arcsinh(np.abs(distance)[:, None] - centres)

    def basis_change(self) -> np.ndarray:
        """The matrix that makes the functions orthogonal, each with a coefficient 1 for itself: the inverse of R of
        their QR decomposition, whose rows are divided by its diagonal."""
        upper = np.linalg.qr(self._functions(np.arange(4096) / 4), mode="r")
        return np.linalg.inv(upper / np.diag(upper)[:, None])

    def __call__(self, distance: Int[np.ndarray, " s"]) -> Float[Array, "h s"]:
        """The bias of each distance, float32."""
        functions = (self._functions(distance) @ self.basis_change()).astype(np.float32)
        return jnp.einsum("sj,jh->hs", functions, self.coefficients[...], precision="highest")


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
