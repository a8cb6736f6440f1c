"""The carry of a decoder's layers, and its parts, which studies exchange (`ModelConfig.parts`)."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from meliad_like.mechanisms.token_heads import TokenCache
from meliad_like.models.base import WINDOW
from meliad_like.models.skeleton import DecoderCarry


class LayerCarry(NamedTuple):
    """The carry of one layer."""

    tokens: TokenCache | None
    """The keys and values of the last window of tokens; None if no mechanism sees the block before."""
    mechanisms: dict[str, Any]
    """The carry of each mechanism, by name."""
    positions: dict[str, Int[Array, " b"]] = {}  # noqa: RUF012 - it is never changed
    """Where a study has changed what mechanisms remember: the number of tokens that each of them has read of the
    document which it remembers, by name. The others have read the whole document up to here."""

    def own_positions(self, name: str, positions: Int[Array, "b c"], window: int) -> Int[Array, "b c"]:
        """The position of each block's first token as the named mechanism counts, which forgets where a document
        begins.

        Args:
            name: of the mechanism.
            positions: in the document.
            window: tokens of a block.
        """
        if name not in self.positions:
            return positions
        begun = jnp.cumsum(positions == 0, axis=1) > 0
        return jnp.where(begun, positions, self.positions[name][:, None] + window * np.arange(positions.shape[1]))


def parts_of(carry: DecoderCarry) -> dict[str, Any]:
    """As `ModelConfig.parts`: the window's cache, and the carries of each mechanism that has one, by layer."""
    parts = {}
    tokens = [layer.tokens for layer in carry.layers]
    if jax.tree.leaves(tokens):
        parts[WINDOW] = carry.position, tokens
    for name in dict.fromkeys(name for layer in carry.layers for name in layer.mechanisms):
        layers = {i: layer for i, layer in enumerate(carry.layers) if jax.tree.leaves(layer.mechanisms.get(name))}
        if layers:
            position = next(iter(layers.values())).positions.get(name, carry.position)
            parts[name] = position, {i: layer.mechanisms[name] for i, layer in layers.items()}
    return parts


def with_parts(carry: DecoderCarry, parts: dict[str, Any]) -> DecoderCarry:
    """As `ModelConfig.with_parts`."""
    layers = list(carry.layers)
    for name, (position, content) in parts.items():
        if name == WINDOW:
            carry = carry._replace(position=position)
            layers = [layer._replace(tokens=tokens) for layer, tokens in zip(layers, content, strict=True)]
            continue
        for i, one in content.items():
            mechanisms, positions = layers[i].mechanisms | {name: one}, layers[i].positions | {name: position}
            layers[i] = layers[i]._replace(mechanisms=mechanisms, positions=positions)
    return carry._replace(layers=layers)
