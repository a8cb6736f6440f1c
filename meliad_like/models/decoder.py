"""The decoder: a stack of layers with any combination of mixers (`meliad_like/mixers/base.py`).

Slide, Transformer-XL, Block-Recurrent and Memorizing Transformers, and stacks in which layers with and without
attention take turns. Block-Recurrent Transformers, section 3; block feedback, appendix E.
"""

import dataclasses
import functools
import itertools
from collections.abc import Iterable
from typing import Any, ClassVar, Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, PRNGKeyArray

from meliad_like.errors import UserError
from meliad_like.layers.basic import Linear, RMSNorm, embed, parameter, scores, split_key, tiled_dropout
from meliad_like.layers.feedforward import FEEDFORWARDS, FeedForwardConfig
from meliad_like.layers.flops import Flops
from meliad_like.layers.sharding import constrain, num_parts
from meliad_like.mixers.base import MIXERS, Carry, DecoderShape, KernelKind, Mixer, MixerConfig
from meliad_like.mixers.kernel_check import kernel_that_works
from meliad_like.mixers.positions import POSITIONS, T5, PositionConfig
from meliad_like.mixers.sliding_window import TokenCache
from meliad_like.models.config import FAR, MODELS, ModelConfig, ModelTraits, builds
from meliad_like.models.model import BaseDecoder
from meliad_like.models.notation import Pair, entries_by_layer
from meliad_like.registry import Registry, configs_in, kind_field, names_in, resumable, size
from meliad_like.validation import check_above_zero, check_not_negative, layer_indices

zeros = jax.nn.initializers.zeros
HOW_IT_READS = ("window_length", "activation_dtype", "dropout_rate", "chunk_length", "clear_states", "span")
"""Fields that a published model does not determine."""
Norms = Literal["before", "after", "around"]
"""The place of the norms of a layer's mixers and of its feed-forward network."""


@dataclasses.dataclass(frozen=True)
class StackConfig(ModelConfig):
    """The fields of all decoders whose softmax shares the embedding, and whose layers attend to a window.

    `num_layers` does not count `extra_layers`. In gin the fields are bound as those of `DecoderConfig`, so that one
    file of sizes or options serves all these decoders.
    """

    bound_as: ClassVar[str] = "DecoderConfig"

    extra_layers: int = size(0, "fixed")
    """The number of layers in addition to `num_layers`. The paper's 13-layer baselines have one; so do other sizes."""
    position: PositionConfig = kind_field(POSITIONS, T5)
    """The position strategy of attention inside the window."""
    logit_scale: float | None = None
    """Factor on the hidden vectors before the softmax; by default 1 / sqrt(model_width)."""
    logit_bound: float | None = None
    """The bound c of the logits, which become c tanh(logit / c); None: none."""
    embedding_scale: float = 1.0
    """Factor on the embedding's vectors, without an effect on logits that share the embedding."""
    tied_embedding: bool = True
    """Whether the softmax shares the embedding."""
    norm_epsilon: float = 1e-6
    """The epsilon of the RMS norms of the layers and of the last one, which is added to the mean square."""
    feedforward_bias: bool = False
    """Whether feed-forward networks have biases, as in the newer code of the reference (`melodi/`)."""
    mask_empty_cache: bool = True
    """Whether the empty cache is masked for a document's first tokens. In the reference they attend to zeros."""
    clear_states: bool = False
    """Whether every segment begins with empty states, which measures their value beyond a segment. The window stays."""

    def __post_init__(self):
        super().__post_init__()
        check_not_negative(self, ("extra_layers", "norm_epsilon"))
        check_above_zero(self, ("logit_bound",))
        self.position.check(self.head_size)

    @property
    def total_layers(self) -> int:
        return self.num_layers + self.extra_layers

    @property
    def clears_states(self) -> str | None:
        """The setting by which every segment begins with empty states; None: they pass from segment to segment."""
        return "DecoderConfig.clear_states=True" if self.clear_states else None


@MODELS.register("decoder")
class DecoderConfig(StackConfig):
    """A stack of layers that see earlier tokens through mixers.

    The defaults are the paper's 12-layer model with a sliding window.
    """

    pattern: tuple[str | Pair, ...] = size(("sliding_window+feedforward",), "layer_entries")
    """What each layer has: the names of mixers and of a feed-forward network, joined by +. These entries are repeated
    from the first layer to the last; pairs behind them, such as ((-3,), "recurrent_states+feedforward"), say what the
    layers of these numbers have instead, counted from 0 or, if negative, from the end."""
    mixers: tuple[MixerConfig, ...] = kind_field(MIXERS, tuple, named_in="pattern")
    """The mixers that `pattern` names: the ways in which layers see earlier tokens (`meliad_like/mixers`). Those that
    are not given have their defaults."""
    feedforwards: tuple[FeedForwardConfig, ...] = kind_field(FEEDFORWARDS, tuple, named_in="pattern")
    """The feed-forward networks that `pattern` names, in the same way."""
    doubled_inputs: tuple[int, ...] = size((), "layer_indices")
    """The layers whose input is added to their output once more, as in google-research/meliad's dense memory;
    negative numbers count from the end."""
    norms_after: tuple[int, ...] = size((), "layer_indices")
    """The layers whose norms come after the mixers and after the feed-forward network, and not before them (OLMo)."""
    norms_around: tuple[int, ...] = size((), "layer_indices")
    """The layers that have such norms in addition to those before (Gemma 2)."""
    attention_kernel: Literal["auto", "none", "tpu", "gpu", "interpreted"] = resumable("auto")
    """The kernels that compute a segment's attention to the window, on TPUs also to a span, and of and to states,
    without its scores in memory (`kernels/registry.py`): none, those compiled for TPUs or NVIDIA GPUs, or the first
    interpreted, for tests. `auto`: the platform's where they pass a check (`kernels/check.py`), else none."""
    recurrence_kernel: Literal["auto", "none", "tpu", "gpu", "interpreted"] = resumable("auto")
    """The kernels that compute linear recurrences (`layers/linear_recurrence.py`): none, those compiled for TPUs or
    NVIDIA GPUs, or the latter interpreted. `auto`: the platform's if they pass a check, otherwise none."""
    published: str = resumable("")
    """The config.json of the published model that the decoder was opened from, with which it can be written again
    (`conversion/published`); "": none. It does not determine how the decoder computes."""

    def __post_init__(self):
        super().__post_init__()
        for field, registry in (("mixers", MIXERS), ("feedforwards", FEEDFORWARDS)):
            object.__setattr__(self, field, tuple(self._named(registry, getattr(self, field))))
        shape = self.shape
        for config in self.mixers:
            config.check(shape)
        for name in ("doubled_inputs", "norms_after", "norms_around"):
            self.layers_of(name)
        if both := self.layers_of("norms_after") & self.layers_of("norms_around"):
            raise UserError(f"DecoderConfig.norms_after and norms_around both name layer {min(both)}")
        if self.clears_states and not self.traits.states:
            raise UserError(f"{self.clears_states} has no effect: no mixer of the decoder has states")

    def on_this_platform(self):
        kinds = [kind for kind in get_args(KernelKind) if getattr(self, f"{kind}_kernel") == "auto"]
        kernels = {f"{kind}_kernel": kernel_that_works(self.shape, self.activation_dtype, kind) for kind in kinds}
        kernels = {field: kernel for field, kernel in kernels.items() if kernel != "none"}
        return dataclasses.replace(self, **kernels) if kernels else self

    def layers_of(self, name: str) -> frozenset[int]:
        """The layers that the field `doubled_inputs`, `norms_after` or `norms_around` names, counted from 0."""
        return layer_indices(f"DecoderConfig.{name}", getattr(self, name), self.total_layers)

    @functools.cached_property
    def shape(self) -> DecoderShape:
        """The sizes of the decoder, and the mixers and networks of its layers."""
        mixers, networks = zip(*map(self._parts, entries_by_layer(self.pattern, self.total_layers)))
        in_layers = {mixer: None for layer in mixers for mixer in layer}
        for mixer in in_layers:
            if mixer.reads and mixer.reads not in map(MIXERS.name_of, in_layers):
                raise UserError(f"{type(mixer).__name__} reads what {mixer.reads} publishes: name that in a layer too")
        return DecoderShape.of(self, layers=mixers, feedforwards=networks)

    def _named(self, registry: Registry, given: tuple[Any, ...]) -> list[Any]:
        """The configs of a registry that `pattern` names: those given, or the defaults. They are in the order of their
        names, so that equal decoders are equal configs."""
        configs, names = {registry.name_of(config): config for config in given}, set(names_in(self.pattern))
        inside: dict[type, Any] = {}
        for part in itertools.chain.from_iterable(map(configs_in, given)):
            if inside.setdefault(type(part), part) != part:
                raise UserError(f"{given} has two different {type(part).__name__}: a decoder has one of a class")
        for name, config in configs.items():
            if name not in names and config != type(config)():
                raise UserError(f"{config} has no effect: DecoderConfig.pattern does not name {name}")
        return [configs.get(name, registry[name]()) for name in sorted(names & set(registry))]

    def _parts(self, entry: str) -> tuple[tuple[MixerConfig, ...], FeedForwardConfig | None]:
        """The mixers of a layer, in the order of their names, and its feed-forward network."""
        names = set(names_in(entry))
        if unknown := names - set(MIXERS) - set(FEEDFORWARDS):
            known = ", ".join((*MIXERS, *FEEDFORWARDS))
            raise UserError(f"DecoderConfig.pattern names {min(unknown)!r}, which is not one of {known}")
        mixers = tuple(mixer for mixer in self.mixers if MIXERS.name_of(mixer) in names)
        networks = [network for network in self.feedforwards if FEEDFORWARDS.name_of(network) in names]
        windows = [MIXERS.name_of(mixer) for mixer in mixers if mixer.has_window]
        if len(windows) > 1:
            raise UserError(f"a layer can't be {entry}: {' and '.join(windows)} each have the attention to the window")
        if len(networks) > 1:
            raise UserError(f"a layer can't be {entry}: it has {len(networks)} feed-forward networks")
        return mixers, networks[0] if networks else None

    def determined(self, other: "DecoderConfig") -> list[str]:
        # A decoder that was opened from a published model may read in another way.
        free = HOW_IT_READS if self.published == other.published != "" else ()
        return [name for name in super().determined(other) if name.rpartition(".")[2] not in free]

    def layers_with(self, kind: type[MixerConfig]) -> list[int]:
        """The layers that have a mixer of this class, counted from 0."""
        return [i for i, mixers in enumerate(self.shape.layers) if any(isinstance(mixer, kind) for mixer in mixers)]

    @functools.cached_property
    def publishers(self) -> dict[str, int]:
        """The layer that publishes values for mixers of other layers, by the name of the publishing mixer."""
        reads = {mixer.reads for layer in self.shape.layers for mixer in layer} - {None}
        return {name: self.layers_with(MIXERS[name])[-1] for name in sorted(reads)}

    @property
    def num_block_by_block(self) -> int:
        """The number of layers that read a block before the next block: those up to the last one that publishes."""
        return max(self.publishers.values(), default=-1) + 1

    @property
    def traits(self) -> ModelTraits:
        mixers = dict.fromkeys(mixer for layer in self.shape.layers for mixer in layer)
        traits = [mixer.traits(self.shape) for mixer in mixers]
        farthest = max(traits, key=lambda each: each.attends_to(np.array(FAR)).item())
        return ModelTraits(
            lambda position: np.asarray(np.maximum.reduce([each.attends_to(position) for each in traits]) + 1),
            limited_by=farthest.limited_by,
            sequential_because=next((each.sequential_because for each in traits if each.sequential_because), None),
            needs_segments=next((each.needs_segments for each in traits if each.needs_segments), self.clears_states),
            states=tuple(dict.fromkeys(name for each in traits for name in each.states)),
        )

    def flops(self, vocabulary_size: int) -> Flops:
        shape, d = self.shape, self.model_width
        flops = Flops.of_products(2 * d * vocabulary_size)
        for network in filter(None, shape.feedforwards):
            flops += network.flops(d, self.feedforward_width)
        for mixer in itertools.chain.from_iterable(shape.layers):
            flops += mixer.flops(shape) + Flops.of_products(2 * mixer.width(shape) * d)
        return flops


class Layer(Mixer):
    """A layer, with the methods of a mixer: it reads the output of the layer below, and its results are its own output.

    In a pretrained decoder `LayerContext.published` has the vectors that are inserted.
    """

    def init_carry(self, b: int, dtype: Any) -> Carry:
        """The carry of `b` lanes before their first token: nothing."""
        del b, dtype

    def begin_segment(self, carry: Carry) -> Carry:
        """The carry at the beginning of a segment."""
        return carry


class ResidualFeedForward(nnx.Module):
    """`x + feedforward(norm(x))`; with norms `after`, `x + norm(feedforward(x))`, and with norms `around` both."""

    def __init__(self, config: FeedForwardConfig, shape: DecoderShape, *, norms: Norms = "before", rngs: nnx.Rngs):
        d, self.dropout_rate, self.norms = shape.model_width, shape.dropout_rate, norms
        self.norm = RMSNorm(d, shape.norm_epsilon, rngs=rngs)
        self.second_norm = RMSNorm(d, shape.norm_epsilon, rngs=rngs) if norms == "around" else None
        self.network = config.build(d, shape.feedforward_width, bias=shape.feedforward_bias, rngs=rngs)

    def __call__(self, x: Float[Array, "*batch d"], dropout_key: PRNGKeyArray | None) -> Float[Array, "*batch d"]:
        with jax.named_scope("feedforward"):
            y = self.norm(self.network(x)) if self.norms == "after" else self.network(self.norm(x))
            y = y if self.second_norm is None else self.second_norm(y)
            return x + tiled_dropout(y, self.dropout_rate, dropout_key)


class DecoderLayer(Layer):
    """`x + output(mixers(norm(x)))`, then `x + feedforward(norm(x))`; a layer may lack either of the two.

    With norms `after` these are `x + norm(output(mixers(x)))` and `x + norm(feedforward(x))`, with norms `around` both,
    and with `doubled_input` the layer's input is added to the result once more.
    """

    def __init__(self, config: DecoderConfig, index: int, *, rngs: nnx.Rngs):
        after, around, doubled = map(config.layers_of, ("norms_after", "norms_around", "doubled_inputs"))
        norms: Norms = "after" if index in after else "around" if index in around else "before"
        self.shape, self.doubled_input, self.norms = config.shape, index in doubled, norms
        shape, d = config.shape, config.model_width
        mixers = {MIXERS.name_of(mixer): mixer for mixer in shape.layers[index]}
        traits = {name: mixer.traits(shape) for name, mixer in mixers.items()}
        self.names = tuple(mixers)
        self.mixers = nnx.Dict({name: mixer.build(shape, rngs=rngs) for name, mixer in mixers.items()})
        self.clearing = tuple(name for name in mixers if config.clear_states and traits[name].states)
        """The mixers that begin every segment with an empty memory."""
        self.widths = tuple(mixer.width(shape) for mixer in mixers.values())
        if mixers:
            bias = zeros if any(each.output_bias for each in traits.values()) else None
            self.norm = RMSNorm(d, shape.norm_epsilon, rngs=rngs)
            self.second_norm = RMSNorm(d, shape.norm_epsilon, rngs=rngs) if norms == "around" else None
            self.output = Linear(sum(self.widths), d, ("heads", "model"), rngs=rngs, bias_initializer=bias)
        network = shape.feedforwards[index]
        self.feedforward = ResidualFeedForward(network, shape, norms=norms, rngs=rngs) if network else None

    def init_carry(self, b, dtype):
        return {name: self.mixers[name].init_carry(b, dtype) for name in self.names}

    def begin_segment(self, carry):
        return carry | {name: empty_but_window(self.mixers[name], carry[name]) for name in self.clearing}

    def begin_decoding(self, carry):
        return {name: self.mixers[name].begin_decoding(carry[name]) for name in self.names}

    def __call__(self, x, context, carry, dropout_key=None):
        return self._read(x, carry, dropout_key, lambda mixer, x, carry, key: mixer(x, context, carry, key))

    def decode(self, x, counts, context, carry):
        return self._read(x, carry, None, lambda mixer, x, carry, key: mixer.decode(x, counts, context, carry))

    def _read(self, x, carry, dropout_key, read):
        """The layer's output, and the carry; `read(mixer, x, carry, key)` returns a mixer's results and carry."""
        y, keys = x, split_key(dropout_key, 2 + len(self.names))
        if self.names:
            inputs = x if self.norms == "after" else self._normed(x, keys[0])
            results, carry = [], dict(carry)
            for name, width, key in zip(self.names, self.widths, keys[2:], strict=True):
                with jax.named_scope(name):
                    result, carry[name] = read(self.mixers[name], inputs, carry[name], key)
                if result.shape[-1] != width:
                    raise ValueError(f"the mixer {name} returns {result.shape[-1]} channels, and its width is {width}")
                results.append(result)
            mixed = self.output(jnp.concatenate(results, axis=-1))
            mixed = self._normed(mixed, keys[0]) if self.norms == "after" else mixed
            y = x + (mixed if self.second_norm is None else self.second_norm(mixed))
        if self.feedforward is not None:
            y = self.feedforward(y, keys[1])
        return x + y if self.doubled_input else y, carry

    def _normed(self, x, dropout_key):
        return tiled_dropout(self.norm(x), self.shape.dropout_rate, dropout_key)


def is_window(node: Any) -> bool:
    """Whether a part of a carry is the cache of attention to a window."""
    return isinstance(node, TokenCache)


def empty_but_window(mixer: Any, carry: Any) -> Any:
    """A mixer's carry before its first token, but with the window's cache of `carry`."""
    empty = mixer.init_carry(jax.tree.leaves(carry)[0].shape[0], jnp.float32)
    return jax.tree.map(
        lambda new, old: old if is_window(new) else new.astype(old.dtype), empty, carry, is_leaf=is_window
    )


class Stack(BaseDecoder):
    """A decoder whose softmax shares the embedding. A family implements `make_layers`."""

    config: StackConfig

    def __init__(self, config: StackConfig, vocabulary_size: int, *, rngs: nnx.Rngs):
        self.config = config
        self.logit_scale = config.model_width**-0.5 if config.logit_scale is None else config.logit_scale
        table = jax.nn.initializers.normal(1.0), (vocabulary_size, config.model_width), ("vocabulary", "model"), "table"
        self.embedding = parameter(rngs.params(), *table)
        self.layers = nnx.List(self.make_layers(rngs))
        self.final_norm = RMSNorm(config.model_width, config.norm_epsilon, rngs=rngs)
        self.output_embedding = None if config.tied_embedding else parameter(rngs.params(), *table)

    def make_layers(self, rngs: nnx.Rngs) -> Iterable[Layer]:
        """The layers, with fresh parameters."""
        raise NotImplementedError

    def embed(self, tokens, position, dropout_key):
        # XLA crashes on a lookup along the vocabulary, sharded over `tensor`, inside of `over_sequence`.
        vocabulary = "vocabulary" if num_parts() == 1 else None
        table = self.embedding[...]
        # Rounded after the lookup, so that the gradient of a frequent token, a sum of many small terms, is float32.
        x = embed(table if tokens.ndim == 1 else constrain(table, vocabulary, None), tokens)
        # In float32, because a table that is kept in bfloat16 would have factor and product rounded to it.
        scale = self.config.embedding_scale
        return (x if scale == 1 else x.astype(jnp.float32) * scale).astype(self.dtype)

    def finish(self, x, dropout_key):
        return tiled_dropout(self.final_norm(x), self.config.dropout_rate, dropout_key)

    def logits(self, hidden: Float[Array, "*batch d"]) -> Float[Array, "*batch v"]:
        """The logits of the next token, float32."""
        table = self.embedding if self.output_embedding is None else self.output_embedding
        logits, bound = self.logit_scale * scores(hidden, table[...]), self.config.logit_bound
        return logits if bound is None else bound * jnp.tanh(logits / bound)


@builds(DecoderConfig)
class Decoder(Stack):
    """A language model with a window of `w` tokens, whose mixers may reach further back."""

    config: DecoderConfig

    def make_layers(self, rngs):
        return (DecoderLayer(self.config, i, rngs=rngs) for i in range(self.config.total_layers))

    def published(self, carry, start) -> dict[str, Any]:
        return {
            name: self.layers[i].mixers[name].publish(carry.layers[i][name], start)
            for name, i in self.config.publishers.items()
        }
