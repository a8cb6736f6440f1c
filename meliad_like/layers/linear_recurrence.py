"""Linear recurrences whose state is a matrix for each head, token by token and in chunks of tokens.

    S_t = S_{t-1} Diag(alpha_t) + u_t k_t^T,    y_t = S_t q_t

alpha_t is a decay between 0 and 1, one for a head or one for each channel of its keys. u_t is the value v_t, or with a
*strength* beta_t the delta rule's correction, beta_t (v_t - S_{t-1} Diag(alpha_t) k_t). Mamba-2, retention, the gated
delta rule and Kimi Delta Attention are of this form (Dao & Gu 2024, section 6; Yang et al. 2024, section 3.2; Kimi
Linear 2025). In shapes `g` is the number of groups of heads that share queries and keys, `p` the size of a value, and
`e` is 1 with a decay for each head, and `k` with one for each channel.

The recurrence of channels that each have one number as their state, and the short causal convolution of such a layer's
inputs, are here as well.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from einops import rearrange
from jaxtyping import Array, Bool, Float, Int

from meliad_like.layers.backend import adds_heads_one_by_one, fills_whole_triangles, sums_by_products
from meliad_like.layers.basic import for_all, times_column
from meliad_like.layers.sharding import from_left, scan_in_order


class Rule(NamedTuple):
    """The effect of tokens on the states of all heads, float32; `n` stands for any axes of tokens."""

    query: Float[Array, "b g n k"]
    key: Float[Array, "b g n k"]
    value: Float[Array, "b h n p"]
    log_decay: Float[Array, "b h n e"]
    """The logarithm of alpha."""
    strength: Float[Array, "b h n 1"] | None
    """The strength beta; None: the values are written as they are, times the step."""
    step: Float[Array, "b h n 1"] | None = None
    """The factor of the values without a strength; None: 1."""

    def without_step(self) -> "Rule":
        """The same rule, whose values are multiplied by the step."""
        return self if self.step is None else self._replace(value=times_column(self.value, self.step), step=None)


def read_token(matrix: Float[Array, "b h p k"], rule: Rule) -> tuple[Float[Array, "b h p k"], Float[Array, "b h p"]]:
    """The states after one token, and the vectors that it reads, by the equations as they stand. The rule has no axis
    of tokens."""
    rule = rule.without_step()
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
    """The states after a segment, and the vectors that every token reads.

    With g_t, the product of the decays of a chunk's tokens up to t, the state is S_t = S_0 Diag(g_t) +
    sum_{s <= t} u_s (k_s g_t / g_s)^T. The delta rule's corrections solve u_t + beta_t sum_{s < t} (k_t g_t / g_s) k_s
    u_s = beta_t (v_t - S_0 (g_t k_t)), a triangular system of equations for each chunk; its solutions for the v_t and
    the g_t k_t need no S_0. So all chunks are computed at once, except for the states with which each begins.

    Args:
        rule: the rule of the segment's tokens.
        matrix: the states before it.
        start: blocks with which a document begins.
        chunk: tokens of a chunk, a power of two that divides a block.
    """
    rule, group_count = rule.without_step(), rule.query.shape[1]

    def cut(x: Float[Array, "b heads n _"]) -> Float[Array, "c b g r t _"]:
        return rearrange(x, "b (g r) (c t) e -> c b g r t e", g=group_count, t=chunk)

    query, key, value, log_decay = map(cut, rule[:4])
    readers = (query,) if rule.strength is None else (query, key)
    (of_queries, *of_keys), decay, until_end = decayed_products(readers, key, log_decay)
    of_chunk = decay[..., -1:, :]
    if rule.strength is None:
        # What a chunk's tokens write depends on no earlier chunk.
        xs = of_chunk, written(value, key, until_end)

        def add(matrix, of_chunk, added):
            return matrix * of_chunk + added, ()

        next_state = add
    else:
        strength = cut(rule.strength)
        products = jnp.where(np.tri(chunk, k=-1, dtype=bool), times_column(of_keys[0], strength), 0)
        known = times_column(jnp.concatenate([value, decay * key], axis=-1), strength)
        solved = solve_unit_triangular(products, known)
        xs = of_chunk, *jnp.split(solved, [value.shape[-1]], axis=-1), key, until_end

        def correct(matrix, of_chunk, of_values, of_keys, key, until_end):
            update = of_values - of_keys @ matrix.mT
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
    read = of_queries @ (value if rule.strength is None else update)
    if decay.shape[-1] == 1:
        read += times_column(query @ before.mT, decay)
    else:
        read += (decay * query) @ before.mT
    return rearrange(matrix, "b g r p k -> b (g r) p k"), rearrange(read, "c b g r t p -> b (g r) (c t) p")


def written(
    update: Float[Array, "*batch r t p"], key: Float[Array, "*batch 1 t k"], until_end: Float[Array, "*batch r t e"]
) -> Float[Array, "*batch r p k"]:
    """The part of the updates of a chunk's tokens that is left at its end; the smaller factor is decayed."""
    if until_end.shape[-1] == 1:
        return times_column(update, until_end).mT @ key
    return update.mT @ (key * until_end)


def decayed_products(
    readers: Sequence[Float[Array, "*batch 1 t k"]],
    key: Float[Array, "*batch 1 t k"],
    log_decay: Float[Array, "*batch r t e"],
) -> tuple[list[Float[Array, "*batch r t t"]], Float[Array, "*batch r t e"], Float[Array, "*batch r t e"]]:
    """The products of queries or keys with the keys of the same and of earlier tokens, times the decay between the two:
    entry [t, s] is sum_i reader_ti key_si alpha_(s+1)i ... alpha_ti for s <= t, and 0 otherwise.

    Returns:
      The products of each of `readers`; the decay of a chunk's state up to each token, and from each token to the end.
    """
    groups, t = key.shape[2], key.shape[-2]
    # exp(-128) is about 3e-56, which is rounded to 0 in float32: the bound changes no decay, and keeps sums finite.
    log_decay = jnp.maximum(log_decay, -128)
    if log_decay.shape[-1] > 1 and fills_whole_triangles():
        return _whole_products_by_channel(readers, key, log_decay)
    if log_decay.shape[-1] > 1:
        merged = (jnp.broadcast_to(y, log_decay.shape) for y in (*readers, key, log_decay))
        *x, key, log_decay = (rearrange(y, "c b g r t k -> c b (g r) t k") for y in merged)
        results = products_by_channel(rearrange(x, "j c b h t k -> c b h (t j) k"), key, log_decay)
        products, begin, end = (rearrange(y, "c b (g r) s k -> c b g r s k", g=groups) for y in results)
        return [products[..., i :: len(x), :] for i in range(len(x))], jnp.exp(begin), jnp.exp(end)
    between, since_begin, until_end = sums_between(log_decay[..., 0])
    # Masked before the exponential.
    decays = jnp.exp(jnp.where(np.tri(t, dtype=bool), between, -jnp.inf))
    heads = log_decay.shape[3] if adds_heads_one_by_one() else 1
    products = [jnp.concatenate([x @ key.mT] * heads, axis=3) * decays for x in readers]
    return products, jnp.exp(since_begin)[..., None], jnp.exp(until_end)[..., None]


@jax.custom_jvp
def sums_between(
    log_decay: Float[Array, "*batch t"],
) -> tuple[Float[Array, "*batch t t"], Float[Array, "*batch t"], Float[Array, "*batch t"]]:
    """The sums of logarithms of decays from each token s to each later token t (entry [t, s], without that of s), up to
    each token, and from each token to the end.

    A head can decay by exp(-300) at each of some tokens and hardly at the others, for which the difference of two
    float32 sums would have no digits left. So the multiples of a power of two are added separately: these sums have at
    most 24 binary digits, as no logarithm is below -128, and so are exact.

    The same holds for derivatives. That of a token's logarithm is a sum over the pairs of tokens around it, which is 0
    where the token forgets all; as a difference of sums over more pairs it would keep their rounding errors, and is
    then multiplied by a logarithm of -300. So derivatives never use differences.
    """
    t = log_decay.shape[-1]
    unit = t / 2**17
    rounded = jnp.round(log_decay / unit) * unit
    coarse, fine = exact_product(jnp.stack([rounded, log_decay - rounded]), np.tri(t, dtype=np.float32).T)
    between = (coarse[..., None] - coarse[..., None, :]) + (fine[..., None] - fine[..., None, :])
    return between, coarse + fine, (coarse[..., -1:] - coarse) + (fine[..., -1:] - fine)


@sums_between.defjvp
def _sums_between_jvp(primals, tangents):
    (tangent,), t = tangents, primals[0].shape[-1]
    not_after = np.tri(t, dtype=np.float32)
    after = 1 - not_after
    if sums_by_products():
        # Which tokens are between the two of each pair.
        pairs = (not_after[:, None] * after).reshape(-1, t)
        between = exact_product(tangent, pairs.T).reshape(*tangent.shape, t)
    else:
        between = exact_product(not_after * tangent[..., None, :], after.T)
    return sums_between(*primals), (between, exact_product(tangent, not_after.T), exact_product(tangent, after.T))


def products_by_channel(
    x: Float[Array, "c b h tj k"], key: Float[Array, "c b h t k"], log_decay: Float[Array, "c b h t k"]
) -> tuple[Float[Array, "c b h tj t"], Float[Array, "c b h t k"], Float[Array, "c b h t k"]]:
    """`decayed_products` of `j` readers for each token with a decay for each channel, for a power of two `t`, and the
    sums of the logarithms up to each token, and from each token to the end.

    The decays of the channels can't be divided between the factors of one product of matrices, as exp(G_t) and
    exp(-G_s) of their sums, because the latter overflows. But for readers in the second half and keys in the first, the
    decays from the middle to the former and from the latter to the middle are at most 1; then each half is halved.
    """
    t, readers = key.shape[-2], x.shape[-2] // key.shape[-2]
    if t == 1:
        return x @ key.mT, log_decay, jnp.zeros_like(log_decay)

    def in_halves(y):
        # Along the axis of heads, because XLA crashes on CPUs where arrays have many axes (jaxlib 0.10.2).
        return rearrange(y, "c b h (i t) k -> c b (h i) t k", i=2)

    parts = products_by_channel(in_halves(x), in_halves(key), in_halves(log_decay))
    (first, begin_1, end_1), (second, begin_2, end_2) = ([y[:, :, i::2] for y in parts] for i in (0, 1))
    later = x[..., readers * t // 2 :, :] * jnp.repeat(jnp.exp(begin_2), readers, axis=-2)
    below = later @ (key[..., : t // 2, :] * jnp.exp(end_1)).mT
    upper, lower = jnp.concatenate([first, jnp.zeros_like(first)], axis=-1), jnp.concatenate([below, second], axis=-1)
    begin = jnp.concatenate([begin_1, begin_2 + begin_1[..., -1:, :]], axis=-2)
    end = jnp.concatenate([end_1 + begin_2[..., -1:, :], end_2], axis=-2)
    return jnp.concatenate([upper, lower], axis=-2), begin, end


def _whole_products_by_channel(
    readers: Sequence[Float[Array, "*batch 1 t k"]],
    key: Float[Array, "*batch 1 t k"],
    log_decay: Float[Array, "*batch r t k"],
) -> tuple[list[Float[Array, "*batch r t t"]], Float[Array, "*batch r t k"], Float[Array, "*batch r t k"]]:
    """`products_by_channel` for accelerators: the blocks of one size have a product together."""
    t = key.shape[-2]
    token, earlier = np.arange(t)[:, None], np.arange(t)

    def decays(block: int, is_later: bool | np.ndarray) -> Float[Array, "*batch r t k"]:
        """The decay of each token from the beginning of its block if `is_later`, or to the end of it."""
        summed = np.where(is_later, earlier <= token, earlier > token) & (earlier // block == token // block)
        return jnp.exp(exact_product(summed.astype(np.float32), log_decay))

    products = [jnp.eye(t) * jnp.sum(x * key, axis=-1, keepdims=True) for x in readers]
    for block in 2 ** np.arange(t.bit_length() - 1):
        is_later = token // block % 2 == 1
        decay = decays(block, is_later)
        decayed, is_below = (key * decay).mT, is_later & (earlier // block == token // block - 1)
        products = [jnp.where(is_below, (x * decay) @ decayed, y) for x, y in zip(readers, products)]
    return [jnp.broadcast_to(x, (*log_decay.shape[:-1], t)) for x in products], decays(t, True), decays(t, False)


# Accelerators round the factors of a product to bfloat16 unless they are told not to.
exact_product = functools.partial(jnp.matmul, precision="highest")


@jax.custom_jvp
def solve_unit_triangular(
    below: Float[Array, "*batch t t"], known: Float[Array, "*batch t n"]
) -> Float[Array, "*batch t n"]:
    """The `x` with `x + below @ x = known`, for matrices that are 0 on and above the diagonal, and a power of two `t`.

    Its derivative needs only the inverse and the result, and nothing of how the inverse was computed.
    """
    return exact_product(inverse_of_unit_triangular(below + jnp.eye(below.shape[-1])), known)


@solve_unit_triangular.defjvp
def _solve_jvp(primals, tangents):
    (below, known), (below_tangent, known_tangent) = primals, tangents
    inverse = inverse_of_unit_triangular(below + jnp.eye(below.shape[-1]))
    solved = exact_product(inverse, known)
    return solved, exact_product(inverse, known_tangent - exact_product(below_tangent, solved))


def inverse_of_unit_triangular(system: Float[Array, "c *batch t t"]) -> Float[Array, "c *batch t t"]:
    """The inverse of lower triangular matrices with a diagonal of ones, for a power of two `t`, by products of blocks.

    On CPUs `jax.scipy.linalg.solve_triangular` waits in threads of XLA's pool for other threads of this pool, and a
    training on two cores was seen to wait forever (jaxlib 0.10.2).
    """
    t = system.shape[-1]
    if t == 1 or fills_whole_triangles():
        return _inverse_of_whole(system)
    half = t // 2
    # Along the first axis, because XLA crashes on CPUs where arrays have many axes (jaxlib 0.10.2).
    diagonal = jnp.concatenate([system[..., :half, :half], system[..., half:, half:]])
    first, second = jnp.split(inverse_of_unit_triangular(diagonal), 2)
    below = -exact_product(second, exact_product(system[..., half:, :half], first))
    return jnp.block([[first, jnp.zeros_like(first)], [below, second]])


def _inverse_of_whole(system: Float[Array, "c *batch t t"]) -> Float[Array, "c *batch t t"]:
    """`inverse_of_unit_triangular` by products of whole matrices: `inverse` is that of the blocks on the diagonal."""
    block = np.arange(system.shape[-1]) // 2
    inverse = 2 * jnp.eye(len(block)) - jnp.where(block[:, None] == block, system, 0)
    while block[-1]:
        # The lower left quarters of the blocks that are twice as large.
        is_below = (block[:, None] == block + 1) & (block[:, None] % 2 == 1)
        below = jnp.where(is_below, system, 0)
        inverse -= exact_product(inverse, exact_product(below, inverse))
        block = block // 2
    return inverse


def scan_channels(
    decay: Float[Array, "b n channels"], added: Float[Array, "b n channels"], state: Float[Array, "b channels"]
) -> tuple[Float[Array, "b channels"], Float[Array, "b n channels"]]:
    """The state of h_t = a_t h_{t-1} + x_t after a segment, and after every token, by a tree of compositions. `decay`
    is a, which is 0 where a document begins, and `added` is x."""
    decay, added = jax.lax.associative_scan(compose, (decay, added), axis=1)

    def scan(state):
        states = decay * state[:, None] + added
        return states[:, -1], states

    return scan_in_order(scan, state)


def compose(first: tuple[Array, Array], second: tuple[Array, Array]) -> tuple[Array, Array]:
    """Composes two maps h -> a h + x, pairs of a and x: the map of earlier tokens, and then the map of later ones."""
    (a, x), (later_a, later_x) = first, second
    return a * later_a, later_a * x + later_x


def flops_of_rule(
    chunk: int, groups: int, heads: int, key_size: int, value_size: int, *, by_channel: bool = False, corrected: bool
) -> float:
    """The operations of one token in `read_chunks`, with those that decay the products of a chunk, by the tokens of a
    chunk and the fields of `mixers.matrix_recurrence.Sizes`."""
    if by_channel:
        between, products = 0, (chunk + 5 * math.log2(chunk)) * heads * key_size
    else:
        between, products = 7 * chunk * heads, 2 * chunk * groups * key_size + chunk * heads
    read = between + products + 2 * chunk * heads * value_size + 4 * heads * key_size * value_size
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


def convolve(
    inputs: Float[Array, "b n channels"],
    recent: Float[Array, "b recent channels"],
    filters: Float[Array, "taps channels"],
    start: Bool[Array, "b c"],
) -> Float[Array, "b n channels"]:
    """A causal convolution of every channel, which sees no token of another document; sums and result are float32.

    `recent` are the inputs of the tokens before, one fewer than filters; the last filter is for the token itself.
    """
    n, length = inputs.shape[1], len(filters)
    padded = jnp.concatenate([recent.astype(inputs.dtype), inputs], axis=1)
    # The number of documents that have begun up to each token: tokens of other documents have other numbers.
    document = jnp.repeat(jnp.cumsum(start, axis=1), n // start.shape[1], axis=1)
    padded_document = jnp.pad(document, ((0, 0), (length - 1, 0)))
    result = jnp.zeros(inputs.shape, jnp.float32)
    for i in range(length):
        same = padded_document[:, i : i + n] == document
        result += jnp.where(same[..., None], padded[:, i : i + n], 0) * for_all(filters[i], inputs.shape)
    return result


def convolve_segment(
    inputs: Float[Array, "b n channels"],
    recent: Float[Array, "b recent channels"],
    filters: Float[Array, "taps channels"],
    start: Bool[Array, "b c"],
    kernel: Callable[..., Array] | None = None,
) -> tuple[Float[Array, "b n channels"], Float[Array, "b recent channels"]]:
    """`convolve`, or a kernel that computes it, for a device's tokens of a segment, and the inputs of the last tokens,
    for the next segment. `recent` are the inputs of the last tokens before the whole segment."""
    newest = inputs[:, inputs.shape[1] - recent.shape[1] :].astype(recent.dtype)
    (before,) = from_left((newest,), (recent,))
    return (kernel or convolve)(inputs, before, filters, start), newest


def convolve_tokens(
    inputs: Float[Array, "b n channels"],
    recent: Float[Array, "b recent channels"],
    filters: Float[Array, "taps channels"],
    counts: Int[Array, " b"],
) -> tuple[Float[Array, "b n channels"], Float[Array, "b recent channels"]]:
    """`convolve_segment` for tokens of the same document; the inputs that are returned are the last ones of the first
    `counts` tokens of each lane."""
    every = jnp.concatenate([recent, inputs], axis=1)
    if inputs.shape[1] == 1:
        # For writing: on a CPU, slices of taps and lookups take longer.
        convolved = jnp.sum(every.astype(jnp.float32) * filters, axis=1, keepdims=True)
        return convolved, jnp.where(counts[:, None, None] > 0, every[:, 1:].astype(recent.dtype), recent)
    convolved = convolve(inputs, recent, filters, jnp.zeros((inputs.shape[0], 1), bool))
    places = (counts[:, None] + np.arange(recent.shape[1]))[..., None]
    return convolved, jnp.take_along_axis(every, places, axis=1).astype(recent.dtype)
