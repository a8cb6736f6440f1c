"""Biases by distance other than T5's, of the reference's newer code (google-research/meliad, `position*.py`)."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from meliad_like.layers.basic import parameter


class FourierBias(nnx.Module):
    """A Fourier series of the distance for each head, whose 64 wavelengths grow from 2 tokens to nearly 4 windows."""

    num_waves = 64

    def __init__(self, w: int, num_heads: int, *, rngs: nnx.Rngs):
        self.w = w
        self.amplitudes = parameter(rngs.params(), _first_half, (num_heads, 2 * self.num_waves), ("heads", None))

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

    `learned`: a common factor on all slopes is learned. `bound`: the bias falls to minus this number, which is learned
    for the layer (`learned`) or for each head (`by_head`), constant, or None for no bound.
    """

    def __init__(self, num_heads: int, learned: bool, bound: str | float | None, *, rngs: nnx.Rngs):
        ones = jax.nn.initializers.ones
        self.num_heads, self.constant = num_heads, bound if isinstance(bound, float) else None
        self.slope = parameter(rngs.params(), ones, (), ()) if learned else None
        num_bounds = {"learned": 1, "by_head": num_heads}.get(bound, 0) if isinstance(bound, str) else 0
        self.bound = parameter(rngs.params(), ones, (num_bounds,), (None,)) if num_bounds else None

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
        self.hidden_scale = parameter(rngs.params(), ones, (self.width,), (None,))
        self.hidden_bias = parameter(rngs.params(), normal(10.0), (self.width,), (None,))
        self.output = parameter(rngs.params(), output, (num_heads, self.width), ("heads", None))

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
        self.coefficients = parameter(rngs.params(), zeros, (self.num_functions, num_heads), (None, "heads"))

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
