"""Position strategies: how attention inside a window represents the positions of its keys.

A strategy sees distances or places within a tile of `2w` keys, never positions in a document, which may therefore be of
any length. Each is a config under a registered name (`DecoderConfig.position`) and the module that it builds.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import ClassVar, Literal, NamedTuple

import jax.numpy as jnp
import numpy as np
from einops import rearrange
from flax import nnx
from jaxtyping import Array, Float, Int

from meliad_like.errors import UserError
from meliad_like.layers.attention import ring_distance, split_heads, unit
from meliad_like.layers.basic import Linear
from meliad_like.layers.position_biases import AlibiBias, FourierBias, NetworkBias, OrthogonalBias
from meliad_like.layers.positions import T5Bias, rotate, sinusoids, wavelengths
from meliad_like.registry import Registry
from meliad_like.validation import check_above_zero, check_choices

POSITIONS = Registry("position")


class Placed(NamedTuple):
    """Queries of unit length times the attention scale, and keys of unit length, both with their positions."""

    query: Float[Array, "b c h w k"]
    key: Float[Array, "b c h w k"]
    previous_key: Float[Array, "b c h w k"]


class Position(nnx.Module):
    """The strategy without positions, and the base class of the other strategies."""

    changes_keys: ClassVar[bool] = False
    """Whether positions change queries or keys, instead of only adding a bias to the scores."""
    places_blocks: ClassVar[bool] = False
    """Whether decoding keeps keys with their positions for a block, which `begin_block` makes."""

    def __init__(self, w: int):
        self.w = w

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
        self, x: Float[Array, "*batch s k"], place: Int[Array, "*#batch s"] | np.ndarray
    ) -> Float[Array, "*batch s k"]:
        """Keys or queries of unit length with their positions, in the places of a tile whose block begins at w."""
        return x

    def place(
        self,
        projections: tuple[Linear, Linear],
        scale: Callable[[Array], Array],
        query: Float[Array, "b c h w k"],
        kept: Float[Array, "b c h w k"],
        previous_kept: Float[Array, "b c h w k"],
    ) -> Placed:
        """Queries and keys of a segment's tiles, with their positions.

        Args:
            projections: the layer's query and key projections.
            scale: multiplies queries with the attention scale.
            query: the queries, in the form in which they are kept.
            kept, previous_kept: keys of each block and of the block before it, in that form.
        """
        return Placed(scale(query), kept, previous_kept)

    def begin_block(
        self, projections: tuple[Linear, Linear], kept: Float[Array, "b h w k"]
    ) -> Float[Array, "b h w k"] | None:
        """The cached keys with the positions of the block before; None unless `places_blocks`."""
        return None

    def place_token(
        self,
        projections: tuple[Linear, Linear],
        scale: Callable[[Array], Array],
        query: Float[Array, "b h 1 k"],
        key: Float[Array, "b h 1 k"],
        ring: tuple[Float[Array, "b h w k"], Float[Array, "b h w k"] | None],
        offset: Int[Array, " b"],
    ) -> tuple[Float[Array, "b h 1 k"], Float[Array, "b h w k"], Float[Array, "b h w k"] | None]:
        """A token's query and the keys that it sees, with their positions.

        Args:
            projections, scale: as in `place`.
            query, key: the query and key of the token, in the form in which they are kept.
            ring: the last w keys as they are kept, and with their positions (`begin_block`).
            offset: the token's offset in its block.

        Returns:
            The query, the keys, and the placed keys with the token's own.
        """
        return scale(query), ring[0], None


class BiasPosition(Position):
    """A bias by distance: a module that maps distances to the biases of each head (`layers/positions.py`)."""

    def __init__(self, w: int, by_distance: nnx.Module):
        super().__init__(w)
        self.by_distance = by_distance

    def bias(self, num_heads, longest):
        return self.by_distance(np.arange(1, longest + 1))


class RotaryPosition(Position):
    """Rotary embedding: queries and keys are rotated by their places (Su et al. 2021)."""

    changes_keys = True

    def __init__(self, w: int, unit: float):
        super().__init__(w)
        self.unit = unit

    def placed(self, x, place):
        return rotate(x, place, wavelengths(x.shape[-1]) / np.float32(self.unit))

    def place(self, projections, scale, query, kept, previous_kept) -> Placed:
        here, before = np.arange(self.w, 2 * self.w), np.arange(self.w)
        placed = (self.placed(x, place) for x, place in ((kept, here), (previous_kept, before)))
        return Placed(self.placed(scale(query), here), *placed)

    def place_token(self, projections, scale, query, key, ring, offset):
        distance = jnp.asarray(ring_distance(self.w))[offset]
        return self.placed(scale(query), np.full(1, self.w)), self.placed(ring[0], (self.w - distance)[:, None]), None


class InfusedPosition(Position):
    """Sinusoids of the places are added to what queries and keys are projected from (Shortformer, section 5.1).

    A document's first block also has the places w to 2w - 1; in Shortformer it counts from 0. Because a projection is
    linear, that of the sinusoids is added to that of the tokens, before both get unit length; so keys are kept without.
    """

    changes_keys = True
    places_blocks = True

    def __init__(self, w: int, model_width: int):
        super().__init__(w)
        self.model_width = model_width

    def kept(self, projected):
        return projected

    def plain(self, kept):
        return unit(kept)

    def _infused(self, projection: Linear, place: Int[Array, " n"] | np.ndarray, like: Array) -> Float[Array, "h n k"]:
        table = jnp.asarray(sinusoids(2 * self.w, self.model_width), like.dtype)
        return split_heads(projection(table[place]), like.shape[-3])

    def place(self, projections, scale, query, kept, previous_kept) -> Placed:
        of_query, of_key = projections
        here, before = np.arange(self.w, 2 * self.w), np.arange(self.w)
        return Placed(
            scale(unit(query + self._infused(of_query, here, query))),
            unit(kept + self._infused(of_key, here, kept)),
            unit(previous_kept + self._infused(of_key, before, kept)),
        )

    def begin_block(self, projections, kept):
        return unit(kept + self._infused(projections[1], np.arange(self.w), kept))

    def place_token(self, projections, scale, query, key, ring, offset):
        of_query, of_key = (
            rearrange(self._infused(linear, self.w + offset, query), "h b k -> b h 1 k") for linear in projections
        )
        placed = ring[1]
        assert placed is not None
        new = placed.at[jnp.arange(len(offset)), :, offset].set(unit(key + of_key)[:, :, 0])
        # The token doesn't see itself, so the key that it replaces, w tokens before, is still there.
        return scale(unit(query + of_query)), placed, new


@dataclasses.dataclass(frozen=True)
class PositionConfig:
    """The base class of the configs of position strategies."""

    places_vectors: ClassVar[bool] = True
    """Whether `Position.placed` can give places to vectors that are not tokens."""

    def check(self, model_width: int, head_size: int, mask_empty_cache: bool) -> None:
        """Checks that a decoder of these sizes can have the strategy.

        Raises:
          UserError: a decoder of these sizes can't have the strategy.
        """

    def build(self, w: int, num_heads: int, model_width: int, *, rngs: nnx.Rngs) -> Position:
        """The strategy's module for one layer."""
        raise NotImplementedError


@POSITIONS.register("none")
@dataclasses.dataclass(frozen=True)
class NoPosition(PositionConfig):
    """No positions: a window is a set of tokens without an order."""

    def build(self, w, num_heads, model_width, *, rngs):
        return Position(w)


@POSITIONS.register("t5")
@dataclasses.dataclass(frozen=True)
class T5(PositionConfig):
    """T5's bias by distance: one table of 32 buckets for each layer."""

    def build(self, w, num_heads, model_width, *, rngs):
        return BiasPosition(w, T5Bias(num_heads, rngs=rngs))


@POSITIONS.register("fourier")
@dataclasses.dataclass(frozen=True)
class Fourier(PositionConfig):
    """A Fourier series of the distance for each head and layer."""

    def build(self, w, num_heads, model_width, *, rngs):
        return BiasPosition(w, FourierBias(w, num_heads, rngs=rngs))


@POSITIONS.register("alibi")
@dataclasses.dataclass(frozen=True)
class Alibi(PositionConfig):
    """ALiBi (Press et al. 2022): a bias that falls with the distance; by default as published.

    The reference learns a factor on all slopes, and a bound. The attention scale multiplies the bias in any case.
    """

    learned_slope: bool = False
    """Whether a factor on the slopes of a layer is learned."""
    bound: Literal["none", "learned", "by_head", "fixed"] = "none"
    """The number at which the bias stops falling: none, a learned one for each layer, one for each head, or a `fixed`
    one."""
    fixed_bound: float = 2.0
    """The bound, if `bound` is `fixed`."""

    def __post_init__(self):
        check_choices(self)
        check_above_zero(self, ("fixed_bound",))

    def build(self, w, num_heads, model_width, *, rngs):
        bound = {"none": None, "fixed": self.fixed_bound}.get(self.bound, self.bound)
        return BiasPosition(w, AlibiBias(num_heads, self.learned_slope, bound, rngs=rngs))


@POSITIONS.register("network")
@dataclasses.dataclass(frozen=True)
class Network(PositionConfig):
    """A small network of the distance for each layer."""

    def build(self, w, num_heads, model_width, *, rngs):
        return BiasPosition(w, NetworkBias(num_heads, rngs=rngs))


@POSITIONS.register("orthogonal")
@dataclasses.dataclass(frozen=True)
class Orthogonal(PositionConfig):
    """A learned combination of seven orthogonal functions of the distance for each head and layer."""

    def build(self, w, num_heads, model_width, *, rngs):
        return BiasPosition(w, OrthogonalBias(num_heads, rngs=rngs))


@POSITIONS.register("rotary")
@dataclasses.dataclass(frozen=True)
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
        return RotaryPosition(w, {"1": 1.0, "pi": math.pi}[self.unit])


@POSITIONS.register("infused")
@dataclasses.dataclass(frozen=True)
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
