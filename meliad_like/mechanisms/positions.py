"""Position strategies: how attention inside a window represents the positions of its keys.

A strategy sees distances or places within a tile of `2w` keys, never positions in a document, which may therefore be of
any length. Each is a config under a registered name (`DecoderConfig.position`) and the module that it builds.
"""

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from einops import rearrange
from flax import nnx
from jaxtyping import Array, Float, Int

from meliad_like.errors import UserError
from meliad_like.layers.attention import ring_distance, split_heads, unit
from meliad_like.layers.basic import Linear
from meliad_like.layers.positions import T5Bias, rotate, sinusoids
from meliad_like.registry import Registry

POSITIONS = Registry("position")


class Placed(NamedTuple):
    """Queries of unit length times the attention scale, and keys of unit length, both with their positions."""

    query: Float[Array, "b c h w k"]
    key: Float[Array, "b c h w k"]
    previous_key: Float[Array, "b c h w k"]


class Position(nnx.Module):
    """The strategy without positions, and the base class of the other strategies."""

    def __init__(self, w: int):
        self.w = w

    def kept(self, projected: Float[Array, "*batch k"]) -> Float[Array, "*batch k"]:
        """The form in which projected queries and keys are kept, keys also in the cache: by default of unit length."""
        return unit(projected)

    def plain(self, kept: Float[Array, "*batch k"]) -> Float[Array, "*batch k"]:
        """Queries or keys of unit length without positions, from the form in which they are kept."""
        return kept

    def bias(self, num_heads: int) -> Float[Array, "h w"]:
        """The bias added to the scores at the distances 1 to w, float32."""
        return jnp.zeros((num_heads, self.w), jnp.float32)

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

    def init_placed(self, key: Float[Array, "b h w k"]) -> Float[Array, "b h w k"] | None:
        """An array for keys whose places stay the same for a decoded block; None if they change with every token."""
        return None

    def begin_block(self, projections: tuple[Linear, Linear], kept: Float[Array, "b h w k"]) -> Array | None:
        """The cached keys with the positions of the block before."""
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
            ring: the last w keys as they are kept, and with their positions (`init_placed`).
            offset: the token's offset in its block.

        Returns:
            The query, the keys, and the placed keys with the token's own.
        """
        return scale(query), ring[0], None


class T5Position(Position):
    """T5's learned bias by distance (Raffel et al. 2020, section 2.1)."""

    def __init__(self, w: int, num_heads: int, *, rngs: nnx.Rngs):
        super().__init__(w)
        self.by_distance = T5Bias(num_heads, rngs=rngs)

    def bias(self, num_heads: int) -> Float[Array, "h w"]:
        return self.by_distance(np.arange(1, self.w + 1))


class RotaryPosition(Position):
    """Rotary embedding: queries and keys are rotated by their places (Su et al. 2021)."""

    def place(self, projections, scale, query, kept, previous_kept) -> Placed:
        here, before = np.arange(self.w, 2 * self.w), np.arange(self.w)
        return Placed(rotate(scale(query), here), rotate(kept, here), rotate(previous_kept, before))

    def place_token(self, projections, scale, query, key, ring, offset):
        distance = jnp.asarray(ring_distance(self.w))[offset]
        return rotate(scale(query), np.full(1, self.w)), rotate(ring[0], (self.w - distance)[:, None]), None


class InfusedPosition(Position):
    """Sinusoids of the places are added to what queries and keys are projected from (Shortformer, section 5.1).

    A document's first block also has the places w to 2w - 1; in Shortformer it counts from 0. Because a projection is
    linear, that of the sinusoids is added to that of the tokens, before both get unit length; so keys are kept without.
    """

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

    def init_placed(self, key):
        return jnp.zeros_like(key)

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

    def check(self, model_width: int, head_size: int, mask_empty_cache: bool) -> None:
        """
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
        return T5Position(w, num_heads, rngs=rngs)


@POSITIONS.register("rotary")
@dataclasses.dataclass(frozen=True)
class Rotary(PositionConfig):
    """Rotary embeddings with wavelengths from 2 pi to 20,000 pi."""

    def check(self, model_width, head_size, mask_empty_cache):
        if head_size % 2:
            raise UserError(f"head_size={head_size} must be even for position=rotary")

    def build(self, w, num_heads, model_width, *, rngs):
        return RotaryPosition(w)


@POSITIONS.register("infused")
@dataclasses.dataclass(frozen=True)
class Infused(PositionConfig):
    """Sinusoids added to the inputs of the query and key projections."""

    def check(self, model_width, head_size, mask_empty_cache):
        if model_width % 2 or model_width < 4:
            raise UserError(f"model_width={model_width} must be even, and at least 4, for position=infused")
        if not mask_empty_cache:
            raise UserError("position='infused' needs mask_empty_cache=True: keys of an empty cache have no places")

    def build(self, w, num_heads, model_width, *, rngs):
        return InfusedPosition(w, model_width)
