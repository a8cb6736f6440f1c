"""The programs of the kernels for linear recurrences on TPUs (`kernels/recurrence_tpu.py`): a chunk of some heads.

Of a chunk's tokens, the *updates* u_t are what they write. With the decays g_t of the state from the chunk's beginning
to token t, e_t from there to its end, and D between two tokens, and with the inverse T of I + A, where A is beta
(k k^T D) below the diagonal:

    u = T beta (v - g k S^T),    y = (q k^T D) u + g q S^T,    S' = g_end S + (u e)^T k

The backward pass computes all of this again from the states before each chunk, which the forward pass saves.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float

from meliad_like.kernels.window_tpu import matrix_product as product

SQUARE = 16
"""The side of the squares of which the inverse of a triangular matrix is made."""


class Options(NamedTuple):
    """The settings that are known when the kernels are compiled."""

    dtype: Any
    """The dtype of the factors of products. Products of float32 have the precision of the platform's default."""
    heads: int
    """The largest number of heads that are computed at once, so that one of them works while another waits."""
    interpret: bool | pltpu.InterpretParams


class Inputs(NamedTuple):
    """The rule of a chunk's tokens, in references to the groups and heads of one program."""

    query: Any
    """[g, t, k]"""
    key: Any
    """[g, t, k]"""
    value: Any
    """[h, t, p]"""
    log_decay: Any
    """[h, t], at least -128."""
    strength: Any
    """[h, t]; None: values are written as they are."""


class Decays(NamedTuple):
    """The decays of a head's states in a chunk."""

    between: Float[Array, "t t"]
    """From token s to token t, and 0 above the diagonal."""
    since_begin: Float[Array, "t 1"]
    until_end: Float[Array, "t 1"]

    @property
    def of_chunk(self) -> Float[Array, "1 1"]:
        return self.since_begin[-1:]


class Head(NamedTuple):
    """The arrays of a head in a chunk, as the programs load them."""

    index: Any
    group: int
    query: Array
    key: Array
    value: Array
    of_queries: Array
    """[t, t]: the products of queries with keys, float32."""
    of_keys: Any
    """[t, t]: the products of keys with keys, float32; None without strength."""
    decays: Decays
    strength: Any
    """[t, 1]"""


def indices(t: int) -> tuple[Array, Array]:
    """The row and the column of each entry of a square matrix."""
    row, column = (jax.lax.broadcasted_iota(jnp.int32, (t, t), axis) for axis in (0, 1))
    return row, column


def precisely(options: Options, x: Array, y: Array, contracted: tuple[int, int] = (1, 0)) -> Array:
    """The product of two float32 matrices, of factors of at least 16 binary digits.

    In three passes of a TPU's unit where activations are bfloat16. Its six passes for all digits are for float32.
    """
    if options.dtype == jnp.float32:
        axes = (contracted[:1], contracted[1:]), ((), ())
        return jax.lax.dot_general(x, y, axes, precision="highest", preferred_element_type=jnp.float32)
    (x, rest_of_x), (y, rest_of_y) = _in_two(x), _in_two(y)
    return product(x, y, contracted) + (product(rest_of_x, y, contracted) + product(x, rest_of_y, contracted))


def _in_two(x: Array) -> tuple[Array, Array]:
    """A number rounded to bfloat16, and what that leaves of it."""
    rounded = x.astype(jnp.bfloat16)
    return rounded, (x - rounded.astype(jnp.float32)).astype(jnp.bfloat16)


def sums_of_decays(log_decay: Float[Array, "h t"]) -> Float[Array, "h2 t"]:
    """The sums of the logarithms of decays up to each token, in two parts, as in `linear_recurrence.sums_between`."""
    t = log_decay.shape[1]
    unit, (row, column) = t / 2**17, indices(t)
    rounded = jnp.round(log_decay / unit) * unit
    parts = jnp.concatenate([rounded, log_decay - rounded])
    return jnp.dot(parts, (row <= column).astype(jnp.float32), precision="highest", preferred_element_type=jnp.float32)


def _decays(rows: list[Array], columns: Array) -> Decays:
    """The decays from the two parts of their sums, each a row [1, t] and a column."""
    row, column = indices(len(columns))
    parts = [columns[:, i : i + 1] for i in range(2)]
    difference = functools.reduce(jnp.add, [x - y for x, y in zip(parts, rows)])
    between = jnp.exp(jnp.where(column <= row, difference, -jnp.inf))
    until_end = jnp.exp(functools.reduce(jnp.add, [x[-1:] - x for x in parts]))
    return Decays(between, jnp.exp(functools.reduce(jnp.add, parts)), until_end)


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
    """[t, t], rounded; this and the following are None without strength."""
    from_state: Any = None
    """[t, p]: the values that the state has for the keys, not decayed."""
    difference: Any = None
    """[t, p]: the values without what the state has for their keys."""


def updates(options: Options, x: Head, state: Float[Array, "p k"]) -> Updates:
    """The updates of a chunk's tokens, from the state before it, rounded."""
    if x.strength is None:
        return Updates(x.value)
    row, column = indices(len(x.key))
    below = jnp.where(column < row, x.of_keys * x.decays.between * x.strength, 0)
    inverse = inverse_of_unit_triangular(options, below).astype(options.dtype)
    from_state = product(x.key, state, (1, 1))
    difference = x.value.astype(jnp.float32) - x.decays.since_begin * from_state
    update = product(inverse, (x.strength * difference).astype(options.dtype)).astype(options.dtype)
    return Updates(update, inverse, from_state, difference)


def _times(options: Options, x: Array, factor: Array) -> Array:
    return (x.astype(jnp.float32) * factor).astype(options.dtype)


def forward_kernel(options: Options, first, x: Inputs, matrix, read, before, after, sums):
    """Writes what the tokens read [h, t, p], and the states before the chunk and after it [h, p, k]."""
    is_first = _begin(x, first, pl.program_id(2), matrix, after, sums)

    def run(heads: list[Head]):
        results = []
        for head in heads:
            state = jnp.where(is_first, 0.0, after[head.index])
            rounded = state.astype(options.dtype)
            update = updates(options, head, rounded).update
            weights = (head.of_queries * head.decays.between).astype(options.dtype)
            result = product(weights, update) + head.decays.since_begin * product(head.query, rounded, (1, 1))
            added = product(_times(options, update, head.decays.until_end), head.key, (0, 0))
            results.append((head.index, rounded, result, head.decays.of_chunk * state + added))
        for index, rounded, result, state in results:
            before[index], after[index] = rounded, state
            read[index] = result.astype(options.dtype)

    _for_all_heads(options, x, sums, run)


def backward_kernel(
    options: Options,
    first,
    x: Inputs,
    before,
    cotangent,
    of_after,
    gradients: Inputs,
    of_state,
    sums,
    of_queries,
    of_keys,
):
    """Writes the gradients of the inputs, and of the states before the chunk [h, p, k], from last to first.

    `of_state` are the gradients of the states after a chunk, and then of those before it.
    """
    chunk = pl.num_programs(2) - 1 - pl.program_id(2)
    is_first = _begin(x, first, chunk, of_after, of_state, sums)
    of_queries[...] = jnp.zeros(of_queries.shape, jnp.float32)
    of_keys[...] = jnp.zeros(of_keys.shape, jnp.float32)

    def run(heads: list[Head]):
        results = [_gradients(options, x, before[x.index], cotangent[x.index], of_state[x.index]) for x in heads]
        for x, (of_inputs, of_before) in zip(heads, results, strict=True):
            row = pl.ds(x.index, 1)
            of_queries[x.group] += of_inputs.query
            of_keys[x.group] += of_inputs.key
            gradients.value[x.index] = of_inputs.value.astype(options.dtype)
            gradients.log_decay[row, :] = of_inputs.log_decay
            if x.strength is not None:
                gradients.strength[row, :] = of_inputs.strength
            of_state[x.index] = jnp.where(is_first, 0.0, of_before)

    _for_all_heads(options, x, sums, run)
    gradients.query[...] = of_queries[...].astype(options.dtype)
    gradients.key[...] = of_keys[...].astype(options.dtype)


def _gradients(options: Options, x: Head, before, cotangent, of_after) -> tuple[Inputs, Float[Array, "p k"]]:
    """The gradients of the inputs of a head, and of the state before it.

    Gradients of the strength's and decays' are rows [1, t].
    """
    decays, (row, column) = x.decays, indices(len(x.key))
    since_begin, until_end, between = decays.since_begin, decays.until_end, decays.between
    made, rounded = updates(options, x, before), of_after.astype(options.dtype)
    weights = x.of_queries * between
    of_update = product(weights.astype(options.dtype), cotangent, (0, 0)) + until_end * product(x.key, rounded, (1, 1))
    of_weights = product(cotangent, made.update, (1, 1))
    # Of the sums of logarithms of decays: between tokens, since the beginning, and until the end.
    of_between = of_weights * weights
    of_products = (of_weights * between).astype(options.dtype)
    from_state, to_state = product(cotangent, before), product(made.update, rounded)
    of_query = product(of_products, x.key) + since_begin * from_state
    of_key = product(of_products, x.query, (0, 0)) + until_end * to_state
    query, key = x.query.astype(jnp.float32), x.key.astype(jnp.float32)
    of_begin = since_begin * jnp.sum(query * from_state, axis=1, keepdims=True)
    of_end = until_end * jnp.sum(key * to_state, axis=1, keepdims=True)
    of_chunk = decays.of_chunk * jnp.sum(before.astype(jnp.float32) * of_after)
    of_before = decays.of_chunk * of_after + product(_times(options, cotangent, since_begin), x.query, (0, 0))
    of_value, of_strength = of_update, None
    if x.strength is not None:
        # The gradient of the values times their strength.
        of_known = product(made.inverse, of_update.astype(options.dtype), (0, 0))
        of_value = x.strength * of_known
        of_solved = -jnp.where(column < row, product(of_known.astype(options.dtype), made.update, (1, 1)), 0)
        below = x.of_keys * between
        of_strength = jnp.sum(of_known * made.difference, axis=1, keepdims=True)
        of_strength += jnp.sum(of_solved * below, axis=1, keepdims=True)
        of_below = x.strength * of_solved
        of_between += of_below * below
        of_pairs = (of_below * between).astype(options.dtype)
        read = _times(options, of_value, since_begin)
        of_key += product(of_pairs, x.key) + product(of_pairs, x.key, (0, 0)) - product(read, before)
        of_begin -= since_begin * jnp.sum(of_value * made.from_state, axis=1, keepdims=True)
        of_before -= product(read, x.key, (0, 0))
    of_begin += jnp.where(row[:, :1] == len(row) - 1, of_chunk, 0)
    # The token in each column decays what is between an earlier one and itself or a later one.
    of_pairs = precisely(options, of_between, (row >= column).astype(jnp.float32), (0, 0))
    of_log_decay = jnp.sum(jnp.where(row < column, of_pairs + of_end, of_begin), axis=0, keepdims=True)
    if of_strength is not None:
        of_strength = jnp.sum(jnp.where(row == column, of_strength, 0), axis=0, keepdims=True)
    return Inputs(of_query, of_key, of_value, of_log_decay, of_strength), of_before


def _begin(x: Inputs, first, chunk, matrix, state, sums):
    """Begins a chunk: with a lane's first one the states, and the sums of its decays. Returns whether a document begins
    with the chunk."""

    @pl.when(pl.program_id(2) == 0)
    def _():
        state[...] = matrix[...]

    sums[...] = sums_of_decays(x.log_decay[...])
    return first[pl.program_id(0), chunk] > 0


def _for_all_heads(options: Options, x: Inputs, sums, run: Callable[[list[Head]], None]) -> None:
    """Runs a function for all heads of the program, in lists of some."""
    num_groups, num_heads = len(x.query), len(x.value)
    in_group = num_heads // num_groups
    at_once = max(i for i in range(1, min(options.heads, in_group) + 1) if in_group % i == 0)
    groups = []
    for group in range(num_groups):
        query, key = x.query[group], x.key[group]
        of_keys = None if x.strength is None else product(key, key, (1, 1))
        groups.append((query, key, product(query, key, (1, 1)), of_keys))

    def load(group: int, index) -> Head:
        rows = [sums[pl.ds(place, 1), :] for place in (index, num_heads + index)]
        rows += [] if x.strength is None else [x.strength[pl.ds(index, 1), :]]
        # Transposed in whole tiles.
        columns = jnp.concatenate(rows + rows[:1] * (8 - len(rows))).T
        query, key, of_queries, of_keys = groups[group]
        strength = None if x.strength is None else columns[:, 2:3]
        decays = _decays(rows[:2], columns)
        return Head(index, group, query, key, x.value[index], of_queries, of_keys, decays, strength)

    def step(i, _):
        begins = [(group, group * in_group + i * at_once) for group in range(num_groups)]
        run([load(group, begin + j) for group, begin in begins for j in range(at_once)])
        return 0

    if in_group == at_once:
        step(0, 0)
    else:
        jax.lax.fori_loop(0, in_group // at_once, step, 0)
