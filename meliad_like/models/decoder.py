"""The decoder: Slide, Transformer-XL, Block-Recurrent, Memorizing and every other combination of memory mechanisms.

Block-Recurrent Transformers, section 3; block feedback, appendix E.
"""

import dataclasses
import functools
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from einops import rearrange
from flax import nnx
from jaxtyping import Array, Float, Int, PRNGKeyArray

from meliad_like.errors import UserError
from meliad_like.layers.attention import merge_heads
from meliad_like.layers.basic import FeedForward, Linear, RMSNorm, embed, parameter, rows, tiled_dropout
from meliad_like.layers.flops import Flops
from meliad_like.layers.sequence import num_parts
from meliad_like.layers.sharding import constrain
from meliad_like.layers.windows import with_summaries, without_summaries
from meliad_like.mechanisms.base import (
    MECHANISMS,
    LayerParts,
    Mechanism,
    MechanismConfig,
    OneToken,
    SegmentTokens,
    Shape,
    Watched,
)
from meliad_like.mechanisms.positions import POSITIONS, T5, NoPosition, Position, PositionConfig
from meliad_like.mechanisms.sliding_window import SlidingWindow
from meliad_like.mechanisms.token_heads import TokenHeads
from meliad_like.models.base import MODELS, ModelConfig
from meliad_like.models.decoder_carry import LayerCarry, parts_of, with_parts
from meliad_like.models.skeleton import DecoderCarry, Layer, Skeleton
from meliad_like.registry import kind_field, resumable, size
from meliad_like.validation import check_not_negative

AnyMechanism = TypeVar("AnyMechanism", bound=MechanismConfig)


@MODELS.register("decoder")
@dataclasses.dataclass(frozen=True)
class DecoderConfig(ModelConfig):
    """A stack of layers that see earlier tokens through memory mechanisms.

    The defaults are the paper's 12-layer model with a sliding window. `num_layers` does not count `extra_layers`.
    """

    extra_layers: int = size(0, "fixed")
    """Added to `num_layers`. The paper's 13-layer baselines have one extra layer; so do those of other sizes."""
    position: PositionConfig = kind_field(POSITIONS, T5)
    """The position strategy of attention inside the window."""
    mechanisms: tuple[MechanismConfig, ...] = kind_field(MECHANISMS, lambda: (SlidingWindow(),), many=True)
    """The memory mechanisms: the ways in which layers see earlier tokens (`meliad_like/mechanisms`)."""
    logit_scale: float | None = None
    """Factor on the hidden vectors before the softmax; by default 1 / sqrt(model_width)."""
    feedforward_bias: bool = False
    """Whether feed-forward networks have biases, as in the newer code of the reference (`melodi/`)."""
    mask_empty_cache: bool = True
    """Whether the empty cache is masked for a document's first tokens. In the reference they attend to zeros."""
    scan_layers: bool = resumable(False)
    """Whether consecutive layers of the same form are one `jax.lax.scan`, a smaller program. Decoding is not."""

    def __post_init__(self):
        super().__post_init__()
        check_not_negative(self, ("extra_layers",))
        self.position.check(self.model_width, self.head_size, self.mask_empty_cache)
        ordered = sorted(self.mechanisms, key=lambda mechanism: (mechanism.rank, MECHANISMS.name_of(mechanism)))
        object.__setattr__(self, "mechanisms", tuple(ordered))
        for mechanism in self.mechanisms:
            others = tuple(other for other in self.mechanisms if other is not mechanism)
            if any(type(other) is type(mechanism) for other in others):
                raise UserError(f"mechanisms hold two {type(mechanism).__name__}: name all of its layers in one")
            mechanism.check(self.shape, others)
        for index in range(self.total_layers):
            own = self.acting(index)
            closing = [type(mechanism).__name__ for mechanism in own if mechanism.closes]
            if not any(mechanism.mixed_width(self.shape) for mechanism in own):
                raise UserError(f"layer {index} has no mechanism by which it sees other tokens: name it in `layers`")
            if len(closing) > 1:
                raise UserError(f"layer {index} can't have both {' and '.join(closing)}: each computes its output")

    @property
    def summary_tokens(self) -> int:
        """The number of summary tokens behind every block."""
        return sum(mechanism.summary_tokens for mechanism in self.mechanisms)

    @property
    def total_layers(self) -> int:
        return self.num_layers + self.extra_layers

    @functools.cached_property
    def shape(self) -> Shape:
        """The sizes of the decoder that its mechanisms receive."""
        same = (field.name for field in dataclasses.fields(Shape) if field.name != "num_layers")
        return Shape(num_layers=self.total_layers, **{name: getattr(self, name) for name in same})

    def acting(self, index: int) -> list[MechanismConfig]:
        """The mechanisms of layer `index`, counted from 0, in the order of its calls; one that closes it comes last."""
        return [mechanism for mechanism in self.mechanisms if mechanism.acts(self.shape, index)]

    def mechanism(self, kind: type[AnyMechanism]) -> AnyMechanism | None:
        """The config of the mechanism of this class; None if the decoder has none."""
        return next((mechanism for mechanism in self.mechanisms if isinstance(mechanism, kind)), None)

    def with_mechanism(self, mechanism: MechanismConfig) -> "DecoderConfig":
        """The same decoder with this mechanism, which replaces a mechanism of the same class or is added."""
        others = (other for other in self.mechanisms if type(other) is not type(mechanism))
        return dataclasses.replace(self, mechanisms=(*others, mechanism))

    def without_mechanism(self, kind: type[MechanismConfig]) -> "DecoderConfig":
        """The same decoder without the mechanism of this class."""
        others = tuple(other for other in self.mechanisms if not isinstance(other, kind))
        return dataclasses.replace(self, mechanisms=others)

    def cleared(self) -> "DecoderConfig | None":
        """The same decoder with states that are reset in every segment; None if it has no states."""
        cleared = [mechanism.cleared() for mechanism in self.mechanisms]
        if all(mechanism is None for mechanism in cleared):
            return None
        kept = zip(cleared, self.mechanisms)
        return dataclasses.replace(self, mechanisms=tuple(new or old for new, old in kept))

    def layer_position(self, index: int) -> PositionConfig:
        """The position strategy of layer `index`, counted from 0."""
        free = any(mechanism.without_positions for mechanism in self.acting(index))
        return NoPosition() if free else self.position

    @property
    def num_block_by_block(self) -> int:
        """The number of layers that read a block before the next block: those up to the last one that publishes."""
        publishing = (mechanism.indices(self.total_layers) for mechanism in self.mechanisms if mechanism.publishes)
        return max((index + 1 for indices in publishing for index in indices), default=0)

    @property
    def needs_segments(self) -> str | None:
        return next((m.needs_segments for m in self.mechanisms if m.needs_segments is not None), None)

    @property
    def waits_for(self) -> str | None:
        return next((m.waits_for for m in self.mechanisms if m.waits_for is not None), None)

    def flops(self, vocabulary_size: int) -> Flops:
        d, inner = self.model_width, self.shape.inner_width
        parts = [Flops.of_products(2 * d * vocabulary_size)]
        for index in range(self.total_layers):
            own = self.acting(index)
            mixed = sum(mechanism.mixed_width(self.shape) for mechanism in own)
            parts.append(Flops.of_products(2 * d * 3 * inner + 2 * mixed * d + 4 * d * self.feedforward_width))
            parts += [mechanism.flops(self.shape, index) for mechanism in own]
        return Flops(*(sum(kind) for kind in zip(*parts)))

    def num_visible(self, position: Int[np.ndarray, "..."]) -> Int[np.ndarray, "..."]:
        visible = [mechanism.num_visible(self.shape, position) for mechanism in self.mechanisms]
        return np.asarray(np.maximum.reduce(visible))

    def carry_axes(self, carry: DecoderCarry) -> DecoderCarry:
        axes = {MECHANISMS.name_of(kind): kind.carry_axes for kind in self.mechanisms}

        def of_layer(layer: LayerCarry) -> LayerCarry:
            mechanisms = {name: jax.tree.map(lambda _, n=name: axes[n], one) for name, one in layer.mechanisms.items()}
            tokens, positions = jax.tree.map(lambda _: ("lanes",), (layer.tokens, layer.positions))
            return LayerCarry(tokens, mechanisms, positions)

        return DecoderCarry(("lanes",), [of_layer(layer) for layer in carry.layers])  # type: ignore[arg-type]

    def parts(self, carry: DecoderCarry) -> dict[str, Any]:
        return parts_of(carry)

    def with_parts(self, carry: DecoderCarry, parts: dict[str, Any]) -> DecoderCarry:
        return with_parts(carry, parts)

    def build(self, vocabulary_size: int, *, rngs: nnx.Rngs) -> "Decoder":
        return Decoder(self, vocabulary_size, rngs=rngs)


class DecoderLayer(Layer):
    """Pre-norm attention and feed-forward with residuals (Block-Recurrent Transformers, section 3.1, vertical)."""

    def __init__(self, config: DecoderConfig, index: int, *, rngs: nnx.Rngs):
        self.config = config
        d, shape = config.model_width, config.shape
        self.attention_norm = RMSNorm(d, rngs=rngs)
        self.heads = TokenHeads(
            d,
            config.num_heads,
            config.head_size,
            config.window_length,
            config.layer_position(index),
            config.mask_empty_cache,
            rngs=rngs,
        )
        acting = {MECHANISMS.name_of(kind): kind for kind in config.acting(index)}
        self.mechanisms = nnx.Dict({name: kind.build(shape, index, rngs=rngs) for name, kind in acting.items()})
        # A tree of parameters is sorted by names; mechanisms are called in this order, the closing one last.
        self.names = tuple(acting)
        mixed_width = sum(kind.mixed_width(shape) for kind in acting.values())
        self.num_results = mixed_width // shape.inner_width
        self.output = Linear(mixed_width, d, ("heads", "model"), rngs=rngs)
        self.feedforward_norm = RMSNorm(d, rngs=rngs)
        self.feedforward = FeedForward(d, config.feedforward_width, d, rngs=rngs, bias=config.feedforward_bias)
        self.closing = next((name for name, kind in acting.items() if kind.closes), None)
        """The mechanism that computes the layer's output, if there is one."""
        self.sees_block_before = any(kind.sees_block_before for kind in acting.values())

    def init_carry(self, b: int, dtype, decoding: bool) -> LayerCarry:
        carries = {name: self.mechanisms[name].init_carry(b, dtype, decoding) for name in self.names}
        cache = self.heads.init_cache(b, dtype, decoding) if decoding or self.sees_block_before else None
        return LayerCarry(cache, carries)

    def _each(self, method: str, carry: LayerCarry, *arguments: Any) -> LayerCarry:
        """The carry after calling the named method of each mechanism."""
        before = carry.mechanisms
        after = {name: getattr(self.mechanisms[name], method)(before[name], *arguments) for name in self.names}
        return carry._replace(mechanisms=after)

    def begin_segment(self, carry: LayerCarry) -> LayerCarry:
        return self._each("begin_segment", carry)

    def begin_block(self, carry: LayerCarry, position: Int[Array, " b"]) -> LayerCarry:
        cache, begun = self.heads.plain(carry.tokens), {}
        for name in self.names:
            own = carry.own_positions(name, position[:, None], self.config.window_length)
            begun[name] = self.mechanisms[name].begin_block(carry.mechanisms[name], own[:, 0] == 0, cache)
        return carry._replace(tokens=self.heads.begin_block(carry.tokens), mechanisms=begun)

    def end_block(self, carry: LayerCarry, position: Int[Array, " b"]) -> LayerCarry:
        return self._each("end_block", carry, self.heads.plain(carry.tokens), position)

    def close_block(
        self, summaries: Float[Array, "b u d"] | None, carry: LayerCarry, position: Int[Array, " b"]
    ) -> tuple[Float[Array, "b u d"] | None, LayerCarry]:
        """The output for the summary tokens of a decoded block, and the carry after it (`Mechanism.close_block`)."""
        if (name := self.closing) is None:
            return summaries, carry
        cache = self.heads.plain(carry.tokens)
        assert cache is not None
        closed = self.mechanisms[name].close_block(self._parts(), summaries, carry.mechanisms[name], cache, position)
        return closed[0], carry._replace(mechanisms={**carry.mechanisms, name: closed[1]})

    @property
    def acts_at_blocks(self) -> bool:
        """Whether decoding has to call `begin_block` and `end_block` of this layer."""
        classes = [type(mechanism) for mechanism in self.mechanisms.values()]
        return type(self.heads.position).begin_block is not Position.begin_block or any(
            getattr(one, method) is not getattr(Mechanism, method)
            for one in classes
            for method in ("begin_block", "end_block", "close_block")
        )

    def publish(self, carry: LayerCarry, name: str) -> Any:
        """What the named mechanism publishes for other layers, after `begin_block`."""
        return self.mechanisms[name].publish(carry.mechanisms[name])

    def _parts(self) -> LayerParts:
        def finish(x, results, key):
            return self._finish(x, merge_heads(*results), key)

        return LayerParts(self._normed, self.heads, self.num_results - 1, finish)

    def _normed(self, x: Float[Array, "b n d"], dropout_key: PRNGKeyArray | None) -> Float[Array, "b n d"]:
        return tiled_dropout(self.attention_norm(x), self.config.dropout_rate, dropout_key)

    def _finish(
        self, x: Float[Array, "*batch d"], mixed: Float[Array, "*batch i"], dropout_key: PRNGKeyArray | None = None
    ) -> Float[Array, "*batch d"]:
        x = x + self.output(mixed)
        with jax.named_scope("feedforward"):
            y = self.feedforward(self.feedforward_norm(x))
            if dropout_key is not None:
                y = tiled_dropout(y, self.config.dropout_rate, dropout_key)
            return x + y

    def __call__(
        self,
        x: Float[Array, "b n d"],
        carry: LayerCarry,
        positions: Int[Array, "b c"],
        shared: dict[str, Any],
        dropout_key: PRNGKeyArray | None = None,
    ) -> tuple[Float[Array, "b n d"], LayerCarry]:
        num_keys, w = 2 + len(self.names), self.config.window_length
        keys = [None] * num_keys if dropout_key is None else list(jax.random.split(dropout_key, num_keys))
        x, summaries = without_summaries(x, positions.shape[1], w)
        normed = self._normed(x, keys[0])
        for_kernel = any(module.reads_projected for module in self.mechanisms.values())
        tile, cache = self.heads.tile(normed, carry.tokens, positions, for_kernel)
        own_positions = {name: carry.own_positions(name, positions, w) for name in self.names}
        tokens = {name: SegmentTokens(normed, tile, own_positions[name], shared) for name in self.names}
        mixed, carries = [], {}
        for name, key in zip(self.names, keys[2:], strict=True):
            if name == self.closing:
                continue
            with jax.named_scope(name):
                own, carries[name] = self.mechanisms[name](tokens[name], carry.mechanisms[name], key)
            mixed = self.mechanisms[name].combine(mixed, own)
        if (name := self.closing) is None:
            x = self._finish(x, rearrange(merge_heads(*mixed), "b c w i -> b (c w) i"), keys[1])
        else:
            with jax.named_scope(name):
                arguments = x, summaries, tokens[name], mixed, carry.mechanisms[name], keys[1]
                x, summaries, carries[name] = self.mechanisms[name].close(self._parts(), *arguments)
        read = {name: own_positions[name][:, -1] + w for name in carry.positions}
        return with_summaries(x, summaries), LayerCarry(cache, carries, read)

    def decode_step(
        self, x: Float[Array, "b d"], carry: LayerCarry, position: Int[Array, " b"], shared: dict[str, Any]
    ) -> tuple[Float[Array, "b d"], LayerCarry]:
        normed = self.attention_norm(x)
        tile, cache = self.heads.token(normed, carry.tokens, position)
        token, mixed, carries = OneToken(normed, tile, position, shared), [], {}
        for name in self.names:
            if name == self.closing:
                continue
            with jax.named_scope(name):
                own, carries[name] = self.mechanisms[name].decode_step(token, carry.mechanisms[name])
            mixed = self.mechanisms[name].combine(mixed, own)
        if (name := self.closing) is None:
            x = self._finish(x, merge_heads(*mixed)[:, 0])
        else:
            module = self.mechanisms[name]
            x, carries[name] = module.close_token(self._parts(), x, token, mixed, carry.mechanisms[name])
        return x, LayerCarry(cache, carries)

    def watch(self, before: LayerCarry, after: LayerCarry, position: Int[Array, " b"]) -> dict[str, Watched]:
        tile = None
        if before.tokens is not None and after.tokens is not None:
            tile = self.heads.tile_of_caches(before.tokens, after.tokens, position)
        watched = {
            name: self.mechanisms[name].watch(before.mechanisms[name], after.mechanisms[name], tile, position == 0)
            for name in self.names
        }
        return {name: one for name, one in watched.items() if one is not None}


class Decoder(Skeleton):
    """A language model with a window of `w` tokens, and memory mechanisms that may reach further back."""

    config: DecoderConfig

    def __init__(self, config: DecoderConfig, vocabulary_size: int, *, rngs: nnx.Rngs):
        self.config = config
        self.num_block_by_block = config.num_block_by_block
        self.scan_layers = config.scan_layers
        self.logit_scale = config.model_width**-0.5 if config.logit_scale is None else config.logit_scale
        shape = (vocabulary_size, config.model_width)
        self.embedding = parameter(rngs.params(), jax.nn.initializers.normal(1.0), shape, ("vocabulary", "model"))
        self.layers = nnx.List(DecoderLayer(config, i, rngs=rngs) for i in range(config.total_layers))
        initializer, shape = jax.nn.initializers.truncated_normal(0.25), (config.summary_tokens, config.model_width)
        summaries = parameter(rngs.params(), initializer, shape, (None, "model")) if config.summary_tokens else None
        self.summary_embedding = summaries
        self.final_norm = RMSNorm(config.model_width, rngs=rngs)

    def embed(self, tokens, position, dropout_key):
        # XLA crashes on a lookup along the vocabulary, sharded over `tensor`, inside of `over_sequence`.
        vocabulary = "vocabulary" if num_parts() == 1 else None
        table = self.embedding[...]
        # Rounded after the lookup, so that the gradient of a frequent token, a sum of many small terms, is float32.
        return embed(table if tokens.ndim == 1 else constrain(table, vocabulary, None), tokens).astype(self.dtype)

    def _summaries(self, *shape: int) -> Float[Array, "*batch u d"] | None:
        """The summary tokens before the first layer, which are the same for all blocks; None if there are none."""
        if self.summary_embedding is None:
            return None
        table = self.summary_embedding[...].astype(self.dtype)
        return jnp.broadcast_to(table, (*shape, *table.shape))

    def enter(self, x, c):
        return with_summaries(x, self._summaries(x.shape[0], c))

    def leave(self, x, c):
        return without_summaries(x, c, self.config.window_length)[0]

    def end_block(self, layers, position):
        ended, summaries = {}, self._summaries(len(position))
        for i, one in super().end_block(layers, position).items():
            summaries, ended[i] = self.layers[i].close_block(summaries, one, position)
        return ended

    def finish(self, x, dropout_key):
        x = self.final_norm(x)
        return x if dropout_key is None else tiled_dropout(x, self.config.dropout_rate, dropout_key)

    def logits(self, hidden: Float[Array, "*batch d"]) -> Float[Array, "*batch v"]:
        """The logits of the next token, float32; the softmax shares the embedding's parameters."""
        table = self.embedding[...].astype(hidden.dtype)
        logits = self.logit_scale * jnp.einsum("nd,vd->nv", rows(hidden), table, preferred_element_type=jnp.float32)
        return logits.reshape(*hidden.shape[:-1], -1)

    def shared(self, carry: DecoderCarry) -> dict[str, Any]:
        shared = {}
        for kind in self.config.mechanisms:
            if kind.publishes:
                name, indices = MECHANISMS.name_of(kind), sorted(kind.indices(len(self.layers)))
                shared[name] = kind.share({i: self.layers[i].publish(carry.layers[i], name) for i in indices})
        return shared
