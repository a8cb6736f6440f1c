"""Pallas kernels for NVIDIA GPUs that compute `decayed_products` with a decay for each channel of the keys.

As there, the blocks of one size have a product together: of the readers in every second block with the keys in the
block before it, each decayed to the boundary between the two. A program keeps a chunk's decays on the chip, where they
would be an array of the size of the keys for each size of a block, and for each factor of its products.
"""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton
from jaxtyping import Array, Float

from meliad_like.kernels.common import Grid, Ref, differentiable, row_and_column
from meliad_like.kernels.common import matrix_product as product
from meliad_like.kernels.recurrence import times
from meliad_like.kernels.recurrence_gpu_programs import Options

SLICE = 64
"""The largest number of channels that are computed at once."""


class Channels(NamedTuple):
    """The readers, keys and decays of a chunk and head, or of all of them."""

    query: Float[Ref, "t k"]
    key: Float[Ref, "t k"]
    log_decay: Float[Ref, "t k"]


class Products(NamedTuple):
    """The products of a chunk's readers with its keys, and its decays, for a head; or for all of them."""

    of_queries: Float[Ref, "t t"]
    of_keys: Float[Ref, "t t"]
    decay: Float[Ref, "t k"]
    """From the chunk's beginning to each token."""
    until_end: Float[Ref, "t k"]
    """From each token to the chunk's end."""


OF_CHANNELS = Channels("bhnk", "bhnk", "bch1tk")
OF_PRODUCTS = Products("bch1tt", "bch1tt", "bch1tk", "bch1tk")
"""The axes of the arrays of all chunks and heads. All are float32 but queries, keys and the products of queries."""


def _sums(options: Options, summed: Array, log_decay: Array, contracted: tuple[int, int] = (1, 0)) -> Array:
    """Sums of logarithms of decays, or of gradients. Sums of numbers rounded to eleven bits are not enough."""
    precision = None if options.interpret else jax.lax.DotAlgorithmPreset.TF32_TF32_F32_X3
    return product(summed.astype(jnp.float32), log_decay, contracted, precision)


def _blocks(t: int, level) -> tuple[Array, Array]:
    """The tokens whose decays are summed for each token, in blocks of 2^level tokens: up to it in every second block,
    and from it to the end of the block in the others; and the pairs of readers and keys that have a product."""
    row, column = row_and_column(t)
    of_row, of_column = (jnp.right_shift(x, level) for x in (row, column))
    is_later = (of_row & 1) == 1
    summed = jnp.where(is_later, column <= row, column > row) & (of_row == of_column)
    return summed, is_later & (of_column == of_row - 1)


def products_kernel(options: Options, x: Channels, results: Products):
    """Writes the products and decays of a chunk of a head."""
    t, k = x.key.shape
    size = min(SLICE, k)
    slices = [pl.ds(i * size, size) for i in range(k // size)]

    def add(level, sums):
        of_queries, of_keys = sums
        summed, is_below = _blocks(t, level)
        for at in slices:
            decay = jnp.exp(_sums(options, summed, x.log_decay[:, at]))
            query, key = (times(options.dtype, y[:, at], decay) for y in (x.query, x.key))
            of_queries += jnp.where(is_below, product(query, key, (1, 1)), 0)
            of_keys += jnp.where(is_below, product(key, key, (1, 1)), 0)
        return of_queries, of_keys

    none = jnp.zeros((t, t), jnp.float32)
    of_queries, of_keys = jax.lax.fori_loop(0, t.bit_length() - 1, add, (none, none))
    row, column = row_and_column(t)
    until, after = column <= row, column > row
    for at in slices:
        query, key = (y[:, at].astype(jnp.float32) for y in (x.query, x.key))
        of_queries += jnp.where(row == column, jnp.sum(query * key, axis=1, keepdims=True), 0)
        results.decay[:, at] = jnp.exp(_sums(options, until, x.log_decay[:, at]))
        results.until_end[:, at] = jnp.exp(_sums(options, after, x.log_decay[:, at]))
    results.of_queries[...] = of_queries.astype(results.of_queries.dtype)
    results.of_keys[...] = of_keys


def products_gradient_kernel(options: Options, x: Channels, cotangents: Products, gradients: Channels):
    """Writes the gradients of some channels of a chunk's inputs."""
    query, key = x.query[...].astype(jnp.float32), x.key[...].astype(jnp.float32)
    log_decay, t = x.log_decay[...], len(key)
    row, column = row_and_column(t)
    of_log_decay = jnp.zeros(key.shape, jnp.float32)
    for summed, of_decay in ((column <= row, cotangents.decay), (column > row, cotangents.until_end)):
        of_sum = of_decay[...] * jnp.exp(_sums(options, summed, log_decay))
        of_log_decay += _sums(options, summed, of_sum, (0, 0))
    same = jnp.where(row == column, cotangents.of_queries[...].astype(jnp.float32), 0)
    same = jnp.sum(same, axis=1, keepdims=True)

    def add(level, sums):
        of_query, of_key, of_log_decay = sums
        summed, is_below = _blocks(t, level)
        decay = jnp.exp(_sums(options, summed, log_decay))
        reader, read = times(options.dtype, query, decay), times(options.dtype, key, decay)
        of_queries, of_keys = (
            jnp.where(is_below, y[...].astype(jnp.float32), 0).astype(options.dtype)
            for y in (cotangents.of_queries, cotangents.of_keys)
        )
        # The gradients of queries and keys that are decayed.
        of_reader = product(of_queries, read)
        of_read = product(of_keys, read) + product(of_queries, reader, (0, 0)) + product(of_keys, read, (0, 0))
        of_sum = decay * (query * of_reader + key * of_read)
        of_log_decay += _sums(options, summed, of_sum, (0, 0))
        return of_query + decay * of_reader, of_key + decay * of_read, of_log_decay

    sums = same * key, same * query, of_log_decay
    of_query, of_key, of_log_decay = jax.lax.fori_loop(0, t.bit_length() - 1, add, sums)
    gradients.query[...] = of_query.astype(gradients.query.dtype)
    gradients.key[...] = of_key.astype(gradients.key.dtype)
    gradients.log_decay[...] = of_log_decay


def products_by_channel_in_kernel(
    options: Options,
    query: Float[Array, "b h n k"],
    key: Float[Array, "b h n k"],
    log_decay: Float[Array, "b c h 1 t k"],
) -> Products:
    """The results of `decayed_products` with queries and keys for each head; products of a key with itself are 0."""
    # As in `decayed_products`: the bound changes no decay.
    return _products(options, Channels(query, key, jnp.maximum(log_decay, -128)))


def _forward(options, x):
    (*batch, t, k) = x.log_decay.shape
    squares, decays = (jax.ShapeDtypeStruct((*batch, t, size), jnp.float32) for size in (t, k))
    of_queries = jax.ShapeDtypeStruct(squares.shape, options.dtype)
    results = Products(of_queries, squares, decays, decays)
    [products] = _call(options, products_kernel, x, k, [(x, OF_CHANNELS)], (results, OF_PRODUCTS))
    return products, x


def _backward(options, x, cotangents):
    read, slice = [(x, OF_CHANNELS), (cotangents, OF_PRODUCTS)], math.gcd(x.key.shape[3], SLICE)
    return tuple(_call(options, products_gradient_kernel, x, slice, read, (x, OF_CHANNELS)))


_products = differentiable(_forward, _backward)


def _call(options: Options, kernel, x: Channels, size: int, read, written) -> list[Any]:
    """Runs a kernel in a grid of chunks times slices of `size` channels, heads and lanes."""
    b, c, h, _, t, k = x.log_decay.shape
    programs, places = {"c": c, "h": h, "b": b}, {"n": "c"}
    if (slices := k // size) > 1:
        programs = {"i": c * slices, "h": h, "b": b}
        places = dict.fromkeys("cn", lambda at: jax.lax.div(at["i"], slices))
        places["k"] = lambda at: jax.lax.rem(at["i"], slices)
    grid = Grid(programs, dict.fromkeys("bch1") | {"n": t, "t": t, "k": size}, places)
    run, params = functools.partial(kernel, options), triton.CompilerParams(num_warps=options.warps[1], num_stages=1)
    return grid.call(run, read, [written], params, interpret=options.interpret, name=kernel.__name__)
