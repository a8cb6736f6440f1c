"""The protocol of memory mechanisms: a frozen config that describes a mechanism, and the module that it builds.

A layer has heads of its tokens, a list of mechanisms and a feed-forward network. It treats all mechanisms alike: it
calls each of them, lets each combine its result with the results before it, and projects the combined result.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from meliad_like.errors import UserError
from meliad_like.layers.flops import Flops
from meliad_like.mechanisms.positions import PositionConfig
from meliad_like.mechanisms.token_heads import Tile, TokenCache, TokenHeads, TokenTile
from meliad_like.registry import Registry, size

MECHANISMS = Registry("mechanism")


@dataclasses.dataclass(frozen=True)
class Shape:
    """The sizes of the decoder that a mechanism is part of."""

    num_layers: int
    model_width: int
    num_heads: int
    head_size: int
    feedforward_width: int
    window_length: int
    dropout_rate: float
    mask_empty_cache: bool
    position: PositionConfig

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
    """Position of each block's first token in its document; 0 where a document begins."""
    shared: dict[str, Any]
    """By mechanism: what its layers publish (`MechanismConfig.share`) before each block. The first axes are b and c."""


class OneToken(NamedTuple):
    """One token of every lane, as a mechanism sees it while decoding."""

    normed: Float[Array, "b d"]
    """The layer's input, after its norm."""
    tile: TokenTile
    position: Int[Array, " b"]
    """The number of earlier tokens of its document."""
    shared: dict[str, Any]


class LayerParts(NamedTuple):
    """The parts of a layer that a mechanism which closes the layer calls itself (`MechanismConfig.closes`)."""

    norm: Callable[[Array, PRNGKeyArray | None], Array]
    """The norm of the layer's input, with dropout if there is a key."""
    heads: TokenHeads
    num_others: int
    """The number of results of the layer's other mechanisms."""
    finish: Callable[..., Array]
    """The layer's output from its input, [*batch, t, d], the list of its mechanisms' results, [*batch, h, t, k], and a
    dropout key or None."""


class Watched(NamedTuple):
    """Internal values of a mechanism while it reads a block, for studies."""

    before: Float[Array, "b r d"]
    """The state vectors before the block."""
    after: Float[Array, "b r d"]
    """The state vectors after the block."""
    gates: dict[str, Float[Array, "2 b r d"]]
    """By gate: the share of each channel that was kept, and the share of the update that was added."""


class Mechanism(nnx.Module):
    """One way in which a layer sees earlier tokens. `b c h w k` are lanes, blocks, heads, tokens, head size.

    Where a layer reads block by block (while decoding, or up to the last layer that publishes), `begin_block` is called
    before each block, for the lanes whose block begins. `end_block` is called only while decoding.
    """

    reads_projected: bool = False
    """Whether its tile must have queries, keys and values as they are projected (`Tile.projected`)."""

    def init_carry(self, b: int, dtype: Any, decoding: bool) -> Any:
        """The carry of `b` lanes before their first token: a pytree of arrays with the lane axis first."""
        del b, dtype, decoding
        return ()

    def begin_segment(self, carry: Any) -> Any:
        """The carry at the beginning of a segment. It is not called while decoding, which has no segments."""
        return carry

    def begin_block(self, carry: Any, start: Bool[Array, " b"], cache: TokenCache) -> Any:
        """The carry at the beginning of a block.

        Args:
            carry: the carry after the block before.
            start: lanes where a document begins with the block.
            cache: the layer's token cache, which holds the block before; keys of unit length, without positions.
        """
        del start, cache
        return carry

    def __call__(
        self, tokens: SegmentTokens, carry: Any, dropout_key: PRNGKeyArray | None
    ) -> tuple[Float[Array, "b c h w k"], Any]:
        """The result of every token of a segment, by head, and the carry after the segment."""
        raise NotImplementedError

    def decode_step(self, token: OneToken, carry: Any) -> tuple[Float[Array, "b h 1 k"], Any]:
        """The same as `__call__` for one token of every lane, at a cost independent of the document's length."""
        raise NotImplementedError

    def end_block(self, carry: Any, cache: TokenCache, position: Int[Array, " b"]) -> Any:
        """The carry at the end of a block that was read token by token.

        Args:
            carry: the carry after the block's last token.
            cache: the layer's token cache, which holds the whole block; keys as for `begin_block`.
            position: position of the block's last token.
        """
        del cache, position
        return carry

    def combine(
        self, others: list[Float[Array, "*batch h t k"]], own: Float[Array, "*batch h t k"]
    ) -> list[Float[Array, "*batch h t k"]]:
        """Combines the results of the mechanisms before it with its own; by default concatenates them."""
        return [*others, own]

    def close(
        self,
        parts: LayerParts,
        x: Float[Array, "b n d"],
        summaries: Float[Array, "b c u d"] | None,
        tokens: SegmentTokens,
        others: list[Float[Array, "b c h w k"]],
        carry: Any,
        dropout_key: PRNGKeyArray | None,
    ) -> tuple[Float[Array, "b n d"], Float[Array, "b c u d"] | None, Any]:
        """The output of the layer for a segment, and the carry after it.

        Args:
            parts: the parts of the layer.
            x: the layer's input, before its norm.
            summaries: the layer's input for the summary tokens of each block (`MechanismConfig.summary_tokens`).
            tokens: what the layer's other mechanisms have seen.
            others: their results.
            carry: the carry after the segment before.
            dropout_key: random key in training; None: no dropout.
        """
        raise NotImplementedError

    def close_token(
        self,
        parts: LayerParts,
        x: Float[Array, "b d"],
        token: OneToken,
        others: list[Float[Array, "b h 1 k"]],
        carry: Any,
    ) -> tuple[Float[Array, "b d"], Any]:
        """The same as `close` for one token of every lane; the summary tokens follow with `close_block`."""
        raise NotImplementedError

    def close_block(
        self,
        parts: LayerParts,
        summaries: Float[Array, "b u d"] | None,
        carry: Any,
        cache: TokenCache,
        position: Int[Array, " b"],
    ) -> tuple[Float[Array, "b u d"] | None, Any]:
        """The layer's output for the summary tokens of a block that was read token by token, and the carry after it.

        Args:
            parts, summaries: as for `close`.
            carry, cache, position: as for `end_block`.
        """
        del parts, cache, position
        return summaries, carry

    def publish(self, carry: Any) -> Any:
        """The part of a carry, after `begin_block`, that other layers may read (see `MechanismConfig.share`)."""
        raise NotImplementedError

    def watch(self, before: Any, after: Any, tile: Tile | None, start: Bool[Array, " b"]) -> Watched | None:
        """Internal values for studies; None if the mechanism has none.

        Args:
            before, after: the carries before and after a block.
            tile: the heads of the block's tokens; None if no mechanism of the layer sees the block before.
            start: lanes where a document begins with the block.
        """
        del before, after, tile, start
        return None


@dataclasses.dataclass(frozen=True)
class MechanismConfig:
    """The config of a mechanism. Every field that is a size declares how it scales (`meliad_like/registry.py`)."""

    layers: tuple[int, ...] | None = size((), "layer_indices")
    """The layers that have the mechanism; negative numbers count from the end. None: all layers."""

    carry_axes: ClassVar[tuple[str, ...]] = ("lanes",)
    """The logical axes of every array in the carry, from the first axis; axes not listed are not sharded."""
    rank: ClassVar[int] = 2
    """A layer's mechanisms are called in the order of their ranks, then of their names. Rank 0 is the window, rank 1 is
    mixed into the window's result head by head, rank 2 is concatenated with it. A mechanism that closes its layer is
    called last."""
    without_positions: ClassVar[bool] = False
    """Whether its layers have no positions, because it compares tokens at any distance."""
    sees_block_before: ClassVar[bool] = True
    """Whether it reads the keys and values of the block before a block."""

    def check(self, shape: Shape, others: tuple["MechanismConfig", ...]) -> None:
        """Checks that a decoder of this shape can have the mechanism.

        Args:
            shape: the sizes of the decoder.
            others: the other mechanisms of the decoder.

        Raises:
          UserError: the decoder can't have it.
        """
        del others
        self.check_layers(shape.num_layers)

    def check_layers(self, num_layers: int) -> None:
        """Checks that `layers` names existing layers, each once.

        Raises:
          UserError: `layers` is empty, or names a layer that does not exist, or names a layer twice.
        """
        if self.layers is None:
            return
        name = type(self).__name__
        object.__setattr__(self, "layers", tuple(self.layers))
        if not self.layers:
            raise UserError(f"{name}.layers=() names no layer: name some, or bind nothing of {name}")
        if not all(-num_layers <= layer < num_layers for layer in self.layers):
            raise UserError(f"{name}.layers={self.layers} names a layer that {num_layers} layers lack")
        if len({layer % num_layers for layer in self.layers}) != len(self.layers):
            raise UserError(f"{name}.layers={self.layers} names a layer twice")

    def indices(self, num_layers: int) -> frozenset[int]:
        """The indices of the layers that have the mechanism, counted from 0."""
        return frozenset(range(num_layers) if self.layers is None else (layer % num_layers for layer in self.layers))

    def acts(self, shape: Shape, index: int) -> bool:
        """Whether layer `index`, counted from 0, has a module of the mechanism."""
        return index in self.indices(shape.num_layers)

    def build(self, shape: Shape, index: int, *, rngs: nnx.Rngs) -> Mechanism:
        """The module for layer `index`, in which the mechanism acts."""
        raise NotImplementedError

    @property
    def closes(self) -> bool:
        """Whether its module computes the output of its layers itself, which one mechanism of a layer can do.

        This is computed after the layer's other mechanisms, by the methods whose names begin with `close`, which are
        then called instead of `__call__` and `decode_step`. A mechanism does so if its memory is made of this output,
        so that a block waits for the one before, or if it changes the residual.
        """
        return False

    @property
    def summary_tokens(self) -> int:
        """The number of learned vectors behind every block's tokens, which go up the stack with them and become a
        summary of the block.

        Layers without the mechanism don't change them, and no token sees them.
        """
        return 0

    def mixed_width(self, shape: Shape) -> int:
        """The number of channels that it adds to the input of the output projection of a layer in which it acts."""
        return shape.inner_width

    def flops(self, shape: Shape, index: int) -> Flops:
        """The operations of one token in layer `index`, in which it acts, without the layer's own projections."""
        raise NotImplementedError

    def num_visible(self, shape: Shape, position: Int[np.ndarray, "..."]) -> Int[np.ndarray, "..."]:
        """The number of consecutive tokens up to a position of its document, itself included, that a token attends to
        in one layer. What a search finds is not counted."""
        del shape
        return np.ones_like(position)

    @property
    def publishes(self) -> bool:
        """Whether other layers read what the mechanism's layers publish before each block. If so, the layers up to the
        last of these read a block before the next block."""
        return False

    @property
    def needs_segments(self) -> str | None:
        """The setting by which the carry depends on where segments end; None if it doesn't.

        If it does, the model can't generate text token by token.
        """
        return None

    def cleared(self) -> "MechanismConfig | None":
        """The same mechanism with states that are reset in every segment; None if it has no states."""
        return None

    @property
    def waits_for(self) -> str | None:
        """The reason why a segment can't be sharded over devices (`MeshConfig.sequence`); None if it can."""
        return None

    def share(self, published: dict[int, Any]) -> Any:
        """What other layers receive, from the values that layers with the mechanism publish, by layer."""
        raise NotImplementedError


@dataclasses.dataclass(frozen=True)
class StatesConfig(MechanismConfig):
    """The config of a mechanism with states that pass from block to block."""

    clear_states: bool = False
    """Reset the states in every segment, which measures their value beyond a segment."""

    @property
    def needs_segments(self) -> str | None:
        return f"{type(self).__name__}.clear_states=True" if self.clear_states else None

    def cleared(self) -> "StatesConfig":
        return dataclasses.replace(self, clear_states=True)
