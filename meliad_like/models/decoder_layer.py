"""One layer of the decoder: windowed attention and, in a recurrent layer, cross-attention to states."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from einops import rearrange
from flax import nnx
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from meliad_like.layers.attention import (
    attend,
    attend_window,
    head_scale,
    merge_heads,
    ring_distance,
    ring_square,
    split_heads,
    unit,
)
from meliad_like.layers.basic import FeedForward, Linear, RMSNorm, dropout_multiplier, parameter, tiled_dropout
from meliad_like.layers.positions import T5Bias, rotate
from meliad_like.layers.recurrence import StateCell
from meliad_like.models.decoder_config import DecoderConfig


class DecodingCarry(NamedTuple):
    """What a recurrent layer keeps while a block is decoded token by token; written at the block's first token."""

    previous_key: Float[Array, "b h w k"]
    previous_value: Float[Array, "b h w k"]
    state_key: Float[Array, "b h r k"]
    state_value: Float[Array, "b h r k"]


class LayerCarry(NamedTuple):
    """What a layer remembers. Column `s` of the caches is the last token whose offset in its block is `s`."""

    key: Float[Array, "b h w k"]
    value: Float[Array, "b h w k"]
    states: Float[Array, "b r d"] | None = None
    decoding: DecodingCarry | None = None


class TokenHeads(NamedTuple):
    """Projections of tokens, [b, h, n, k]: unit keys, values, scaled unit queries; the last where there are states."""

    key: Array
    value: Array
    query: Array
    cross_query: Array | None


class DecoderLayer(nnx.Module):
    """Pre-norm attention and feed-forward with residuals (Block-Recurrent Transformers, section 3.1, vertical)."""

    def __init__(self, config: DecoderConfig, *, recurrent: bool, rngs: nnx.Rngs):
        self.config = config
        d, h, inner = config.model_width, config.num_heads, config.num_heads * config.head_size
        ones = jax.nn.initializers.ones
        self.attention_norm = RMSNorm(d, rngs=rngs)
        self.key = Linear(d, inner, ("model", "heads"), rngs=rngs)
        self.value = Linear(d, inner, ("model", "heads"), rngs=rngs)
        self.query = Linear(d, inner, ("model", "heads"), rngs=rngs)
        self.attention_scale = parameter(rngs.params(), ones, (h,), ("heads",))
        self.position_bias = T5Bias(h, rngs=rngs) if config.position == "t5" else None
        self.output = Linear(inner * (2 if recurrent else 1), d, ("heads", "model"), rngs=rngs)
        self.feedforward_norm = RMSNorm(d, rngs=rngs)
        self.feedforward = FeedForward(d, config.feedforward_width, d, rngs=rngs)
        self.cross_query = Linear(d, inner, ("model", "heads"), rngs=rngs) if recurrent else None
        self.cross_attention_scale = parameter(rngs.params(), ones, (h,), ("heads",)) if recurrent else None
        self.cell = (
            StateCell(
                num_states=config.num_states,
                model_width=d,
                num_heads=h,
                head_size=config.head_size,
                feedforward_width=config.feedforward_width,
                gate=config.gate,
                cell=config.cell,
                rngs=rngs,
            )
            if recurrent
            else None
        )

    def init_carry(self, b: int, dtype, decoding: bool) -> LayerCarry:
        """An empty cache and the learned initial states."""
        config = self.config

        def cache(length: int):
            return jnp.zeros((b, config.num_heads, length, config.head_size), dtype)

        w, r = config.window_length, config.num_states
        carry = LayerCarry(cache(w), cache(w))
        if self.cell is not None:
            carry = carry._replace(states=self.cell.initial_states(b, dtype))
            if decoding:
                carry = carry._replace(decoding=DecodingCarry(cache(w), cache(w), cache(r), cache(r)))
        return carry

    def _heads(self, x: Float[Array, "b n d"]) -> TokenHeads:
        h, cross_query = self.config.num_heads, None
        if self.cross_query is not None and self.cross_attention_scale is not None:
            cross_query = unit(split_heads(self.cross_query(x), h)) * head_scale(self.cross_attention_scale, x.dtype)
        return TokenHeads(
            key=unit(split_heads(self.key(x), h)),
            value=split_heads(self.value(x), h),
            query=unit(split_heads(self.query(x), h)) * head_scale(self.attention_scale, x.dtype),
            cross_query=cross_query,
        )

    def _bias_by_distance(self) -> Float[Array, "h w"]:
        """The scaled position bias of distances 1 to w: the attention scale multiplies the bias as well."""
        w = self.config.window_length
        if self.position_bias is None:
            return jnp.zeros((self.config.num_heads, w), jnp.float32)
        return self.position_bias(np.arange(1, w + 1)) * jnp.abs(self.attention_scale[...])[:, None]

    def _finish(
        self, x: Float[Array, "*batch d"], mixed: Float[Array, "*batch i"], dropout_key: PRNGKeyArray | None = None
    ) -> Float[Array, "*batch d"]:
        x = x + self.output(mixed)
        y = self.feedforward(self.feedforward_norm(x))
        if dropout_key is not None:
            y = tiled_dropout(y, self.config.dropout_rate, dropout_key)
        return x + y

    def __call__(
        self,
        x: Float[Array, "b n d"],
        carry: LayerCarry,
        start: Bool[Array, "b c"],
        continues: Bool[Array, " b"],
        dropout_key: PRNGKeyArray | None = None,
    ) -> tuple[Float[Array, "b n d"], LayerCarry]:
        """A segment of `c` blocks.

        Args:
            x: the tokens.
            carry: from the segment before.
            start: blocks with which a document begins.
            continues: whether the lane was inside a document before this segment (its cache is not empty).
            dropout_key: none to keep everything.
        """
        config, w = self.config, self.config.window_length
        keys = (None,) * 3 if dropout_key is None else jax.random.split(dropout_key, 3)
        heads = self._heads(tiled_dropout(self.attention_norm(x), config.dropout_rate, keys[0]))
        key, value, query, cross_query = (
            y if y is None else rearrange(y, "b h (c w) k -> b c h w k", w=w) for y in heads
        )
        inside = ~start & jnp.concatenate([continues[:, None], jnp.ones_like(start[:, 1:])], axis=1)
        previous_valid = inside
        previous_key, previous_value = _block_before(key, carry.key), _block_before(value, carry.value)
        if not config.mask_empty_cache:
            empty = ~inside[:, :, None, None, None]
            previous_key, previous_value = jnp.where(empty, 0, previous_key), jnp.where(empty, 0, previous_value)
            previous_valid = jnp.ones_like(inside)
        multiplier = None
        if dropout_key is not None and config.dropout_rate > 0.0:
            shape = (config.num_heads, w, w)
            multiplier = dropout_multiplier(keys[1], config.dropout_rate, shape, jnp.float32)
        window_query, window_key, window_previous_key = query, key, previous_key
        if config.position == "rotary":
            window_query, window_key = (rotate(y, np.arange(w, 2 * w)) for y in (query, key))
            window_previous_key = rotate(previous_key, np.arange(w))
        window_attention = attend_window(
            window_query,
            window_key,
            value,
            window_previous_key,
            previous_value,
            ring_square(self._bias_by_distance()),
            previous_valid,
            multiplier,
        )
        mixed = [window_attention]
        states = carry.states
        if self.cell is not None:
            # Tokens see the states from before their block; so their side waits for no scan but this one.
            tiles = (
                jnp.concatenate([previous_key, key], axis=3),
                jnp.concatenate([previous_value, value], axis=3),
                start,
                jnp.repeat(jnp.stack([previous_valid, jnp.ones_like(previous_valid)], axis=2), w, axis=2),
            )
            states, state_key, state_value = self._scan_states(states, tiles)
            mixed.append(attend(cross_query, state_key, state_value))
        x = self._finish(x, rearrange(merge_heads(*mixed), "b c w i -> b (c w) i"), keys[2])
        return x, carry._replace(key=key[:, -1], value=value[:, -1], states=states)

    def _scan_states(self, states: Float[Array, "b r d"], tiles: tuple[Array, ...]):
        """Runs the states over the blocks.

        Args:
            states: from the segment before.
            tiles: of each block, by `b` and `c`: keys and values of the block before and its own, whether a document
                begins with it, and which of the keys belong to its document.

        Returns:
            The last states, and the keys and values of the states that came into each block.
        """
        cell, (key, value, start, valid) = self.cell, tiles
        if self.config.clear_states:
            start = start.at[:, 0].set(True)

        kernels = cell.kernels(states.dtype)

        def step(states, block):
            key, value, start, valid = block
            states = jnp.where(start[:, None, None], cell.initial_states(states.shape[0], states.dtype), states)
            heads = cell.heads(states, kernels)
            return cell.update(states, heads, key, value, valid), (heads.key, heads.value)

        blocks = jax.tree.map(lambda y: jnp.moveaxis(y, 1, 0), (key, value, start, valid))
        states, heads = jax.lax.scan(step, states, blocks)
        return states, *(jnp.moveaxis(y, 0, 1) for y in heads)

    def decode_step(
        self, x: Float[Array, "b d"], carry: LayerCarry, position: Int[Array, " b"]
    ) -> tuple[Float[Array, "b d"], LayerCarry]:
        """One token at `position`, the number of tokens of its document before it."""
        w = self.config.window_length
        offset = position % w
        heads = self._heads(self.attention_norm(x)[:, None])
        if self.cell is not None:
            carry = self._begin_block(carry, offset)
        distance = jnp.asarray(ring_distance(w))[offset]
        bias = jnp.moveaxis(jnp.take(self._bias_by_distance(), distance - 1, axis=1), 0, 1)
        seen = (jnp.arange(w) < offset[:, None]) | (position >= w)[:, None] | (not self.config.mask_empty_cache)
        query, key = heads.query, carry.key
        if self.config.position == "rotary":
            query, key = rotate(query, np.full(1, w)), rotate(key, (w - distance)[:, None])
        mixed = [attend(query, key, carry.value, bias[:, :, None], seen[:, None, None])]
        if self.cell is not None:
            mixed.append(attend(heads.cross_query, carry.decoding.state_key, carry.decoding.state_value))
        x = self._finish(x, merge_heads(*mixed)[:, 0])
        lanes = jnp.arange(x.shape[0])
        carry = carry._replace(
            key=carry.key.at[lanes, :, offset].set(heads.key[:, :, 0]),
            value=carry.value.at[lanes, :, offset].set(heads.value[:, :, 0]),
        )
        return x, carry if self.cell is None else self._end_block(carry, position, offset)

    def _begin_block(self, carry: LayerCarry, offset: Int[Array, " b"]) -> LayerCarry:
        """Keeps the block before, which the ring is about to lose, and projects the states once for the block."""

        def begin(carry):
            heads = self.cell.heads(carry.states, self.cell.kernels(carry.states.dtype))
            new = DecodingCarry(carry.key, carry.value, heads.key, heads.value)
            first = (offset == 0)[:, None, None, None]
            return carry._replace(decoding=jax.tree.map(lambda x, y: jnp.where(first, x, y), new, carry.decoding))

        return jax.lax.cond(jnp.any(offset == 0), begin, lambda carry: carry, carry)

    def _end_block(self, carry: LayerCarry, position: Int[Array, " b"], offset: Int[Array, " b"]) -> LayerCarry:
        """Updates the states of the lanes whose block is complete."""
        w = self.config.window_length

        def end(carry):
            key = jnp.concatenate([carry.decoding.previous_key, carry.key], axis=2)
            value = jnp.concatenate([carry.decoding.previous_value, carry.value], axis=2)
            previous = ((position >= w) | (not self.config.mask_empty_cache))[:, None]
            valid = (jnp.arange(2 * w) >= w) | previous
            states = self.cell.update(
                carry.states, self.cell.heads(carry.states, self.cell.kernels(carry.states.dtype)), key, value, valid
            )
            return carry._replace(states=jnp.where((offset == w - 1)[:, None, None], states, carry.states))

        return jax.lax.cond(jnp.any(offset == w - 1), end, lambda carry: carry, carry)


def _block_before(blocks: Float[Array, "b c h w k"], cached: Float[Array, "b h w k"]) -> Float[Array, "b c h w k"]:
    """Each block's predecessor; the first one's is cached and takes no gradient."""
    return jnp.concatenate([jax.lax.stop_gradient(cached).astype(blocks.dtype)[:, None], blocks[:, :-1]], axis=1)
