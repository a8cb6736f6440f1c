"""Position strategies: how attention inside a window represents the positions of its keys.

A strategy sees distances or places within a tile of `2w` keys, never positions in a document, which may therefore be of
any length. Each is a config under a registered name (`DecoderConfig.position`) and the module that it builds.
Biases other than T5's are from the reference's newer code (google-research/meliad, `position*.py`).
"""

import math
from typing import ClassVar, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from meliad_like.errors import UserError
from meliad_like.layers.basic import parameter
from meliad_like.layers.rotary import rotate, wavelengths
from meliad_like.registry import Registry
from meliad_like.validation import check_above_zero, check_choices

POSITIONS = Registry("position")
NUM_BUCKETS = 32
MAX_DISTANCE = 128


class Position(nnx.Module):
    """The strategy without positions, and the base class of the other strategies."""

    changes_keys: ClassVar[bool] = False
    """Whether positions change queries and keys, instead of only adding a bias to the scores."""

    def bias(self, num_heads: int, longest: int) -> Float[Array, "h longest"]:
        """The bias added to the scores at the distances 1 to `longest`, float32."""
        return jnp.zeros((num_heads, longest), jnp.float32)

    def placed(
        self, x: Float[Array, "*batch h s k"], place: Int[Array, "... s"] | np.ndarray
    ) -> Float[Array, "*batch h s k"]:
        """Queries or keys of unit length with their positions: `place`, [s] or [b, 1, s], are positions in a tile of
        `2w` tokens whose block begins at w."""
        return x


class BiasPosition(Position):
    """A bias by distance: a module that maps distances to the biases of each head."""

    def __init__(self, by_distance: nnx.Module):
        self.by_distance = by_distance

    def bias(self, num_heads, longest):
        return self.by_distance(np.arange(1, longest + 1))


class RotaryPosition(Position):
    """Rotary embedding: queries and keys are rotated by their places (Su et al. 2021)."""

    changes_keys = True

    def __init__(self, unit: float):
        self.unit = unit

    def placed(self, x, place):
        return rotate(x, place, wavelengths(x.shape[-1]) / np.float32(self.unit))


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
    """ALiBi (Press et al. 2022): a bias that falls with the distance, by a slope of each head, to minus a bound."""

    def __init__(self, config: "Alibi", num_heads: int, *, rngs: nnx.Rngs):
        ones, num_bounds = jax.nn.initializers.ones, {"learned": 1, "by_head": num_heads}.get(config.bound)
        self.num_heads, self.constant = num_heads, config.fixed_bound if config.bound == "fixed" else None
        self.slope = parameter(rngs.params(), ones, (), (), "scale") if config.learned_slope else None
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


@POSITIONS.register("none")
class PositionConfig:
    """The strategy without positions, in which a window is a set of tokens without an order, and the base class of the
    configs of the other strategies."""

    def check(self, head_size: int) -> None:
        """Raises a UserError if a decoder with heads of this size can't have the strategy."""

    def build(self, w: int, num_heads: int, *, rngs: nnx.Rngs) -> Position:
        """The strategy's module for one layer."""
        return Position()


@POSITIONS.register("t5")
class T5(PositionConfig):
    """T5's bias by distance: one table of 32 buckets for each layer."""

    def build(self, w, num_heads, *, rngs):
        return BiasPosition(T5Bias(num_heads, rngs=rngs))


@POSITIONS.register("fourier")
class Fourier(PositionConfig):
    """A Fourier series of the distance for each head and layer."""

    def build(self, w, num_heads, *, rngs):
        return BiasPosition(FourierBias(w, num_heads, rngs=rngs))


@POSITIONS.register("alibi")
class Alibi(PositionConfig):
    """ALiBi (Press et al. 2022): a bias that falls with the distance; by default as published.

    The reference learns a factor on all slopes, and a bound. The attention scale always multiplies the bias.
    """

    learned_slope: bool = False
    """Whether a factor on the slopes of a layer is learned."""
    bound: Literal["none", "learned", "by_head", "fixed"] = "none"
    """The number at which the bias stops falling: none, learned for each layer or head, or `fixed_bound`."""
    fixed_bound: float = 2.0
    """The bound, if `bound` is `fixed`."""

    def __post_init__(self):
        check_choices(self)
        check_above_zero(self, ("fixed_bound",))

    def build(self, w, num_heads, *, rngs):
        return BiasPosition(AlibiBias(self, num_heads, rngs=rngs))


@POSITIONS.register("network")
class Network(PositionConfig):
    """A small network of the distance for each layer."""

    def build(self, w, num_heads, *, rngs):
        return BiasPosition(NetworkBias(num_heads, rngs=rngs))


@POSITIONS.register("orthogonal")
class Orthogonal(PositionConfig):
    """A learned combination of seven orthogonal functions of the distance for each head and layer."""

    def build(self, w, num_heads, *, rngs):
        return BiasPosition(OrthogonalBias(num_heads, rngs=rngs))


@POSITIONS.register("rotary")
class Rotary(PositionConfig):
    """Rotary embeddings, with wavelengths from 2 pi to 20,000 pi if the unit is 1."""

    unit: Literal["1", "pi"] = "1"
    """The angle by which one position turns the first pair of a head: 1 radian as published, pi in the reference."""

    def __post_init__(self):
        check_choices(self)

    def check(self, head_size):
        if head_size % 2:
            raise UserError(f"head_size={head_size} must be even for position=rotary")

    def build(self, w, num_heads, *, rngs):
        return RotaryPosition({"1": 1.0, "pi": math.pi}[self.unit])
