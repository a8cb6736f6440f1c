"""The programs of the kernels for linear recurrences on TPUs (`kernels/recurrence_tpu.py`): a chunk of some heads.

Of a chunk's tokens, the *updates* u_t are what they write. With queries and keys that are decayed from the chunk's
beginning to the token (q', k'), or from there to its end (k"), and of the delta rule the inverse T of I + A, where A
is beta times the products of keys below the diagonal:

    u = T beta (v - k' S^T),    y = (products of queries) u + q' S^T,    S' = decay_end S + u^T k"

The backward pass computes all of this again from the states before each chunk, which the forward pass saves.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Float

from meliad_like.kernels.recurrence_tpu_products import (
    ByChannel,
    ByHead,
    Options,
    Products,
    indices,
    precisely,
    product,
    sums_of_decays,
    times,
)

SQUARE = 16
"""The side of the squares of which the inverse of a triangular matrix is made."""


class Inputs(NamedTuple):
    """The rule of a chunk's tokens, in references to the groups and heads of one program; or its gradients."""

    query: Any
    """[g, t, k]"""
    key: Any
    """[g, t, k]"""
    value: Any
    """[h, t, p]"""
    log_decay: Any
    """[h, t], or with decays by channel [h, t, k]; at least -128."""
    strength: Any
    """[h, t]; None: values are written as they are."""


class Head:
    """A head in a chunk: its arrays, decayed."""

    def __init__(self, options: Options, index: Any, group: int, value: Array, decayed: ByHead | ByChannel, strength):
        """`strength` is a column [t, 1], or None."""
        self.options, self.index, self.group, self.value, self.strength = options, index, group, value, strength
        self.decayed, self.products = decayed, decayed.products
        since_begin, until_end = self.products[2:]
        self.query, self.key = (times(options, x, since_begin) for x in (decayed.query, decayed.key))
        self.key_until_end = times(options, decayed.key, until_end)
        self.weights = self.products.of_queries.astype(options.dtype)
        self.of_chunk = since_begin[-1:]

    def after(self, state: Float[Array, "p k"], update: Float[Array, "t p"]) -> Float[Array, "p k"]:
        """The state after the chunk."""
        return self.of_chunk * state + product(update, self.key_until_end, (0, 0))


def inverse_of_unit_triangular(options: Options, below: Float[Array, "t t"]) -> Float[Array, "t t"]:
    """The inverse of I + `below`, whose entries on and above the diagonal are 0.

    Squares on the diagonal are inverted row by row, all at once, side by side; those below are products. All numbers
    are of the size of the result's, whereas the powers of a matrix, for keys that repeat, are as large as binomial
    coefficients.
    """
    t = len(below)
    side = min(SQUARE, t)
    (row, column), squares = indices(t), range(0, t, side)
    of_square = column[:side] // side
    diagonal = functools.reduce(jnp.add, [jnp.where(of_square == i // side, below[i : i + side], 0) for i in squares])
    inverse = (column[:side] % side == row[:side]).astype(jnp.float32)
    for i in range(side - 1):
        factors = jnp.take_along_axis(diagonal, of_square * side + i, axis=1)
        inverse -= factors * inverse[i : i + 1]
    inverse = jnp.where(row // side == column // side, jnp.concatenate([inverse] * len(squares)), 0)
    while side < t:
        inverse = _in_pairs(options, below, inverse, side)
        side *= 2
    return inverse


def _in_pairs(options: Options, below: Float[Array, "t t"], inverse: Float[Array, "t t"], size: int) -> Array:
    """The inverses of the blocks on the diagonal that are twice as large as those of `inverse`."""
    t = len(below)

    def of_second(x):
        """The rows of the second block of each pair of blocks."""
        return jnp.concatenate([x[i : i + size] for i in range(size, t, 2 * size)])

    def in_place(x):
        blocks = [x[i : i + size] for i in range(0, t // 2, size)]
        return jnp.concatenate([y for block in blocks for y in (jnp.zeros_like(block), block)])

    of_row, of_column = (of_second(x) // size for x in indices(t))
    total = precisely(options, jnp.where(of_row == of_column + 1, of_second(below), 0), inverse)
    return inverse - in_place(precisely(options, of_second(inverse), in_place(total)))


class Updates(NamedTuple):
    """What a chunk's tokens write to a head."""

    update: Array
    """[t, p], rounded."""
    inverse: Any = None
    """[t, t], rounded; None without strength."""
    difference: Any = None
    """[t, p]: the values without what the state has for their keys; None without strength."""


def updates(x: Head, state: Float[Array, "p k"]) -> Updates:
    """The updates of a chunk's tokens, from the state before it, rounded."""
    if x.strength is None:
        return Updates(x.value)
    row, column = indices(len(x.key))
    below = jnp.where(column < row, x.products.of_keys * x.strength, 0)
    inverse = inverse_of_unit_triangular(x.options, below).astype(x.options.dtype)
    difference = x.value.astype(jnp.float32) - product(x.key, state, (1, 1))
    update = product(inverse, times(x.options, difference, x.strength))
    return Updates(update.astype(x.options.dtype), inverse, difference)


def forward_kernel(options: Options, first, x: Inputs, matrix, read, before, after, sums):
    """Writes what the tokens read [h, t, p], and the states before the chunk and after it [h, p, k]."""
    is_first = _begin(options, x, first, pl.program_id(2), matrix, after, sums)

    def run(heads: list[Head]):
        results = []
        for head in heads:
            state = jnp.where(is_first, 0.0, after[head.index])
            rounded = state.astype(options.dtype)
            update = updates(head, rounded).update
            result = product(head.weights, update) + product(head.query, rounded, (1, 1))
            results.append((head.index, rounded, result, head.after(state, update)))
        for index, rounded, result, state in results:
            before[index], after[index] = rounded, state
            read[index] = result.astype(options.dtype)

    _for_all_heads(options, x, sums, run)


def backward_kernel(
    options: Options, first, x: Inputs, before, cotangent, of_after, gradients, of_state, sums, of_queries, of_keys
):
    """Writes the gradients of the inputs, and of the states before the chunk [h, p, k], from last to first.

    `of_state` are the gradients of the states after a chunk, and then of those before it.
    """
    chunk = pl.num_programs(2) - 1 - pl.program_id(2)
    is_first = _begin(options, x, first, chunk, of_after, of_state, sums)
    of_queries[...] = jnp.zeros(of_queries.shape, jnp.float32)
    of_keys[...] = jnp.zeros(of_keys.shape, jnp.float32)

    def run(heads: list[Head]):
        results = [_gradients(x, before[x.index], cotangent[x.index], of_state[x.index]) for x in heads]
        for x, (of_inputs, of_before) in zip(heads, results, strict=True):
            of_queries[x.group] += of_inputs.query
            of_keys[x.group] += of_inputs.key
            gradients.value[x.index] = of_inputs.value.astype(options.dtype)
            gradients.log_decay[_row(gradients.log_decay, x.index)] = of_inputs.log_decay
            if x.strength is not None:
                gradients.strength[_row(gradients.strength, x.index)] = of_inputs.strength
            of_state[x.index] = jnp.where(is_first, 0.0, of_before)

    _for_all_heads(options, x, sums, run)
    gradients.query[...] = of_queries[...].astype(options.dtype)
    gradients.key[...] = of_keys[...].astype(options.dtype)


def _gradients(x: Head, before, cotangent, of_after) -> tuple[Inputs, Float[Array, "p k"]]:
    """The gradients of the inputs of a head, where that of the strength is a row [1, t], and of the state before it."""
    options, decayed, (row, column) = x.options, x.decayed, indices(len(x.key))
    made, rounded = updates(x, before), of_after.astype(options.dtype)
    of_update = product(x.weights, cotangent, (0, 0)) + product(x.key_until_end, rounded, (1, 1))
    of_queries = jnp.where(column <= row, product(cotangent, made.update, (1, 1)), 0)
    # The gradients of what is decayed.
    of_query, of_key_until_end = product(cotangent, before), product(made.update, rounded)
    of_before = x.of_chunk * of_after + product(cotangent, x.query, (0, 0))
    of_value, of_strength, of_keys, of_key = of_update, None, None, jnp.zeros_like(of_query)
    if x.strength is not None:
        # The gradient of the values times their strength.
        of_known = product(made.inverse, of_update.astype(options.dtype), (0, 0))
        of_value = x.strength * of_known
        of_solved = -jnp.where(column < row, product(of_known.astype(options.dtype), made.update, (1, 1)), 0)
        of_keys = x.strength * of_solved
        of_strength = jnp.sum(of_known * made.difference, axis=1, keepdims=True)
        of_strength += jnp.sum(of_solved * x.products.of_keys, axis=1, keepdims=True)
        of_strength = jnp.sum(jnp.where(row == column, of_strength, 0), axis=0, keepdims=True)
        written = of_value.astype(options.dtype)
        of_key = -product(written, before)
        of_before -= product(written, x.key, (0, 0))
    query, key = decayed.query.astype(jnp.float32), decayed.key.astype(jnp.float32)
    of_begin, of_end = query * of_query + key * of_key, key * of_key_until_end
    of_chunk = jnp.sum(before.astype(jnp.float32) * of_after, axis=0, keepdims=True)
    of_begin += jnp.where(row[:, :1] == len(row) - 1, of_chunk, 0)
    since_begin, until_end = x.products[2:]
    of_query, of_key = since_begin * of_query, since_begin * of_key + until_end * of_key_until_end
    of_products = Products(of_queries, of_keys, of_begin, of_end)
    of_query, of_key, of_log_decay = decayed.pull_back(of_products, of_query, of_key)
    return Inputs(of_query, of_key, of_value, of_log_decay, of_strength), of_before


def _row(reference, index) -> Any:
    """The index of a head in a reference to [h, t], as a row, or to [h, t, k]."""
    return (pl.ds(index, 1), slice(None)) if len(reference.shape) == 2 else index


def _begin(options: Options, x: Inputs, first, chunk, matrix, state, sums):
    """Begins a chunk: with a lane's first one the states, and the sums of its decays. Returns whether a document begins
    with the chunk."""

    @pl.when(pl.program_id(2) == 0)
    def _():
        state[...] = matrix[...]

    if not options.by_channel:
        sums[...] = sums_of_decays(x.log_decay[...])
    return first[pl.program_id(0), chunk] > 0


def _for_all_heads(options: Options, x: Inputs, sums, run: Callable[[list[Head]], None]) -> None:
    """Runs a function for all heads of the program, in lists of some."""
    num_groups, num_heads = len(x.query), len(x.value)
    in_group = num_heads // num_groups
    at_once = max(i for i in range(1, min(options.heads, in_group) + 1) if in_group % i == 0)
    vectors = [(x.query[group], x.key[group]) for group in range(num_groups)]
    pairs = []
    if not options.by_channel:
        for query, key in vectors:
            pairs.append((product(query, key, (1, 1)), None if x.strength is None else product(key, key, (1, 1))))

    def load(group: int, index) -> Head:
        rows = [] if options.by_channel else [sums[pl.ds(place, 1), :] for place in (index, num_heads + index)]
        rows += [] if x.strength is None else [x.strength[pl.ds(index, 1), :]]
        columns = []
        if rows:
            # Transposed in whole tiles.
            transposed = jnp.concatenate(rows + rows[:1] * (8 - len(rows))).T
            columns = [transposed[:, i : i + 1] for i in range(len(rows))]
        strength = None if x.strength is None else columns[-1]
        if options.by_channel:
            decayed = ByChannel(options, *vectors[group], x.log_decay[index], with_keys=strength is not None)
        else:
            decayed = ByHead(options, *vectors[group], pairs[group], rows[:2], columns[:2])
        return Head(options, index, group, x.value[index], decayed, strength)

    def step(i, _):
        begins = [(group, group * in_group + i * at_once) for group in range(num_groups)]
        run([load(group, begin + j) for group, begin in begins for j in range(at_once)])
        return 0

    if in_group == at_once:
        step(0, 0)
    else:
        jax.lax.fori_loop(0, in_group // at_once, step, 0)
