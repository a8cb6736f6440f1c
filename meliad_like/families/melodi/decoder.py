"""MELODI (Chen et al. 2025, arXiv:2410.03156): every window leaves a few compressed tokens for the windows after it.

Behind the w tokens of a window u *summary tokens* go up the stack, which are mixed with its tokens in every layer. A
layer makes of both its *short-term memory*: r vectors that the next window sees in front of it, in the same layer. A
long-term layer also adds e vectors of every window to a *long-term memory* of m vectors, to which all its tokens
attend. A token sees the earlier tokens of its own window, and the memories.

The memory of a window is made of the layer's output, so a layer reads one window after the other, in a scan. The
projections of the tokens, the summary tokens and the long-term memory before the segment are outside of the scan.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from einops import rearrange
from flax import nnx
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from meliad_like.families.melodi.config import MelodiConfig
from meliad_like.layers.attention import attend, merge_heads
from meliad_like.layers.basic import (
    Linear,
    RMSNorm,
    dropout_multiplier,
    fan_in,
    fold_key,
    only_first,
    parameter,
    split_key,
    tiled_dropout,
)
from meliad_like.layers.lanes import at_lanes
from meliad_like.mixers.sliding_window import TokenCache, TokenHeads
from meliad_like.models.config import builds
from meliad_like.models.decoder import Layer, ResidualFeedForward, Stack

small = jax.nn.initializers.truncated_normal(0.25)


class MelodiCarry(NamedTuple):
    """The carry of a layer; the last four fields are set only while decoding.

    Memories are stored before norm and projection, so that they are read with new weights.
    """

    short: Float[Array, "b r d"]
    long: Float[Array, "b m d"] | None
    """A ring: vector `j` of the document's window `i` lies in slot `(e i + j) % m`. Nothing in it has a position."""
    position: Int[Array, " b"]
    """The number of tokens of the document that the memories have seen."""
    window: TokenCache | None = None
    """The tokens of the current window so far."""
    short_heads: tuple[Float[Array, "b h r k"], ...] | None = None
    """The keys and values of the short-term memory."""
    long_heads: tuple[Float[Array, "b h m k"], ...] | None = None
    """The keys and values of the long-term memory; () without one."""
    mixed: dict[str, Float[Array, "b out d"]] | None = None
    """The sum over the tokens of the window so far for each mixing, float32."""


class Window(NamedTuple):
    """Tokens and summary tokens of a window of every lane, `s` in all, and their heads."""

    number: Int[Array, ""]
    """The number of the window in its segment, from 0."""
    x: Float[Array, "b s d"]
    placed_query: Float[Array, "b h s k"]
    query: Float[Array, "b h s k"]
    """Queries without positions."""
    placed_key: Float[Array, "b h s k"]
    value: Float[Array, "b h s k"]
    age: Int[Array, " b"]
    """The number of the document's windows before it."""


class SequenceMix(nnx.Module):
    """A linear map along the sequence, from the tokens and summary tokens of a window to `out` vectors.

    All channels are treated alike. With `norms`, tokens and summary tokens each pass a norm before.
    """

    def __init__(self, w: int, u: int, out: int, model_width: int, norms: bool, *, rngs: nnx.Rngs):
        self.w, self.out = w, out
        self.kernel = parameter(rngs.params(), fan_in, (w + u, out), (None, None), "matrix")
        self.bias = parameter(rngs.params(), jax.nn.initializers.zeros, (out,), (None,), "bias")
        self.token_norm = RMSNorm(model_width, rngs=rngs) if norms else None
        self.summary_norm = RMSNorm(model_width, rngs=rngs) if norms else None

    def of_tokens(self, x: Float[Array, "b w d"]) -> Float[Array, "b out d"]:
        """The part of the result that comes from the tokens, float32."""
        x = x if self.token_norm is None else self.token_norm(x)
        kernel = self.kernel[: self.w].astype(x.dtype)
        return jnp.einsum("so,bsd->bod", kernel, x, preferred_element_type=jnp.float32)

    def of_next_tokens(
        self, x: Float[Array, "b n d"], offset: Int[Array, "b n"], counts: Int[Array, " b"]
    ) -> Float[Array, "b out d"]:
        """The part of the result that comes from the first `counts` of these tokens, at these offsets in the window."""
        x = x if self.token_norm is None else self.token_norm(x)
        rows = jnp.take(self.kernel[...], offset, axis=0, mode="clip")
        return jnp.einsum("bno,bnd->bod", rows, only_first(x.astype(jnp.float32), counts, axis=1), precision="highest")

    def add_summaries(self, mixed: Float[Array, "b out d"], x: Float[Array, "b u d"]) -> Float[Array, "b out d"]:
        """The whole result, from the part of the tokens and the summary tokens."""
        x = x if self.summary_norm is None else self.summary_norm(x)
        kernel, bias = self.kernel[self.w :].astype(x.dtype), self.bias[...][:, None]
        return mixed + jnp.einsum("so,bsd->bod", kernel, x, preferred_element_type=jnp.float32) + bias


def toeplitz(by_distance: Float[Array, "h length"], rows: int, lead: int) -> Float[Array, "h rows s"]:
    """Values by distance (1 to `length`) laid out for `rows` queries, which follow `lead` keys of others.

    With 3 queries and 1 key before them, a query (row) and a key (column) have these distances, and where the key is
    not before the query the value is 0:

        1  0  0  0
        2  1  0  0
        3  2  1  0

    It consists of copies and a reshape, as `layers/attention.ring_square`, so that its gradient is a sum.
    """
    h, columns = by_distance.shape[0], lead + rows
    near, far = by_distance[:, :lead], by_distance[:, lead:]
    cycle = jnp.concatenate([near[:, ::-1], jnp.zeros((h, rows)), far[:, ::-1]], axis=1)
    # A row begins one place further left in the cycle than the row above it.
    by_row = jnp.tile(cycle, (1, rows))[:, : rows * (columns + rows - 2)]
    return by_row.reshape(h, rows, -1)[..., :columns]


class MelodiLayer(Layer):
    """A layer that reads one window after the other, because its memories are made of its output.

    Its input and output have `w + u` vectors for every window, of its tokens and of its summary tokens.
    """

    def __init__(self, config: MelodiConfig, index: int, *, rngs: nnx.Rngs):
        shape = config.shape
        self.config, self.shape = config, shape
        d, inner = shape.model_width, shape.inner_width
        self.norm = RMSNorm(d, shape.norm_epsilon, rngs=rngs)
        self.heads = TokenHeads(shape, rngs=rngs)
        self.output = Linear(inner, d, ("heads", "model"), rngs=rngs)
        self.feedforward = ResidualFeedForward(config.feedforward, shape, rngs=rngs)
        u, r, e = config.num_summaries, config.short_length, config.long_length
        self.long = index in config.long_indices
        sizes = (shape.window_length, u)
        self.summary_mix = None if config.is_last(index) else SequenceMix(*sizes, u, d, True, rngs=rngs)
        self.short_mix = SequenceMix(*sizes, r, d, r == u, rngs=rngs)
        self.long_mix = SequenceMix(*sizes, e, d, False, rngs=rngs) if self.long else None
        size_of_gate = shape.num_heads, shape.head_size
        self.gate = parameter(rngs.params(), small, size_of_gate, ("heads", None), "bias") if self.long else None

    @property
    def _mixes(self) -> dict[str, SequenceMix]:
        mixes = {"summary": self.summary_mix, "short": self.short_mix, "long": self.long_mix}
        return {name: mix for name, mix in mixes.items() if mix is not None}

    def init_carry(self, b, dtype):
        config, d = self.config, self.shape.model_width
        short = jnp.zeros((b, config.short_length, d), dtype)
        long = jnp.zeros((b, config.long_slots, d), dtype) if self.long else None
        return MelodiCarry(short, long, jnp.zeros((b,), jnp.int32))

    def begin_segment(self, carry):
        return jax.tree.map(jnp.zeros_like, carry) if self.config.clear_states else carry

    def __call__(self, x, context, carry, dropout_key=None):
        positions, position = context.count(carry.position, self.shape.window_length)
        (b, c), age = positions.shape, positions // self.shape.window_length
        token_key, summary_key, ring_key, windows_key = split_key(dropout_key, 4)
        windows = self._windows(x, age, token_key, summary_key)
        ring = self._memory_heads(carry.long, ring_key) if self.long else ()
        bias = self._bias()

        def read(state, window: Window):
            short, added = state
            memory_key, window_key, long_key, output_key = split_key(fold_key(windows_key, window.number), 4)
            memory = self._memory_heads(jnp.where((window.age > 0)[:, None, None], short, 0), memory_key)
            result = self._attend_window(bias, window, memory, window_key)
            if self.long:
                result = self._mix_long(result, window.query, self._long_term(ring, added, age[:, 0], window), long_key)
            y = self._finish(window.x, result, output_key)
            tokens, summaries = self.config.split_window(y)
            summaries, short, extracted = self._make(
                summaries, {name: mix.of_tokens(tokens) for name, mix in self._mixes.items()}
            )
            if self.long:
                # A key of its own for the vectors' dropout, which are read by later windows of the segment.
                new = self._memory_heads(extracted, fold_key(memory_key, 1))
                begin = window.number * self.config.long_length
                added = tuple(jax.lax.dynamic_update_slice_in_dim(y, z, begin, axis=2) for y, z in zip(added, new))
            return (short, added), (jnp.concatenate([tokens, summaries], axis=1), extracted)

        heads = (b, self.shape.num_heads, c * self.config.long_length, self.shape.head_size)
        nothing_added = (jnp.zeros(heads, x.dtype),) * 2 if self.long else ()
        (short, _), (x, extracted) = jax.lax.scan(read, (carry.short, nothing_added), windows)
        long = self._remember(carry.long, jnp.moveaxis(extracted, 0, 1), age) if self.long else None
        return rearrange(x, "c b s d -> b (c s) d"), MelodiCarry(short, long, position)

    def _windows(self, x: Float[Array, "b n d"], age: Int[Array, "b c"], token_key, summary_key) -> Window:
        """All windows of a segment, along a new first axis."""
        c, w, position = age.shape[1], self.shape.window_length, self.heads.position
        windows = rearrange(x, "b (c s) d -> b c s d", c=c)

        def normed(y: Float[Array, "b c s d"], key) -> Float[Array, "b c s d"]:
            flat = rearrange(y, "b c s d -> b (c s) d")
            return rearrange(self._normed(flat, key), "b (c s) d -> b c s d", c=c)

        tokens, summaries = self.config.split_window(windows)
        seen = jnp.concatenate([normed(tokens, token_key), normed(summaries, summary_key)], axis=2)
        heads = self.heads.of(rearrange(seen, "b c s d -> b (c s) d"))
        key, value, query = (rearrange(y, "b h (c s) k -> c b h s k", c=c) for y in heads)
        place = w + np.arange(seen.shape[2])
        placed = position.placed(query, place), query, position.placed(key, place), value
        return Window(jnp.arange(c), jnp.moveaxis(windows, 1, 0), *placed, age.T)

    def _normed(self, x: Float[Array, "b n d"], dropout_key: PRNGKeyArray | None) -> Float[Array, "b n d"]:
        return tiled_dropout(self.norm(x), self.shape.dropout_rate, dropout_key)

    def _finish(self, x: Float[Array, "b s d"], result: Float[Array, "b h s k"], dropout_key) -> Float[Array, "b s d"]:
        return self.feedforward(x + self.output(merge_heads(result)), dropout_key)

    def _memory_heads(self, memory: Float[Array, "b s d"], dropout_key) -> tuple[Float[Array, "b h s k"], ...]:
        """Keys and values of a memory; vectors of zeros have keys and values of zeros."""
        return self.heads.of(self._normed(memory, dropout_key))[:2]

    def _bias(self) -> Float[Array, "h rows columns"]:
        """The bias of a window's queries for the short-term memory and the window's keys."""
        r, rows = self.config.short_length, self.shape.window_length + self.config.num_summaries
        return toeplitz(self.heads.bias(r + rows - 1), rows, r)

    def _multiplier(self, dropout_key, num_rows: int, num_keys: int):
        return dropout_multiplier(dropout_key, self.shape.dropout_rate, (self.shape.num_heads, num_rows, num_keys))

    def _shown(self, age: Int[Array, " b"], num_columns: int) -> Bool[Array, "b columns"]:
        """Whether a query may see the vector in a column; the short-term memory, in the first ones, may be empty."""
        is_token = jnp.arange(num_columns) >= self.config.short_length
        return is_token | (age > 0)[:, None] | (not self.shape.mask_empty_cache)

    def _attend_window(self, bias, window: Window, memory, dropout_key):
        """Attention of a window's last queries to the short-term memory and the earlier ones of its vectors."""
        r, w = self.config.short_length, self.shape.window_length
        num_rows, num_columns = window.placed_query.shape[2], bias.shape[2]
        earlier = np.tri(bias.shape[1], num_columns, r - 1, dtype=bool)[-num_rows:]
        return attend(
            window.placed_query,
            (self.heads.position.placed(memory[0], np.arange(w - r, w)), window.placed_key),
            (memory[1], window.value),
            bias[:, -num_rows:],
            earlier & self._shown(window.age, num_columns)[:, None, None],
            self._multiplier(dropout_key, num_rows, num_columns),
        )

    def _mix_long(self, result, query, seen, dropout_key):
        """Mixes a result with attention to the long-term memory, by a learned share of each head and channel. `query`
        has no positions; `seen` are the memory's keys and values, and which of them are visible."""
        assert self.gate is not None
        keys, values, shown = seen
        multiplier = self._multiplier(dropout_key, query.shape[2], shown.shape[1])
        read = attend(query, keys, values, mask=shown[:, None, None], multiplier=multiplier)
        share = jax.nn.sigmoid(self.gate[...])[:, None]
        # In float32, because the gate's gradient is a sum over all tokens.
        mixed = share * result.astype(jnp.float32) + (1 - share) * read.astype(jnp.float32)
        return mixed.astype(result.dtype)

    def _long_term(self, ring, added, written: Int[Array, " b"], window: Window):
        """The keys and values of the long-term memory before a window, and which of them are visible: of the last m
        those of its document, or with an empty memory that is not masked all, with zeros for the rest.

        Args:
            ring: the keys and values of the ring before the segment.
            added: the keys and values of the vectors of the segment's windows.
            written: the number of the document's windows before the segment.
        """
        e, m = self.config.long_length, self.config.long_slots
        # Vectors are counted from the beginning of the segment: -1 is the newest in the ring.
        in_ring = (jnp.arange(m) - e * written[:, None]) % m - m
        in_segment = jnp.broadcast_to(jnp.arange(added[0].shape[2]), (written.shape[0], added[0].shape[2]))
        vector, end = jnp.concatenate([in_ring, in_segment], axis=1), e * window.number
        last, real = (vector >= end - m) & (vector < end), vector >= end - e * window.age[:, None]
        both = zip(ring, added)
        if self.shape.mask_empty_cache:
            return *both, last & real
        halves = real[:, None, :m, None], real[:, None, m:, None]
        return *(tuple(jnp.where(*half, 0) for half in zip(halves, parts)) for parts in both), last

    def _filled(self, age: Int[Array, " b"]) -> Bool[Array, "b m"]:
        """The slots that hold vectors of a document after `age` windows."""
        return jnp.arange(self.config.long_slots) < self.config.long_length * age[:, None]

    def _remember(self, long: Float[Array, "b m d"], new: Float[Array, "b c e d"], written: Int[Array, "b c"]):
        """The ring after a segment: with the vectors of the last document's windows, of which the last m are left."""
        c, e, m = *new.shape[1:3], self.config.long_slots
        last = written[:, -1:]
        window = last - np.arange(c)[::-1]
        vector = (e * window[:, :, None] + np.arange(e)).reshape(new.shape[0], c * e)
        keep = (vector >= 0) & (vector >= e * (last + 1) - m)
        slot = jnp.where(keep, vector % m, m)
        lanes = jnp.arange(new.shape[0])[:, None]
        return long.at[lanes, slot].set(jax.lax.stop_gradient(rearrange(new, "b c e d -> b (c e) d")), mode="drop")

    def _make(
        self, summaries: Float[Array, "b u d"], mixed: dict[str, Float[Array, "b out d"]]
    ) -> tuple[Float[Array, "b u d"], Float[Array, "b r d"], Any]:
        """The vectors that a window leaves, from the output for its summary tokens and the tokens' part of each mixing.

        Returns:
            The summary tokens for the next layer, the short-term memory, and the vectors for the long-term memory.
        """
        results = {name: mix.add_summaries(mixed[name], summaries) for name, mix in self._mixes.items()}
        results = {name: y.astype(summaries.dtype) for name, y in results.items()}
        short = results["short"]
        # With another length, the reference has no residual.
        if self.config.short_length == self.config.num_summaries:
            short += summaries
        return summaries + results.get("summary", 0), short, results.get("long")

    def begin_decoding(self, carry):
        b = carry.position.shape[0]
        empty = self.heads.init_cache(b, carry.short.dtype)._replace(position=carry.position)
        filled = self._filled(carry.position // self.shape.window_length)[:, :, None]
        long = self._memory_heads(jnp.where(filled, carry.long, 0), None) if self.long else ()
        mixed = {name: jnp.zeros((b, mix.out, self.shape.model_width)) for name, mix in self._mixes.items()}
        window, short = self.heads.begin_block(empty), self._memory_heads(carry.short, None)
        return carry._replace(window=window, short_heads=short, long_heads=long, mixed=mixed)

    def _mix_stored(self, result, query, carry, age: Int[Array, " b"]):
        """`_mix_long` while decoding."""
        if not self.long:
            return result
        shown = self._filled(age) | (not self.shape.mask_empty_cache)
        return self._mix_long(result, query, (*carry.long_heads, shown), None)

    def decode(self, x, counts, context, carry):
        r, w, heads = self.config.short_length, self.shape.window_length, self.heads
        inputs, window = heads.tokens(self.norm(x), counts, carry.window)
        age, offset = carry.window.position // w, inputs.offset
        # One token alone sees the ring as it was, which is then changed in place.
        keys, values = inputs.old if x.shape[1] == 1 else inputs.new
        distance = r + offset[..., None] - np.arange(r + w)
        result = attend(
            inputs.placed_query,
            (heads.position.placed(carry.short_heads[0], np.arange(w - r, w)), keys),
            (carry.short_heads[1], values),
            heads.bias_at(distance, offset, r + w - 1, lambda bias: toeplitz(bias, w, r)),
            ((distance > 0) & self._shown(age, r + w)[:, None])[:, None],
        )
        x = self._finish(x, self._mix_stored(result, inputs.query, carry, age), None)
        mixed = {name: carry.mixed[name] + mix.of_next_tokens(x, offset, counts) for name, mix in self._mixes.items()}
        return x, carry._replace(window=window, mixed=mixed)

    def end_window(
        self, carry: MelodiCarry, summaries: Float[Array, "b u d"]
    ) -> tuple[MelodiCarry, Float[Array, "b u d"]]:
        """The carry after a window whose last token has been decoded. The window's summary tokens come from the layer
        below, and are returned for the next layer."""
        w, heads = self.shape.window_length, self.heads
        tokens, age = carry.window, carry.position // w
        assert tokens is not None
        key, value, query = heads.of(self.norm(summaries))
        place = 2 * w + np.arange(summaries.shape[1])
        of_tokens = heads.position.placed(tokens.key, np.arange(w, 2 * w))
        keys = jnp.concatenate([of_tokens, heads.position.placed(key, place)], axis=2)
        values = jnp.concatenate([tokens.value, value], axis=2)
        placed_query = heads.position.placed(query, place)
        window = Window(jnp.zeros((), jnp.int32), summaries, placed_query, query, keys, values, age)
        result = self._attend_window(self._bias(), window, carry.short_heads, None)
        result = self._mix_stored(result, query, carry, age)
        summaries, short, extracted = self._make(self._finish(summaries, result, None), carry.mixed)
        long = self._remember(carry.long, extracted[:, None], age[:, None]) if self.long else None
        return self.begin_decoding(MelodiCarry(short, long, carry.position + w)), summaries


@builds(MelodiConfig)
class Melodi(Stack):
    """A language model that reads windows of `w` tokens, each with the memories that the windows before it left."""

    config: MelodiConfig

    def make_layers(self, rngs):
        config = self.config
        yield from [MelodiLayer(config, i, rngs=rngs) for i in range(config.total_layers)]
        sizes = config.num_summaries, config.model_width
        self.summary_embedding = parameter(rngs.params(), small, sizes, (None, "model"), "table")

    def _summaries(self, *batch: int) -> Float[Array, "*batch u d"]:
        """The summary tokens before the first layer."""
        # Rounded after they are repeated, so that their gradients are float32 sums over lanes and blocks.
        return jnp.tile(self.summary_embedding[...], (*batch, 1, 1)).astype(self.dtype)

    def embed(self, tokens, position, dropout_key):
        """The embedding vectors of tokens, [m], or of the windows of a segment, [b, n], with their summary tokens."""
        x = super().embed(tokens, position, dropout_key)
        if tokens.ndim == 1:
            return x
        windows = rearrange(x, "b (c w) d -> b c w d", w=self.config.window_length)
        windows = jnp.concatenate([windows, self._summaries(*windows.shape[:2])], axis=2)
        return rearrange(windows, "b c s d -> b (c s) d")

    def read_segment(self, tokens, *arguments, **options):
        """Reads a segment, as `BaseDecoder.read_segment`; the outputs are those for tokens."""

        def of_tokens(x):
            windows = rearrange(x, "b (c s) d -> b c s d", c=tokens.shape[1] // self.config.window_length)
            return rearrange(self.config.split_window(windows)[0], "b c w d -> b (c w) d")

        outputs, carry = super().read_segment(tokens, *arguments, **options)
        return list(map(of_tokens, outputs)), carry

    def read_tokens(self, tokens, counts, carry, longest=None):
        """Reads tokens as `BaseDecoder.read_tokens`. Behind a window's last token, its summary tokens pass the layers
        from the first to the last."""
        outputs, carry = super().read_tokens(tokens, counts, carry, longest)
        ends = (counts > 0) & (carry.position % self.config.window_length == 0)
        outputs, layers = at_lanes(ends, self._end_window, outputs, carry.layers)
        return outputs, carry._replace(layers=layers)

    def _end_window(self, carries: list[MelodiCarry]) -> list[MelodiCarry]:
        summaries, ended = self._summaries(carries[0].position.shape[0]), []
        for layer, carry in zip(self.layers, carries, strict=True):
            carry, summaries = layer.end_window(carry, summaries)
            ended.append(carry)
        return ended
