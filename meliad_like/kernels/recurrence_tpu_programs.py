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

from meliad_like.kernels.common import Ref
from meliad_like.kernels.common import row_and_column as indices
from meliad_like.kernels.convolution_tpu import TILE
from meliad_like.kernels.recurrence import times
from meliad_like.kernels.recurrence_tpu_products import (
    ByChannel,
    ByHead,
    Options,
    Products,
    precisely,
    product,
    sums_of_decays,
)

SQUARE = 16
"""The side of the squares of which the inverse of a triangular matrix is made."""


class Inputs(NamedTuple):
    """The rule of a chunk's tokens, in references to the groups and heads of one program; or its gradients.

    Vectors are side by side, because an axis for groups or heads would cost copies, and small ones fill no tiles."""

    query: Float[Ref, "t gk"]
    key: Float[Ref, "t gk"]
    value: Float[Ref, "t hp"]
    log_decay: Float[Ref, "h t"] | Float[Ref, "t hk"]
    """The latter with decays by channel; at least -128."""
    strength: Float[Ref, "h t"]
    """Without the delta rule, the step; None: 1."""


class Results(NamedTuple):
    """What a chunk's tokens read, in references to the heads of one program."""

    vectors: Float[Ref, "t hp"] = None
    """With a norm, divided by their root mean square."""
    factor: Float[Ref, "h t"] = None
    """1 over the root mean square, float32; None: without a norm."""


class Head:
    """A head in a chunk: its arrays, decayed."""

    def __init__(self, options: Options, index, group, value, decayed: ByHead | ByChannel, strength: Any, factor: Any):
        """`strength` and `factor`, that of its norm, are columns [t, 1], or None."""
        self.options, self.index, self.group, self.value = options, index, group, value
        self.strength, self.factor = strength, factor
        self.decayed, self.products = decayed, decayed.products
        since_begin, until_end = self.products[2:]
        self.query, self.key = (times(options.dtype, x, since_begin) for x in (decayed.query, decayed.key))
        self.key_until_end = times(options.dtype, decayed.key, until_end)
        self.weights = self.products.of_queries.astype(options.dtype)
        self.of_chunk = since_begin[-1:]


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


def updates(x: Head, state: Float[Array, "p k"]) -> tuple[Float[Array, "t p"], Any, Any]:
    """The updates of a chunk's tokens, from the state before it, both rounded. With the delta rule, also the inverse
    [t, t], rounded, and the values without what the state has for their keys [t, p]; otherwise None."""
    if not x.options.corrected:
        return x.value if x.strength is None else times(x.options.dtype, x.value, x.strength), None, None
    row, column = indices(len(x.key))
    below = jnp.where(column < row, x.products.of_keys * x.strength, 0)
    inverse = inverse_of_unit_triangular(x.options, below).astype(x.options.dtype)
    difference = x.value.astype(jnp.float32) - product(x.key, state, (1, 1))
    update = product(inverse, times(x.options.dtype, difference, x.strength))
    return update.astype(x.options.dtype), inverse, difference


def forward_kernel(options: Options, first, x: Inputs, matrix, read: Results, before, after, sums):
    """Writes what the tokens read, and the states before the chunk and after it [h, p, k]."""
    is_first = _begin(options, x, first, pl.program_id(2), matrix, after, sums)

    def run(turn: Turn, heads: list[Head]):
        results, states = [], []
        for head in heads:
            state = jnp.where(is_first, 0.0, after[head.index])
            rounded = state.astype(options.dtype)
            update, *_ = updates(head, rounded)
            result = product(head.weights, update) + product(head.query, rounded, (1, 1))
            if options.norm_epsilon is not None:
                factor = jax.lax.rsqrt(jnp.mean(result * result, axis=1, keepdims=True) + options.norm_epsilon)
                result *= factor
                read.factor[pl.ds(head.index, 1), :] = _row(factor)
            results.append(result)
            state = head.of_chunk * state + product(update, head.key_until_end, (0, 0))
            states.append((head.index, rounded, state))
        turn.write(read.vectors, results)
        for index, rounded, state in states:
            before[index], after[index] = rounded, state

    _for_all_heads(options, x, matrix.shape, sums, run)


def backward_kernel(
    options: Options, first, x: Inputs, before, read: Results, cotangent, of_after, gradients, of_state, *scratch
):
    """Writes the gradients of the inputs, and of the states before the chunk [h, p, k], from last to first.

    `of_state` are the gradients of the states after a chunk, and then of those before it.
    """
    chunk = pl.num_programs(2) - 1 - pl.program_id(2)
    sums, of_queries, of_keys = scratch
    is_first = _begin(options, x, first, chunk, of_after, of_state, sums)
    of_queries[...] = jnp.zeros(of_queries.shape, jnp.float32)
    of_keys[...] = jnp.zeros(of_keys.shape, jnp.float32)

    def run(turn: Turn, heads: list[Head]):
        cotangents = turn.read(cotangent)
        if options.norm_epsilon is not None:
            cotangents = map(functools.partial(_of_unnormed, options), cotangents, turn.read(read.vectors), heads)
        results = [_gradients(x, before[x.index], y, of_state[x.index]) for x, y in zip(heads, cotangents)]
        for x, (of_inputs, of_before) in zip(heads, results, strict=True):
            columns = slice(x.group * x.key.shape[1], (x.group + 1) * x.key.shape[1])
            of_queries[:, columns] += of_inputs.query
            of_keys[:, columns] += of_inputs.key
            if not options.by_channel:
                gradients.log_decay[pl.ds(x.index, 1), :] = of_inputs.log_decay
            if x.strength is not None:
                gradients.strength[pl.ds(x.index, 1), :] = of_inputs.strength
            of_state[x.index] = jnp.where(is_first, 0.0, of_before)
        turn.write(gradients.value, [x.value for x, _ in results])
        if options.by_channel:
            turn.write(gradients.log_decay, [x.log_decay for x, _ in results])

    _for_all_heads(options, x, before.shape, sums, run, read.factor)
    gradients.query[...] = of_queries[...].astype(options.dtype)
    gradients.key[...] = of_keys[...].astype(options.dtype)


def _gradients(x: Head, before, cotangent, of_after) -> tuple[Inputs, Float[Array, "p k"]]:
    """The gradients of the inputs of a head, where that of the strength is a row [1, t], and of the state before it."""
    options, decayed, (row, column) = x.options, x.decayed, indices(len(x.key))
    (update, inverse, difference), rounded = updates(x, before), of_after.astype(options.dtype)
    of_update = product(x.weights, cotangent, (0, 0)) + product(x.key_until_end, rounded, (1, 1))
    of_queries = jnp.where(column <= row, product(cotangent, update, (1, 1)), 0)
    # The gradients of what is decayed.
    of_query, of_key_until_end = product(cotangent, before), product(update, rounded)
    of_before = x.of_chunk * of_after + product(cotangent, x.query, (0, 0))
    of_value, of_strength, of_keys, of_key = of_update, None, None, jnp.zeros_like(of_query)
    if options.corrected:
        # The gradient of the values times their strength.
        of_known = product(inverse, of_update.astype(options.dtype), (0, 0))
        of_value = x.strength * of_known
        of_solved = -jnp.where(column < row, product(of_known.astype(options.dtype), update, (1, 1)), 0)
        of_keys = x.strength * of_solved
        of_strength = jnp.sum(of_known * difference, axis=1, keepdims=True)
        of_strength += jnp.sum(of_solved * x.products.of_keys, axis=1, keepdims=True)
        written = of_value.astype(options.dtype)
        of_key = -product(written, before)
        of_before -= product(written, x.key, (0, 0))
    elif x.strength is not None:
        of_value = x.strength * of_update
        of_strength = jnp.sum(of_update * x.value.astype(jnp.float32), axis=1, keepdims=True)
    of_strength = None if of_strength is None else _row(of_strength)
    query, key = decayed.query.astype(jnp.float32), decayed.key.astype(jnp.float32)
    of_begin, of_end = query * of_query + key * of_key, key * of_key_until_end
    of_chunk = jnp.sum(before.astype(jnp.float32) * of_after, axis=0, keepdims=True)
    of_begin += jnp.where(row[:, :1] == len(row) - 1, of_chunk, 0)
    since_begin, until_end = x.products[2:]
    of_query, of_key = since_begin * of_query, since_begin * of_key + until_end * of_key_until_end
    of_products = Products(of_queries, of_keys, of_begin, of_end)
    of_query, of_key, of_log_decay = decayed.pull_back(of_products, of_query, of_key)
    return Inputs(of_query, of_key, of_value, of_log_decay, of_strength), of_before


def _of_unnormed(options: Options, cotangent: Array, read: Array, x: Head) -> Array:
    """The gradient of a head's results before their norm, rounded."""
    along, of_read = read.astype(jnp.float32), cotangent.astype(jnp.float32)
    of_read -= along * jnp.mean(along * of_read, axis=1, keepdims=True)
    return (x.factor * of_read).astype(options.dtype)


def _row(x: Float[Array, "t 1"]) -> Float[Array, "1 t"]:
    """The transpose of a column."""
    row, column = indices(len(x))
    return jnp.sum(jnp.where(row == column, x, 0), axis=0, keepdims=True)


class Turn(NamedTuple):
    """Some heads of each group of a program, which are computed at once."""

    number: Any
    groups: int
    in_group: int
    """The number of heads of a group."""
    at_once: int
    """The number of those that are computed at once."""

    def _columns(self, reference) -> list[Any]:
        """The columns of the heads of each group, in a reference to vectors of all heads."""
        size = reference.shape[1] // (self.groups * self.in_group)
        width = self.at_once * size
        return [pl.ds(i * self.in_group * size + self.number * width, width) for i in range(self.groups)]

    def read(self, reference) -> list[Array]:
        """The vectors of each of these heads."""
        return [x for part in self._columns(reference) for x in jnp.split(reference[:, part], self.at_once, axis=1)]

    def write(self, reference, vectors: list[Array]) -> None:
        """Writes the vectors of each of these heads."""
        for i, part in enumerate(self._columns(reference)):
            of_group = vectors[i * self.at_once : (i + 1) * self.at_once]
            reference[:, part] = jnp.concatenate(of_group, axis=1).astype(reference.dtype)


def _begin(options: Options, x: Inputs, first, chunk, matrix, state, sums):
    """Begins a chunk: with a lane's first one the states, and the sums of its decays. Returns whether a document begins
    with the chunk."""

    @pl.when(pl.program_id(2) == 0)
    def _():
        state[...] = matrix[...]

    if not options.by_channel:
        sums[...] = sums_of_decays(x.log_decay[...])
    return first[pl.program_id(0), chunk] > 0


def _for_all_heads(options: Options, x: Inputs, states, sums, run: Callable[[Turn, list[Head]], None], factor=None):
    """Runs a function for all heads of the program, turn by turn. `states` is the shape of their states, and `factor`
    in the backward pass that of `Results`."""
    num_heads, value_size, key_size = states
    num_groups = x.key.shape[1] // key_size
    in_group = num_heads // num_groups
    at_once = largest_part(options, in_group, min(options.heads, in_group), key_size, value_size)
    queries, keys = (jnp.split(y[...], num_groups, axis=1) for y in (x.query, x.key))
    pairs = []
    if not options.by_channel:
        for query, key in zip(queries, keys):
            pairs.append((product(query, key, (1, 1)), product(key, key, (1, 1)) if options.corrected else None))

    def load(group: int, index: Any, value: Array, log_decay: Array | None) -> Head:
        decays = [None if options.by_channel else sums[pl.ds(place, 1), :] for place in (index, num_heads + index)]
        rest = (None if y is None else y[pl.ds(index, 1), :] for y in (x.strength, factor))
        *columns, strength, of_norm = _columns(*decays, *rest)
        if log_decay is None:
            decayed = ByHead(options, queries[group], keys[group], pairs[group], decays, columns)
        else:
            decayed = ByChannel(options, queries[group], keys[group], log_decay)
        return Head(options, index, group, value, decayed, strength, of_norm)

    def step(number, _):
        turn = Turn(number, num_groups, in_group, at_once)
        places = ((i, i * in_group + number * at_once + j) for i in range(num_groups) for j in range(at_once))
        log_decays = turn.read(x.log_decay) if options.by_channel else [None] * num_groups * at_once
        run(turn, [load(*place, *rest) for place, *rest in zip(places, turn.read(x.value), log_decays, strict=True)])
        return 0

    if in_group == at_once:
        step(0, 0)
    else:
        jax.lax.fori_loop(0, in_group // at_once, step, 0)


def _columns(*rows: Array | None) -> list[Any]:
    """The transposes of rows [1, t], in whole tiles; None remains None."""
    given = [x for x in rows if x is not None]
    transposed = iter(jnp.split(jnp.concatenate(given + given[:1] * (8 - len(given))).T, 8, axis=1) if given else ())
    return [None if x is None else next(transposed) for x in rows]


def largest_part(options: Options, number: int, most: int, *sizes: int) -> int:
    """The largest divisor of a number of groups or heads, at most `most`, with which their vectors of these sizes fill
    whole tiles; the number itself if there is none."""
    tile = 1 if options.interpret else TILE
    divisors = (i for i in range(1, most + 1) if number % i == 0 and all(i * size % tile == 0 for size in sizes))
    return max(divisors, default=number)
