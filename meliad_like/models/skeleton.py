"""The base class of all decoders: how a segment passes through the layers, and how a token does while decoding.

A family defines the embedding of its tokens, its layers, and the logits of hidden vectors. This module has what the
families share: scans over blocks, rematerialisation, dropout keys, and the calls where blocks begin and end.
"""

from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from einops import rearrange
from flax import nnx
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from meliad_like.layers.basic import rematerialise
from meliad_like.layers.sequence import from_rightmost, num_parts, own_blocks
from meliad_like.layers.sharding import constrain
from meliad_like.mechanisms.base import Watched, at_lanes


class DecoderCarry(NamedTuple):
    """The carry of a decoder: everything that it remembers of the documents in its lanes."""

    position: Int[Array, " b"]
    """The number of tokens of the lane's document read so far, padding included; a multiple of w between segments."""
    layers: list[Any]
    """The carry of each layer."""


class Layer(Protocol):
    """The methods that a layer must have; `DecoderLayer` documents them."""

    acts_at_blocks: bool

    def init_carry(self, b: int, dtype, decoding: bool) -> Any: ...
    def begin_segment(self, carry: Any) -> Any: ...
    def begin_block(self, carry: Any, position: Array) -> Any: ...
    def end_block(self, carry: Any, position: Array) -> Any: ...
    def __call__(
        self, x: Array, carry: Any, positions: Array, shared: dict[str, Any], dropout_key: Array | None
    ) -> tuple[Array, Any]: ...
    def decode_step(self, x: Array, carry: Any, position: Array, shared: dict[str, Any]) -> tuple[Array, Any]: ...
    def watch(self, before: Any, after: Any, position: Array) -> dict[str, Watched]: ...


class Skeleton(nnx.Module):
    """A carry-passing language model of blocks of `w` tokens, without its parameters.

    A family sets `layers` and `config`, which has `window_length`, `activation_dtype` and `remat`, and implements
    `embed`, `finish` and `logits`.
    """

    config: Any
    layers: Any
    block_by_block = False
    """Whether all layers read a block before the next block."""

    def embed(
        self, tokens: Int[Array, "*batch"], position: Int[Array, "*#batch"], dropout_key: PRNGKeyArray | None
    ) -> Float[Array, "*batch d"]:
        """The embedding vectors of tokens at these positions in their blocks."""
        raise NotImplementedError

    def finish(self, x: Float[Array, "*batch d"], dropout_key: PRNGKeyArray | None) -> Float[Array, "*batch d"]:
        """The hidden vectors for `logits`, from the output of the last layer."""
        raise NotImplementedError

    def logits(self, hidden: Float[Array, "*batch d"]) -> Float[Array, "*batch v"]:
        """The logits of the next token, float32."""
        raise NotImplementedError

    def shared(self, layers: list[Any]) -> dict[str, Any]:
        """What layers publish for each other after `begin_block`, by mechanism."""
        del layers
        return {}

    @property
    def dtype(self):
        return jnp.dtype(self.config.activation_dtype)

    def init_carry(self, b: int, *, decoding: bool = False) -> DecoderCarry:
        """The carry of `b` lanes before their first token; `decoding` adds the arrays that `decode_step` needs."""
        layers = [layer.init_carry(b, self.dtype, decoding) for layer in self.layers]
        return DecoderCarry(jnp.zeros((b,), jnp.int32), layers)

    def __call__(
        self,
        tokens: Int[Array, "b n"],
        carry: DecoderCarry,
        start: Bool[Array, "b c"],
        dropout_key: PRNGKeyArray | None = None,
    ) -> tuple[Float[Array, "b n d"], DecoderCarry]:
        """Reads a segment.

        Args:
            tokens: a whole number of blocks; inside of `over_sequence`, the blocks of this device.
            carry: the carry after the segment before, or `init_carry`; its position is a multiple of w.
            start: blocks of the whole segment with which a new document begins; nothing before them is remembered.
            dropout_key: random key in training; None: no dropout.

        Returns:
            Hidden vectors for `logits`, and the carry for the next segment.
        """
        n, w = num_parts() * tokens.shape[1], self.config.window_length
        if n % w or start.shape[1] != n // w:
            raise ValueError(f"{n} tokens with {start.shape[1]} start flags are not whole blocks of window_length={w}")
        keys = [None] * (len(self.layers) + 2)
        if dropout_key is not None:
            keys = list(jax.random.split(dropout_key, len(keys)))
        x = self.embed(tokens, jnp.arange(tokens.shape[1]) % w, keys[-2])
        x = constrain(x, "lanes", None, None)
        positions = block_positions(carry.position, start, w)
        # No gradient passes from a segment to the one before, also not through a carry that is differentiated.
        layers = jax.lax.stop_gradient(carry.layers)
        layers = [layer.begin_segment(one) for layer, one in zip(self.layers, layers, strict=True)]
        stack = self._scan_stack if self.block_by_block else self._stack
        x, layers = stack(x, layers, positions, keys[:-2])
        return self.finish(x, keys[-1]), DecoderCarry(positions[:, -1] + w, from_rightmost(layers))

    def _stack(
        self,
        x: Float[Array, "b n d"],
        layers: list[Any],
        positions: Int[Array, "b c"],
        keys: list[PRNGKeyArray | None],
        shared: dict[str, Any] | None = None,
    ) -> tuple[Float[Array, "b n d"], list[Any]]:
        """Applies the layers one after the other to the whole segment."""
        new_layers = []
        for layer, one, key in zip(self.layers, layers, keys, strict=True):
            call = rematerialise(type(layer).__call__, self.config.remat)
            x, one = call(layer, x, one, own_blocks(positions), shared or {}, key)
            x = constrain(x, "lanes", None, None)
            new_layers.append(one)
        return x, new_layers

    def _scan_stack(
        self,
        x: Float[Array, "b n d"],
        layers: list[Any],
        positions: Int[Array, "b c"],
        keys: list[PRNGKeyArray | None],
    ) -> tuple[Float[Array, "b n d"], list[Any]]:
        """Applies all layers to a block before the next block."""

        def step(layers, block):
            x, position, number = block
            begun = [layer.begin_block(one, position) for layer, one in zip(self.layers, layers, strict=True)]
            folded = [None if key is None else jax.random.fold_in(key, number) for key in keys]
            x, layers = self._stack(x, begun, position[:, None], folded, self.shared(begun))
            return layers, x

        c = positions.shape[1]
        if c == 1:
            layers, x = step(layers, (x, positions[:, 0], 0))
            return x, layers
        blocks = rearrange(x, "b (c w) d -> c b w d", c=c)
        layers, x = jax.lax.scan(step, layers, (blocks, positions.T, jnp.arange(c)))
        return rearrange(x, "c b w d -> b (c w) d"), layers

    def _at_blocks(
        self, flags: Bool[Array, " b"], method: str, layers: list[Any], position: Int[Array, " b"]
    ) -> list[Any]:
        """The carries after calling this method of each layer that acts at block boundaries, for the flagged lanes."""
        acting = {i: one for i, one in enumerate(layers) if self.layers[i].acts_at_blocks}
        if not acting:
            return layers

        def act(acting):
            return {i: getattr(self.layers[i], method)(one, position) for i, one in acting.items()}

        acted = at_lanes(flags, act, acting)
        return [acted.get(i, one) for i, one in enumerate(layers)]

    def decode_step(self, token: Int[Array, " b"], carry: DecoderCarry) -> tuple[Float[Array, "b v"], DecoderCarry]:
        """Reads one more token per lane at a cost that does not depend on the number of tokens read before.

        Lanes may be at different positions. The carry comes from `init_carry(b, decoding=True)`, directly or
        after whole segments. Returns the logits of the next token.
        """
        position, w = carry.position, self.config.window_length
        x = self.embed(token, position % w, None)
        begun = self._at_blocks(position % w == 0, "begin_block", carry.layers, position)
        shared, layers = self.shared(begun), []
        for layer, one in zip(self.layers, begun, strict=True):
            x, one = layer.decode_step(x, one, position, shared)
            layers.append(one)
        layers = self._at_blocks(position % w == w - 1, "end_block", layers, position)
        return self.logits(self.finish(x, None)), DecoderCarry(position + 1, layers)

    def watch(self, before: DecoderCarry, after: DecoderCarry) -> dict[str, Watched]:
        """The internal values of a block for studies, by names such as `layer 3 recurrent_states`.

        Args:
            before, after: the carries before and after a segment of one block.
        """
        watched = {}
        for i, (layer, *carries) in enumerate(zip(self.layers, before.layers, after.layers, strict=True)):
            for name, one in layer.watch(*carries, before.position).items():
                watched[f"layer {i} {name}"] = one
        return watched


def block_positions(position: Int[Array, " b"], start: Bool[Array, "b c"], w: int) -> Int[Array, "b c"]:
    """The position of each block's first token in its document.

    Args:
        position: position of the segment's first token, if the lane's document continues.
        start: blocks with which a document begins.
    """
    block = jnp.arange(start.shape[1])
    last_start = jax.lax.cummax(jnp.where(start, block, -1), axis=1)
    return jnp.where(last_start >= 0, (block - last_start) * w, position[:, None] + block * w)
