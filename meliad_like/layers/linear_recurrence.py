"""Linear recurrences whose state is a matrix for each head, token by token and in chunks of tokens.

    S_t = S_{t-1} Diag(alpha_t) + u_t k_t^T,    y_t = S_t q_t

alpha_t is a decay between 0 and 1, one for a head or one for each channel of its keys. u_t is the value v_t, or with a
*strength* beta_t the delta rule's correction, beta_t (v_t - S_{t-1} Diag(alpha_t) k_t). Mamba-2, retention, the gated
delta rule and Kimi Delta Attention are of this form (Dao & Gu 2024, section 6; Yang et al. 2024, section 3.2; Kimi
Linear 2025). In shapes `g` is the number of groups of heads that share queries and keys, `p` the size of a value, and
`e` is 1 with a decay for each head, and `k` with one for each channel.
"""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from einops import rearrange
from jaxtyping import Array, Bool, Float

from meliad_like.errors import UserError
from meliad_like.layers.sequence import scan_in_order

ROWS = 16
"""The tokens of a chunk whose decays by channel are multiplied one by one, instead of as a product of matrices."""


class Rule(NamedTuple):
    """What a token does with the states of all heads, float32; `n` stands for any axes of tokens."""

    query: Float[Array, "b g n k"]
    key: Float[Array, "b g n k"]
    value: Float[Array, "b h n p"]
    log_decay: Float[Array, "b h n e"]
    """The logarithm of alpha."""
    strength: Float[Array, "b h n 1"] | None
    """beta; None: the values are written as they are."""


def read_token(matrix: Float[Array, "b h p k"], rule: Rule) -> tuple[Float[Array, "b h p k"], Float[Array, "b h p"]]:
    """The states after one token, and what it reads, by the equations as they stand.

    Args:
        matrix: the states before it.
        rule: of the token, without the axis of tokens.
    """
    group = rule.value.shape[1] // rule.query.shape[1]
    query, key = (jnp.repeat(x, group, axis=1) for x in (rule.query, rule.key))
    matrix = matrix * jnp.exp(rule.log_decay)[:, :, None]
    update = rule.value
    if rule.strength is not None:
        update = rule.strength * (update - jnp.einsum("bhpk,bhk->bhp", matrix, key))
    matrix = matrix + jnp.einsum("bhp,bhk->bhpk", update, key)
    return matrix, jnp.einsum("bhpk,bhk->bhp", matrix, query)


def read_chunks(
    rule: Rule, matrix: Float[Array, "b h p k"], start: Bool[Array, "b c"], chunk: int
) -> tuple[Float[Array, "b h p k"], Float[Array, "b h n p"]]:
    """The states after a segment, and what every token reads.

    With g_t, the product of the decays of a chunk's tokens up to t, the state is S_t = S_0 Diag(g_t) +
    sum_{s <= t} u_s (k_s g_t / g_s)^T. The delta rule's corrections solve u_t + beta_t sum_{s < t} (k_t g_t / g_s) k_s
    u_s = beta_t (v_t - S_0 (g_t k_t)), a triangular system of equations for each chunk; its solutions for the v_t and
    the g_t k_t need no S_0. So all chunks are computed at once, except for the states with which each begins.

    Args:
        rule: of the segment's tokens.
        matrix: the states before it.
        start: blocks with which a document begins.
        chunk: tokens of a chunk, a power of two that divides a block.
    """
    group_count = rule.query.shape[1]

    def cut(x: Float[Array, "b heads n _"]) -> Float[Array, "c b g r t _"]:
        return rearrange(x, "b (g r) (c t) e -> c b g r t e", g=group_count, t=chunk)

    query, key, value, log_decay = map(cut, rule[:4])
    total = running_total(log_decay)
    decay, until_end = jnp.exp(jnp.sum(total, axis=0)), jnp.exp(between(total, total[..., -1:, :]))
    of_chunk = decay[..., -1:, :]
    if rule.strength is None:
        # What a chunk's tokens write depends on no earlier chunk.
        xs = of_chunk, written(value, key, until_end)

        def add(matrix, of_chunk, added):
            return matrix * of_chunk + added, ()

        next_state = add
    else:
        strength = cut(rule.strength)
        products = jnp.where(np.tri(chunk, k=-1, dtype=bool), decayed_products(key, key, total) * strength, 0)
        known = jnp.concatenate([value, decay * key], axis=-1) * strength
        solved = exact_product(inverse_of_unit_triangular(products + jnp.eye(chunk)), known)
        xs = of_chunk, *jnp.split(solved, [value.shape[-1]], axis=-1), key, until_end

        def correct(matrix, of_chunk, of_values, of_keys, key, until_end):
            update = of_values - of_keys @ transposed(matrix)
            return matrix * of_chunk + written(update, key, until_end), update

        next_state = correct

    def step(matrix, x):
        first, x = x
        matrix = jnp.where(first[:, None, None, None, None], 0, matrix)
        after, update = next_state(matrix, *x)
        return after, (matrix, update)

    num_chunks = len(decay)
    in_block = num_chunks // start.shape[1]
    first = jnp.repeat(start, in_block, axis=1) & (np.arange(num_chunks) % in_block == 0)
    matrix = rearrange(matrix, "b (g r) p k -> b g r p k", g=group_count)
    matrix, (before, update) = scan_in_order(lambda matrix: jax.lax.scan(step, matrix, (first.T, xs)), matrix)
    read = decayed_products(query, key, total) @ (value if rule.strength is None else update)
    if decay.shape[-1] == 1:
        read += decay * (query @ transposed(before))
    else:
        read += (decay * query) @ transposed(before)
    return rearrange(matrix, "b g r p k -> b (g r) p k"), rearrange(read, "c b g r t p -> b (g r) (c t) p")


def transposed(x: Float[Array, "... i j"]) -> Float[Array, "... j i"]:
    return jnp.swapaxes(x, -1, -2)


def running_total(x: Float[Array, "*batch t e"]) -> Float[Array, "2 *batch t e"]:
    """The sums of the first 1, 2, ..., t numbers, each as float32 and the rest that float32 has no digits for.

    A channel can decay by exp(-300) at each of some tokens, and hardly at the others: the differences of float32 sums
    would have no digits left for the latter.
    """

    def add(first, second):
        (a, rest_of_a), (b, rest_of_b) = first, second
        total = a + b
        of_b = total - a
        return total, rest_of_a + rest_of_b + ((a - (total - of_b)) + (b - of_b))

    return jnp.stack(jax.lax.associative_scan(add, (x, jnp.zeros_like(x)), axis=x.ndim - 2))


def between(earlier: Float[Array, "2 ..."], later: Float[Array, "2 ..."]) -> Float[Array, "..."]:
    """The differences of two running totals."""
    return (later[0] - earlier[0]) + (later[1] - earlier[1])


def written(
    update: Float[Array, "*batch r t p"], key: Float[Array, "*batch 1 t k"], until_end: Float[Array, "*batch r t e"]
) -> Float[Array, "*batch r p k"]:
    """What is left of the updates of a chunk's tokens at its end; the smaller factor is decayed."""
    if until_end.shape[-1] == 1:
        return transposed(update * until_end) @ key
    return transposed(update) @ (key * until_end)


def decayed_products(
    x: Float[Array, "*batch 1 t k"], key: Float[Array, "*batch 1 t k"], total: Float[Array, "2 *batch r t e"]
) -> Float[Array, "*batch r t t"]:
    """The products of queries or keys with the keys of the same and of earlier tokens, times the decay between the two.

    Entry [t, s] is sum_i x_ti key_si exp(total_ti - total_si) for s <= t, and 0 otherwise. With a decay for each
    channel, exp(total_ti) and exp(-total_si) can't be factors of a product of matrices, because the latter overflows.
    Rows of `ROWS` tokens are relative to the total of the first of them, so that both factors are at most 1; only the
    tokens of the same rows are multiplied channel by channel (Kimi Linear 2025, as in fla-org's secondary chunks).
    """
    t = total.shape[-2]
    # Masked before the exponential, which would overflow above the diagonal.
    if total.shape[-1] == 1:
        log_decay = jnp.where(np.tri(t, dtype=bool), between(transposed(total), total), -jnp.inf)
        return (x @ transposed(key)) * jnp.exp(log_decay)
    size = min(ROWS, t)
    rows, row_keys, row_totals = (rearrange(y, "... (i t) k -> ... i t k", t=size) for y in (x, key, total))
    first = row_totals[..., :1, :]
    earlier = np.arange(t) < size * np.arange(t // size)[:, None]
    until_first = jnp.exp(jnp.where(earlier[..., None], between(total[..., None, :, :], first), -jnp.inf))
    products = (rows * jnp.exp(between(first, row_totals))) @ transposed(key[..., None, :, :] * until_first)
    log_decay = between(row_totals[..., None, :, :], row_totals[..., :, None, :])
    decay = jnp.exp(jnp.where(np.tri(size, dtype=bool)[..., None], log_decay, -jnp.inf))
    within = jnp.einsum("...tk,...sk,...tsk->...ts", rows, row_keys, decay)
    diagonal = within[..., :, :, None, :] * np.eye(t // size)[:, None, :, None]
    return rearrange(products, "... i t s -> ... (i t) s") + rearrange(diagonal, "... i t j s -> ... (i t) (j s)")


# Accelerators round the factors of a product to bfloat16 unless they are told not to.
exact_product = functools.partial(jnp.matmul, precision="highest")


def inverse_of_unit_triangular(system: Float[Array, "*batch t t"]) -> Float[Array, "*batch t t"]:
    """The inverse of lower triangular matrices with a diagonal of ones, for a power of two `t`, by products of blocks.

    Not `jax.scipy.linalg.solve_triangular`: on CPUs it waits in threads of XLA's pool for other threads of this pool,
    and a training on two cores was seen to wait forever (jaxlib 0.10.2).
    """
    t = system.shape[-1]
    if t == 1:
        return jnp.ones_like(system)
    half = t // 2
    first, second = inverse_of_unit_triangular(jnp.stack([system[..., :half, :half], system[..., half:, half:]]))
    below = -exact_product(second, exact_product(system[..., half:, :half], first))
    return jnp.block([[first, jnp.zeros_like(first)], [below, second]])


def check_chunks(config: Any) -> None:
    """Checks that the chunks of a mixer, `chunk_length` tokens long, can divide blocks of any length.

    Raises:
        UserError: their length is not a power of two.
    """
    length = config.chunk_length
    if length < 1 or length & (length - 1):
        raise UserError(f"{type(config).__name__}.chunk_length={length} must be a power of two")


def flops_of_rule(
    chunk: int, groups: int, heads: int, key_size: int, value_size: int, *, by_channel: bool = False, corrected: bool
) -> float:
    """The operations of one token in `read_chunks`, with those that decay the products of a chunk.

    Args:
        chunk: tokens of a chunk.
        groups, heads, key_size, value_size: `g`, `h`, `k` and `p`.
        by_channel: whether each channel has its decay.
        corrected: whether updates are the delta rule's corrections.
    """
    decays = 8 * min(ROWS, chunk) * heads * key_size if by_channel else 5 * chunk * heads
    products = 2 * chunk * groups * key_size + decays
    read = products + 2 * chunk * heads * value_size + 4 * heads * key_size * value_size
    if not corrected:
        return read
    solved = 2 * chunk * heads * (key_size + value_size) + 2 * chunk**2 / 3 * heads
    return read + products + solved + 2 * heads * key_size * value_size


def log_uniform_rate(key, shape, dtype):
    """Initial logarithms of a decay's rate, as in Mamba-2: of rates between 1 and 16."""
    return jnp.log(jax.random.uniform(key, shape, dtype, 1.0, 16.0))


def inverse_softplus_step(key, shape, dtype):
    """Initial biases of a decay's step, as in Mamba-2: softplus of them is log-uniform between 0.001 and 0.1."""
    step = jnp.exp(jax.random.uniform(key, shape, dtype, math.log(0.001), math.log(0.1)))
    return step + jnp.log(-jnp.expm1(-step))
