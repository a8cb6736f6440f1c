"""Shortformer (Press et al. 2021, section 5), its ablations, and the model of Baevski & Auli 2018 that it improves."""

import itertools
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int, PRNGKeyArray

from meliad_like.errors import UserError
from meliad_like.families.layers import LayerNorm, dropout
from meliad_like.layers.attention import attend, merge_heads, split_heads, with_tokens
from meliad_like.layers.basic import (
    Linear,
    check_tokens,
    dropout_multiplier,
    embed,
    fold_key,
    parameter,
    product,
    rows,
    scores,
    split_key,
    uniform,
)
from meliad_like.layers.flops import Flops
from meliad_like.layers.lanes import at_lanes
from meliad_like.layers.losses import TokenLosses, divisor, in_slices
from meliad_like.layers.sharding import constrain
from meliad_like.models.config import MODELS, ModelConfig, ModelTraits, builds
from meliad_like.models.decoder import Layer
from meliad_like.models.model import BaseDecoder
from meliad_like.registry import size
from meliad_like.validation import check_not_negative, check_positive

xavier = jax.nn.initializers.xavier_uniform()
# Xavier with a gain of 1 / sqrt(2): keys, queries and values as if they were one matrix.
shared_xavier = jax.nn.initializers.variance_scaling(0.5, "fan_avg", "uniform")
# Uniform between -1 / sqrt(fan_in) and 1 / sqrt(fan_in), for kernels; biases need to be told their fan_in.
uniform_fan_in = jax.nn.initializers.variance_scaling(1 / 3, "fan_in", "uniform")
EPSILON = 1e-5
# A segment is cut into at least this number of pieces, whose logits in a band are computed one after the other.
PIECES = 8
# Fairseq counts positions from this number, and its checkpoints were trained with it.
FIRST_POSITION = 2


def sinusoids(num_positions: int, model_width: int) -> Float[np.ndarray, "s d"]:
    """Sines, then cosines, of each position; wavelengths from 2 pi to 20,000 pi (Vaswani et al. 2017, section 3.5)."""
    half = model_width // 2
    frequency = np.exp(np.arange(half) * (-np.log(10_000) / (half - 1)))
    angle = (np.arange(num_positions) + FIRST_POSITION)[:, None] * frequency
    return np.concatenate([np.sin(angle), np.cos(angle)], axis=1).astype(np.float32)


@MODELS.register("shortformer")
class ShortformerConfig(ModelConfig):
    """A transformer of Baevski & Auli 2018, with the two parts of Shortformer (section 5): positions that are infused
    into attention, and a cache of the tokens before. The defaults are the paper's best model for WikiText-103.

    A token sees itself, the earlier tokens of its block (`window_length`, the paper's L), and the cache.
    """

    num_layers: int = size(16, "layers")
    cache_length: int = size(512, "length")
    """The number of tokens before the block that a token sees as well (the paper's L'); 0: none."""
    position: Literal["infused", "input"] = "infused"
    """The vectors to which sinusoidal positions are added: `infused`, the inputs of the query and key projections of
    every layer (section 5.1); or `input`, the scaled word embeddings, counted from the beginning of each block."""
    cutoffs: tuple[int, ...] = (20_000, 60_000)
    """First ids of the vocabulary's narrower bands (`AdaptiveVocabulary`); (): one table, shared with the softmax."""
    band_factor: int = size(4, "fixed")
    """The ratio of the width of a band's vectors to the width of the next band's."""
    dropout_rate: float = 0.3
    """Dropout of the embeddings, and of the outputs of attention and feed-forward networks."""
    attention_dropout_rate: float = 0.1
    """Dropout of the attention weights."""
    activation_dropout_rate: float = 0.1
    """Dropout of the feed-forward network's hidden layer."""
    softmax_dropout_rate: float = 0.2
    """Dropout of the input of the softmax, and of the inputs of its narrower bands."""

    def __post_init__(self):
        super().__post_init__()
        check_positive(self, ("band_factor",))
        check_not_negative(self, ("cache_length",))
        # Half of the channels are sines, whose frequencies are spaced by 1 / (model_width / 2 - 1).
        if self.model_width % 2 or self.model_width < 4:
            raise UserError(f"model_width={self.model_width} must be even, and at least 4")
        object.__setattr__(self, "cutoffs", tuple(self.cutoffs))
        if any(low >= high for low, high in zip((0, *self.cutoffs), self.cutoffs)):
            raise UserError(f"cutoffs={self.cutoffs} must be positive and ascend")
        if self.model_width < self.band_factor ** len(self.cutoffs):
            raise UserError(
                f"model_width={self.model_width} leaves nothing for the last of {len(self.cutoffs) + 1} bands, each "
                f"band_factor={self.band_factor} times narrower than the one before"
            )

    def flops(self, vocabulary_size: int) -> Flops:
        """The operations of one token, without the narrower bands of the softmax, which few tokens need; how many
        depends on the text."""
        d, w, m = self.model_width, self.window_length, self.cache_length
        inner, edges = self.num_heads * self.head_size, (0, *self.cutoffs, vocabulary_size)
        projections = 2 * d * inner * (2 + 2 * (m + w) / w)
        attention = 2 * 2 * (m + w) * inner
        layers = self.num_layers * (projections + attention + 4 * d * self.feedforward_width)
        widths = [d // self.band_factor**i for i in range(len(edges) - 1)] if self.cutoffs else []
        softmax = sum(2 * d * width for width in widths) + 2 * d * (edges[1] + len(self.cutoffs))
        return Flops.of_products(layers + softmax)

    @property
    def num_block_by_block(self):
        return self.num_layers

    @property
    def traits(self):
        return ModelTraits(self._num_visible, memory="window" if self.cache_length else None)

    def _num_visible(self, position: Int[np.ndarray, "..."]) -> Int[np.ndarray, "..."]:
        """The cache at the beginning of the block, and the block up to the token."""
        offset = position % self.window_length
        return np.minimum(position - offset, self.cache_length) + offset + 1


class ShortformerCarry(NamedTuple):
    """The carry of one layer; the last three only while decoding."""

    cache: Float[Array, "b m d"] | None
    """The layer's inputs, after its norm, at the last m tokens; the newest come last, and the first may be empty."""
    position: Int[Array, " b"]
    """The number of tokens of the document before the block."""
    recent: Float[Array, "b w d"] | None = None
    """The layer's inputs, after its norm, of the block's tokens so far."""
    key: Float[Array, "b h s k"] | None = None
    """The keys of the cached tokens, then of the block's."""
    value: Float[Array, "b h s k"] | None = None


class ShortformerLayer(Layer):
    """Attention and feed-forward, each after a norm and added to the residual stream."""

    def __init__(self, config: ShortformerConfig, *, rngs: nnx.Rngs):
        self.config = config
        d, f, inner = config.model_width, config.feedforward_width, config.num_heads * config.head_size
        zeros = jax.nn.initializers.zeros

        def head_projection():
            bias = uniform(d**-0.5)
            return Linear(d, inner, ("model", "heads"), rngs=rngs, initializer=shared_xavier, bias_initializer=bias)

        self.attention_norm = LayerNorm(d, EPSILON, rngs=rngs)
        self.query, self.key, self.value = head_projection(), head_projection(), head_projection()
        self.output = Linear(inner, d, ("heads", "model"), rngs=rngs, initializer=xavier, bias_initializer=zeros)
        self.feedforward_norm = LayerNorm(d, EPSILON, rngs=rngs)
        self.feedforward_hidden = Linear(
            d, f, ("model", "feedforward"), rngs=rngs, initializer=uniform_fan_in, bias_initializer=uniform(d**-0.5)
        )
        self.feedforward_output = Linear(
            f, d, ("feedforward", "model"), rngs=rngs, initializer=uniform_fan_in, bias_initializer=uniform(f**-0.5)
        )

    def init_carry(self, b, dtype):
        m, d = self.config.cache_length, self.config.model_width
        return ShortformerCarry(jnp.zeros((b, m, d), dtype) if m else None, jnp.zeros(b, jnp.int32))

    def __call__(self, x, context, carry, dropout_key=None):
        config, (b, w) = self.config, x.shape[:2]
        m = config.cache_length
        num_cached = jnp.minimum(m, context.positions[:, 0])
        keys = split_key(dropout_key, 4)
        inputs = self.attention_norm(x)
        seen = inputs
        if m:
            seen = jnp.concatenate([jax.lax.stop_gradient(carry.cache).astype(inputs.dtype), inputs], axis=1)
        place = num_cached[:, None] + np.arange(-m, w)
        not_later = np.arange(-m, w) <= np.arange(w)[:, None]
        mixed = attend(
            self._query(inputs, place[:, m:]),
            self._key(seen, place),
            split_heads(self.value(seen), config.num_heads),
            mask=not_later & (place >= 0)[:, None, None, :],
            multiplier=dropout_multiplier(keys[1], config.attention_dropout_rate, (b, config.num_heads, w, m + w)),
        )
        x = self._finish(x, merge_heads(mixed), (keys[0], keys[2], keys[3]))
        return x, ShortformerCarry(seen[:, w:] if m else None, context.positions[:, 0] + w)

    def decode(self, x, counts, context, carry):
        w, m, position = self.config.window_length, self.config.cache_length, context.positions[:, None]
        offset, num_cached = position % w + np.arange(x.shape[1]), jnp.minimum(m, position - position % w)
        inputs, place = self.attention_norm(x), num_cached + offset
        value = split_heads(self.value(inputs), self.config.num_heads)
        carry = carry._replace(
            recent=with_tokens(carry.recent, inputs, offset, counts, axis=1),
            key=with_tokens(carry.key, self._key(inputs, place), m + offset, counts, axis=2),
            value=with_tokens(carry.value, value, m + offset, counts, axis=2),
        )
        slot = np.arange(-m, w)
        visible = (slot >= -num_cached[..., None]) & (slot <= offset[..., None])
        mixed = attend(self._query(inputs, place), carry.key, carry.value, mask=visible[:, None])
        x = self._finish(x, merge_heads(mixed), (None,) * 3)
        return at_lanes(context.block_ends(counts, w), self._end_block, x, carry)

    def begin_decoding(self, carry):
        """The carry with the keys and values of the cached inputs, which are projected once for the block."""
        config, m, b = self.config, self.config.cache_length, carry.position.shape[0]
        w, d, dtype = config.window_length, config.model_width, jnp.dtype(config.activation_dtype)
        key = value = jnp.zeros((b, config.num_heads, w, config.head_size), dtype)
        if m:
            old_key = self._key(carry.cache, jnp.minimum(m, carry.position)[:, None] + np.arange(-m, 0))
            old_value = split_heads(self.value(carry.cache), config.num_heads)
            key, value = (jnp.concatenate(pair, axis=2) for pair in ((old_key, key), (old_value, value)))
        return carry._replace(recent=jnp.zeros((b, w, d), dtype), key=key, value=value)

    def _end_block(self, carry: ShortformerCarry) -> ShortformerCarry:
        """The carry after the block has moved into the cache."""
        w, cache = self.config.window_length, None
        if self.config.cache_length:
            cache = jnp.concatenate([carry.cache, carry.recent], axis=1)[:, w:]
        return self.begin_decoding(ShortformerCarry(cache, carry.position + w))

    def _placed(self, inputs: Float[Array, "b s d"], place: Int[Array, "b s"]) -> Float[Array, "b s d"]:
        """`inputs` with their positions, if those are infused; places below 0 are empty."""
        if self.config.position == "input":
            return inputs
        table = sinusoids(self.config.cache_length + self.config.window_length, self.config.model_width)
        return inputs + jnp.asarray(table, inputs.dtype)[jnp.maximum(place, 0)]

    def _query(self, inputs: Float[Array, "b t d"], place: Int[Array, "b t"]) -> Float[Array, "b h t k"]:
        query = self.query(self._placed(inputs, place)) * self.config.head_size**-0.5
        return split_heads(query, self.config.num_heads)

    def _key(self, inputs: Float[Array, "b s d"], place: Int[Array, "b s"]) -> Float[Array, "b h s k"]:
        return split_heads(self.key(self._placed(inputs, place)), self.config.num_heads)

    def _finish(self, x, mixed, keys):
        config = self.config
        x = x + dropout(self.output(mixed), config.dropout_rate, keys[0])
        with jax.named_scope("feedforward"):
            hidden = jax.nn.relu(self.feedforward_hidden(self.feedforward_norm(x)))
            hidden = dropout(hidden, config.activation_dropout_rate, keys[1])
            return x + dropout(self.feedforward_output(hidden), config.dropout_rate, keys[2])


class Band(nnx.Module):
    """The vectors of consecutive ids, and their projection to the model's width."""

    def __init__(self, size: int, width: int, model_width: int, *, projected: bool, rngs: nnx.Rngs):
        normal = jax.nn.initializers.normal(width**-0.5)
        self.embedding = parameter(rngs.params(), normal, (size, width), ("vocabulary", "model"), "table")
        self.projection = (
            parameter(rngs.params(), xavier, (width, model_width), (None, "model"), "matrix") if projected else None
        )

    @property
    def table(self) -> Float[Array, "v i"]:
        """The vectors in float32. They are rounded after a lookup, so that its gradient is a float32 sum."""
        return constrain(self.embedding[...], "vocabulary", None)


class AdaptiveVocabulary(nnx.Module):
    """Adaptive embedding and softmax: frequent words get wide vectors (Baevski & Auli 2018, section 3).

    Token ids are ranks: the smaller, the more frequent. `cutoffs` cut them into bands, and each band after the first
    has vectors `band_factor` times narrower than the one before it. A projection for each band takes its vectors to the
    model's width. The softmax shares both (section 3): the first band's words and one cluster for each other band are
    scored against the hidden vector itself, the words of another band against its projection to the band's width, and

        log p(w) = log p_head(cluster of w) + log p_cluster(w).

    Without cutoffs this is one table, shared by the embedding and the softmax.
    """

    def __init__(self, config: ShortformerConfig, vocabulary_size: int, *, rngs: nnx.Rngs):
        cutoffs, d = config.cutoffs, config.model_width
        if cutoffs and cutoffs[-1] >= vocabulary_size:
            raise UserError(
                f"cutoffs={cutoffs} must be below the vocabulary's size of {vocabulary_size}; () for one shared table"
            )
        self.size = vocabulary_size
        self.edges = (0, *cutoffs, vocabulary_size)
        self.dropout_rate = config.softmax_dropout_rate
        self.bands = nnx.List(
            Band(last - first, d // config.band_factor**i, d, projected=bool(cutoffs), rngs=rngs)
            for i, (first, last) in enumerate(itertools.pairwise(self.edges))
        )
        self.clusters = Linear(d, len(cutoffs), ("model", None), rngs=rngs, initializer=xavier) if cutoffs else None

    def embed(self, tokens: Int[Array, "*batch"], dtype) -> Float[Array, "*batch d"]:
        """The vector of each token, not scaled. Ids out of range are treated as in `layers.basic.embed`."""
        if len(self.bands) == 1:
            return embed(self.bands[0].table, tokens).astype(dtype)
        check_tokens(tokens, self.size)
        total = jnp.where((tokens >= 0) & (tokens < self.size), 0.0, jnp.nan)[..., None].astype(dtype)
        for band, first, last in zip(self.bands, self.edges, self.edges[1:]):
            index = jnp.clip(tokens - first, 0, last - first - 1)
            x = band.table[index].astype(dtype)
            assert band.projection is not None
            x = product(rows(x), band.projection[...].astype(dtype)).reshape(*tokens.shape, -1)
            total = total + jnp.where(((tokens >= first) & (tokens < last))[..., None], x, 0)
        return total

    def log_probabilities(self, hidden: Float[Array, "*batch d"]) -> Float[Array, "*batch v"]:
        """The exact log-probability of every token of the vocabulary, float32."""
        head = self._head(hidden)
        parts = [head[..., : self.edges[1]]]
        for i in range(1, len(self.bands)):
            within = jax.nn.log_softmax(self._band_logits(i, hidden, None))
            parts.append(head[..., self.edges[1] + i - 1, None] + within)
        return jnp.concatenate(parts, axis=-1)

    def score(
        self,
        hidden: Float[Array, "b n d"],
        targets: Int[Array, "b n"],
        slice_length: int,
        dropout_key: PRNGKeyArray | None = None,
    ) -> TokenLosses:
        """The loss of each target, without the logits of the whole vocabulary.

        A band's logits are needed only for tokens whose target, or possibly whose most likely token, lies in the band.
        Each lane is sorted so that these tokens come first; a piece in which no lane has such a token is skipped. The
        logits of at most `slice_length` tokens of a lane exist at the same time.
        """
        keys = split_key(dropout_key, len(self.bands) + 1)
        hidden = dropout(hidden, self.dropout_rate, keys[0])
        n = targets.shape[1]

        def head_score(hidden, targets):
            head = self._head(hidden)
            words, clusters = head[..., : self.edges[1]], head[..., self.edges[1] :]
            index = targets
            for i, first in enumerate(self.edges[1:-1]):
                index = jnp.where(targets >= first, self.edges[1] + i, index)
            target = jnp.take_along_axis(head, index[..., None], axis=-1)[..., 0]
            return target, jnp.max(words, axis=-1), clusters

        target, best, clusters = in_slices(head_score, divisor(n, slice_length), hidden, targets)
        best = jax.lax.stop_gradient(best)
        piece = divisor(n, min(slice_length, max(n // PIECES, 1)))
        for i in range(1, len(self.bands)):
            first, last = self.edges[i], self.edges[i + 1]
            inside = (targets >= first) & (targets < last)
            cluster = clusters[..., i - 1]
            # A band whose cluster is less likely than a word of the first band can't hold the most likely token.
            needed = inside | (cluster > best)
            index = jnp.clip(targets - first, 0, last - first - 1)
            of_target, of_best = self._score_needed(i, needed, piece, hidden, index, keys[i])
            target = target + jnp.where(inside, of_target, 0.0)
            best = jnp.maximum(best, jnp.where(needed, jax.lax.stop_gradient(cluster + of_best), -jnp.inf))
        return TokenLosses(-target, target >= best, None)

    def _head(self, hidden: Float[Array, "*batch d"]) -> Float[Array, "*batch s"]:
        """Log-probabilities of the first band's words, and of the cluster of each other band."""
        logits = scores(hidden, self.bands[0].table)
        if self.clusters is not None:
            # `self.clusters(hidden)` would return results in the dtype of `hidden`; these must be float32.
            clusters = scores(hidden, self.clusters.kernel[...].T)
            logits = jnp.concatenate([logits, clusters], axis=-1)
        return jax.nn.log_softmax(logits)

    def _band_logits(self, i: int, hidden: Float[Array, "*batch d"], key: PRNGKeyArray | None):
        band = self.bands[i]
        assert band.projection is not None
        narrow = product(rows(hidden), band.projection[...].astype(hidden.dtype).T)
        narrow = dropout(narrow, self.dropout_rate, key).reshape(*hidden.shape[:-1], -1)
        return scores(narrow, band.table)

    def _score_needed(self, i: int, needed, piece: int, hidden, index, key) -> tuple[Array, Array]:
        """Log-probabilities in the softmax of band `i`: of each target, and of the most likely token. Those of tokens
        that are not `needed` are finite and have no meaning."""

        def compute(hidden, index, number):
            logits = jax.nn.log_softmax(self._band_logits(i, hidden, fold_key(key, number[0, 0])))
            return jnp.take_along_axis(logits, index[..., None], axis=-1)[..., 0], jnp.max(logits, axis=-1)

        def skip(hidden, index, number):
            return jnp.zeros(index.shape), jnp.zeros(index.shape)

        def one_piece(needed, *inputs):
            return jax.lax.cond(jnp.any(needed), compute, skip, *inputs)

        def reordered(x, order):
            return jnp.take_along_axis(x, order.reshape(*order.shape, *(1,) * (x.ndim - 2)), axis=1)

        order = jnp.argsort(~needed, axis=1, stable=True)
        number = jnp.broadcast_to(np.arange(needed.shape[1]) // piece, needed.shape)
        results = in_slices(one_piece, piece, *(reordered(x, order) for x in (needed, hidden, index)), number)
        back = jnp.argsort(order, axis=1)
        return jax.tree.map(lambda x: reordered(x, back), results)


@builds(ShortformerConfig)
class Shortformer(BaseDecoder):
    """A language model that reads blocks of `w` tokens, each with the `m` tokens before it.

    No gradient passes from a block to the one before.
    """

    config: ShortformerConfig

    def __init__(self, config: ShortformerConfig, vocabulary_size: int, *, rngs: nnx.Rngs):
        self.config = config
        self.vocabulary = AdaptiveVocabulary(config, vocabulary_size, rngs=rngs)
        self.layers = nnx.List(ShortformerLayer(config, rngs=rngs) for _ in range(config.num_layers))

    def embed(self, tokens, position, dropout_key):
        config = self.config
        x = self.vocabulary.embed(tokens, self.dtype) * config.model_width**0.5
        if config.position == "input":
            x = x + jnp.asarray(sinusoids(config.window_length, config.model_width), self.dtype)[position]
        return dropout(x, config.dropout_rate, dropout_key)

    def finish(self, x, dropout_key):
        return x

    def logits(self, hidden: Float[Array, "*batch d"]) -> Float[Array, "*batch v"]:
        """Log-probabilities of the next token, float32."""
        return self.vocabulary.log_probabilities(hidden)

    def target_scores(self, *arguments) -> TokenLosses:
        return self.vocabulary.score(*arguments)
