"""MELODI (Chen et al. 2025, arXiv:2410.03156): every window leaves a few compressed tokens for the windows after it.

Behind the w tokens of a window u *summary tokens* go up the stack, which are mixed with its tokens in every layer. A
layer makes of both its *short-term memory*: r vectors that the next window sees in front of it, in the same layer. A
long-term layer also adds e vectors of every window to a *long-term memory* of m vectors, to which all its tokens
attend. A token sees the earlier tokens of its own window, and the memories.

The memory of a window is made of the layer's output, so a layer reads one window after the other, in a scan. The
projections of the tokens, the summary tokens and the long-term memory before the segment are outside of the scan.
"""

import dataclasses
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from einops import rearrange
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from meliad_like.errors import UserError
from meliad_like.layers.basic import dropout_multiplier, parameter
from meliad_like.layers.flops import Flops
from meliad_like.layers.windows import SequenceMix, attend_parts, toeplitz
from meliad_like.mechanisms.base import MECHANISMS, Mechanism, Shape, StatesConfig, Watched
from meliad_like.mechanisms.positions import POSITIONS
from meliad_like.registry import size
from meliad_like.validation import check_positive


class DecodingCarry(NamedTuple):
    """What only decoding needs: projections of the memories, and what the window's tokens add to the next ones."""

    short_key: Float[Array, "b h r k"]
    short_value: Float[Array, "b h r k"]
    long_key: Float[Array, "b h m k"] | None
    long_value: Float[Array, "b h m k"] | None
    mixed: dict[str, Float[Array, "b out d"]]
    """By mixing: the sum over the tokens of the window so far, float32."""


def _long_heads(carry: DecodingCarry):
    return (carry.long_key,), (carry.long_value,)


class MelodiCarry(NamedTuple):
    """The carry of a layer. Memories are kept before norm and projection, so that they are read with new weights."""

    short: Float[Array, "b r d"]
    long: Float[Array, "b m d"] | None
    """A ring: vector `j` of the document's window `i` lies in slot `(e i + j) % m`. Nothing in it has a position."""
    decoding: DecodingCarry | None


class MelodiMemory(Mechanism):
    """The memories of one layer. It closes its layer, because they are made of the layer's output."""

    def __init__(self, config: "Melodi", shape: Shape, index: int, *, rngs: nnx.Rngs):
        self.config, self.shape = config, shape
        u, r, e = config.num_summaries, config.short_length, config.long_length
        self.long = index in config.long_indices(shape.num_layers)
        # Nothing reads what the last layer would make of the summary tokens.
        last = index == max(config.indices(shape.num_layers))
        sizes, d = (shape.window_length, u), shape.model_width
        self.summary_mix = None if last else SequenceMix(*sizes, u, d, True, rngs=rngs)
        self.short_mix = SequenceMix(*sizes, r, d, r == u, rngs=rngs)
        self.long_mix = SequenceMix(*sizes, e, d, False, rngs=rngs) if self.long else None
        gate = jax.nn.initializers.truncated_normal(0.25)
        heads = shape.num_heads, shape.head_size
        self.gate = parameter(rngs.params(), gate, heads, ("heads", None)) if self.long else None

    @property
    def _mixes(self) -> dict[str, SequenceMix]:
        mixes = {"summary": self.summary_mix, "short": self.short_mix, "long": self.long_mix}
        return {name: mix for name, mix in mixes.items() if mix is not None}

    def init_carry(self, b, dtype, decoding):
        config, d, (h, k) = self.config, self.shape.model_width, (self.shape.num_heads, self.shape.head_size)
        short = jnp.zeros((b, config.short_length, d), dtype)
        long = jnp.zeros((b, config.long_slots, d), dtype) if self.long else None
        if not decoding:
            return MelodiCarry(short, long, None)
        short_heads = jnp.zeros((b, h, config.short_length, k), dtype)
        long_heads = jnp.zeros((b, h, config.long_slots, k), dtype) if self.long else None
        mixed = {name: jnp.zeros((b, mix.out, d)) for name, mix in self._mixes.items()}
        return MelodiCarry(short, long, DecodingCarry(short_heads, short_heads, long_heads, long_heads, mixed))

    def close(self, parts, x, summaries, tokens, others, carry, dropout_key):
        config, w, u, r = self.config, self.shape.window_length, self.config.num_summaries, self.config.short_length
        (b, c), tile = tokens.positions.shape, tokens.tile
        written = tokens.positions // w
        # The number of windows of the document that memories hold before each window.
        age = jnp.minimum(written, jnp.arange(c)) if config.clear_states else written
        keys = [None] * 3 if dropout_key is None else list(jax.random.split(dropout_key, 3))
        own = parts.heads.of(parts.norm(rearrange(summaries, "b c u d -> b (c u) d"), keys[0]))
        key, value, query = (rearrange(y, "b h (c u) k -> b c h u k", c=c) for y in own)
        place = 2 * w + np.arange(u)
        windows = (
            jnp.concatenate([rearrange(x, "b (c w) d -> b c w d", c=c), summaries], axis=2),
            jnp.concatenate([tile.placed.query, parts.heads.position.placed(query, place)], axis=3),
            jnp.concatenate([tile.query, query], axis=3),
            jnp.concatenate([tile.placed.key, parts.heads.position.placed(key, place)], axis=3),
            jnp.concatenate([tile.value, value], axis=3),
            # The summary tokens take no part in the layer's other mechanisms.
            [jnp.pad(y, ((0, 0),) * 3 + ((0, u), (0, 0))) for y in others],
            age,
        )
        windows = jax.tree.map(lambda y: jnp.moveaxis(y, 1, 0), windows)
        bias = toeplitz(parts.heads.bias(r + w + u - 1), w + u, r)
        old = self._heads(parts, carry.long, keys[1]) if self.long else None

        def step(state, window):
            short, made = state
            number, (x, placed_query, query, key, value, others, age) = window
            key_of = [None] * 4 if keys[2] is None else list(jax.random.split(jax.random.fold_in(keys[2], number), 4))
            memory = self._heads(parts, short, key_of[0])
            result = self._attend_window(parts, bias, placed_query, memory, key, value, age > 0, key_of[1])
            if self.long:
                seen = self._seen(written[:, 0], age, number, c)
                result = self._mix_long(result, query, zip(old, made), seen, key_of[2])
            y = parts.finish(x, [*others, result], key_of[3])
            x, summaries = y[:, :w], y[:, w:]
            mixed = {name: mix.of_tokens(x) for name, mix in self._mixes.items()}
            summaries, short, extracted = self._make(summaries, mixed)
            if self.long:
                # A key of its own for the vectors' dropout, which are read by later windows of the segment.
                new_key = None if key_of[0] is None else jax.random.fold_in(key_of[0], 1)
                new = self._heads(parts, extracted, new_key)
                begin = number * config.long_length
                made = tuple(jax.lax.dynamic_update_slice_in_dim(y, z, begin, axis=2) for y, z in zip(made, new))
            return (short, made), (x, summaries, extracted)

        heads = (b, self.shape.num_heads, c * config.long_length, self.shape.head_size)
        made = (jnp.zeros(heads, x.dtype),) * 2 if self.long else ()
        (short, _), (x, summaries, extracted) = jax.lax.scan(step, (carry.short, made), (jnp.arange(c), windows))
        long = self._remember(carry.long, jnp.moveaxis(extracted, 0, 1), written) if self.long else None
        new = MelodiCarry(short, long, self._decoding(parts, short, long, carry.decoding))
        return rearrange(x, "c b w d -> b (c w) d"), jnp.moveaxis(summaries, 0, 1), new

    def _heads(self, parts, memory: Float[Array, "b s d"], dropout_key) -> tuple[Float[Array, "b h s k"], ...]:
        """Keys and values of a memory."""
        return parts.heads.of(parts.norm(memory, dropout_key))[:2]

    def _multiplier(self, dropout_key, num_rows: int, num_keys: int):
        rate = self.shape.dropout_rate
        if dropout_key is None or rate == 0.0:
            return None
        return dropout_multiplier(dropout_key, rate, (self.shape.num_heads, num_rows, num_keys), jnp.float32)

    def _attend_window(self, parts, bias, query, memory, key, value, filled, dropout_key):
        """Attention of a window's last queries to the short-term memory and the earlier ones of its vectors."""
        r, w = self.config.short_length, self.shape.window_length
        num_rows, num_columns = query.shape[2], bias.shape[2]
        place = np.arange(w - r, w)
        own = np.tri(bias.shape[1], num_columns, r - 1, dtype=bool)[-num_rows:]
        real = jnp.where(np.arange(num_columns) < r, filled[:, None], True)
        return attend_parts(
            query,
            (parts.heads.position.placed(memory[0], place), key),
            (memory[1], value),
            own & self._shown(real)[:, None, None],
            real,
            bias[:, -num_rows:],
            self._multiplier(dropout_key, num_rows, num_columns),
        )

    def _shown(self, real: Bool[Array, "b s"]) -> Bool[Array, "b s"]:
        return real if self.shape.mask_empty_cache else jnp.ones_like(real)

    def _mix_long(self, result, query, stored, seen, dropout_key):
        """Mixes a result with attention to the long-term memory, by a learned share of each head and channel.

        Args:
            result: the result of attention to the window and the short-term memory.
            query: the queries without positions.
            stored: keys and values of the memory, each in several arrays.
            seen: which of them are shown, and which hold something.
        """
        assert self.gate is not None
        (keys, values), (shown, real) = stored, seen
        shown = shown & self._shown(real)
        multiplier = self._multiplier(dropout_key, query.shape[2], real.shape[1])
        read = attend_parts(query, keys, values, shown[:, None, None], real, multiplier=multiplier)
        share = jax.nn.sigmoid(self.gate[...]).astype(result.dtype)[:, None]
        return share * result + (1 - share) * read

    def _seen(self, written: Int[Array, " b"], age: Int[Array, " b"], number: Int[Array, ""], c: int):
        """Which vectors are among the last m before window `number`, and which of them are of its document.

        Args:
            written: the number of the document's windows before the segment.
            age: the number of the document's windows before this one.
            number, c: the window's number in the segment, and the number of windows.

        Returns:
            shown, real: for the ring's slots before the segment, and then for the vectors of the segment's windows.
        """
        e, m = self.config.long_length, self.config.long_slots
        # Vectors are counted from the beginning of the segment: -1 is the newest in the ring.
        in_ring = (jnp.arange(m) - e * written[:, None]) % m - m
        in_segment = jnp.broadcast_to(jnp.arange(c * e), (len(age), c * e))
        vector, end = jnp.concatenate([in_ring, in_segment], axis=1), e * number
        return (vector >= end - m) & (vector < end), vector >= end - e * age[:, None]

    def _remember(self, long: Float[Array, "b m d"], new: Float[Array, "b c e d"], written: Int[Array, "b c"]):
        """The ring after a segment: with the vectors of the last document's windows, of which the last m are left."""
        c, e, m = *new.shape[1:3], self.config.long_slots
        last = written[:, -1:]
        window = last - np.arange(c)[::-1]
        vector = (e * window[:, :, None] + np.arange(e)).reshape(len(new), c * e)
        keep = (vector >= 0) & (vector >= e * (last + 1) - m)
        slot = jnp.where(keep, vector % m, m)
        lanes = np.arange(len(new))[:, None]
        return long.at[lanes, slot].set(jax.lax.stop_gradient(rearrange(new, "b c e d -> b (c e) d")), mode="drop")

    def _make(
        self, summaries: Float[Array, "b u d"], mixed: dict[str, Float[Array, "b out d"]]
    ) -> tuple[Float[Array, "b u d"], Float[Array, "b r d"], Any]:
        """What a window leaves, from the output for its summary tokens and what its tokens add to each mixing.

        Returns:
            The summary tokens for the next layer, the short-term memory, and the vectors for the long-term memory.
        """
        made = {name: mix.add_summaries(mixed[name], summaries) for name, mix in self._mixes.items()}
        made = {name: y.astype(summaries.dtype) for name, y in made.items()}
        # With another length, the reference has no residual.
        short = made["short"] + summaries if self.config.short_length == self.config.num_summaries else made["short"]
        return summaries + made.get("summary", 0), short, made.get("long")

    def _decoding(self, parts, short, long, old):
        """What decoding needs at the beginning of a window."""
        if old is None:
            return None
        short_key, short_value = self._heads(parts, short, None)
        long_key, long_value = self._heads(parts, long, None) if self.long else (None, None)
        mixed = jax.tree.map(jnp.zeros_like, old.mixed)
        return DecodingCarry(short_key, short_value, long_key, long_value, mixed)

    def close_token(self, parts, x, token, others, carry):
        r, w, decoding = self.config.short_length, self.shape.window_length, carry.decoding
        offset, age, tile = token.position % w, token.position // w, token.tile
        distance = offset[:, None] + r - np.arange(r)
        bias = jnp.take(parts.heads.bias(r + w + self.config.num_summaries - 1), distance - 1, axis=1)
        real = jnp.where(np.arange(r + w) < r, (age > 0)[:, None], True)
        own = jnp.arange(r + w) < r + offset[:, None]
        # A query has place w, wherever it stands in its window.
        short_key = parts.heads.position.placed(decoding.short_key, (w - distance)[:, None])
        result = attend_parts(
            tile.placed_query,
            (short_key, tile.placed_key),
            (decoding.short_value, tile.value),
            (own & self._shown(real))[:, None, None],
            real,
            jnp.concatenate([jnp.moveaxis(bias, 0, 1), tile.bias], axis=2)[:, :, None],
        )
        if self.long:
            result = self._mix_long(result, tile.query, _long_heads(decoding), (True, self._filled(age)), None)
        x = parts.finish(x[:, None], [*others, result], None)[:, 0]
        mixed = {
            name: jnp.where((offset == 0)[:, None, None], 0, decoding.mixed[name]) + mix.of_token(x, offset)
            for name, mix in self._mixes.items()
        }
        return x, carry._replace(decoding=decoding._replace(mixed=mixed))

    def _filled(self, age: Int[Array, " b"]) -> Bool[Array, "b m"]:
        return jnp.arange(self.config.long_slots) < self.config.long_length * age[:, None]

    def close_block(self, parts, summaries, carry, cache, position):
        r, w, u, decoding = (
            self.config.short_length,
            self.shape.window_length,
            self.config.num_summaries,
            carry.decoding,
        )
        age, heads = position // w, parts.heads
        key, value, query = heads.of(parts.norm(summaries, None))
        place = 2 * w + np.arange(u)
        result = self._attend_window(
            parts,
            toeplitz(heads.bias(r + w + u - 1), w + u, r),
            heads.position.placed(query, place),
            decoding[:2],
            jnp.concatenate(
                [heads.position.placed(cache.key, np.arange(w, 2 * w)), heads.position.placed(key, place)], axis=2
            ),
            jnp.concatenate([cache.value, value], axis=2),
            age > 0,
            None,
        )
        if self.long:
            result = self._mix_long(result, query, _long_heads(decoding), (True, self._filled(age)), None)
        others = [jnp.zeros_like(result)] * parts.num_others
        summaries, short, extracted = self._make(parts.finish(summaries, [*others, result], None), decoding.mixed)
        long = self._remember(carry.long, extracted[:, None], age[:, None]) if self.long else None
        return summaries, MelodiCarry(short, long, self._decoding(parts, short, long, decoding))

    def watch(self, before, after, tile, start):
        return Watched(jnp.where(start[:, None, None], 0, before.short), after.short, {})


@MECHANISMS.register("melodi")
@dataclasses.dataclass(frozen=True)
class Melodi(StatesConfig):
    """MELODI's memories: by default those of the reference's code, `configs/base_melodi.gin`."""

    layers: tuple[int, ...] | None = size(None, "layer_indices")
    """The layers with a short-term memory; negative numbers count from the end. None: all layers."""
    long_layers: tuple[int, ...] = size((), "layer_indices")
    """The layers among them that also have a long-term memory."""
    num_summaries: int = size(64, "length")
    """The number of summary tokens behind every window (u)."""
    short_length: int = size(64, "length")
    """The number of vectors of a short-term memory (r, the paper's S). If it is not `num_summaries`, they are made
    without norms and residual, as in the reference."""
    long_length: int = size(32, "length")
    """The number of vectors that a window adds to a long-term memory (e, the paper's L)."""
    long_slots: int = size(4096, "length")
    """The number of vectors in a long-term memory (m); the oldest are overwritten."""

    sees_block_before: ClassVar[bool] = False

    def __post_init__(self):
        check_positive(self, ("num_summaries", "short_length", "long_length"))
        object.__setattr__(self, "long_layers", tuple(self.long_layers))
        if self.long_slots < self.long_length:
            raise UserError(f"Melodi.long_slots={self.long_slots} must be at least long_length={self.long_length}")

    def check(self, shape, others):
        super().check(shape, others)
        number = shape.num_layers
        if not shape.position.places_vectors:
            name = POSITIONS.name_of(shape.position)
            raise UserError(f"Melodi can't have position={name!r}: memories are not projected with a place")
        if not all(-number <= layer < number for layer in self.long_layers) or not (
            self.long_indices(number) <= self.indices(number)
        ):
            raise UserError(
                f"Melodi.long_layers={self.long_layers} names a layer that Melodi.layers={self.layers} lacks"
            )

    def long_indices(self, num_layers: int) -> frozenset[int]:
        """The indices of the layers with a long-term memory, counted from 0."""
        return frozenset(layer % num_layers for layer in self.long_layers)

    @property
    def closes(self) -> bool:
        return True

    @property
    def summary_tokens(self) -> int:
        return self.num_summaries

    @property
    def waits_for(self) -> str | None:
        return "with Melodi a window of a layer waits for the memory that the window before it leaves"

    def build(self, shape, index, *, rngs):
        return MelodiMemory(self, shape, index, rngs=rngs)

    def flops(self, shape, index):
        """The operations of memories and summary tokens, and of attention in full tiles.

        Not counted is what depends on the length n of segments: the projection of the long-term memory, 4 d i m / n
        operations a token, and attention to the places of the segment's own vectors beside the m slots.
        """
        d, inner, w = shape.model_width, shape.inner_width, shape.window_length
        u, r, e, m = self.num_summaries, self.short_length, self.long_length, self.long_slots
        last = index == max(self.indices(shape.num_layers))
        flops = u * (8 * d * inner + 4 * d * shape.feedforward_width)
        flops += 4 * d * inner * r + 4 * inner * (w + u) * (r + w + u) + 2 * d * (w + u) * (r + u * (not last))
        if index in self.long_indices(shape.num_layers):
            flops += 4 * inner * (w + u) * m + 4 * d * inner * e + 2 * d * (w + u) * e
        return Flops.of_products(flops / w)

    def num_visible(self, shape, position):
        """The tokens of the window up to the token; earlier ones are seen through memories alone."""
        return position % shape.window_length + 1
