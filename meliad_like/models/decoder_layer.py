"""One layer of the decoder: windowed attention and, where it has them, cross-attention to states or to a memory."""

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
from meliad_like.layers.memory import Memory, attend_memories, recall, remember, search
from meliad_like.layers.positions import T5Bias, rotate, sinusoids
from meliad_like.layers.recurrence import StateCell, StateHeads
from meliad_like.layers.sequence import from_left, in_turn, is_leftmost
from meliad_like.models.decoder_config import DecoderConfig


class DecodingCarry(NamedTuple):
    """What a recurrent layer keeps while a block is decoded token by token; written at the block's first token."""

    previous_key: Float[Array, "b h w k"]
    previous_value: Float[Array, "b h w k"]
    state_key: Float[Array, "b h r k"]
    state_value: Float[Array, "b h r k"]


class LayerCarry(NamedTuple):
    """What a layer remembers. Column `s` of the caches is the last token whose offset in its block is `s`. Keys have
    unit length, but with infused positions, which are added before that."""

    key: Float[Array, "b h w k"]
    value: Float[Array, "b h w k"]
    states: Float[Array, "b r d"] | None = None
    decoding: DecodingCarry | None = None
    memory: Memory | None = None
    placed_key: Float[Array, "b h w k"] | None = None
    """Decoding with infused positions: the keys with theirs, which last for a block."""


class ReadStates(NamedTuple):
    """Under feedback: what a layer reads of the states from before its block; a recurrent layer, what it updates."""

    key: Float[Array, "b h r k"]
    value: Float[Array, "b h r k"]
    states: Float[Array, "b r d"] | None = None
    heads: StateHeads | None = None


class TokenHeads(NamedTuple):
    """Projections of tokens, [b, h, n, k]: unit keys, values, scaled unit queries (with infused positions neither unit
    nor scaled); the last where states are read."""

    key: Array
    value: Array
    query: Array
    cross_query: Array | None


class DecoderLayer(nnx.Module):
    """Pre-norm attention and feed-forward with residuals (Block-Recurrent Transformers, section 3.1, vertical)."""

    def __init__(self, config: DecoderConfig, index: int, *, rngs: nnx.Rngs):
        self.config = config
        recurrent, memorizing = index in config.recurrent_indices, index in config.memory_indices
        reads_states = recurrent or config.feedback != "none"
        d, h, inner = config.model_width, config.num_heads, config.num_heads * config.head_size
        ones = jax.nn.initializers.ones
        self.attention_norm = RMSNorm(d, rngs=rngs)
        self.key = Linear(d, inner, ("model", "heads"), rngs=rngs)
        self.value = Linear(d, inner, ("model", "heads"), rngs=rngs)
        self.query = Linear(d, inner, ("model", "heads"), rngs=rngs)
        self.attention_scale = parameter(rngs.params(), ones, (h,), ("heads",))
        # A memory has no positions, and a layer with one compares its memories to its window: it does without as well.
        self.position = "none" if memorizing else config.position
        self.position_bias = T5Bias(h, rngs=rngs) if self.position == "t5" else None
        self.memory_gate = parameter(rngs.params(), jax.nn.initializers.zeros, (h,), ("heads",)) if memorizing else None
        self.output = Linear(inner * (2 if reads_states else 1), d, ("heads", "model"), rngs=rngs)
        self.feedforward_norm = RMSNorm(d, rngs=rngs)
        self.feedforward = FeedForward(d, config.feedforward_width, d, rngs=rngs)
        self.cross_query = Linear(d, inner, ("model", "heads"), rngs=rngs) if reads_states else None
        self.cross_attention_scale = parameter(rngs.params(), ones, (h,), ("heads",)) if reads_states else None
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
        if decoding and self.position == "infused":
            carry = carry._replace(placed_key=cache(w))
        if self.memory_gate is not None:
            carry = carry._replace(memory=Memory(cache(config.memory_size), cache(config.memory_size)))
        if self.cell is not None:
            carry = carry._replace(states=self.cell.initial_states(b, dtype))
            if decoding:
                carry = carry._replace(decoding=DecodingCarry(cache(w), cache(w), cache(r), cache(r)))
        return carry

    def _heads(self, x: Float[Array, "b n d"]) -> TokenHeads:
        h, cross_query = self.config.num_heads, None
        key, query = (split_heads(linear(x), h) for linear in (self.key, self.query))
        if self.position != "infused":
            key, query = unit(key), self._scaled(query)
        if self.cross_query is not None and self.cross_attention_scale is not None:
            cross_query = unit(split_heads(self.cross_query(x), h)) * head_scale(self.cross_attention_scale, x.dtype)
        return TokenHeads(key=key, value=split_heads(self.value(x), h), query=query, cross_query=cross_query)

    def _scaled(self, query: Float[Array, "*batch h n k"]) -> Float[Array, "*batch h n k"]:
        return unit(query) * head_scale(self.attention_scale, query.dtype)

    def _infused(self, linear: Linear, place: Int[Array, " n"] | np.ndarray, dtype) -> Float[Array, "h n k"]:
        """What these of a tile's 2w places add to keys or queries: sinusoids go into the projection, a linear map."""
        table = jnp.asarray(sinusoids(2 * self.config.window_length, self.config.model_width), dtype)
        return split_heads(linear(table[place]), self.config.num_heads)

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
        positions: Int[Array, "b c"],
        dropout_key: PRNGKeyArray | None = None,
        read_states: ReadStates | None = None,
    ) -> tuple[Float[Array, "b n d"], LayerCarry]:
        """A segment of `c` blocks.

        Args:
            x: the tokens.
            carry: from the segment before.
            positions: of each block's first token in its document; 0 where a document begins.
            dropout_key: none to keep everything.
            read_states: under feedback, where a segment is one block; a recurrent layer without feedback reads its own.
        """
        config, w = self.config, self.config.window_length
        keys = (None,) * 3 if dropout_key is None else jax.random.split(dropout_key, 3)
        heads = self._heads(tiled_dropout(self.attention_norm(x), config.dropout_rate, keys[0]))
        key, value, query, cross_query = TokenHeads(
            *(y if y is None else rearrange(y, "b h (c w) k -> b c h w k", w=w) for y in heads)
        )
        inside = previous_valid = positions > 0
        first_key, first_value = from_left((key[:, -1], value[:, -1]), (carry.key, carry.value))
        previous_key, previous_value = _block_before(key, first_key), _block_before(value, first_value)
        if not config.mask_empty_cache:
            empty = ~inside[:, :, None, None, None]
            previous_key, previous_value = jnp.where(empty, 0, previous_key), jnp.where(empty, 0, previous_value)
            previous_valid = jnp.ones_like(inside)
        multiplier = None
        if dropout_key is not None and config.dropout_rate > 0.0:
            shape = (config.num_heads, w, w)
            multiplier = dropout_multiplier(keys[1], config.dropout_rate, shape, jnp.float32)
        window_query, window_key, window_previous_key = query, key, previous_key
        if self.position == "rotary":
            window_query, window_key = (rotate(y, np.arange(w, 2 * w)) for y in (query, key))
            window_previous_key = rotate(previous_key, np.arange(w))
        cached_key = key[:, -1]
        if self.position == "infused":
            here, before = np.arange(w, 2 * w), np.arange(w)
            window_query = self._scaled(query + self._infused(self.query, here, x.dtype))
            window_key = unit(key + self._infused(self.key, here, x.dtype))
            window_previous_key = unit(previous_key + self._infused(self.key, before, x.dtype))
            # States see tokens without positions.
            key, previous_key = unit(key), unit(previous_key)
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
        states, memory = carry.states, carry.memory
        if memory is not None:
            memory, memories = self._scan_memory(memory, query, key, value, positions)
            window_attention = self._mix_memories(window_attention, query, *memories)
        mixed = [window_attention]
        if cross_query is not None:
            # Tokens see the states from before their block; so their side waits for no scan but this one.
            tiles = (
                jnp.concatenate([previous_key, key], axis=3),
                jnp.concatenate([previous_value, value], axis=3),
                jnp.repeat(jnp.stack([previous_valid, jnp.ones_like(previous_valid)], axis=2), w, axis=2),
            )
            if read_states is None:
                states, state_key, state_value = self._scan_states(states, state_starts(positions, config), tiles)
            else:
                state_key, state_value = read_states.key[:, None], read_states.value[:, None]
                if self.cell is not None:
                    states = self.cell.update(read_states.states, read_states.heads, *(y[:, 0] for y in tiles))
            mixed.append(attend(cross_query, state_key, state_value))
        x = self._finish(x, rearrange(merge_heads(*mixed), "b c w i -> b (c w) i"), keys[2])
        return x, carry._replace(key=cached_key, value=value[:, -1], states=states, memory=memory)

    def begin_states(
        self, states: Float[Array, "b r d"], start: Bool[Array, " b"], kernels: Float[Array, "d 4 i"]
    ) -> tuple[Float[Array, "b r d"], StateHeads]:
        """The states that come into a block, and their projections."""
        states = jnp.where(start[:, None, None], self.cell.initial_states(states.shape[0], states.dtype), states)
        return states, self.cell.heads(states, kernels)

    def _scan_states(self, states: Float[Array, "b r d"], start: Bool[Array, "b c"], tiles: tuple[Array, ...]):
        """Runs the states over the blocks.

        Args:
            states: from the segment before.
            start: blocks before which they become the initial ones.
            tiles: of each block, by `b` and `c`: keys and values of the block before and its own, and which of them
                belong to its document.

        Returns:
            The last states, and the keys and values of the states that came into each block.
        """
        kernels = self.cell.kernels(states.dtype)

        def step(states, block):
            start, *tile = block
            states, heads = self.begin_states(states, start, kernels)
            return self.cell.update(states, heads, *tile), (heads.key, heads.value)

        blocks = jax.tree.map(lambda y: jnp.moveaxis(y, 1, 0), (start, *tiles))
        states, heads = in_turn(lambda states: jax.lax.scan(step, states, blocks), states)
        return states, *(jnp.moveaxis(y, 0, 1) for y in heads)

    def _scan_memory(
        self,
        memory: Memory,
        query: Float[Array, "b c h w k"],
        key: Float[Array, "b c h w k"],
        value: Float[Array, "b c h w k"],
        positions: Int[Array, "b c"],
    ):
        """Searches the memory and adds to it, block by block or all at once (`memory_update`).

        Returns:
            The memory, and keys [b, c, h, w, j, k], values and validity of what was found.
        """
        w = self.config.window_length
        whole = self.config.memory_update == "segment"
        per_turn = positions.shape[1] if whole else 1
        # Of a segment that is longer than the memory its end stays: of two writes to a slot either may be the last.
        newest = np.arange(per_turn) >= per_turn - self.config.memory_size // w

        def step(memory, turn):
            query, key, value, position = turn
            # What an earlier document of the same segment left is neither seen nor kept.
            first, last = position[:, :1], position[:, -1:]
            tokens = (position[:, :, None] + jnp.arange(w)).reshape(len(position), -1)
            same_as_before = jnp.repeat(position == first + w * jnp.arange(per_turn), w, axis=1)
            same_as_last = position == last - w * jnp.arange(per_turn)[::-1]
            keep = jnp.repeat(same_as_last & newest, w, axis=1)
            found, found_key, found_value = self._search(memory, query, first[:, 0])
            valid = found.valid & same_as_before[:, None, :, None]
            return remember(memory, key, value, tokens, keep), (found_key, found_value, valid)

        turns = (rearrange(y, "b (i u) h w k -> i b h (u w) k", u=per_turn) for y in (query, key, value))
        turns = (*turns, rearrange(positions, "b (i u) -> i b u", u=per_turn))
        memory, found = jax.lax.scan(step, memory, turns)
        return memory, [rearrange(y, "i b h (u w) ... -> b (i u) h w ...", u=per_turn) for y in found]

    def _search(self, memory: Memory, query: Float[Array, "b h t k"], filled: Int[Array, " b"]):
        config = self.config
        found = search(query, memory.key, filled, config.memory_neighbors, config.memory_search)
        return found, *recall(memory, found.slot)

    def _mix_memories(
        self,
        window_attention: Float[Array, "*batch h t k"],
        query: Float[Array, "*batch h t k"],
        key: Float[Array, "*batch h t j k"],
        value: Float[Array, "*batch h t j k"],
        valid: Bool[Array, "*batch h t j"],
    ) -> Float[Array, "*batch h t k"]:
        """A learned share of each head is what it found in its memory."""
        if not self.config.mask_empty_cache:
            key, value = (jnp.where(valid[..., None], y, 0) for y in (key, value))
            valid = jnp.ones_like(valid)
        share = jax.nn.sigmoid(self.memory_gate[...]).astype(query.dtype)[:, None, None]
        return (1 - share) * window_attention + share * attend_memories(query, key, value, valid)

    def decode_step(
        self,
        x: Float[Array, "b d"],
        carry: LayerCarry,
        position: Int[Array, " b"],
        read_states: ReadStates | None = None,
    ) -> tuple[Float[Array, "b d"], LayerCarry]:
        """One token.

        Args:
            x: the token of each lane.
            carry: of a recurrent layer, after `begin_block`.
            position: the number of tokens of its document before it.
            read_states: where the layer reads states.
        """
        w = self.config.window_length
        offset = position % w
        heads = self._heads(self.attention_norm(x)[:, None])
        distance = jnp.asarray(ring_distance(w))[offset]
        bias = jnp.moveaxis(jnp.take(self._bias_by_distance(), distance - 1, axis=1), 0, 1)
        seen = (jnp.arange(w) < offset[:, None]) | (position >= w)[:, None] | (not self.config.mask_empty_cache)
        query, key, placed_key = heads.query, carry.key, carry.placed_key
        lanes = jnp.arange(x.shape[0])
        if self.position == "rotary":
            query, key = rotate(query, np.full(1, w)), rotate(key, (w - distance)[:, None])
        elif placed_key is not None:
            of_query, of_key = (
                rearrange(self._infused(linear, w + offset, x.dtype), "h b k -> b h 1 k")
                for linear in (self.query, self.key)
            )
            query, key = self._scaled(query + of_query), placed_key
            placed_key = placed_key.at[lanes, :, offset].set(unit(heads.key + of_key)[:, :, 0])
        window_attention = attend(query, key, carry.value, bias[:, :, None], seen[:, None, None])
        if carry.memory is not None:
            found, found_key, found_value = self._search(carry.memory, heads.query, position - offset)
            window_attention = self._mix_memories(window_attention, heads.query, found_key, found_value, found.valid)
        mixed = [window_attention]
        if read_states is not None:
            mixed.append(attend(heads.cross_query, read_states.key, read_states.value))
        x = self._finish(x, merge_heads(*mixed)[:, 0])
        carry = carry._replace(
            placed_key=placed_key,
            key=carry.key.at[lanes, :, offset].set(heads.key[:, :, 0]),
            value=carry.value.at[lanes, :, offset].set(heads.value[:, :, 0]),
        )
        return x, self._end_block(carry, position, offset)

    def begin_block(self, carry: LayerCarry, position: Int[Array, " b"]) -> LayerCarry:
        """At a block's first token. A recurrent layer keeps the block before, which the ring is about to lose, and
        projects the states once for the block; infused positions of that block become those of a block before.
        To be called before any layer's `decode_step`."""
        if self.cell is None and carry.placed_key is None:
            return carry
        first = position % self.config.window_length == 0

        def begin(carry):
            new = carry
            if self.cell is not None:
                heads = self.cell.heads(carry.states, self.cell.kernels(carry.states.dtype))
                new = new._replace(decoding=DecodingCarry(carry.key, carry.value, heads.key, heads.value))
            if carry.placed_key is not None:
                before = self._infused(self.key, np.arange(self.config.window_length), carry.key.dtype)
                new = new._replace(placed_key=unit(carry.key + before))
            return jax.tree.map(lambda x, y: jnp.where(first.reshape(-1, *[1] * (x.ndim - 1)), x, y), new, carry)

        return jax.lax.cond(jnp.any(first), begin, lambda carry: carry, carry)

    def _end_block(self, carry: LayerCarry, position: Int[Array, " b"], offset: Int[Array, " b"]) -> LayerCarry:
        """Updates states and memory of the lanes whose block is complete."""
        if self.cell is None and carry.memory is None:
            return carry
        w = self.config.window_length
        last = offset == w - 1

        def end(carry):
            if carry.memory is not None:
                tokens = (position - offset)[:, None] + jnp.arange(w)
                keep = jnp.broadcast_to(last[:, None], tokens.shape)
                return carry._replace(memory=remember(carry.memory, carry.key, carry.value, tokens, keep))
            key = jnp.concatenate([carry.decoding.previous_key, carry.key], axis=2)
            key = unit(key) if self.position == "infused" else key
            value = jnp.concatenate([carry.decoding.previous_value, carry.value], axis=2)
            previous = ((position >= w) | (not self.config.mask_empty_cache))[:, None]
            valid = (jnp.arange(2 * w) >= w) | previous
            states = self.cell.update(
                carry.states, self.cell.heads(carry.states, self.cell.kernels(carry.states.dtype)), key, value, valid
            )
            return carry._replace(states=jnp.where(last[:, None, None], states, carry.states))

        return jax.lax.cond(jnp.any(last), end, lambda carry: carry, carry)


def block_positions(position: Int[Array, " b"], start: Bool[Array, "b c"], w: int) -> Int[Array, "b c"]:
    """The position of each block's first token in its document.

    Args:
        position: of the segment's first token, if the document before goes on.
        start: blocks with which a document begins.
    """
    block = jnp.arange(start.shape[1])
    last_start = jax.lax.cummax(jnp.where(start, block, -1), axis=1)
    return jnp.where(last_start >= 0, (block - last_start) * w, position[:, None] + block * w)


def state_starts(positions: Int[Array, "b c"], config: DecoderConfig) -> Bool[Array, "b c"]:
    """The blocks of a segment before which states become the initial ones."""
    starts = positions == 0
    return starts.at[:, 0].set(starts[:, 0] | is_leftmost()) if config.clear_states else starts


def _block_before(blocks: Float[Array, "b c h w k"], cached: Float[Array, "b h w k"]) -> Float[Array, "b c h w k"]:
    """Each block's predecessor; the first one's is cached."""
    return jnp.concatenate([cached.astype(blocks.dtype)[:, None], blocks[:, :-1]], axis=1)
