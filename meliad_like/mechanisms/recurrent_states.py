"""Recurrent states: vectors that each block of tokens reads and updates (Block-Recurrent Transformers).

A token attends to the states from before its block, beside the window (section 3.1, vertical); the states attend to the
block and to themselves, and pass a gate (horizontal). Only the states' side is inside the scan over blocks. The tokens'
side is computed for all blocks at once, before the scan (keys and values) and after it (attention to the states).
With block feedback (appendix E) all other layers read the states too.
"""

import dataclasses
from typing import ClassVar, Literal, NamedTuple

import jax
import jax.numpy as jnp
from einops import rearrange
from flax import nnx
from jaxtyping import Array, Bool, Float

from meliad_like.errors import UserError
from meliad_like.layers.attention import KeysAndValues, attend_unit, split_heads, unit_query
from meliad_like.layers.backend import unrolls_blocks
from meliad_like.layers.basic import Linear, parameter, rematerialise_iteration, row_major
from meliad_like.layers.flops import Flops
from meliad_like.layers.sequence import scan_in_order
from meliad_like.layers.state_cell import CellKind, GateKind, StateCell, StateHeads, TimeConstants
from meliad_like.mechanisms.base import MECHANISMS, Mechanism, Shape, StatesConfig, Watched
from meliad_like.registry import size
from meliad_like.validation import check_choices, check_positive

Feedback = Literal["none", "last", "all"]


class StateKeys(NamedTuple):
    """The keys and values of states, which tokens attend to."""

    key: Float[Array, "b h r k"]
    value: Float[Array, "b h r k"]


class StatesCarry(NamedTuple):
    """The recurrent states of a layer, which pass from block to block."""

    states: Float[Array, "b r d"]
    heads: StateHeads | None = None
    """The projections of the states for the current block, if blocks are read one at a time."""
    previous_key: Float[Array, "b h w k"] | None = None
    """Decoding only: the keys of the block before, which the ring of the token cache overwrites."""
    previous_value: Float[Array, "b h w k"] | None = None


class StateReader(Mechanism):
    """Attention of a layer's tokens to the states that another layer has published."""

    def __init__(self, config: "RecurrentStates", shape: Shape, *, rngs: nnx.Rngs):
        self.name, self.num_heads = config.name, shape.num_heads
        self.cross_query = Linear(shape.model_width, shape.inner_width, ("model", "heads"), rngs=rngs)
        scale = jax.nn.initializers.constant(config.attention_scale)
        self.cross_attention_scale = parameter(rngs.params(), scale, (shape.num_heads,), ("heads",))

    def _attend(self, normed: Float[Array, "b n d"], keys: StateKeys) -> Float[Array, "*batch h t k"]:
        """Attention of tokens to states; separately for each block if the states' keys have a block axis."""
        query = unit_query(split_heads(self.cross_query(normed), self.num_heads), self.cross_attention_scale)
        if keys.key.ndim == 5:
            query = rearrange(query, "b h (c w) k -> b c h w k", c=keys.key.shape[1])
        return attend_unit(query, KeysAndValues(*keys))

    def __call__(self, tokens, carry, dropout_key):
        return self._attend(tokens.normed, tokens.shared[self.name]), carry

    def decode_step(self, token, carry):
        return self._attend(token.normed[:, None], token.shared[self.name]), carry


class StateRecurrence(StateReader):
    """Tokens read the layer's own states, and the states are updated after every block."""

    def __init__(self, config: "RecurrentStates", shape: Shape, *, rngs: nnx.Rngs):
        super().__init__(config, shape, rngs=rngs)
        self.config, self.shape = config, shape
        self.cell = StateCell(
            num_states=config.num_states,
            model_width=shape.model_width,
            num_heads=shape.num_heads,
            head_size=shape.head_size,
            feedforward_width=shape.feedforward_width,
            gate=config.gate,
            cell=config.cell,
            attention_scale=config.attention_scale,
            time_constants=config.time_constants,
            rngs=rngs,
        )

    def init_carry(self, b, dtype, decoding):
        carry = StatesCarry(self.cell.initial_states(b, dtype))
        if not decoding:
            return carry
        h, k = self.shape.num_heads, self.shape.head_size
        window, states = (jnp.zeros((b, h, n, k), dtype) for n in (self.shape.window_length, self.config.num_states))
        return StatesCarry(carry.states, StateHeads(states, states, states, states), window, window)

    def begin_segment(self, carry):
        if not self.config.clear_states:
            return carry
        return carry._replace(states=self.cell.initial_states(carry.states.shape[0], carry.states.dtype))

    def _begin(self, states: Float[Array, "b r d"], start: Bool[Array, " b"]) -> tuple[Array, StateHeads]:
        """The states before a block, and their projections."""
        states = jnp.where(start[:, None, None], self.cell.initial_states(states.shape[0], states.dtype), states)
        return states, self.cell.heads(states)

    def begin_block(self, carry, start, cache):
        states, heads = self._begin(carry.states, start)
        if carry.previous_key is None:
            return StatesCarry(states, heads)
        return StatesCarry(states, heads, cache.key, cache.value)

    def publish(self, carry):
        return StateKeys(carry.heads.key, carry.heads.value)

    def __call__(self, tokens, carry, dropout_key):
        tile = tokens.tile.both_blocks()
        if self.config.publishes and carry.heads is not None:
            # The layer reads one block at a time, and `begin_block` has been called for this one.
            keys = jax.tree.map(lambda x: x[:, None], self.publish(carry))
            states, _ = self.cell.update(carry.states, carry.heads, *jax.tree.map(lambda y: y[:, 0], tile))
            heads = None if carry.previous_key is None else carry.heads
            return self._attend(tokens.normed, keys), carry._replace(states=states, heads=heads)
        states, keys = self._scan(carry.states, tokens.positions == 0, tile)
        return self._attend(tokens.normed, keys), carry._replace(states=states)

    def _scan(self, states: Float[Array, "b r d"], start: Bool[Array, "b c"], tiles: tuple[KeysAndValues, ...]):
        """Runs the states over the blocks.

        Args:
            states: the states after the segment before.
            start: blocks before which the states are reset to the initial states.
            tiles: the blocks before, and the blocks, each with the axes `b` and `c`.

        Returns:
            The last states, and the keys and values of the states before each block.
        """

        def step(states, block):
            start, tile = block
            states, heads = self._begin(states, start)
            return self.cell.update(states, heads, *tile)[0], StateKeys(heads.key, heads.value)

        unroll = unrolls_blocks(start.shape[1])
        if unroll:
            tiles = jax.tree.map(row_major, tiles)
        else:
            step = rematerialise_iteration(step)
        blocks = jax.tree.map(lambda y: jnp.moveaxis(y, 1, 0), (start, tiles))
        states, keys = scan_in_order(lambda states: jax.lax.scan(step, states, blocks, unroll=unroll), states)
        return states, jax.tree.map(lambda y: jnp.moveaxis(y, 0, 1), keys)

    def decode_step(self, token, carry):
        return self._attend(token.normed[:, None], self.publish(carry)), carry

    def end_block(self, carry, cache, position):
        w = self.shape.window_length
        visible = (position >= w) | (not self.shape.mask_empty_cache)
        before = KeysAndValues(carry.previous_key, carry.previous_value, visible)
        states, _ = self.cell.update(carry.states, carry.heads, before, KeysAndValues(cache.key, cache.value))
        return carry._replace(states=states)

    def watch(self, before, after, tile, start):
        assert tile is not None  # It sees the block before.
        states, heads = self._begin(before.states, start)
        _, read = self.cell.update(states, heads, *jax.tree.map(lambda y: y[:, 0], tile.both_blocks()))
        return Watched(states, after.states, self.cell.gate_values(read))


@MECHANISMS.register("recurrent_states")
@dataclasses.dataclass(frozen=True)
class RecurrentStates(StatesConfig):
    """The recurrent layers of a Block-Recurrent Transformer."""

    num_states: int = size(512, "length")
    """The number of state vectors of a layer."""
    gate: GateKind = "fixed"
    """`fixed`: a learned moving average. `lstm`: forget and input gates computed from the states' attention."""
    cell: CellKind = "skip"
    """The positions of the feed-forward network and the gates in the cell (section 3.3; `layers/state_cell.py`)."""
    feedback: Feedback = "none"
    """Block feedback (appendix E): other layers read the states of the `last` recurrent layer, or of `all` of them."""
    attention_scale: float = 1.0
    """The scale of all attention to and of states at the start of training (section 3.1: learned, from 1)."""
    time_constants: TimeConstants = None
    """The shortest and longest number of blocks after which a gate keeps 1/e of a state, at the start of training: the
    channels are spread between them, evenly on a logarithmic scale. None: all begin with about 1.4 (`gate="fixed"`) or
    3.2 (`"lstm"`), as in the paper's code."""

    name: ClassVar[str] = "recurrent_states"

    def __post_init__(self):
        check_choices(self)
        check_positive(self, ("num_states", "attention_scale"))
        if self.time_constants and min(self.time_constants) <= 0:
            raise UserError(f"RecurrentStates.time_constants={self.time_constants} must be above 0")

    @property
    def publishes(self) -> bool:
        return self.feedback != "none"

    @property
    def waits_for(self) -> str | None:
        return (
            f"with feedback={self.feedback!r} a block waits for the layers of the one before"
            if self.publishes
            else None
        )

    def acts(self, shape, index):
        return self.publishes or super().acts(shape, index)

    def build(self, shape, index, *, rngs):
        module = StateRecurrence if index in self.indices(shape.num_layers) else StateReader
        return module(self, shape, rngs=rngs)

    def share(self, published: dict[int, StateKeys]) -> StateKeys:
        if self.feedback == "last":
            return published[max(published)]
        return jax.tree.map(lambda *x: jnp.concatenate(x, axis=2), *(published[i] for i in sorted(published)))

    def flops(self, shape, index):
        """The operations of a token that attends to states, and its share of the states' update."""
        indices, inner = self.indices(shape.num_layers), shape.inner_width
        num_layers_read = len(indices) if self.feedback == "all" and index not in indices else 1
        reading = 2 * shape.model_width * inner + 2 * 2 * num_layers_read * self.num_states * inner
        update = self._update_flops(shape) / shape.window_length if index in indices else 0
        return Flops.of_products(reading + update)

    def _update_flops(self, shape: Shape) -> int:
        """The operations of the update of all states of a layer by one block."""
        d, inner, r, f = shape.model_width, shape.inner_width, self.num_states, shape.feedforward_width
        mixed = 2 * inner
        flops = 2 * r * d * 4 * inner
        flops += 2 * 2 * r * (r + 2 * shape.window_length) * inner
        num_gate_products = 2 if self.gate == "lstm" else 0
        if self.cell in ("skip", "dual"):
            flops += (1 + num_gate_products) * 2 * r * mixed * d
        if self.cell in ("single", "dual"):
            size_in = mixed if self.cell == "single" else d
            flops += 2 * r * size_in * f + (1 + num_gate_products) * 2 * r * f * d
        return flops
