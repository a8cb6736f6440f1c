"""Attention by scaled dot products, as in published models: to a span of tokens, the token itself included.

Queries and keys may pass a norm and get rotary positions, on all channels of a head or on the first ones; several heads
of queries share a head of keys and values; a gate may multiply the results (Vaswani et al. 2017; Ainslie et al. 2023;
Su et al. 2021; Qiu et al. 2025). The span has nothing to do with the length of a block: the cache is a ring of as many
blocks as the span reaches into.

A key is cached with the rotation of its offset in its block, and queries get the rotation of the distance between
blocks: so angles never grow with the document, and no cached key is ever rotated again. In shapes `g` is the number of
heads of keys, `j` the number of heads of queries that share one, and `ring` the number of blocks in the cache.
"""

import dataclasses
from typing import ClassVar, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from einops import rearrange
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from meliad_like.errors import UserError
from meliad_like.kernels.registry import kernel_of_span
from meliad_like.layers.attention import attend, merge_heads, split_heads, with_tokens
from meliad_like.layers.basic import Linear, dropout_multiplier, over_root_mean_square, parameter, project
from meliad_like.layers.flops import Flops
from meliad_like.layers.rotary import ROTARY_SCALINGS, RotaryScaling, RotaryTable, Turns, turned
from meliad_like.layers.sharding import from_all, own_blocks
from meliad_like.mixers.base import MIXERS, DecoderShape, Mixer, MixerConfig, Traits, projection_flops
from meliad_like.registry import kind_field, size
from meliad_like.validation import check_choices, check_not_negative, check_positive

ones, zeros = jax.nn.initializers.ones, jax.nn.initializers.zeros


class AttentionCache(NamedTuple):
    """The keys and values of the last blocks as a ring: a token of the document's block i is in the ring's block
    `i % ring`."""

    key: Float[Array, "b g s k"]
    """The keys, rotated by their offset in their block."""
    value: Float[Array, "b g s k"]
    position: Int[Array, " b"]
    """The number of tokens of the document that have been read."""

    def with_tokens(
        self,
        key: Float[Array, "b g n k"],
        value: Float[Array, "b g n k"],
        places: Int[Array, "b n"],
        counts: Int[Array, " b"],
    ) -> "AttentionCache":
        """The cache with the first `counts` tokens of each lane in these places of the ring."""
        keys, values = (
            with_tokens(cached, new, places, counts, axis=2) for cached, new in ((self.key, key), (self.value, value))
        )
        return AttentionCache(keys, values, self.position + counts)


class SpanAttention(Mixer):
    """Attention of a layer's tokens to a span of tokens."""

    def __init__(self, config: "SpanAttentionConfig", shape: DecoderShape, *, rngs: nnx.Rngs):
        self.config, self.shape = config, shape
        self.w, self.ring = shape.window_length, config.ring(shape)
        h, g, k, d = shape.num_heads, config.key_heads(shape), shape.head_size, shape.model_width
        self.key_heads, self.table = g, config.table(shape)
        biased = {"bias_initializer": zeros if config.input_bias else None, "rngs": rngs}
        self.query = Linear(d, h * k, ("model", "heads"), **biased)
        self.key, self.value = (Linear(d, g * k, ("model", "heads"), **biased) for _ in range(2))
        self.gate = Linear(d, h * k, ("model", "heads"), **biased) if config.gate else None
        sizes = {"none": None, "head": (k, k), "all": (h * k, g * k)}[config.norm]
        axes = ("heads",) if config.norm == "all" else (None,)
        self.query_scale, self.key_scale = (
            (None, None) if sizes is None else (parameter(rngs.params(), ones, (i,), axes, "scale") for i in sizes)
        )

    def init_carry(self, b, dtype):
        empty = jnp.zeros((b, self.key_heads, self.ring * self.w, self.shape.head_size), dtype)
        return AttentionCache(empty, empty, jnp.zeros(b, jnp.int32))

    def _project(
        self, x: Float[Array, "b n d"]
    ) -> tuple[Float[Array, "b h n k"], Float[Array, "b g n k"], Float[Array, "b g n k"], Float[Array, "b n i"] | None]:
        """Queries times the attention's scale, and keys, without positions; values, and the logits of the gate."""
        query, key, value, *gate = project(x, self.query, self.key, self.value, *([self.gate] if self.gate else []))
        query, key = self._normed(query, self.query_scale), self._normed(key, self.key_scale)
        scale = self.shape.head_size**-0.5 if self.config.scale is None else self.config.scale
        query = (query.astype(jnp.float32) * scale).astype(x.dtype)
        g = self.key_heads
        heads = split_heads(query, self.shape.num_heads), split_heads(key, g), split_heads(value, g)
        return *heads, (gate[0] if gate else None)

    def _normed(self, x: Float[Array, "b n i"], scale: nnx.Param | None) -> Float[Array, "b n i"]:
        if scale is None:
            return x
        heads = rearrange(x, "b n (h k) -> b n h k", k=scale.shape[0])
        y = over_root_mean_square(heads, self.config.norm_epsilon) * scale[...]
        return rearrange(y, "b n h k -> b n (h k)").astype(x.dtype)

    def _output(self, mixed: Float[Array, "b h n k"], gate: Float[Array, "b n i"] | None) -> Float[Array, "b n i"]:
        y = merge_heads(mixed)
        return y if gate is None else y * jax.nn.sigmoid(gate)

    def __call__(self, x, context, carry, dropout_key):
        w, ring, g = self.w, self.ring, self.key_heads
        query, key, value, gate = self._project(x)
        positions, read = context.count(carry.position, w)
        c = positions.shape[1]
        query, key, value = (rearrange(y, "b h (c w) k -> b h c w k", w=w) for y in (query, key, value))
        if self.table is not None:
            turns = self.table.of(np.arange(w), scaled=True)
            query, key = turned(query, turns), turned(key, turns)
        # The cached blocks before the segment, the oldest first, and then the segment's.
        before = (carry.position[:, None] // w - np.arange(ring - 1, 0, -1)) % ring
        keys, values = (
            jnp.concatenate([_blocks(cached, ring, before), from_all(new.astype(cached.dtype), axis=2)], axis=2)
            for cached, new in ((carry.key, key), (carry.value, value))
        )
        # The ring's blocks after the segment: each holds the last block of the document that belongs there.
        last = keys.shape[2] - 1 - (read[:, None] // w - 1 - np.arange(ring)) % ring
        kept_keys, kept_values = (rearrange(_take(y, last), "b g r w k -> b g (r w) k") for y in (keys, values))
        keys, values = (own_blocks(y, axis=2, before=ring - 1) for y in (keys, values))
        if self.table is not None:
            keys = turned(keys, _each_block(self.table.of((np.arange(ring + c - 1) - (ring - 1)) * w)))
            query = turned(query, _each_block(self.table.of(np.arange(c) * w)))
        after = AttentionCache(kept_keys, kept_values, read)
        rate = self.shape.dropout_rate
        attend_span = kernel_of_span(self.shape.attention_kernel, w)
        if attend_span and (dropout_key is None or rate == 0):
            tokens = (rearrange(y.astype(x.dtype), "b h c w k -> b h (c w) k") for y in (query, keys, values))
            mixed = attend_span(*tokens, *self._documents(positions), self.config.span)
            return self._output(mixed, gate), after
        query = rearrange(query, "b (g j) c w k -> c b g (j w) k", g=g)

        def attend_block(i, query, position, dropout_key):
            near = (jax.lax.dynamic_slice_in_dim(y, i, ring, axis=2) for y in (keys, values))
            near_keys, near_values = (rearrange(y, "b g r w k -> b g (r w) k") for y in near)
            multiplier = dropout_multiplier(dropout_key, rate, (*query.shape[:-1], near_keys.shape[2]))
            near_keys, near_values, mask = near_keys.astype(x.dtype), near_values.astype(x.dtype), self._seen(position)
            return attend(query, near_keys, near_values, mask=mask, multiplier=multiplier)

        # The weights of a block are computed again in the backward pass, which holds one block in memory at a time.
        read_block = jax.checkpoint(attend_block, prevent_cse=c == 1)
        if c == 1:
            mixed = read_block(0, query[0], positions[:, 0], dropout_key)[None]
        else:

            def step(_, block):
                i, query, position = block
                folded = None if dropout_key is None else jax.random.fold_in(dropout_key, i)
                return None, read_block(i, query, position, folded)

            _, mixed = jax.lax.scan(step, None, (jnp.arange(c), query, positions.T))
        mixed = rearrange(mixed, "c b g (j w) k -> b (g j) (c w) k", w=w)
        return self._output(mixed.astype(x.dtype), gate), after

    def _documents(self, positions: Int[Array, "b c"]) -> tuple[Int[Array, "b n"], Int[Array, "b s"]]:
        """The documents of the queries and of the keys, each named by the place among the keys at which it begins.
        A key before the documents of all queries belongs to none of them."""
        begins = (self.ring - 1 + np.arange(positions.shape[1])) * self.w - positions
        places = np.arange((self.ring - 1 + positions.shape[1]) * self.w)
        begun = jnp.where(begins[:, :, None] <= places, begins[:, :, None], np.iinfo(np.int32).min)
        return jnp.repeat(begins, self.w, axis=1), jnp.max(begun, axis=1)

    def _seen(self, position: Int[Array, " b"]) -> Bool[Array, "b 1 t s"]:
        """True where the queries of a block see a key of the ring's blocks, the last of which is their own: in the
        same document within the span. `position` is the number of tokens of the document before the block."""
        w, ring = self.w, self.ring
        offset = np.arange(w)[:, None]
        distance = (ring - 1) * w + offset - np.arange(ring * w)
        within = (distance >= 0) & (distance < self.config.span)
        seen = within & (distance <= offset + position[:, None, None])
        return jnp.tile(seen[:, None], (1, 1, self.shape.num_heads // self.key_heads, 1))

    def decode(self, x, counts, context, carry):
        w, ring, g, n = self.w, self.ring, self.key_heads, x.shape[1]
        query, key, value, gate = self._project(x)
        block = carry.position // w
        position = carry.position[:, None] + np.arange(n)
        offset = position - (block * w)[:, None]
        # The ring's first blocks, which a document fills one after the other.
        near = ring if context.longest is None else min(ring, -(-context.longest // w))
        # The number of blocks from each of them to the tokens' block.
        distance = (block[:, None] - np.arange(near)) % ring
        if self.table is not None:
            query, key = (turned(y, self._taken(np.arange(w), offset[:, None], scaled=True)) for y in (query, key))
        # Each of the ring's blocks has queries of its own, so that the block is an axis of lanes.
        query = jnp.broadcast_to(query[:, :, None], (*query.shape[:2], near, *query.shape[2:]))
        if self.table is not None:
            query = turned(query, self._taken(np.arange(ring) * w, distance[:, None, :, None]))
        carry = carry.with_tokens(key, value, (block % ring * w)[:, None] + offset, counts)
        away = distance[:, None, :, None] * w + offset[..., None, None] - np.arange(w)
        seen = (away >= 0) & (away < self.config.span) & (away <= position[..., None, None])
        queries = rearrange(query, "b (g j) r n k -> b g r (j n) k", g=g)
        seen = jnp.tile(seen, (1, queries.shape[3] // n, 1, 1))[:, None]
        keys, values = (rearrange(y[:, :, : near * w], "b g (r w) k -> b g r w k", w=w) for y in carry[:2])
        scores = jnp.einsum("bgrmk,bgrwk->bgmrw", queries, keys.astype(x.dtype), preferred_element_type=jnp.float32)
        weights = jax.nn.softmax(jnp.where(seen, scores, -jnp.inf), axis=(-2, -1)).astype(x.dtype)
        mixed = jnp.einsum("bgmrw,bgrwk->bgmk", weights, values.astype(x.dtype), preferred_element_type=jnp.float32)
        mixed = rearrange(mixed, "b g (j n) k -> b (g j) n k", n=n).astype(x.dtype)
        return self._output(mixed, gate), carry

    def _taken(self, places: Int[np.ndarray, " m"], index: Int[Array, "*batch"], *, scaled: bool = False) -> Turns:
        """The rotations (`Turns`) of the places with these indices."""
        assert self.table is not None
        return Turns(*(jnp.take(y, index, axis=0, mode="clip") for y in self.table.of(places, scaled=scaled)))


def _take(blocks: Float[Array, "b g r w k"], index: Int[Array, "b m"]) -> Float[Array, "b g m w k"]:
    return jnp.take_along_axis(blocks, index[:, None, :, None, None], axis=2, mode="clip")


def _blocks(cached: Float[Array, "b g s k"], ring: int, index: Int[Array, "b m"]) -> Float[Array, "b g m w k"]:
    """The blocks of the ring with these indices, which differ from lane to lane."""
    return _take(rearrange(cached, "b g (r w) k -> b g r w k", r=ring), index)


def _each_block(turns: Turns) -> Turns:
    """The rotations of blocks, for all tokens of each block."""
    return Turns(*(y[:, None] for y in turns))


@dataclasses.dataclass(frozen=True)
class SpanAttentionConfig(MixerConfig):
    """Attention to the last `span` tokens, with `DecoderConfig.num_heads` heads of queries. A field that is bound by
    the name of this class is bound for both kinds."""

    begins_again: ClassVar[bool] = False
    """Whether positions begin again with every block, which alone is seen."""
    span: int = size(2048, "length")
    """The number of tokens that a token sees, itself included, of its document."""
    num_key_heads: int = size(0, "heads")
    """The number of heads of keys and values; 0: `num_heads`. Consecutive heads of queries share one."""
    rotary_share: float = 1.0
    """The share of a head's channels, from the first on, that get rotary positions; 0: none."""
    rotary_base: float = 10_000.0
    """The longest wavelength of rotary positions, over 2 pi."""
    rotary_scaling: RotaryScaling = kind_field(ROTARY_SCALINGS, RotaryScaling)
    """The scaling of these wavelengths."""
    norm: Literal["none", "head", "all"] = "none"
    """The norms of queries and keys before positions: none, of each head, or of all heads together."""
    norm_epsilon: float = 1e-6
    """The epsilon of these RMS norms."""
    gate: bool = False
    """Whether the results are multiplied by the sigmoid of another projection of the layer's input."""
    input_bias: bool = False
    """Whether the projections to queries, keys, values and gates have biases."""
    output_bias: bool = False
    """Whether the layer's output projection has a bias."""
    scale: float | None = None
    """The factor on products of queries and keys; None: 1 / sqrt(head_size)."""

    def __post_init__(self):
        check_choices(self)
        check_positive(self, ("span",))
        check_not_negative(self, ("num_key_heads", "norm_epsilon"))
        if not 0 <= self.rotary_share <= 1:
            raise UserError(f"{type(self).__name__}.rotary_share={self.rotary_share} must be between 0 and 1")
        if self.rotary_scaling.extends_windows and not self.begins_again:
            name = f"{type(self).__name__}.rotary_scaling={ROTARY_SCALINGS.name_of(self.rotary_scaling)!r}"
            raise UserError(f"{name} depends on a text's length, and spans don't")

    def check(self, shape):
        if shape.num_heads % self.key_heads(shape):
            name = f"{type(self).__name__}.num_key_heads={self.num_key_heads}"
            raise UserError(f"num_heads={shape.num_heads} must be a multiple of {name}")
        if (turning := self.rotary_size(shape)) % 2:
            name = f"{type(self).__name__}.rotary_share={self.rotary_share}"
            raise UserError(f"{name} of head_size={shape.head_size} is {turning} channels, which must be even")

    def key_heads(self, shape: DecoderShape) -> int:
        return self.num_key_heads or shape.num_heads

    def rotary_size(self, shape: DecoderShape) -> int:
        """The number of a head's channels with rotary positions."""
        return int(self.rotary_share * shape.head_size)

    def table(self, shape: DecoderShape) -> RotaryTable | None:
        turning = self.rotary_size(shape)
        return RotaryTable(turning, self.rotary_base, self.rotary_scaling) if turning else None

    def ring(self, shape: DecoderShape) -> int:
        """The number of blocks in the cache: the token's block, and those that the rest of the span reaches into."""
        return 1 if self.begins_again else -(-(self.span - 1) // shape.window_length) + 1

    def build(self, shape, *, rngs):
        return SpanAttention(self, shape, rngs=rngs)

    def has_kernel(self, shape, kind):
        return kind == "attention" and kernel_of_span(shape.attention_kernel, shape.window_length) is not None

    def flops(self, shape):
        """The operations of projections, and of products with all keys of the cache's blocks, as they are computed."""
        products = 4 * self.ring(shape) * shape.window_length * shape.inner_width
        return Flops.of_products(projection_flops(self, shape) + products)

    def traits(self, shape):
        return Traits(
            attends_to=lambda position: np.minimum(position, self.span - 1),
            limited_by=f"{type(self).__name__}.span",
            output_bias=self.output_bias,
        )


@MIXERS.register("dot_product_attention")
class DotProductAttention(SpanAttentionConfig):
    """Attention to a long span, or to all that is cached."""


@MIXERS.register("local_attention")
class LocalAttention(SpanAttentionConfig):
    """Attention to a window, in stacks in which it takes turns with attention to a longer span."""

    span: int = size(512, "length")
    """The number of tokens that a token sees, itself included, of its document."""
