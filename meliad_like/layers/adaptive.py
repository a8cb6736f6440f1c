"""Adaptive embedding and softmax: frequent words get wide vectors, rare ones narrow (Baevski & Auli 2018, section 3).

Token ids are ranks: the smaller, the more frequent. `cutoffs` cut them into bands, and each band after the first has
vectors `factor` times narrower than the one before it. A projection for each band takes its vectors to the model's
width. The softmax shares both (section 3): the first band's words and one cluster for each other band are scored
against the hidden vector itself, the words of another band against its projection to the band's width, and

    log p(w) = log p_head(cluster of w) + log p_cluster(w).

Without cutoffs this is one table, shared by the embedding and the softmax.
"""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int, PRNGKeyArray

from meliad_like.errors import UserError
from meliad_like.layers.basic import Linear, check_tokens, dropout, embed, parameter, product, rows, scores
from meliad_like.layers.losses import TokenLosses, divisor, in_slices
from meliad_like.layers.sharding import constrain

xavier = jax.nn.initializers.xavier_uniform()
# A segment is cut into at least this number of pieces, whose logits in a band are computed one after the other.
PIECES = 8


class Band(nnx.Module):
    """The vectors of consecutive ids, and their projection to the model's width."""

    def __init__(self, size: int, width: int, model_width: int, *, projected: bool, rngs: nnx.Rngs):
        normal = jax.nn.initializers.normal(width**-0.5)
        self.embedding = parameter(rngs.params(), normal, (size, width), ("vocabulary", "model"))
        self.projection = parameter(rngs.params(), xavier, (width, model_width), (None, "model")) if projected else None

    @property
    def table(self) -> Float[Array, "v i"]:
        """The vectors in float32. They are rounded after a lookup, so that its gradient is a float32 sum."""
        return constrain(self.embedding[...], "vocabulary", None)


class AdaptiveVocabulary(nnx.Module):
    """Embedding and softmax of one vocabulary, which share their parameters."""

    def __init__(
        self,
        vocabulary_size: int,
        model_width: int,
        cutoffs: tuple[int, ...],
        factor: int,
        dropout_rate: float,
        *,
        rngs: nnx.Rngs,
    ):
        """`cutoffs` are the first ids of the bands after the first, and `factor` the ratio of neighbouring widths.
        Dropout applies to the input of the softmax, and to its projection to each narrower band."""
        if cutoffs and cutoffs[-1] >= vocabulary_size:
            raise UserError(
                f"cutoffs={cutoffs} must be below the vocabulary's size of {vocabulary_size}; () for one shared table"
            )
        self.size = vocabulary_size
        self.edges = (0, *cutoffs, vocabulary_size)
        self.dropout_rate = dropout_rate
        self.bands = nnx.List(
            Band(last - first, model_width // factor**i, model_width, projected=bool(cutoffs), rngs=rngs)
            for i, (first, last) in enumerate(itertools.pairwise(self.edges))
        )
        self.clusters = (
            Linear(model_width, len(cutoffs), ("model", None), rngs=rngs, initializer=xavier) if cutoffs else None
        )

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
        keys = (None,) * (len(self.bands) + 1)
        if dropout_key is not None:
            keys = tuple(jax.random.split(dropout_key, len(keys)))
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
            key_of_piece = None if key is None else jax.random.fold_in(key, number[0, 0])
            logits = jax.nn.log_softmax(self._band_logits(i, hidden, key_of_piece))
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
