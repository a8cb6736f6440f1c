"""The protocol of memory mechanisms: a frozen config that knows everything about one, and the module that it builds.

A layer has heads of its tokens, a list of mechanisms and a feed-forward network. It never asks which mechanisms it has:
it calls all of them, lets each combine its result with those before it, and projects what comes out.
"""

import dataclasses
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from meliad_like.errors import UserError
from meliad_like.layers.flops import Flops
from meliad_like.layers.named_layers import check_layers, layer_indices
from meliad_like.mechanisms.token_heads import Tile, TokenCache, TokenTile
from meliad_like.registry import Registry
from meliad_like.sizes import size

MECHANISMS = Registry("mechanism")


@dataclasses.dataclass(frozen=True)
class Shape:
    """What a mechanism knows of the decoder that it is part of."""

    num_layers: int
    model_width: int
    num_heads: int
    head_size: int
    feedforward_width: int
    window_length: int
    dropout_rate: float
    mask_empty_cache: bool

    @property
    def inner_width(self) -> int:
        """The width of all heads together."""
        return self.num_heads * self.head_size


class SegmentTokens(NamedTuple):
    """The tokens of a segment, as a mechanism sees them."""

    normed: Float[Array, "b n d"]
    """The layer's input, after its norm."""
    tile: Tile
    positions: Int[Array, "b c"]
    """Of each block's first token in its document; 0 where a document begins."""
    shared: dict[str, Any]
    """By mechanism: what its layers have published (`MechanismConfig.share`) of the time before the block."""


class OneToken(NamedTuple):
    """One token of every lane, as a mechanism sees it while decoding."""

    normed: Float[Array, "b d"]
    """The layer's input, after its norm."""
    tile: TokenTile
    position: Int[Array, " b"]
    """The number of tokens of its document before it."""
    shared: dict[str, Any]


class Watched(NamedTuple):
    """What a study can watch while a mechanism reads a block."""

    before: Float[Array, "b r d"]
    """The vectors that came into the block."""
    after: Float[Array, "b r d"]
    """The vectors that left it."""
    gates: dict[str, Float[Array, "2 b r d"]]
    """By gate: the share of each channel that was kept, and the share of the update that was taken in."""


class Mechanism(nnx.Module):
    """One way in which a layer sees what came before. `b c h w k` are lanes, blocks, heads, tokens, head size.

    A block-by-block reader, which is a decoder that writes token by token or one whose layers share what they publish,
    calls `begin_block` before a block, for the lanes whose block begins, and while decoding `end_block` after it.
    """

    def init_carry(self, b: int, dtype: Any, decoding: bool) -> Any:
        """What `b` lanes remember before their first token: a pytree of arrays with the lane axis first."""
        del b, dtype, decoding
        return ()

    def begin_segment(self, carry: Any) -> Any:
        """Called once before a segment is read; not while decoding, which has no segments."""
        return carry

    def begin_block(self, carry: Any, start: Bool[Array, " b"], cache: TokenCache) -> Any:
        """The carry that comes into a block.

        Args:
            carry: from the block before.
            start: lanes where a document begins with the block.
            cache: of the layer's tokens, which is the block before; its keys are of unit length, without positions.
        """
        del start, cache
        return carry

    def __call__(
        self, tokens: SegmentTokens, carry: Any, dropout_key: PRNGKeyArray | None
    ) -> tuple[Float[Array, "b c h w k"], Any]:
        """What every token of a segment gets, by head, and the carry after the segment."""
        raise NotImplementedError

    def decode_step(self, token: OneToken, carry: Any) -> tuple[Float[Array, "b h 1 k"], Any]:
        """The same for one token of every lane, at a cost that doesn't depend on how many were read."""
        raise NotImplementedError

    def end_block(self, carry: Any, cache: TokenCache, position: Int[Array, " b"]) -> Any:
        """The carry after a block that was read token by token.

        Args:
            carry: after the block's last token.
            cache: of the layer's tokens, which is the whole block; its keys as for `begin_block`.
            position: of the block's last token.
        """
        del cache, position
        return carry

    def combine(
        self, others: list[Float[Array, "*batch h t k"]], own: Float[Array, "*batch h t k"]
    ) -> list[Float[Array, "*batch h t k"]]:
        """The results of the mechanisms before it with its own: by default beside each other."""
        return [*others, own]

    def publish(self, carry: Any) -> Any:
        """What other layers may read of a carry after `begin_block`, for `MechanismConfig.share`."""
        raise NotImplementedError

    def watch(self, before: Any, after: Any, tile: Tile, start: Bool[Array, " b"]) -> Watched | None:
        """What a study can watch; None: nothing.

        Args:
            before, after: the carries before and after a block.
            tile: of the block.
            start: lanes where a document begins with the block.
        """
        del before, after, tile, start
        return None


@dataclasses.dataclass(frozen=True)
class MechanismConfig:
    """The config of a mechanism. Every field that is a size says how it scales (`meliad_like/sizes.py`)."""

    layers: tuple[int, ...] | None = size((), "layer_indices")
    """Which layers have it; negative numbers count from the end. None: all."""

    carry_axes: ClassVar[tuple[str, ...]] = ("lanes",)
    """The logical axes of every array in the carry, beginning with the first; further axes are not cut."""
    rank: ClassVar[int] = 2
    """A layer's mechanisms are called in the order of their ranks, then of their names: 0 the window, 1 what is mixed
    into its result head by head, 2 what stands beside it."""
    without_positions: ClassVar[bool] = False
    """Whether its layers do without positions, because it compares tokens at distances that have none."""

    def check(self, shape: Shape, others: tuple["MechanismConfig", ...]) -> None:
        """Whether a decoder of this shape can have it.

        Args:
            shape: of the decoder.
            others: its other mechanisms.

        Raises:
          UserError: it can't, in one line.
        """
        if self.layers is None:
            return
        if not self.layers:
            name = type(self).__name__
            raise UserError(f"{name}.layers=() names no layer: name some, or bind nothing of {name}")
        check_layers(self, "layers", shape.num_layers)

    def indices(self, num_layers: int) -> frozenset[int]:
        """The layers that have it, counted from 0."""
        return frozenset(range(num_layers)) if self.layers is None else layer_indices(self.layers, num_layers)

    def build(self, shape: Shape, index: int, *, rngs: nnx.Rngs) -> Mechanism | None:
        """The module of layer `index`, counted from 0; None where that layer has no part in it."""
        raise NotImplementedError

    def mixed_width(self, shape: Shape, index: int) -> int:
        """How many channels it adds to what the layer's output projection reads."""
        return shape.inner_width if index in self.indices(shape.num_layers) else 0

    def flops(self, shape: Shape, index: int) -> Flops:
        """Operations of one token in layer `index` (`layers/flops.py`), without the layer's own projections."""
        raise NotImplementedError

    def num_visible(self, shape: Shape, position: Int[np.ndarray, "..."]) -> Int[np.ndarray, "..."]:
        """How many tokens a token at these positions of its document attends to in one layer, itself included."""
        del shape
        return np.ones_like(position)

    @property
    def publishes(self) -> bool:
        """Whether layers read what other layers publish, so that all layers read a block before any reads the next."""
        return False

    @property
    def needs_segments(self) -> bool:
        """Whether what is remembered depends on where segments end, so that the model can't write token by token."""
        return False

    def cleared(self) -> "MechanismConfig | None":
        """The same mechanism that starts anew in every segment; None where nothing passes through states."""
        return None

    @property
    def waits_for(self) -> str | None:
        """Why the blocks of a segment can't lie on several devices (`MeshConfig.sequence`); None where they can."""
        return None

    def share(self, published: dict[int, Any]) -> Any:
        """What the layers without it get of what its layers have published, by layer."""
        raise NotImplementedError


def at_lanes(flags: Bool[Array, " b"], function, carry: Any) -> Any:
    """`function(carry)` for the lanes whose flag is set, and `carry` for the others; not computed where none is set.

    Args:
        flags: one for each lane.
        function: from a carry to one of the same shape.
        carry: a pytree of arrays with the lane axis first.
    """

    def change(carry: Any) -> Any:
        def select(new, old):
            return old if new is old else jnp.where(flags.reshape(-1, *[1] * (new.ndim - 1)), new, old)

        return jax.tree.map(select, function(carry), carry)

    return jax.lax.cond(jnp.any(flags), change, lambda carry: carry, carry)
