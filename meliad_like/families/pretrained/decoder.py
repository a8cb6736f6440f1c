"""GPT-2 and Llama as carry-passing language models that read a document by windows.

A block of the contract (docs/design.md) is a window. Its positions begin at 0, and its attention ends at its first
token: nothing passes from one window to the next except, where there is a recurrence, a few vectors. Windows may
overlap: then the reader (`data/readers.py`) repeats in each window the last tokens of the one before.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from einops import rearrange
from flax import nnx
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from meliad_like.families.layers import LayerNorm, dropout
from meliad_like.families.pretrained.attention import INSERTED
from meliad_like.families.pretrained.config import PretrainedConfig
from meliad_like.families.pretrained.recurrence import Recurrence
from meliad_like.layers.basic import (
    LINEAR,
    Linear,
    RMSNorm,
    check_tokens,
    embed,
    fold_key,
    parameter,
    product,
    rows,
    scores,
    split_key,
)
from meliad_like.layers.lanes import at_lanes
from meliad_like.layers.losses import token_losses
from meliad_like.layers.sharding import constrain
from meliad_like.mixers.base import MIXERS, LayerContext
from meliad_like.mixers.dot_product_attention import AttentionCache, DotProductAttention
from meliad_like.models.config import builds
from meliad_like.models.decoder import Layer
from meliad_like.models.model import BaseDecoder, DecoderCarry, apply_layers, block_offset, block_positions, groups_of

normal = jax.nn.initializers.normal(0.02)
zeros = jax.nn.initializers.zeros
ATTENTION = MIXERS.name_of(DotProductAttention())
"""The name of a layer's attention, as in a decoder."""


def make_norm(config: PretrainedConfig, rngs) -> LayerNorm | RMSNorm:
    """The norm of the architecture, with the config's epsilon."""
    kind = LayerNorm if config.architecture == "gpt2" else RMSNorm
    return kind(config.model_width, config.norm_epsilon, rngs=rngs)


class Block(Layer):
    """Causal attention and a feed-forward network, each after a norm and added to the residual stream.

    Radford et al. 2019 (GPT-2); Touvron et al. 2023 (Llama). Parameters have the names of a `DecoderLayer`; dropout is
    where GPT-2 has it, of what is added. Vectors are inserted before the attention's norm or after it.
    """

    def __init__(self, config: PretrainedConfig, index: int, *, rngs):
        self.config = config
        self.has_insertions = index in config.insertion_indices
        attention, shape, d, f = config.attention, config.shape, config.model_width, config.feedforward_width
        bias = zeros if attention.output_bias else None
        self.norm = make_norm(config, rngs)
        self.mixers = nnx.Dict({ATTENTION: attention.build(shape, rngs=rngs)})
        self.output = Linear(shape.inner_width, d, ("heads", "model"), bias_initializer=bias, rngs=rngs)
        network = config.network.build(d, f, bias=shape.feedforward_bias, rngs=rngs)
        self.feedforward = nnx.Dict({"norm": make_norm(config, rngs), "network": network})

    def init_cache(self, b: int) -> AttentionCache:
        """An empty cache, for decoding."""
        return self.mixers[ATTENTION].init_carry(b, self.config.activation_dtype)

    def __call__(self, x, context, carry, dropout_key=None):
        keys = split_key(dropout_key, 3)
        mixed, carry = self.mixers[ATTENTION](self.norm(x), self._inserted(context, x.dtype), carry, keys[0])
        return self._finish(x, mixed, *keys[1:]), carry

    def decode(self, x, counts, context, carry):
        mixed, carry = self.mixers[ATTENTION].decode(self.norm(x), counts, self._inserted(context, x.dtype), carry)
        return self._finish(x, mixed, None, None), carry

    def _inserted(self, context: LayerContext, dtype: Any) -> LayerContext:
        """The context with the vectors as the attention reads them; None if this layer has none."""
        vectors = context.published[INSERTED] if self.has_insertions else None
        if vectors is not None:
            vectors = vectors.astype(dtype)
            assert self.config.summary is not None
            if self.config.summary.insertion_point == "before_norm":
                vectors = self.norm(vectors)
        return context._replace(published={INSERTED: vectors})

    def _finish(self, x, mixed, attention_key, feedforward_key):
        x = x + dropout(self.output(mixed), self.config.dropout_rate, attention_key)
        with jax.named_scope("feedforward"):
            y = self.feedforward["network"](self.feedforward["norm"](x))
            return x + dropout(y, self.config.dropout_rate, feedforward_key)


class Window(NamedTuple):
    """The carry of a pretrained decoder in addition to the keys and values of its layers."""

    tokens: Int[Array, "b w"] | None = None
    """The tokens of the current window, of which the next one may repeat the last; only while decoding."""
    inserted: Float[Array, "b e d"] | None = None
    """The vectors of a recurrence for the next window; while decoding, for the current one."""
    weighed: Float[Array, "b w d"] | None = None
    """The weighted outputs of the layers, pooled at the window's end; only while decoding with a recurrence."""


class PretrainedDecoder(BaseDecoder):
    """A pretrained language model with a window of `w` tokens.

    Its layers see their own window alone, so they carry something, keys and values, only while decoding.
    """

    config: PretrainedConfig

    def __init__(self, config: PretrainedConfig, vocabulary_size: int, *, rngs: nnx.Rngs):
        self.config = config

        def table(size: int, axis: str | None) -> nnx.Param:
            return parameter(rngs.params(), normal, (size, config.model_width), (axis, "model"), "table")

        self.embedding = table(vocabulary_size, "vocabulary")
        self.positions = table(config.max_positions, None) if config.architecture == "gpt2" else None
        self.layers = nnx.List(Block(config, i, rngs=rngs) for i in range(config.num_layers))
        self.final_norm = make_norm(config, rngs)
        self.output_embedding = None if config.tied_embedding else table(vocabulary_size, "vocabulary")
        for _, node in list(nnx.iter_graph(self.layers)):
            if isinstance(node, Linear):
                node.matmul_dtype = config.matmul_dtype
                # As these models begin. `replace` keeps the class, which its annotation doesn't say.
                node.kernel = node.kernel.replace(normal(rngs.params(), node.kernel.shape))  # type: ignore[assignment]

    def embed(self, tokens, position, dropout_key):
        # Rounded after the lookup, so that gradients, which are sums of many small terms, are float32.
        x = embed(constrain(self.embedding[...], "vocabulary", None), tokens).astype(self.dtype)
        if self.positions is not None:
            # Gathered whole, as the embedding: the compiler would otherwise gather what was looked up in it.
            x = x + constrain(self.positions[...], None, None)[position].astype(self.dtype)
        return dropout(x, self.config.dropout_rate, dropout_key)

    def finish(self, x, dropout_key):
        return self.final_norm(x)

    def logits(self, hidden: Float[Array, "*batch d"]) -> Float[Array, "*batch v"]:
        """The logits of the next token, float32."""
        table = (self.embedding if self.output_embedding is None else self.output_embedding)[...]
        if self.config.matmul_dtype is None:
            return scores(hidden, table)
        logits = product(rows(hidden).astype(jnp.float32), table.T, self.config.matmul_dtype)
        return logits.reshape(*hidden.shape[:-1], -1)

    def begin_decoding(self, carry):
        b = carry.position.shape[0]
        tokens = jnp.zeros((b, self.config.window_length), jnp.int32)
        window = (carry.window or Window())._replace(tokens=tokens)
        return carry._replace(layers=[layer.init_cache(b) for layer in self.layers], window=window)

    def read_window(
        self,
        tokens: Int[Array, "b t"],
        position: Int[Array, " b"] | None = None,
        inserted: Float[Array, "b e d"] | None = None,
        dropout_key: PRNGKeyArray | None = None,
    ) -> list[Float[Array, "b t d"]]:
        """Reads one window of at most w tokens: returns the embedding and each layer's output, without the final norm.

        Args:
            position: position in the document of the window's first new token; inserted vectors are present where it is
                not 0. None: 0.
            inserted: the vectors from the window before; None: none are inserted.
        """
        position = jnp.zeros(tokens.shape[0], jnp.int32) if position is None else position
        return self._read_window(tokens, position, inserted, [None] * len(self.layers), dropout_key)[0]

    def _read_window(self, tokens, position, inserted, caches, dropout_key):
        """`read_window` with the caches that the window fills while decoding."""
        keys = split_key(dropout_key, len(self.layers) + 2)
        x = constrain(self.embed(tokens, jnp.arange(tokens.shape[1]), keys[-2]), "lanes", None, None)
        groups = groups_of(self.layers, self.config.scan_layers)
        context = LayerContext(position[:, None], {INSERTED: inserted})
        return apply_layers(x, groups, caches, context, keys[:-2], self.config.remat)

    def read_tokens(self, tokens, counts, carry, longest=None):
        """Reads tokens, as `BaseDecoder.read_tokens`.

        Where a window is full, the next one begins with the last `overlap` tokens, which are read again: so texts of
        any length are written by the windows in which they are evaluated.
        """
        w, lanes, token = self.config.window_length, jnp.arange(tokens.shape[0])[:, None], np.arange(tokens.shape[1])
        offset = block_offset(carry.position, w, self.config.overlap)
        outputs, carry = super().read_tokens(tokens, counts, carry, longest)
        # Tokens after `counts` have no place.
        places = lanes, jnp.where(token < counts[:, None], offset[:, None] + token, w)
        window = carry.window._replace(tokens=carry.window.tokens.at[places].set(tokens, mode="drop"))
        carry = carry._replace(window=self._with_outputs(window, places, outputs))
        return at_lanes(offset + counts == w, self._begin_window, outputs, carry)

    def _begin_window(self, carry: DecoderCarry) -> DecoderCarry:
        """The carry at the beginning of the next window."""
        w, o, window = self.config.window_length, self.config.overlap, carry.window
        if not o:
            return carry
        # Later tokens replace the padding, and no token sees what comes after it.
        tokens = jnp.pad(window.tokens[:, -o:], ((0, 0), (0, w - o)))
        outputs, layers = self._read_window(tokens, carry.position, window.inserted, carry.layers, None)
        return carry._replace(layers=layers, window=self._with_outputs(window._replace(tokens=tokens), ..., outputs))

    def _with_outputs(self, window: Window, places: Any, outputs: list[Array]) -> Window:
        """The carry with the layers' outputs for the tokens at these places (lane and offset) of the window."""
        del places, outputs
        return window


class RecurrentDecoder(PretrainedDecoder):
    """A pretrained decoder with a recurrence: every window leaves vectors, to which the next window attends.

    With a recurrence all of a window, its losses included, is computed again in the backward pass, and only the vectors
    that pass between windows are kept (section 3.2), so that one window is in memory at a time.
    """

    def __init__(self, config: PretrainedConfig, vocabulary_size: int, *, rngs: nnx.Rngs):
        super().__init__(config, vocabulary_size, rngs=rngs)
        assert config.summary is not None
        self.summary = config.summary
        sizes = config.num_layers, config.model_width, config.norm_epsilon
        self.recurrence = Recurrence(config.summary, *sizes, rngs=rngs)

    def init_carry(self, b):
        inserted = jnp.zeros((b, self.summary.num_inserted, self.config.model_width), jnp.float32)
        return super().init_carry(b)._replace(window=Window(inserted=inserted))

    def published(self, carry, start):
        return {INSERTED: carry.window.inserted}

    def begin_decoding(self, carry):
        carry, d = super().begin_decoding(carry), self.config.model_width
        weighed = jnp.zeros((*carry.window.tokens.shape, d), self.dtype)
        return carry._replace(window=carry.window._replace(weighed=weighed))

    def read_segment(self, tokens, carry, start, dropout_key=None, *, every_layer=False):
        keep = slice(None if every_layer else -1, None)
        outputs, carry = self._scan(tokens, tokens, carry, start, dropout_key, lambda outputs, _: outputs[keep])
        return [rearrange(y, "c b w d -> b (c w) d") for y in outputs], carry

    def losses(self, tokens, targets, carry, start, dropout_key=None, *, slice_length):
        def finish(outputs, targets):
            return token_losses(self, self.final_norm(outputs[-1]), targets, slice_length)

        losses, carry = self._scan(tokens, targets, carry, start, dropout_key, finish)
        return jax.tree.map(lambda x: rearrange(x, "c b w -> b (c w)"), losses), carry

    def _scan(self, tokens, targets, carry: DecoderCarry, start: Bool[Array, "b c"], dropout_key, finish):
        """`finish(outputs of the layers, targets)` of one window after the other."""
        # Inside of the scan the ids are not known yet.
        check_tokens(tokens, self.embedding.shape[0])
        w = self.config.window_length
        positions, position = block_positions(carry.position, start, w, self.config.overlap)

        def read(inserted, window):
            tokens, targets, position, index = window
            outputs = self.read_window(tokens, position, inserted, fold_key(dropout_key, index))
            return self.recurrence(self._weigh(outputs)), finish(outputs, targets)

        windows = (rearrange(y, "b (c w) -> c b w", c=start.shape[1]) for y in (tokens, targets))
        by_window = (*windows, positions.T, jnp.arange(start.shape[1]))
        keep = jax.checkpoint_policies.save_only_these_names(*([LINEAR] if self.config.remat == "dots" else []))
        read = jax.checkpoint(read, prevent_cse=False, policy=keep)
        inserted, results = jax.lax.scan(read, carry.window.inserted, by_window)
        return results, carry._replace(position=position, window=Window(inserted=inserted))

    def _weigh(self, outputs: list[Float[Array, "*batch d"]]) -> Float[Array, "*batch d"]:
        """The weighted outputs of the layers, from the embedding and the outputs."""
        _, *outputs, last = outputs
        after_norm = self.summary.pooled_layers == "final_norm"
        return self.recurrence.weigh([*outputs, self.final_norm(last) if after_norm else last])

    def _with_outputs(self, window, places, outputs):
        assert window.weighed is not None
        return window._replace(weighed=window.weighed.at[places].set(self._weigh(outputs)))

    def _begin_window(self, carry):
        window = carry.window._replace(inserted=self.recurrence(carry.window.weighed))
        return super()._begin_window(carry._replace(window=window))


@builds(PretrainedConfig)
def build(config: PretrainedConfig, vocabulary_size: int, *, rngs: nnx.Rngs) -> PretrainedDecoder:
    kind = PretrainedDecoder if config.summary is None else RecurrentDecoder
    return kind(config, vocabulary_size, rngs=rngs)
