"""The base class of all decoders: how a segment passes through the layers, and how a token does while decoding.

A family defines the embedding of its tokens, its layers, and the logits of hidden vectors. This module has what the
families share: scans over blocks, rematerialisation, dropout keys, and the calls where blocks begin and end.
"""

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from einops import rearrange
from flax import nnx
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from meliad_like.layers.basic import rematerialise, rematerialise_iteration
from meliad_like.layers.lanes import at_lanes
from meliad_like.layers.losses import TokenLosses, token_losses
from meliad_like.layers.sequence import from_rightmost, num_parts, over_sequence, own_blocks
from meliad_like.layers.sharding import constrain
from meliad_like.mechanisms.base import Watched
from meliad_like.models.base import ModelConfig
from meliad_like.models.layer_groups import Group, groups_of, stacked

# Folded into the step's dropout key; differs from the indices of blocks, which are folded in as well.
SOFTMAX = 2**32 - 1


class DecoderCarry(NamedTuple):
    """The carry of a decoder: everything that it remembers of the documents in its lanes."""

    position: Int[Array, " b"]
    """The number of tokens of the lane's document read so far, padding included; a multiple of w between segments."""
    layers: list[Any]
    """The carry of each layer."""


class Layer(nnx.Module):
    """A layer, with the methods that a layer without a carry need not override."""

    acts_at_blocks = False
    """Whether decoding has to call `begin_block` and `end_block`."""

    def init_carry(self, b: int, dtype: Any, decoding: bool) -> Any:
        """The carry of `b` lanes before their first token: a pytree of arrays with the lane axis first."""
        del b, dtype, decoding

    def begin_segment(self, carry: Any) -> Any:
        """The carry at the beginning of a segment."""
        return carry

    def begin_block(self, carry: Any, position: Int[Array, " b"]) -> Any:
        """The carry at the beginning of the block whose first token is at `position` of its document."""
        del position
        return carry

    def end_block(self, carry: Any, position: Int[Array, " b"]) -> Any:
        """The carry at the end of a block that `decode_step` has read, the last token at `position`."""
        del position
        return carry

    def __call__(
        self,
        x: Float[Array, "b n d"],
        carry: Any,
        positions: Int[Array, "b c"],
        shared: dict[str, Any],
        dropout_key: PRNGKeyArray | None = None,
    ) -> tuple[Float[Array, "b n d"], Any]:
        """Reads a segment of `c` blocks.

        Args:
            x: the hidden vectors of the tokens.
            carry: the carry after the segment before.
            positions: position of each block's first token in its document; 0 where a document begins.
            shared: by mechanism, what other layers have published before each block, with the axes `b` and `c` first;
                in a pretrained decoder the vectors that are inserted.
            dropout_key: random key; None: no dropout.
        """
        raise NotImplementedError

    def decode_step(
        self, x: Float[Array, "b d"], carry: Any, position: Int[Array, " b"], shared: dict[str, Any]
    ) -> tuple[Float[Array, "b d"], Any]:
        """Reads one token of every lane.

        Args:
            x: the hidden vector of each lane's token.
            carry: the carry, after `begin_block` at the beginning of a block.
            position: the number of earlier tokens of its document.
            shared: as in `__call__`, without the axis `c`.
        """
        raise NotImplementedError

    def watch(self, before: Any, after: Any, position: Int[Array, " b"]) -> dict[str, Watched]:
        """The internal values of a block for studies, by mechanism.

        Args:
            before, after: the carries before and after the block.
            position: position of the block's first token in its document.
        """
        del before, after, position
        return {}


class Skeleton(nnx.Module):
    """A carry-passing language model of blocks of `w` tokens, without its parameters.

    A family sets `config` and `layers`, and implements `embed`, `finish` and `logits`.
    """

    config: ModelConfig
    layers: Any
    num_block_by_block = 0
    """The number of layers, from the first one on, that all read a block before the next block. The layers above them
    read the whole segment at once."""
    scan_layers = False
    """Whether consecutive layers of the same form are one `jax.lax.scan`."""

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

    def enter(self, x: Float[Array, "b n d"], c: int) -> Float[Array, "b n2 d"]:
        """The input of the first layer, from the embedding vectors of `c` blocks."""
        return x

    def leave(self, x: Float[Array, "b n2 d"], c: int) -> Float[Array, "b n d"]:
        """The vectors of the tokens alone, from the output of the last layer for `c` blocks."""
        return x

    def shared(self, carry: Any) -> dict[str, Any]:
        """What layers read of the carry after `begin_block` beside their own, by mechanism."""
        del carry
        return {}

    def groups(self, layers: Sequence[Layer]) -> list[Group]:
        """Some consecutive layers as `_stack` applies them."""
        return groups_of(layers, self.scan_layers)

    @property
    def dtype(self):
        return jnp.dtype(self.config.activation_dtype)

    def init_carry(self, b: int, *, decoding: bool = False) -> Any:
        """The carry of `b` lanes before their first token; `decoding` adds the arrays that `decode_step` needs."""
        layers = [layer.init_carry(b, self.dtype, decoding) for layer in self.layers]
        return DecoderCarry(jnp.zeros((b,), jnp.int32), layers)

    def __call__(
        self,
        tokens: Int[Array, "b n"],
        carry: Any,
        start: Bool[Array, "b c"],
        dropout_key: PRNGKeyArray | None = None,
    ) -> tuple[Float[Array, "b n d"], Any]:
        """Reads a segment.

        Args:
            tokens: a whole number of blocks; inside of `over_sequence`, the blocks of this device.
            carry: the carry after the segment before, or `init_carry`; it is at the beginning of a block.
            start: blocks of the whole segment with which a new document begins; nothing before them is remembered.
            dropout_key: random key in training; None: no dropout.

        Returns:
            Hidden vectors for `logits`, and the carry for the next segment.
        """
        outputs, carry = self.read_segment(tokens, carry, start, dropout_key)
        return self.finish(outputs[-1], self._keys(dropout_key)[-1]), carry

    def read_segment(
        self,
        tokens: Int[Array, "b n"],
        carry: Any,
        start: Bool[Array, "b c"],
        dropout_key: PRNGKeyArray | None = None,
        *,
        every_layer: bool = False,
    ) -> tuple[list[Float[Array, "b n d"]], Any]:
        """Reads a segment, as `__call__`: returns the output of the last layer, and the carry.

        With `every_layer`, the list holds the embedding and the output of every layer.
        """
        n, w = num_parts() * tokens.shape[1], self.config.window_length
        if n % w or start.shape[1] != n // w:
            raise ValueError(f"{n} tokens with {start.shape[1]} start flags are not whole blocks of window_length={w}")
        keys = self._keys(dropout_key)
        x = self.embed(tokens, jnp.arange(tokens.shape[1]) % w, keys[-2])
        c = tokens.shape[1] // w
        x = constrain(self.enter(x, c), "lanes", None, None)
        positions, position = self.block_positions(carry.position, start)
        # No gradient passes from a segment to the one before, also not through a carry that is differentiated.
        layers = jax.lax.stop_gradient(carry.layers)
        layers = [layer.begin_segment(one) for layer, one in zip(self.layers, layers, strict=True)]
        k, outputs, below, shared = self.num_block_by_block, [x], [], {}
        if k:
            outputs, below, shared = self._scan_blocks(x, layers[:k], positions, keys[:k], every_layer)
        groups = self.groups(self.layers[k:])
        (_, *above), layers = self._stack(outputs[-1], layers[k:], positions, keys[k:-2], shared, groups)
        outputs, layers = [*outputs, *above], [*below, *layers]
        outputs = [self.leave(x, c) for x in (outputs if every_layer else outputs[-1:])]
        return outputs, carry._replace(position=position, layers=from_rightmost(layers))

    def losses(
        self,
        tokens: Int[Array, "b n"],
        targets: Int[Array, "b n"],
        carry: Any,
        start: Bool[Array, "b c"],
        dropout_key: PRNGKeyArray | None = None,
        *,
        slice_length: int,
    ) -> tuple[TokenLosses, Any]:
        """Reads a segment: returns the loss of every target, and the carry for the next segment.

        Args:
            tokens, carry, start, dropout_key: as for `__call__`.
            targets: the tokens that come next.
            slice_length: number of tokens of a lane whose logits exist at the same time (`layers/losses.py`).
        """

        def read(by_token, others):
            (tokens, targets), (module, carry, start, dropout_key) = by_token, others
            hidden, carry = module(tokens, carry, start, dropout_key)
            softmax_key = None if dropout_key is None else jax.random.fold_in(dropout_key, SOFTMAX)
            return token_losses(module, hidden, targets, slice_length, softmax_key), carry

        return over_sequence(read)((tokens, targets), (self, carry, start, dropout_key))

    def _keys(self, dropout_key: PRNGKeyArray | None) -> list[PRNGKeyArray | None]:
        """A dropout key for each layer, one for `embed` and one for `finish`."""
        number = len(self.layers) + 2
        return [None] * number if dropout_key is None else list(jax.random.split(dropout_key, number))

    def block_positions(
        self, position: Int[Array, " b"], start: Bool[Array, "b c"]
    ) -> tuple[Int[Array, "b c"], Int[Array, " b"]]:
        """The position of each block's first new token in its document, and the position after the segment.

        Args:
            position: position of the segment's first token, if the lane's document continues.
            start: blocks with which a document begins.
        """
        overlap, block = self.config.overlap, jnp.arange(start.shape[1])
        stride = self.config.window_length - overlap
        last_start = jax.lax.cummax(jnp.where(start, block, -1), axis=1)
        # XLA computes positions again in every layer's program. Products with an overlap of 0 cost nothing there.
        read_before = (position - overlap * (position > 0))[:, None] + block * stride
        read = jnp.where(last_start >= 0, (block - last_start) * stride, read_before)
        return read + overlap * (read > 0), read[:, -1] + stride + overlap

    def _stack(
        self,
        x: Float[Array, "b n d"],
        layers: list[Any],
        positions: Int[Array, "b c"],
        keys: list[PRNGKeyArray | None],
        shared: dict[str, Any],
        groups: list[Group],
    ) -> tuple[list[Float[Array, "b n d"]], list[Any]]:
        """Applies the layers one after the other to the whole segment: returns `x` and each layer's output.

        A group of several layers is a `jax.lax.scan`, which the compiler compiles once for all of them. Parameters and
        carries are stacked only inside of the program; outside each layer has its own arrays.
        """

        def apply(x, inputs, *, inside_scan=False):
            layer, one, key = inputs
            call = rematerialise(type(layer).__call__, self.config.remat, inside_scan=inside_scan)
            with jax.named_scope("attention"):
                x, one = call(layer, x, one, own_blocks(positions), shared, key)
            x = constrain(x, "lanes", None, None)
            return x, (x, one)

        outputs, new_layers, others = [x], [], zip(layers, keys, strict=True)
        for group in groups:
            own = list(itertools.islice(others, group.size))
            if group.size == 1:
                x, results = apply(x, (group.layers, *own[0]))
                results = [results]
            else:
                one_layer = rematerialise_iteration(functools.partial(apply, inside_scan=True), self.config.remat)
                x, results = jax.lax.scan(one_layer, x, (group.layers, *stacked(own)))
                results = [jax.tree.map(lambda leaf, i=i: leaf[i], results) for i in range(group.size)]
            outputs += [*(output for output, _ in results[:-1]), x]
            new_layers += [one for _, one in results]
        return outputs, new_layers

    def _scan_blocks(
        self,
        x: Float[Array, "b n d"],
        layers: list[Any],
        positions: Int[Array, "b c"],
        keys: list[PRNGKeyArray | None],
        every_layer: bool,
    ) -> tuple[list[Float[Array, "b n d"]], list[Any], dict[str, Any]]:
        """Applies the first layers to a block before the next block.

        Args:
            x, positions: of the whole segment.
            layers, keys: the carries and dropout keys of these layers.
            every_layer: whether to return `x` and each layer's output, or only the last.

        Returns:
            The outputs, the carries after the segment, and what these layers publish before each block.
        """
        modules = self.layers[: len(layers)]
        groups = self.groups(modules)  # Here parameters are stacked once, not in every iteration.

        def step(layers, block):
            x, position, number = block
            begun = [layer.begin_block(one, position) for layer, one in zip(modules, layers, strict=True)]
            folded = [None if key is None else jax.random.fold_in(key, number) for key in keys]
            shared = jax.tree.map(lambda y: y[:, None], self.shared(DecoderCarry(position, begun)))
            outputs, layers = self._stack(x, begun, position[:, None], folded, shared, groups)
            return layers, (outputs if every_layer else outputs[-1:], shared)

        c = positions.shape[1]
        if c == 1:
            layers, (outputs, shared) = step(layers, (x, positions[:, 0], 0))
            return outputs, layers, shared
        blocks = rearrange(x, "b (c w) d -> c b w d", c=c), positions.T, jnp.arange(c)
        layers, results = jax.lax.scan(rematerialise_iteration(step, self.config.remat), layers, blocks)
        outputs, shared = jax.tree.map(lambda y: rearrange(y, "c b n ... -> b (c n) ..."), results)
        return outputs, layers, shared

    def begin_block(self, layers: dict[int, Any], position: Int[Array, " b"]) -> dict[int, Any]:
        """The carries of layers, by index, before a block whose first token is at `position`."""
        return {i: self.layers[i].begin_block(one, position) for i, one in layers.items()}

    def end_block(self, layers: dict[int, Any], position: Int[Array, " b"]) -> dict[int, Any]:
        """The carries of layers, by index, after a block that was decoded, whose last token is at `position`."""
        return {i: self.layers[i].end_block(one, position) for i, one in layers.items()}

    def _at_blocks(
        self, flags: Bool[Array, " b"], method: Callable[..., Any], layers: list[Any], position: Int[Array, " b"]
    ) -> list[Any]:
        """The carries after `begin_block` or `end_block` of the layers that act at block boundaries, for some lanes."""
        acting = {i: one for i, one in enumerate(layers) if self.layers[i].acts_at_blocks}
        if not acting:
            return layers

        acted = at_lanes(flags, lambda acting: method(acting, position), acting)
        return [acted.get(i, one) for i, one in enumerate(layers)]

    def decode_step(self, token: Int[Array, " b"], carry: Any) -> tuple[Float[Array, "b v"], Any]:
        """Reads one more token per lane at a cost that does not depend on the number of tokens read before.

        Lanes may be at different positions. The carry comes from `init_carry(b, decoding=True)`, directly or
        after whole segments. Returns the logits of the next token.
        """
        (*_, x), carry = self.read_token(token, carry)
        return self.logits(self.finish(x, None)), carry

    def read_token(self, token: Int[Array, " b"], carry: Any) -> tuple[list[Float[Array, "b d"]], Any]:
        """Reads one token per lane: returns its embedding and each layer's output, and the carry."""
        position = carry.position
        offset = self.config.offset(position)
        begun = self._at_blocks(offset == 0, self.begin_block, carry.layers, position)
        shared = self.shared(carry._replace(layers=begun))
        outputs, layers = [self.embed(token, offset, None)], []
        for layer, one in zip(self.layers, begun, strict=True):
            with jax.named_scope("attention"):
                x, one = layer.decode_step(outputs[-1], one, position, shared)
            outputs.append(x)
            layers.append(one)
        layers = self._at_blocks(offset == self.config.window_length - 1, self.end_block, layers, position)
        return outputs, carry._replace(position=position + 1, layers=layers)

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
