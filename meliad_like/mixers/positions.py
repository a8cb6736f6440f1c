"""Position strategies: how attention inside a window represents the positions of its keys.

A strategy sees distances or places within a tile of `2w` keys, never positions in a document, which may therefore be of
any length. Each is a config under a registered name (`DecoderConfig.position`) and the module that it builds.
"""

import dataclasses
import math
from typing import ClassVar, Literal

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from meliad_like.errors import UserError
from meliad_like.layers import positions
from meliad_like.layers.attention import split_heads, unit
from meliad_like.layers.basic import Linear
from meliad_like.registry import Registry
from meliad_like.validation import check_above_zero, check_choices

POSITIONS = Registry("position")


class Position(nnx.Module):
    """The strategy without positions, and the base class of the other strategies."""

    changes_keys: ClassVar[bool] = False
    """Whether positions change queries and keys, instead of only adding a bias to the scores."""

    def kept(self, projected: Float[Array, "*batch k"]) -> Float[Array, "*batch k"]:
        """The form in which projected queries and keys are kept, keys also in the cache: by default of unit length."""
        return unit(projected)

    def plain(self, kept: Float[Array, "*batch k"]) -> Float[Array, "*batch k"]:
        """Queries or keys of unit length without positions, from the form in which they are kept."""
        return kept

    def bias(self, num_heads: int, longest: int) -> Float[Array, "h longest"]:
        """The bias added to the scores at the distances 1 to `longest`, float32."""
        return jnp.zeros((num_heads, longest), jnp.float32)

    def placed(
        self,
        kept: Float[Array, "*batch h s k"],
        place: Int[Array, "... s"] | np.ndarray,
        projection: Linear | None = None,
    ) -> Float[Array, "*batch h s k"]:
        """Queries or keys of unit length with their positions, from the form in which they are kept.

        Places, [s] or [b, 1, s], are those in a tile of `2w` tokens whose block begins at w; `projection` made `kept`.
        """
        return kept


class BiasPosition(Position):
    """A bias by distance: a module that maps distances to the biases of each head (`layers/positions.py`)."""

    def __init__(self, by_distance: nnx.Module):
        self.by_distance = by_distance

    def bias(self, num_heads, longest):
        return self.by_distance(np.arange(1, longest + 1))


class RotaryPosition(Position):
    """Rotary embedding: queries and keys are rotated by their places (Su et al. 2021)."""

    changes_keys = True

    def __init__(self, unit: float):
        self.unit = unit

    def placed(self, kept, place, projection=None):
        return positions.rotate(kept, place, positions.wavelengths(kept.shape[-1]) / np.float32(self.unit))


class InfusedPosition(Position):
    """Sinusoids of the places are added to what queries and keys are projected from (Shortformer, section 5.1).

    A document's first block also has the places w to 2w - 1; in Shortformer it counts from 0. Because a projection is
    linear, that of the sinusoids is added to that of the tokens, before both get unit length; so keys are kept without.
    """

    changes_keys = True

    def __init__(self, w: int, model_width: int):
        self.w, self.model_width = w, model_width

    def kept(self, projected):
        return projected

    def plain(self, kept):
        return unit(kept)

    def placed(self, kept, place, projection=None):
        assert projection is not None
        table = jnp.asarray(positions.sinusoids(2 * self.w, self.model_width), kept.dtype)
        infused = projection(table[place if place.ndim == 1 else place[:, 0]])
        return unit(kept + split_heads(infused, kept.shape[-3]))


@dataclasses.dataclass(frozen=True)
class PositionConfig:
    """The base class of the configs of position strategies."""

    places_vectors: ClassVar[bool] = True
    """Whether `Position.placed` can give places to vectors that are not tokens."""

    def check(self, model_width: int, head_size: int, mask_empty_cache: bool) -> None:
        """Raises a UserError if a decoder of these sizes can't have the strategy."""

    def build(self, w: int, num_heads: int, model_width: int, *, rngs: nnx.Rngs) -> Position:
        """The strategy's module for one layer."""
        raise NotImplementedError


@POSITIONS.register("none")
class NoPosition(PositionConfig):
    """No positions: a window is a set of tokens without an order."""

    def build(self, w, num_heads, model_width, *, rngs):
        return Position()


@POSITIONS.register("t5")
class T5(PositionConfig):
    """T5's bias by distance: one table of 32 buckets for each layer."""

    def build(self, w, num_heads, model_width, *, rngs):
        return BiasPosition(positions.T5Bias(num_heads, rngs=rngs))


@POSITIONS.register("fourier")
class Fourier(PositionConfig):
    """A Fourier series of the distance for each head and layer."""

    def build(self, w, num_heads, model_width, *, rngs):
        return BiasPosition(positions.FourierBias(w, num_heads, rngs=rngs))


@POSITIONS.register("alibi")
class Alibi(PositionConfig):
    """ALiBi (Press et al. 2022): a bias that falls with the distance; by default as published.

    The reference learns a factor on all slopes, and a bound. The attention scale multiplies the bias in any case.
    """

    learned_slope: bool = False
    """Whether a factor on the slopes of a layer is learned."""
    bound: Literal["none", "learned", "by_head", "fixed"] = "none"
    """The number at which the bias stops falling: none, learned for each layer or head, or `fixed`."""
    fixed_bound: float = 2.0
    """The bound, if `bound` is `fixed`."""

    def __post_init__(self):
        check_choices(self)
        check_above_zero(self, ("fixed_bound",))

    def build(self, w, num_heads, model_width, *, rngs):
        return BiasPosition(positions.AlibiBias(num_heads, self.learned_slope, self.bound, self.fixed_bound, rngs=rngs))


@POSITIONS.register("network")
class Network(PositionConfig):
    """A small network of the distance for each layer."""

    def build(self, w, num_heads, model_width, *, rngs):
        return BiasPosition(positions.NetworkBias(num_heads, rngs=rngs))


@POSITIONS.register("orthogonal")
class Orthogonal(PositionConfig):
    """A learned combination of seven orthogonal functions of the distance for each head and layer."""

    def build(self, w, num_heads, model_width, *, rngs):
        return BiasPosition(positions.OrthogonalBias(num_heads, rngs=rngs))


@POSITIONS.register("rotary")
class Rotary(PositionConfig):
    """Rotary embeddings, with wavelengths from 2 pi to 20,000 pi if the unit is 1."""

    unit: Literal["1", "pi"] = "1"
    """The angle by which one position turns the first pair of a head: 1 radian as published, pi in the reference."""

    def __post_init__(self):
        check_choices(self)

    def check(self, model_width, head_size, mask_empty_cache):
        if head_size % 2:
            raise UserError(f"head_size={head_size} must be even for position=rotary")

    def build(self, w, num_heads, model_width, *, rngs):
        return RotaryPosition({"1": 1.0, "pi": math.pi}[self.unit])


@POSITIONS.register("infused")
class Infused(PositionConfig):
    """Sinusoids added to the inputs of the query and key projections."""

    places_vectors: ClassVar[bool] = False

    def check(self, model_width, head_size, mask_empty_cache):
        if model_width % 2 or model_width < 4:
            raise UserError(f"model_width={model_width} must be even, and at least 4, for position=infused")
        if not mask_empty_cache:
            raise UserError("position='infused' needs mask_empty_cache=True: keys of an empty cache have no places")

    def build(self, w, num_heads, model_width, *, rngs):
        return InfusedPosition(w, model_width)
