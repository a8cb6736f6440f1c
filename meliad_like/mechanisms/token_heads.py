"""The heads of a layer's tokens, which its mechanisms share, and the cache of the last window of tokens."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from einops import rearrange
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from meliad_like.layers.attention import KeysAndValues, merge_heads, scaled, split_heads
from meliad_like.layers.attention_kernel import Projected
from meliad_like.layers.basic import Linear, parameter
from meliad_like.layers.sequence import from_left
from meliad_like.mechanisms.positions import Placed, Position, PositionConfig


class TokenCache(NamedTuple):
    """The keys and values of a layer's last `w` tokens as a ring: column `s` holds the last with block offset `s`."""

    key: Float[Array, "b h w k"]
    """Keys as the position strategy keeps them: of unit length, but unnormalised with infused positions."""
    value: Float[Array, "b h w k"]
    placed_key: Float[Array, "b h w k"] | None = None
    """The keys with their positions, only while decoding with infused positions; valid for one block."""


class Tile(NamedTuple):
    """The queries of each block, and the keys and values of the block and of the block before it."""

    query: Float[Array, "b c h w k"]
    """Queries of unit length times the attention scale, without positions."""
    key: Float[Array, "b c h w k"]
    """Keys of unit length, without positions."""
    value: Float[Array, "b c h w k"]
    previous_key: Float[Array, "b c h w k"]
    previous_value: Float[Array, "b c h w k"]
    previous_valid: Bool[Array, "b c"]
    """Whether the block before belongs to the same document."""
    placed: Placed
    """Queries and keys with positions."""
    bias: Float[Array, "h w"]
    """The bias of the scores at the distances 1 to w, times the attention scale."""
    scale: Float[Array, " h"]
    """The attention scale."""
    projected: Projected | None = None
    """Queries, keys and values as they are projected, for a kernel; None if no mechanism of the layer reads them, or if
    positions change queries and keys."""

    def both_blocks(self) -> tuple[KeysAndValues, KeysAndValues]:
        """The block before, which is visible if it belongs to the same document, and the block."""
        before = KeysAndValues(self.previous_key, self.previous_value, self.previous_valid)
        return before, KeysAndValues(self.key, self.value)


class TokenTile(NamedTuple):
    """The query of one token of every lane, and the keys and values of the ring of tokens before it."""

    query: Float[Array, "b h 1 k"]
    """Queries of unit length times the attention scale, without positions."""
    placed_query: Float[Array, "b h 1 k"]
    placed_key: Float[Array, "b h w k"]
    value: Float[Array, "b h w k"]
    bias: Float[Array, "b h w"]
    """The bias by column of the ring."""
    own_key: Float[Array, "b h 1 k"]
    """The token's own key, of unit length and without positions, which it does not see."""
    own_value: Float[Array, "b h 1 k"]
    seen: Bool[Array, "b w"]
    """The visible columns: tokens of the document, or zeros of an empty cache that are not masked."""


class TokenHeads(nnx.Module):
    """Keys, values and queries of a layer's tokens, the attention scale of each head, and the position strategy."""

    def __init__(
        self,
        model_width: int,
        num_heads: int,
        head_size: int,
        window_length: int,
        position: PositionConfig,
        mask_empty_cache: bool,
        *,
        rngs: nnx.Rngs,
    ):
        self.num_heads, self.head_size, self.w = num_heads, head_size, window_length
        self.mask_empty_cache = mask_empty_cache
        inner = num_heads * head_size
        self.key = Linear(model_width, inner, ("model", "heads"), rngs=rngs)
        self.value = Linear(model_width, inner, ("model", "heads"), rngs=rngs)
        self.query = Linear(model_width, inner, ("model", "heads"), rngs=rngs)
        self.attention_scale = parameter(rngs.params(), jax.nn.initializers.ones, (num_heads,), ("heads",))
        self.position: Position = position.build(window_length, num_heads, model_width, rngs=rngs)

    def init_cache(self, b: int, dtype, decoding: bool) -> TokenCache:
        """An empty cache."""
        empty = jnp.zeros((b, self.num_heads, self.w, self.head_size), dtype)
        return TokenCache(empty, empty, self.position.init_placed(empty) if decoding else None)

    @property
    def scale(self) -> Float[Array, " h"]:
        """The attention scale of each head: the absolute value of its parameter."""
        return jnp.abs(self.attention_scale[...])

    def _scale(self, query: Float[Array, "*batch h n k"]) -> Float[Array, "*batch h n k"]:
        return scaled(query, self.attention_scale)

    def bias(self, longest: int) -> Float[Array, "h longest"]:
        """The bias at the distances 1 to `longest`, times the attention scale, which multiplies the bias as well."""
        return self.position.bias(self.num_heads, longest) * self.scale[:, None]

    def of(self, y: Float[Array, "b n d"]) -> tuple[Float[Array, "b h n k"], ...]:
        """The heads of vectors without positions: keys of unit length, values, and queries as in a `Tile`.

        What is not used of the result is not computed in a compiled program.
        """
        key, value, query = self._project(y)
        return self.position.plain(key), value, self._scale(self.position.plain(query))

    def _project(self, y: Float[Array, "b n d"]) -> tuple[Float[Array, "b h n k"], ...]:
        """Keys, values and queries; keys and queries in the form in which the position strategy keeps them."""
        return self._kept(self.key(y), self.value(y), self.query(y))

    def _kept(self, *projected: Float[Array, "b n i"]) -> tuple[Float[Array, "b h n k"], ...]:
        key, value, query = (split_heads(x, self.num_heads) for x in projected)
        return self.position.kept(key), value, self.position.kept(query)

    def tile(
        self,
        y: Float[Array, "b n d"],
        cache: TokenCache | None,
        positions: Int[Array, "b c"],
        for_kernel: bool = False,
    ) -> tuple[Tile, TokenCache | None]:
        """The heads of a segment, and the cache after it.

        Args:
            y: the layer's input, after its norm.
            cache: the cache after the segment before; None: the layer's mechanisms don't see the block before theirs.
            positions: position of each block's first token in its document; 0 where a document begins.
            for_kernel: whether a mechanism reads `Tile.projected`.
        """
        projected = self.key(y), self.value(y), self.query(y)
        # Kept before they are cut into blocks: an axis for the lengths of the blocks costs XLA two copies a layer.
        key, value, query = (rearrange(x, "b h (c w) k -> b c h w k", w=self.w) for x in self._kept(*projected))
        last_key, last_value = key[:, -1], value[:, -1]
        if for_kernel:
            # Computed by itself, so that the other blocks' keys get unit length only in the kernel.
            last_key, last_value, _ = self._kept(*(x[:, -self.w :] for x in projected))
        if cache is None:
            before_key, before_value, after = jnp.zeros_like(last_key), jnp.zeros_like(last_value), None
        else:
            before_key, before_value = from_left((last_key, last_value), (cache.key, cache.value))
            after = cache._replace(key=last_key, value=last_value)
        tile = self._tile(query, key, value, before_key, before_value, positions)
        if for_kernel and not self.position.changes_keys:
            of_key, of_value, of_query = projected
            of_before = [merge_heads(x.astype(of_key.dtype)) for x in (before_key, before_value)]
            tile = tile._replace(projected=Projected(of_query, of_key, of_value, *of_before))
        return tile, after

    def tile_of_caches(self, before: TokenCache, after: TokenCache, position: Int[Array, " b"]) -> Tile:
        """The tile of one block that has been read, from the caches before and after it; its queries are zeros.

        Args:
            before, after: the layer's caches.
            position: position of the block's first token in its document.
        """
        key, value = after.key[:, None], after.value[:, None]
        return self._tile(jnp.zeros_like(key), key, value, before.key, before.value, position[:, None])

    def _tile(self, query, key, value, before_key, before_value, positions) -> Tile:
        previous_valid = positions > 0
        previous_key, previous_value = _block_before(key, before_key), _block_before(value, before_value)
        if not self.mask_empty_cache:
            empty = ~previous_valid[:, :, None, None, None]
            previous_key, previous_value = jnp.where(empty, 0, previous_key), jnp.where(empty, 0, previous_value)
            previous_valid = jnp.ones_like(previous_valid)
        return Tile(
            query=self._scale(self.position.plain(query)),
            key=self.position.plain(key),
            value=value,
            previous_key=self.position.plain(previous_key),
            previous_value=previous_value,
            previous_valid=previous_valid,
            placed=self.position.place((self.query, self.key), self._scale, query, key, previous_key),
            bias=self.bias(self.w),
            scale=self.scale,
        )

    def plain(self, cache: TokenCache | None) -> TokenCache | None:
        """The cache with keys of unit length and without positions."""
        return cache if cache is None else cache._replace(key=self.position.plain(cache.key))

    def begin_block(self, cache: TokenCache | None) -> TokenCache | None:
        """The cache before the first token of a block is decoded: the keys get the positions of the block before."""
        if cache is None:
            return None
        return cache._replace(placed_key=self.position.begin_block((self.query, self.key), cache.key))

    def token(
        self, y: Float[Array, "b d"], cache: TokenCache, position: Int[Array, " b"]
    ) -> tuple[TokenTile, TokenCache]:
        """The heads of one token of every lane, and the cache with it.

        Args:
            y: the layer's input, after its norm.
            cache: the cache of the tokens before.
            position: the number of earlier tokens of its document.
        """
        key, value, query = self._project(y[:, None])
        offset, lanes = position % self.w, jnp.arange(len(y))
        placed_query, placed_key, new_placed = self.position.place_token(
            (self.query, self.key), self._scale, query, key, (cache.key, cache.placed_key), offset
        )
        # The distance of the token in ring column s is (offset - s - 1) % w + 1.
        column = (offset[:, None] - jnp.arange(self.w) - 1) % self.w
        tile = TokenTile(
            query=self._scale(self.position.plain(query)),
            placed_query=placed_query,
            placed_key=placed_key,
            value=cache.value,
            bias=jnp.moveaxis(jnp.take(self.bias(self.w), column, axis=1), 0, 1),
            own_key=self.position.plain(key),
            own_value=value,
            seen=(jnp.arange(self.w) < offset[:, None]) | (position >= self.w)[:, None] | (not self.mask_empty_cache),
        )
        return tile, TokenCache(
            key=cache.key.at[lanes, :, offset].set(key[:, :, 0]),
            value=cache.value.at[lanes, :, offset].set(value[:, :, 0]),
            placed_key=new_placed,
        )


def _block_before(blocks: Float[Array, "b c h w k"], cached: Float[Array, "b h w k"]) -> Float[Array, "b c h w k"]:
    """The block before each block; for the first block, the cached one."""
    # Not a slice and a concatenation, which are two copies on a TPU, and as many in the backward pass.
    unpadded = (0, 0, 0)
    moved = jax.lax.pad(blocks, jnp.zeros((), blocks.dtype), (unpadded, (1, -1, 0), *[unpadded] * 3))
    is_first = jnp.arange(blocks.shape[1])[:, None, None, None] == 0
    return jnp.where(is_first, cached.astype(blocks.dtype)[:, None], moved)
