"""The programs of the kernels for linear recurrences (`kernels/recurrence_gpu.py`), each for a head and lane.

In the names of a chunk's arrays: `t` tokens, keys of size `k`, values of size `p`, and `e` decays, one or `k`. Of its
tokens, the *updates* u_t are what they write, and of the delta rule T is the inverse of I + beta (products of keys):

    u = T beta (v - decay k S^T),    y = decay q S^T + (products of queries) u,    S' = decay_end S + (u until_end)^T k
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Float

from meliad_like.kernels.common import Ref, row_and_column
from meliad_like.kernels.common import matrix_product as product
from meliad_like.kernels.recurrence import times

SQUARE = 16
"""The side of the squares of which the inverse of a triangular matrix is made."""
HIGHEST = jax.lax.Precision.HIGHEST


class Options(NamedTuple):
    """The settings that are known when the kernels are compiled."""

    dtype: Any
    """The dtype of the factors of products. Products of float32 have the precision of the platform's default."""
    values: int
    """The number of channels of a value that one program carries through a segment."""
    slice: int
    """The largest number of channels of a value that the other programs compute at once."""
    warps: tuple[int, int]
    """The number of warps of the programs that go through a segment, and of the programs of one chunk."""
    stages: tuple[int, int]
    """The number of stages of their loops."""
    interpret: bool


class Chunk(NamedTuple):
    """The inputs of a chunk: the rule that its tokens apply to the states of a head."""

    query: Float[Ref, "t k"]
    key: Float[Ref, "t k"]
    value: Float[Ref, "t p"]
    strength: Float[Ref, "t 1"]
    """The writing strength of the delta rule; None: values are written as they are."""
    of_queries: Float[Ref, "t t"]
    """The products of queries with keys, times the decay between the two; 0 above the diagonal."""
    of_keys: Float[Ref, "t t"]
    """The same of keys with keys; the diagonal is not used. None: without strength."""
    decay: Float[Ref, "t e"]
    """The decay of the state from the chunk's beginning to each token."""
    until_end: Float[Ref, "t e"]
    """The decay from each token to the chunk's end."""


def exactly(options: Options) -> Any:
    """The precision of products with the inverse, whose factors are float32.

    Where activations are float32, their rounding would be the largest error: other products are of rounded numbers.
    """
    if options.interpret or options.dtype != jnp.float32:
        return None
    return jax.lax.DotAlgorithmPreset.TF32_TF32_F32_X3


def inverse_kernel(options: Options, of_keys, strength, inverse):
    """Writes the inverse [t, t] of I + strength (products of keys below the diagonal), in float32.

    Squares on the diagonal are inverted row by row, those below are products of squares: all numbers are of the size of
    the result's, whereas the powers of a matrix, for keys that repeat, are as large as binomial coefficients.
    """
    side = min(len(of_keys), SQUARE)
    m = len(of_keys) // side
    row, column = row_and_column(side)

    def rows(i):
        return pl.ds(i * side, side)

    def step(r, diagonal):
        def next_row(i, square):
            place = i * side + r
            of_row = of_keys[place, rows(i)] * strength[place, 0]
            of_row = jnp.where(jax.lax.broadcasted_iota(jnp.int32, (side,), 0) < r, of_row, 0)
            return square - jnp.where(row == r, jnp.sum(of_row[:, None] * square, axis=0)[None], 0)

        return tuple(next_row(i, square) for i, square in enumerate(diagonal))

    identity = (row == column).astype(jnp.float32)
    diagonal = jax.lax.fori_loop(1, side, step, (identity,) * m)
    below: dict[tuple[int, int], Array] = {(i, i): square for i, square in enumerate(diagonal)}
    for i in range(m):
        # From the diagonal to the left.
        of_row = [of_keys[rows(i), rows(j)] * strength[rows(i), :] for j in range(i)]
        for j in range(m):
            if j < i:
                total = sum(product(of_row[s], below[s, j], precision=HIGHEST) for s in range(j, i))
                below[i, j] = -product(diagonal[i], total, precision=HIGHEST)
            inverse[rows(i), rows(j)] = below.get((i, j), jnp.zeros_like(identity))


def slices(options: Options, p: int) -> Iterator[Any]:
    """The channels of a value that are computed at once."""
    size = min(options.slice, p)
    return (pl.ds(i * size, size) for i in range(p // size))


def solved_kernel(options: Options, chunk: Chunk, inverse, of_values, of_keys):
    """Writes the updates without a state [t, p], and the keys of the state's part of them [t, k]: u = of_values -
    of_keys S^T. `of_values` is None where only the latter is asked for."""
    inverse, strength, precision = inverse[...], chunk.strength[...], exactly(options)
    decayed = chunk.key[...].astype(jnp.float32) * (strength * chunk.decay[...])
    of_keys[...] = product(inverse, decayed, precision=precision).astype(of_keys.dtype)
    if of_values is None:
        return
    for at in slices(options, chunk.value.shape[1]):
        value = chunk.value[:, at].astype(jnp.float32) * strength
        of_values[:, at] = product(inverse, value, precision=precision).astype(of_values.dtype)


def _decayed(state: Array, decay: Float[Ref, "c t e"], index) -> Array:
    """The state times the decay of a chunk."""
    return state * decay[index, decay.shape[1] - 1, :][None]


def states_kernel(options: Options, first, key, until_end, decay, matrix, of_values, of_keys, before, update, after):
    """Writes the states before each chunk [c, p, k], and after the segment [p, k], for some channels of the values.

    `first` [c] is 1 for the chunks with which a document begins; keys are [n, k], and decays [c, t, e] as in `Chunk`.
    With the delta rule, `update` [n, p] are the updates; else `of_values` are, and `of_keys` and `update` are None.
    """
    c, t, _ = decay.shape

    def step(index, state):
        rows = pl.ds(index * t, t)
        state = jnp.where(first[index] > 0, 0.0, state)
        rounded = state.astype(options.dtype)
        before[index] = rounded.astype(before.dtype)
        written = of_values[rows, :].astype(jnp.float32)
        if of_keys is not None:
            written -= product(of_keys[rows, :], rounded, (1, 1))
            update[rows, :] = written.astype(update.dtype)
        of_chunk = key[rows, :]
        return _decayed(state, decay, index) + _written(options, written, of_chunk, until_end[index])

    after[...] = jax.lax.fori_loop(0, c, step, matrix[...])


def _written(options: Options, update: Array, key: Array, until_end: Array) -> Array:
    """The part of the updates that is left at a chunk's end [p, k]."""
    if until_end.shape[1] == 1:
        update = update * until_end
    else:
        key = times(options.dtype, key, until_end)
    return product(update.astype(options.dtype), key, (0, 0))


def read_kernel(options: Options, chunk: Chunk, before, update, read):
    """Writes the results that the tokens read [t, p]."""
    decayed = (chunk.query[...].astype(jnp.float32) * chunk.decay[...]).astype(options.dtype)
    of_queries = chunk.of_queries[...]
    for at in slices(options, update.shape[1]):
        from_state = product(decayed, before[at, :], (1, 1))
        read[:, at] = (from_state + product(of_queries, update[:, at])).astype(read.dtype)


def read_gradient_kernel(options: Options, chunk: Chunk, cotangent, of_update):
    """Writes the gradient of the updates, as far as the chunk's own tokens read them [t, p]."""
    of_queries = chunk.of_queries[...]
    for at in slices(options, cotangent.shape[1]):
        of_update[:, at] = product(of_queries, cotangent[:, at], (0, 0)).astype(of_update.dtype)


def states_gradient_kernel(
    options: Options, first, key, until_end, decay, query, cotangent, of_after, of_read, of_keys,
    of_state, of_update, of_matrix,
):  # fmt: skip
    """Writes the gradients of the states after each chunk [c, p, k], of the updates [n, p] and of the states before the
    segment [p, k], for some channels of the values. `of_read` is the result of `read_gradient_kernel`."""
    c, t, e = decay.shape

    def step(i, gradient):
        index = c - 1 - i
        rows = pl.ds(index * t, t)
        rounded = gradient.astype(options.dtype)
        of_state[index] = rounded.astype(of_state.dtype)
        of_end, of_begin, of_chunk = until_end[index], decay[index], key[rows, :]
        total = of_read[rows, :].astype(jnp.float32)
        if e == 1:
            total += of_end * product(of_chunk, rounded, (1, 1))
        else:
            total += product(times(options.dtype, of_chunk, of_end), rounded, (1, 1))
        of_update[rows, :] = total.astype(of_update.dtype)
        read, reader = cotangent[rows, :], query[rows, :]
        if e == 1:
            read = times(options.dtype, read, of_begin)
        else:
            reader = times(options.dtype, reader, of_begin)
        gradient = _decayed(gradient, decay, index) + product(read, reader, (0, 0))
        if of_keys is not None:
            gradient -= product(total.astype(options.dtype), of_keys[rows, :], (0, 0))
        return jnp.where(first[index] > 0, 0.0, gradient)

    of_matrix[...] = jax.lax.fori_loop(0, c, step, of_after[...])


class Saved(NamedTuple):
    """The saved arrays that the gradients of a chunk's inputs need."""

    before: Float[Ref, "p k"]
    """The states before it."""
    of_state: Float[Ref, "p k"]
    """The gradient of the states after it."""
    update: Float[Ref, "t p"]
    of_update: Float[Ref, "t p"]
    """The gradient of the updates."""
    cotangent: Float[Ref, "t p"]
    """The cotangent of the results."""
    inverse: Float[Ref, "t t"]
    """None: without strength."""


class _Sums(NamedTuple):
    """Sums over the channels of a head's values, for the gradients of a chunk's inputs."""

    of_queries: Float[Array, "t t"]
    """The gradient of the products of queries."""
    from_state: Float[Array, "t k"]
    """The gradient of the queries that read the state, decayed."""
    to_state: Float[Array, "t k"]
    """The gradient of the keys that write to it, decayed."""
    shrunk: Float[Array, "1 k"]
    """The gradient of the decay of the whole chunk."""
    of_known: Float[Any, "t k"] = None
    """The gradient of the decayed keys with which the delta rule reads the state, over their strength."""
    of_keys: Float[Any, "t t"] = None
    """The gradient of the products of keys, over their strength."""
    of_strength: Float[Any, "t 1"] = None
    """The part of the strength's gradient that comes from the values."""


def input_gradient_kernel(options: Options, chunk: Chunk, saved: Saved, gradients: Chunk):
    """Writes the gradients of a chunk's inputs, for a group of heads that share queries and keys.

    Arrays of heads have an axis for the heads of the group first.
    """
    query, key = chunk.query[...].astype(jnp.float32), chunk.key[...].astype(jnp.float32)

    def by_head(head, of_inputs):
        sums = _over_values(options, chunk, saved, gradients, head)
        return [x + y for x, y in zip(of_inputs, _of_head(chunk, sums, gradients, head, query, key))]

    none = jnp.zeros(query.shape, jnp.float32)
    of_query, of_key = _loop(chunk.decay.shape[0], by_head, [none, none])
    gradients.query[...] = of_query.astype(gradients.query.dtype)
    gradients.key[...] = of_key.astype(gradients.key.dtype)


def _over_values(options: Options, chunk: Chunk, saved: Saved, gradients: Chunk, head) -> _Sums:
    """The sums of one head; writes the gradients of the values with the delta rule."""
    (t, k), p = chunk.key.shape, saved.update.shape[2]
    size = min(options.slice, p)

    def by_slice(index, sums: _Sums):
        at = pl.ds(index * size, size)
        before, of_state = saved.before[head, at, :], saved.of_state[head, at, :]
        update, cotangent = saved.update[head, :, at], saved.cotangent[head, :, at]
        shrunk = before.astype(jnp.float32) * of_state.astype(jnp.float32)
        sums = sums._replace(
            of_queries=sums.of_queries + product(cotangent, update, (1, 1)),
            from_state=sums.from_state + product(cotangent, before),
            to_state=sums.to_state + product(update, of_state),
            shrunk=sums.shrunk + jnp.sum(shrunk, axis=0)[None],
        )
        if saved.inverse is None:
            return sums
        of_update = saved.of_update[head, :, at].astype(jnp.float32)
        known = product(saved.inverse[head], of_update, (0, 0), exactly(options))
        gradients.value[head, :, at] = (known * chunk.strength[head]).astype(gradients.value.dtype)
        value, rounded = chunk.value[head, :, at].astype(jnp.float32), known.astype(options.dtype)
        return sums._replace(
            of_known=sums.of_known - product(rounded, before),
            of_keys=sums.of_keys - product(rounded, update, (1, 1)),
            of_strength=sums.of_strength + jnp.sum(known * value, axis=1, keepdims=True),
        )

    shapes = [(t, t), (t, k), (t, k), (1, k), *[(t, k), (t, t), (t, 1)][: 3 * (saved.inverse is not None)]]
    return _loop(p // size, by_slice, _Sums(*(jnp.zeros(shape, jnp.float32) for shape in shapes)))


def _of_head(chunk: Chunk, sums: _Sums, gradients: Chunk, head, query: Array, key: Array) -> tuple[Array, Array]:
    """The part of a head in the gradients of queries and keys; writes those of its products, decays and strengths."""
    decay, until_end, t = chunk.decay[head], chunk.until_end[head], len(key)
    gradients.of_queries[head] = sums.of_queries.astype(gradients.of_queries.dtype)
    of_decay, of_until_end = query * sums.from_state, key * sums.to_state
    of_query, of_key = decay * sums.from_state, until_end * sums.to_state
    if sums.of_known is not None:
        strength = chunk.strength[head]
        row, column = row_and_column(t)
        of_keys = jnp.where(column < row, sums.of_keys, 0)
        of_decay += strength * key * sums.of_known
        of_key += strength * decay * sums.of_known
        of_known = jnp.sum(decay * key * sums.of_known, axis=1, keepdims=True)
        of_products = jnp.sum(of_keys * chunk.of_keys[head], axis=1, keepdims=True)
        gradients.strength[head] = sums.of_strength + of_known + of_products
        gradients.of_keys[head] = of_keys * strength
    shrunk = sums.shrunk
    if decay.shape[1] == 1:
        of_decay, of_until_end, shrunk = (jnp.sum(x, axis=1, keepdims=True) for x in (of_decay, of_until_end, shrunk))
    last = jax.lax.broadcasted_iota(jnp.int32, (t, 1), 0) == t - 1
    gradients.decay[head] = of_decay + jnp.where(last, shrunk, 0)
    gradients.until_end[head] = of_until_end
    return of_query, of_key


def _loop(times: int, step: Callable, initial: Any) -> Any:
    """A loop, which is none in the compiled program if it runs once."""
    return step(0, initial) if times == 1 else jax.lax.fori_loop(0, times, step, initial)
