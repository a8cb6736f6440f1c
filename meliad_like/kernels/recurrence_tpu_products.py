"""The products of a chunk's tokens with each other and their decay, and their gradients, in the programs of the kernels
for linear recurrences on TPUs (`kernels/recurrence_tpu_programs.py`): with a decay for each head, or for each channel.

The former are one product of matrices times the decay between tokens. The latter can't be one product, as is said at
`linear_recurrence.products_by_channel`; as on other accelerators, the blocks of one size have a product together.
"""

import functools
from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float

from meliad_like.kernels.common import Interpret
from meliad_like.kernels.common import matrix_product as product
from meliad_like.kernels.common import row_and_column as indices
from meliad_like.kernels.recurrence import times


class Options(NamedTuple):
    """The settings that are known when the kernels are compiled."""

    dtype: Any
    """The dtype of the factors of products. Products of float32 have the precision of the platform's default."""
    heads: int
    """The largest number of heads that are computed at once, so that one of them works while another waits."""
    by_channel: bool
    """Whether each channel of a key has its decay."""
    corrected: bool
    """Whether the rule is the delta rule."""
    norm_epsilon: float | None
    """The epsilon of the norm of each head's results; None: they have no norm."""
    interpret: Interpret


class Products(NamedTuple):
    """The products of a chunk's tokens for a head, and its decays; or the gradients of all of these."""

    of_queries: Float[Array, "t t"]
    """The products of queries with keys, times the decay between the two; 0 above the diagonal."""
    of_keys: Float[Any, "t t"]
    """The products of keys with keys, as those of queries; the diagonal is not used. None without the delta rule."""
    since_begin: Float[Array, "t e"]
    """The decay of the state from the chunk's beginning to each token."""
    until_end: Float[Array, "t e"]
    """The decay from each token to the chunk's end."""


def precisely(options: Options, x: Array, y: Array, contracted: tuple[int, int] = (1, 0)) -> Array:
    """The product of two matrices of float32, or booleans that count as 0 and 1, of factors of at least 16 binary
    digits.

    Where activations are bfloat16, in two or three passes of a TPU's unit instead of the six for all digits.
    """
    if options.dtype == jnp.float32:
        return exactly(x.astype(jnp.float32), y.astype(jnp.float32), contracted)
    factors = [(a, b) for i, a in enumerate(_parts(x)) for j, b in enumerate(_parts(y)) if i + j < 2]
    return functools.reduce(jnp.add, [product(*pair, contracted) for pair in reversed(factors)])


def exactly(x: Array, y: Array, contracted: tuple[int, int] = (1, 0)) -> Array:
    """The product of two float32 matrices."""
    return product(x, y, contracted, "highest")


def _parts(x: Array) -> list[Array]:
    """Numbers rounded to bfloat16, and what that leaves of them."""
    if x.dtype == bool:
        return [x.astype(jnp.float32).astype(jnp.bfloat16)]
    rounded = x.astype(jnp.bfloat16)
    return [rounded, (x - rounded.astype(jnp.float32)).astype(jnp.bfloat16)]


def sums_of_decays(log_decay: Float[Array, "h t"]) -> Float[Array, "h2 t"]:
    """The sums of the logarithms of decays up to each token, in two parts, as in `linear_recurrence.sums_between`."""
    t = log_decay.shape[1]
    unit, (row, column) = t / 2**17, indices(t)
    rounded = jnp.round(log_decay / unit) * unit
    return exactly(jnp.concatenate([rounded, log_decay - rounded]), (row <= column).astype(jnp.float32))


class ByHead:
    """The products with a decay for the head."""

    def __init__(self, options: Options, query: Array, key: Array, pairs: tuple[Array, Any], rows, columns):
        """`pairs`: the products of queries and of keys with keys; `rows` and `columns`: the two parts of the sums of
        the logarithms of decays, each [1, t] and [t, 1]."""
        self.options, self.query, self.key = options, query, key
        row, column = indices(len(key))
        between = functools.reduce(jnp.add, [x - y for x, y in zip(columns, rows)])
        self.between = jnp.exp(jnp.where(column <= row, between, -jnp.inf))
        until_end = functools.reduce(jnp.add, [x[-1:] - x for x in columns])
        decays = jnp.exp(functools.reduce(jnp.add, columns)), jnp.exp(until_end)
        of_queries, of_keys = (None if x is None else x * self.between for x in pairs)
        self.products = Products(of_queries, of_keys, *decays)

    def pull_back(self, of: Products, of_query: Array, of_key: Array) -> tuple[Array, Array, Float[Array, "1 t"]]:
        """The gradients of queries, keys and logarithms of decays, with what is known of the first two already."""
        row, column = indices(len(self.key))
        of_between = of.of_queries * self.products.of_queries
        reads = (of.of_queries * self.between).astype(self.options.dtype)
        of_query += product(reads, self.key)
        of_key += product(reads, self.query, (0, 0))
        if of.of_keys is not None:
            of_between += of.of_keys * self.products.of_keys
            reads = (of.of_keys * self.between).astype(self.options.dtype)
            of_key += product(reads, self.key) + product(reads, self.key, (0, 0))
        of_begin, of_end = (y * jnp.sum(x, axis=1, keepdims=True) for x, y in zip(of[2:], self.products[2:]))
        # The token in each column decays what is between an earlier one and itself or a later one.
        of_pairs = precisely(self.options, of_between, row >= column, (0, 0))
        return of_query, of_key, jnp.sum(jnp.where(row < column, of_pairs + of_end, of_begin), axis=0, keepdims=True)


class ByChannel:
    """The products with a decay for each channel of a key.

    For blocks of each size, of the readers in every second block with the keys in the block before it, each decayed to
    the boundary between the two.
    """

    def __init__(self, options: Options, query: Array, key: Array, log_decay: Float[Array, "t k"]):
        self.options, self.query, self.key, self.log_decay, t = options, query, key, log_decay, len(key)
        row, column = indices(t)
        self.until, self.after = column <= row, column > row
        same = jnp.sum(query.astype(jnp.float32) * key.astype(jnp.float32), axis=1, keepdims=True)
        of_queries, of_keys = jnp.where(row == column, same, 0), jnp.zeros((t, t), jnp.float32)
        for level in range(t.bit_length() - 1):
            is_below, _, _, reader, read = self._blocks(level)
            of_queries += jnp.where(is_below, product(reader, read, (1, 1)), 0)
            if options.corrected:
                of_keys += jnp.where(is_below, product(read, read, (1, 1)), 0)
        decays = (jnp.exp(precisely(options, chosen, log_decay)) for chosen in (self.until, self.after))
        self.products = Products(of_queries, of_keys if options.corrected else None, *decays)

    def _blocks(self, level: int) -> tuple[Array, Array, Array, Array, Array]:
        """For blocks of 2^level tokens: the pairs of readers and keys; the tokens whose decays are summed for each
        token, from a boundary or to it; its decay; queries and keys with their decay."""
        of_row, of_column = (jnp.right_shift(x, level) for x in indices(len(self.key)))
        is_later = (of_row & 1) == 1
        chosen = (self.after ^ is_later) & (of_row == of_column)
        decay = jnp.exp(precisely(self.options, chosen, self.log_decay))
        reader, read = (times(self.options.dtype, x, decay) for x in (self.query, self.key))
        return is_later & (of_column == of_row - 1), chosen, decay, reader, read

    def pull_back(self, of: Products, of_query: Array, of_key: Array) -> tuple[Array, Array, Float[Array, "t k"]]:
        """See `ByHead.pull_back`."""
        t, options = len(self.key), self.options
        row, column = indices(t)
        query, key = (x.astype(jnp.float32) for x in (self.query, self.key))
        same = jnp.sum(jnp.where(row == column, of.of_queries, 0), axis=1, keepdims=True)
        of_query += same * key
        of_key += same * query
        of_log_decay = precisely(options, self.until, of.since_begin * self.products.since_begin, (0, 0))
        of_log_decay += precisely(options, self.after, of.until_end * self.products.until_end, (0, 0))
        for level in range(t.bit_length() - 1):
            is_below, chosen, decay, reader, read = self._blocks(level)
            of_queries = jnp.where(is_below, of.of_queries, 0).astype(options.dtype)
            # The gradients of queries and keys that are decayed.
            of_reader, of_read = product(of_queries, read), product(of_queries, reader, (0, 0))
            if of.of_keys is not None:
                of_keys = jnp.where(is_below, of.of_keys, 0).astype(options.dtype)
                of_read += product(of_keys, read) + product(of_keys, read, (0, 0))
            of_query += decay * of_reader
            of_key += decay * of_read
            of_log_decay += precisely(options, chosen, decay * (query * of_reader + key * of_read), (0, 0))
        return of_query, of_key, of_log_decay
