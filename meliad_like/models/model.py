"""A model without its parameters, and the base class of all decoders: how a segment passes through the layers, and how
a token does while decoding.

A family defines the embedding of its tokens, its layers, and the logits of hidden vectors. This module has what the
families share: scans over blocks, rematerialisation, dropout keys, and the calls where blocks begin and end.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from einops import rearrange
from flax import nnx
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from meliad_like.layers.basic import fold_key, rematerialise, rematerialise_iteration, split_key
from meliad_like.layers.flops import Flops
from meliad_like.layers.losses import TokenLosses, token_losses
from meliad_like.layers.sharding import constrain, from_rightmost, num_parts, over_sequence
from meliad_like.mixers.base import LayerContext, count_by_block
from meliad_like.models.config import FAR, ActivationDtype, ModelConfig, Remat

# Folded into the step's dropout key; differs from the indices of blocks, which are folded in as well.
SOFTMAX = 2**32 - 1


@dataclasses.dataclass
class ParameterKeys:
    """The keys that `nnx.Rngs(key)` gives to parameters, counted in Python.

    The counter of `nnx.Rngs` is an array: each of its updates walks through all that was traced before, so that the
    time to trace a model grew with the square of its parameter arrays.
    """

    key: PRNGKeyArray
    count: int = 0

    def params(self) -> PRNGKeyArray:
        """The next key."""
        self.count += 1
        return jax.random.fold_in(self.key, self.count - 1)


@dataclasses.dataclass(frozen=True)
class Model:
    """A language model without its parameters; hashable, so that it can be a static argument."""

    config: ModelConfig
    vocabulary_size: int

    def _build(self, key: PRNGKeyArray) -> nnx.Module:
        return self.config.build(self.vocabulary_size, rngs=cast(nnx.Rngs, ParameterKeys(key)))

    @functools.cached_property
    def _abstract(self) -> tuple[nnx.GraphDef, nnx.State]:
        return nnx.split(nnx.eval_shape(lambda: self._build(jax.random.key(0))))

    def _annotations(self, name: str) -> dict[str, Any]:
        is_variable = lambda leaf: isinstance(leaf, nnx.Variable)  # noqa: E731
        variables = self._abstract[1]
        return nnx.to_pure_dict(jax.tree.map(lambda leaf: leaf.get_metadata(name), variables, is_leaf=is_variable))

    @property
    def axes(self) -> dict[str, Any]:
        """The logical axes of every parameter: the tree of `init` with tuples of names for arrays."""
        return self._annotations("axes")

    @property
    def kinds(self) -> dict[str, Any]:
        """The kind of every parameter (`layers.basic.Kind`): the tree of `init` with names for arrays."""
        return self._annotations("kind")

    @property
    def abstract_params(self) -> dict[str, Any]:
        """The shapes and dtypes of the parameters."""
        return nnx.to_pure_dict(self._abstract[1])

    def abstract_params_in(self, dtype: ActivationDtype) -> dict[str, Any]:
        """The shapes of the parameters if matrices are kept in this dtype. Vectors are few, and some are logarithms:
        they stay float32."""
        return jax.tree.map(lambda leaf: leaf.update(dtype=dtype) if leaf.ndim > 1 else leaf, self.abstract_params)

    @property
    def num_parameters(self) -> int:
        return sum(leaf.size for leaf in jax.tree.leaves(self.abstract_params))

    @functools.cached_property
    def rate_factors(self) -> dict[str, float]:
        """Factors on the learning rate that aren't 1, by the first name of a parameter; 0: it is not trained."""
        factors = {name: self.config.traits.rate_factor(name) for name in self.abstract_params}
        return {name: factor for name, factor in factors.items() if factor != 1}

    @property
    def flops(self) -> Flops:
        """The operations of one token in all layers, and of its logits."""
        return self.config.flops(self.vocabulary_size)

    @property
    def flops_per_prediction(self) -> dict[str, float]:
        """The operations of a predicted token in a long document, including tokens that windows read again.
        `as_counted` as `layers/flops.py` describes, and `by_the_paper` if the family's paper describes how to count."""
        w, traits = self.config.window_length, self.config.traits
        counted, paper = self.flops.forward * w / (w - self.config.overlap), traits.flops_by_the_paper
        return {"as_counted": counted} | ({} if paper is None else {"by_the_paper": paper})

    def abstract_carry(self, num_lanes: int, *, decoding: bool = False) -> Any:
        """The shapes and dtypes of the carry between segments, or with `decoding` between tokens."""

        def make(params):
            module = self.bind(params)
            carry = module.init_carry(num_lanes)
            return module.begin_decoding(carry) if decoding else carry

        return jax.eval_shape(make, self.abstract_params)

    @property
    def num_visible(self) -> int:
        """The largest number of tokens, itself included, that a token attends to in a layer."""
        return int(np.max(self.config.traits.num_visible(FAR + np.arange(self.config.window_length))))

    @property
    def sight(self) -> str:
        """A text for people that says how far the model sees in a document."""
        traits, visible = self.config.traits, self.num_visible
        limit = f" ({traits.limited_by})" if traits.limited_by else ""
        attention = f"the last {visible:,} tokens by attention{limit}"
        if not traits.states or traits.needs_segments:
            return attention
        return "everything by its states" + (f", {attention}" if visible > 1 else "")

    def for_separate_sequences(self, num_tokens: int) -> "Model":
        """The model with the same parameters for independent sequences of this number of tokens."""
        return Model(self.config.for_separate_sequences(num_tokens), self.vocabulary_size)

    def init(self, key: PRNGKeyArray) -> dict[str, Any]:
        """Fresh parameters: nested dictionaries of float32 arrays."""
        return nnx.to_pure_dict(nnx.state(self._build(key), nnx.Param))

    def bind(self, params: dict[str, Any]) -> Any:
        """The module with these parameters; cheap, meant to be called inside a jitted function."""
        graphdef, abstract = self._abstract
        state = jax.tree.map(lambda x: x, abstract)
        fixed = {name: params[name] for name, factor in self.rate_factors.items() if factor == 0}
        params = params | jax.lax.stop_gradient(fixed)
        nnx.replace_by_pure_dict(state, params)
        return nnx.merge(graphdef, state)


def block_offset(position: Any, window_length: int, overlap: int) -> Any:
    """The offset in its block of the token at each position of a document: an array like `position`."""
    if not overlap:
        return position % window_length
    # Only the first window has new tokens before the overlap.
    later = overlap + (position - overlap) % (window_length - overlap)
    return later + (position < overlap) * (position - later)


class Group(NamedTuple):
    """Consecutive layers that are applied by one piece of the program."""

    layers: Any
    """A layer, or if there are several, a layer whose parameters are stacked along a new first axis."""
    size: int


def stacked(trees: Sequence[Any]) -> Any:
    """One tree of the same form, each array with the arrays of `trees` along a new first axis."""
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *trees)


def groups_of(layers: Iterable[Any], scan_layers: bool) -> list[Group]:
    """The layers in order; with `scan_layers`, consecutive ones of the same form are one group. Two layers have the
    same form if their trees have the same settings, names, shapes and dtypes."""
    if not scan_layers:
        return [Group(layer, 1) for layer in layers]

    def form(layer):
        leaves, tree = jax.tree.flatten(layer)
        return tree, [(leaf.shape, leaf.dtype) for leaf in leaves]

    alike = [list(same) for _, same in itertools.groupby(layers, form)]
    return [Group(same[0] if len(same) == 1 else stacked(same), len(same)) for same in alike]


class DecoderCarry(NamedTuple):
    """The carry of a decoder: everything that it remembers of the documents in its lanes."""

    position: Int[Array, " b"]
    """The number of tokens of the lane's document read so far, padding included; a multiple of w between segments."""
    layers: list[Any]
    """The carry of each layer."""
    window: Any = None
    """The carry of a family in addition to its layers' carries, from token to token or from block to block."""


def block_positions(
    position: Int[Array, " b"], start: Bool[Array, "b c"], window_length: int, overlap: int
) -> tuple[Int[Array, "b c"], Int[Array, " b"]]:
    """The position of each block's first new token in its document, and the position after the segment. `position` is
    that of the segment's first token, if the lane's document continues."""
    # XLA computes positions again in every layer's program. Products with an overlap of 0 cost nothing there.
    read, after = count_by_block(position - overlap * (position > 0), start, window_length - overlap)
    return read + overlap * (read > 0), after + overlap


def apply_layers(
    x: Array,
    groups: list[Group],
    carries: list[Any],
    context: LayerContext,
    keys: list[PRNGKeyArray | None],
    remat: Remat,
) -> tuple[list[Array], list[Any]]:
    """Applies layers one after the other to the whole segment: returns `x` and each layer's output, and the carries.

    A group of several layers is a `jax.lax.scan`, which the compiler compiles once for all of them. Parameters and
    carries are stacked only inside of the program; outside each layer has its own arrays.
    """

    def apply(x, inputs, *, inside_scan=False):
        layer, one, key = inputs
        call = rematerialise(type(layer).__call__, remat, inside_scan=inside_scan)
        with jax.named_scope("attention"):
            x, one = call(layer, x, context, one, key)
        x = constrain(x, "lanes", None, None)
        return x, (x, one)

    outputs, new_carries, carries_and_keys = [x], [], zip(carries, keys, strict=True)
    for group in groups:
        of_group = list(itertools.islice(carries_and_keys, group.size))
        if group.size == 1:
            x, result = apply(x, (group.layers, *of_group[0]))
            results = [result]
        else:
            one_layer = rematerialise_iteration(functools.partial(apply, inside_scan=True), remat)
            x, results = jax.lax.scan(one_layer, x, (group.layers, *stacked(of_group)))
            results = [jax.tree.map(lambda leaf, i=i: leaf[i], results) for i in range(group.size)]
        outputs += [*(output for output, _ in results[:-1]), x]
        new_carries += [one for _, one in results]
    return outputs, new_carries


class BaseDecoder(nnx.Module):
    """A carry-passing language model of blocks of `w` tokens, without its parameters.

    A family sets `config` and `layers`, and implements `embed`, `finish` and `logits`.
    """

    config: ModelConfig
    layers: Any
    target_scores: Callable[..., TokenLosses] | None = None
    """`token_losses` of a family that computes them without the logits of the whole vocabulary; None: from `logits`."""

    def embed(
        self, tokens: Int[Array, "*batch"], position: Int[Array, "*#batch"], dropout_key: PRNGKeyArray | None
    ) -> Float[Array, "*batch d"]:
        """The embedding vectors of tokens at these positions in their blocks: [b, n] of a segment, [m] in decoding."""
        raise NotImplementedError

    def finish(self, x: Float[Array, "*batch d"], dropout_key: PRNGKeyArray | None) -> Float[Array, "*batch d"]:
        """The hidden vectors for `logits`, from the output of the last layer."""
        raise NotImplementedError

    def logits(self, hidden: Float[Array, "*batch d"]) -> Float[Array, "*batch v"]:
        """The logits of the next token, float32."""
        raise NotImplementedError

    def published(self, carry: Any, start: Bool[Array, " b"]) -> dict[str, Any]:
        """The values that layers read before a block from the carries of other layers, in either form
        (`LayerContext.published`). `start` are the lanes in which a document begins with the block."""
        del carry, start
        return {}

    @property
    def dtype(self):
        return jnp.dtype(self.config.activation_dtype)

    def init_carry(self, b: int) -> Any:
        """The carry of `b` lanes before their first token."""
        return DecoderCarry(jnp.zeros((b,), jnp.int32), [layer.init_carry(b, self.dtype) for layer in self.layers])

    def begin_decoding(self, carry: Any) -> Any:
        """Converts a carry for segments to one for decoding, with the arrays that only decoding needs."""
        both = zip(self.layers, carry.layers, strict=True)
        return carry._replace(layers=[layer.begin_decoding(one) for layer, one in both])

    def end_decoding(self, carry: Any) -> Any:
        """Converts a carry for decoding to a carry for segments, without the arrays that are None in `init_carry`. All
        lanes must be at the beginning of a block."""
        empty = jax.eval_shape(lambda: self.init_carry(1))
        return jax.tree.map(lambda x, y: None if x is None else y, empty, carry, is_leaf=lambda x: x is None)

    def __call__(
        self, tokens: Int[Array, "b n"], carry: Any, start: Bool[Array, "b c"], dropout_key: PRNGKeyArray | None = None
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
        return self.finish(outputs[-1], split_key(dropout_key, len(self.layers) + 2)[-1]), carry

    def read_segment(
        self,
        tokens: Int[Array, "b n"],
        carry: Any,
        start: Bool[Array, "b c"],
        dropout_key: PRNGKeyArray | None = None,
        *,
        every_layer: bool = False,
    ) -> tuple[list[Float[Array, "b s d"]], Any]:
        """Reads a segment, as `__call__`: returns the output of the last layer, and the carry. With `every_layer`, the
        list holds the embedding and the output of every layer. There are `s` vectors: those of the `n` tokens, and of
        what a family adds to each block (`embed`)."""
        n, w = num_parts() * tokens.shape[1], self.config.window_length
        if n % w or start.shape[1] != n // w:
            raise ValueError(f"{n} tokens with {start.shape[1]} start flags are not whole blocks of window_length={w}")
        # A dropout key for each layer, one for `embed` and one for `finish`.
        keys = split_key(dropout_key, len(self.layers) + 2)
        x = self.embed(tokens, jnp.arange(tokens.shape[1]) % w, keys[-2])
        x = constrain(x, "lanes", None, None)
        positions, position = block_positions(carry.position, start, w, self.config.overlap)
        # No gradient passes from a segment to the one before, also not through a carry that is differentiated.
        layers = jax.lax.stop_gradient(carry.layers)
        layers = [layer.begin_segment(one) for layer, one in zip(self.layers, layers, strict=True)]
        k, outputs, below, published = self.config.num_block_by_block, [x], [], {}
        if k:
            outputs, below, published = self._scan_blocks(x, layers[:k], positions, keys[:k], every_layer)
        groups, context = groups_of(self.layers[k:], self.config.scan_layers), LayerContext(positions, published)
        (_, *above), layers = apply_layers(outputs[-1], groups, layers[k:], context, keys[k:-2], self.config.remat)
        outputs, layers = [*outputs, *above], from_rightmost([*below, *layers])
        return outputs if every_layer else outputs[-1:], carry._replace(position=position, layers=layers)

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
        """Reads a segment, as `__call__`: returns the loss of every target, and the carry for the next segment.
        `slice_length` is the number of tokens of a lane whose logits exist at the same time (`layers/losses.py`)."""

        def read(by_token, replicated):
            (tokens, targets), (module, carry, start, dropout_key) = by_token, replicated
            hidden, carry = module(tokens, carry, start, dropout_key)
            return token_losses(module, hidden, targets, slice_length, fold_key(dropout_key, SOFTMAX)), carry

        return over_sequence(read)((tokens, targets), (self, carry, start, dropout_key))

    def _scan_blocks(
        self, x: Array, layers: list[Any], positions: Int[Array, "b c"], keys, every_layer: bool
    ) -> tuple[list[Array], list[Any], dict[str, Any]]:
        """Applies the first layers, which have these carries and keys, to a block before the next block. Returns the
        outputs as `apply_layers` (or only the last), the carries, and what the layers publish before each block."""
        # Here parameters are stacked once, not in every iteration.
        groups = groups_of(self.layers[: len(layers)], self.config.scan_layers)

        def step(layers, block):
            x, position, number = block
            folded = [fold_key(key, number) for key in keys]
            published = jax.tree.map(
                lambda y: y[:, None], self.published(DecoderCarry(position, layers), position == 0)
            )
            context = LayerContext(position[:, None], published)
            outputs, layers = apply_layers(x, groups, layers, context, folded, self.config.remat)
            return layers, (outputs if every_layer else outputs[-1:], published)

        c = positions.shape[1]
        if c == 1:
            layers, (outputs, published) = step(layers, (x, positions[:, 0], 0))
            return outputs, layers, published
        blocks = rearrange(x, "b (c w) d -> c b w d", c=c), positions.T, jnp.arange(c)
        layers, results = jax.lax.scan(rematerialise_iteration(step, self.config.remat), layers, blocks)
        outputs, published = jax.tree.map(lambda y: rearrange(y, "c b n ... -> b (c n) ..."), results)
        return outputs, layers, published

    def decode_step(
        self, token: Int[Array, " b"], carry: Any, longest: int | None = None
    ) -> tuple[Float[Array, "b v"], Any]:
        """Reads one more token per lane at a cost that does not depend on the number of tokens read before. Lanes may
        be at different positions. Returns the logits of the next token. `longest`: as for `read_tokens`."""
        (*_, x), carry = self.read_tokens(token[:, None], jnp.ones_like(token), carry, longest)
        return self.logits(self.finish(x[:, 0], None)), carry

    def read_tokens(
        self, tokens: Int[Array, "b n"], counts: Int[Array, " b"], carry: Any, longest: int | None = None
    ) -> tuple[list[Float[Array, "b n d"]], Any]:
        """Reads the first `counts` tokens of each lane, which are all in the lane's current block: returns the
        embedding and each layer's output, and the carry, in its form for decoding. `longest`: a number of tokens that
        no document exceeds then (`LayerContext`)."""
        offset = block_offset(carry.position, self.config.window_length, self.config.overlap)
        offset = offset[:, None] + np.arange(tokens.shape[1])
        x = self.embed(tokens.reshape(-1), offset.reshape(-1), None).reshape(*tokens.shape, -1)
        published = self.published(carry, jnp.zeros_like(carry.position, bool))
        context = LayerContext(carry.position, published, longest)
        outputs, layers = [x], []
        for layer, one in zip(self.layers, carry.layers, strict=True):
            with jax.named_scope("attention"):
                x, one = layer.decode(x, counts, context, one)
            outputs.append(x)
            layers.append(one)
        return outputs, carry._replace(position=carry.position + counts, layers=layers)
