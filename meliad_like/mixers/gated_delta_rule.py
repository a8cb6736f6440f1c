"""The gated delta rule: a matrix for each head that forgets, and is corrected by every token (Yang et al. 2024).

Gated Delta Networks, section 3.1 and equation 10: the state of a head is a matrix S that maps keys to values,

    S_t = S_{t-1} alpha_t (I - beta_t k_t k_t^T) + beta_t v_t k_t^T,    o_t = S_t q_t,

with a decay alpha_t and a writing strength beta_t, both between 0 and 1 and read from the token. Queries, keys and
values pass a short convolution along the document and a SiLU, and queries and keys get unit length; the outputs of a
head pass an RMS norm and a gate (section 3.3). Segments are read in chunks: within a chunk the rule is a triangular
system of equations (section 3.2), and only S passes from chunk to chunk. The states start at zero with every document.
In shapes `p` is the size of a value, which equals `k`, and `taps` the length of the convolution.
"""

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from einops import rearrange
from flax import nnx
from jaxtyping import Array, Bool, Float

from meliad_like.errors import UserError
from meliad_like.layers.attention import merge_heads, split_heads, unit
from meliad_like.layers.basic import Linear, over_root_mean_square, parameter
from meliad_like.layers.convolution import convolve_segment, convolve_token
from meliad_like.layers.flops import Flops
from meliad_like.layers.sequence import scan_in_order
from meliad_like.mixers.base import MIXERS, Mixer, Shape, StatesConfig, Traits, check_taps
from meliad_like.registry import size
from meliad_like.validation import check_positive


class DeltaCarry(NamedTuple):
    """What passes from token to token."""

    matrix: Float[Array, "b h p k"]
    """The states, float32: from keys (last axis) to values."""
    recent: Float[Array, "b recent channels"]
    """The last inputs of the convolutions: queries, keys and values of the last `conv_length - 1` tokens."""


class Rule(NamedTuple):
    """What a token does with the states, float32; `n` stands for any axes of tokens."""

    query: Float[Array, "b h n k"]
    key: Float[Array, "b h n k"]
    value: Float[Array, "b h n p"]
    log_decay: Float[Array, "b h n"]
    """Logarithm of alpha."""
    strength: Float[Array, "b h n"]
    """beta."""


class DeltaRule(Mixer):
    """Tokens write to and read from matrices."""

    def __init__(self, config: "GatedDeltaRule", shape: Shape, *, rngs: nnx.Rngs):
        self.config, self.w = config, shape.window_length
        self.num_heads, self.head_size = shape.num_heads, shape.head_size
        d, h, inner = shape.model_width, shape.num_heads, shape.inner_width
        self.query, self.key, self.value, self.gate = (
            Linear(d, inner, ("model", "heads"), rngs=rngs) for _ in range(4)
        )
        fan_in = jax.nn.initializers.variance_scaling(1.0, "fan_in", "truncated_normal", in_axis=0, out_axis=())
        self.query_filter, self.key_filter, self.value_filter = (
            parameter(rngs.params(), fan_in, (config.conv_length, inner), (None, "heads")) for _ in range(3)
        )
        self.decay = Linear(d, h, ("model", "heads"), rngs=rngs)
        self.strength = Linear(d, h, ("model", "heads"), rngs=rngs)
        # As in Mamba-2: rates between 1 and 16, steps between 0.001 and 0.1.
        self.log_rate = parameter(rngs.params(), _log_uniform_rate, (h,), ("heads",))
        self.step_bias = parameter(rngs.params(), _inverse_softplus_step, (h,), ("heads",))
        self.norm_scale = parameter(rngs.params(), jax.nn.initializers.ones, (shape.head_size,), (None,))

    def init_carry(self, b, dtype):
        matrix = jnp.zeros((b, self.num_heads, self.head_size, self.head_size), jnp.float32)
        width = 3 * self.num_heads * self.head_size
        return DeltaCarry(matrix, jnp.zeros((b, self.config.conv_length - 1, width), dtype))

    def _inputs(self, x: Float[Array, "b n d"]) -> Float[Array, "b n channels"]:
        """What the convolutions read."""
        return jnp.concatenate([linear(x) for linear in (self.query, self.key, self.value)], axis=-1)

    def _rule(self, x: Float[Array, "b n d"], convolved: Float[Array, "b n channels"]) -> Rule:
        query, key, value = (split_heads(x, self.num_heads) for x in jnp.split(jax.nn.silu(convolved), 3, axis=-1))
        query, key, value = (x.astype(jnp.float32) for x in (unit(query), unit(key), value))
        step = jax.nn.softplus(self.decay(x).astype(jnp.float32) + self.step_bias[...])
        strength = jax.nn.sigmoid(self.strength(x).astype(jnp.float32))
        log_decay = -jnp.exp(self.log_rate[...]) * step
        return Rule(query, key, value, *(rearrange(x, "b n h -> b h n") for x in (log_decay, strength)))

    def _filters(self) -> Float[Array, "taps channels"]:
        filters = (self.query_filter, self.key_filter, self.value_filter)
        return jnp.concatenate([x[...] for x in filters], axis=-1)

    def _output(self, read: Float[Array, "b h n p"], x: Float[Array, "b n d"]) -> Float[Array, "b n i"]:
        """The norm and the gate."""
        read = over_root_mean_square(read, 1e-6) * self.norm_scale[...]
        gate = jax.nn.silu(split_heads(self.gate(x), self.num_heads).astype(jnp.float32))
        return merge_heads((read * gate).astype(x.dtype))

    def __call__(self, x, at, carry, dropout_key):
        start = at.start
        convolved, recent = convolve_segment(self._inputs(x), carry.recent, self._filters(), start)
        rule = self._rule(x, convolved)
        chunk = math.gcd(self.w, self.config.chunk_length)
        matrix, read = scan_in_order(lambda matrix: read_chunks(rule, matrix, start, chunk), carry.matrix)
        return self._output(read, x), DeltaCarry(matrix, recent)

    def step(self, x, at, carry):
        x = x[:, None]
        convolved, recent = convolve_token(self._inputs(x), carry.recent, self._filters())
        rule = self._rule(x, convolved)
        matrix = update(carry.matrix, jax.tree.map(lambda y: y[:, :, 0], rule))
        read = jnp.einsum("bhpk,bhnk->bhnp", matrix, rule.query)
        return self._output(read, x)[:, 0], DeltaCarry(matrix, recent)


def update(matrix: Float[Array, "b h p k"], rule: Rule) -> Float[Array, "b h p k"]:
    """The states after one token, by the rule of this token as it stands (equation 10)."""
    decayed = matrix * jnp.exp(rule.log_decay)[..., None, None]
    error = rule.value - jnp.einsum("bhpk,bhk->bhp", decayed, rule.key)
    return decayed + jnp.einsum("bh,bhp,bhk->bhpk", rule.strength, error, rule.key)


def read_chunks(
    rule: Rule, matrix: Float[Array, "b h p k"], start: Bool[Array, "b c"], chunk: int
) -> tuple[Float[Array, "b h p k"], Float[Array, "b h n p"]]:
    """The states after a segment, and what every token reads, in chunks whose length divides a block.

    With g_t, the decay of a chunk's tokens up to t, the state is S_t = g_t S_0 + sum_{s <= t} g_t / g_s u_s k_s^T. The
    corrections u solve u_t + beta_t sum_{s < t} g_t / g_s (k_t k_s) u_s = beta_t (v_t - g_t S_0 k_t), a triangular
    system for each chunk. Its solutions for the v_t and the g_t k_t need no S_0 and are found for all chunks at once.
    """
    n = rule.query.shape[2]
    query, key, value, log_decay, strength = (x.reshape(*x.shape[:2], n // chunk, chunk, *x.shape[3:]) for x in rule)
    total = jnp.cumsum(log_decay, axis=-1)
    lower = np.tri(chunk, dtype=bool)
    # Masked before the exponential, which would overflow above the diagonal.
    decay = jnp.exp(jnp.where(lower, total[..., :, None] - total[..., None, :], -jnp.inf))
    products = jnp.einsum("...tk,...sk->...ts", key, key) * decay * strength[..., None]
    system = jnp.where(np.tri(chunk, k=-1, dtype=bool), products, 0) + jnp.eye(chunk)
    known = jnp.concatenate([value, key * jnp.exp(total)[..., None]], axis=-1) * strength[..., None]
    solved = exact_product(inverse_of_unit_triangular(system), known)
    of_values, of_keys = jnp.split(solved, [value.shape[-1]], axis=-1)
    seen = jnp.einsum("...tk,...sk->...ts", query, key) * decay
    first_chunks = jnp.repeat(start, n // chunk // start.shape[1], axis=1)
    first_chunks &= jnp.arange(n // chunk) % (n // chunk // start.shape[1]) == 0
    end = jnp.exp(total[..., -1:] - total)

    def step(matrix, one):
        query, key, of_values, of_keys, seen, total, end, first = one
        matrix = jnp.where(first[:, None, None, None], 0, matrix)
        corrections = of_values - jnp.einsum("bhtk,bhpk->bhtp", of_keys, matrix)
        read = jnp.einsum("bhtk,bhpk->bhtp", query * jnp.exp(total)[..., None], matrix)
        read += jnp.einsum("bhts,bhsp->bhtp", seen, corrections)
        matrix = matrix * jnp.exp(total[..., -1])[..., None, None]
        return matrix + jnp.einsum("bhtp,bhtk->bhpk", corrections, key * end[..., None]), read

    by_chunk = (query, key, of_values, of_keys, seen, total, end)
    xs = (*(jnp.moveaxis(x, 2, 0) for x in by_chunk), first_chunks.T)
    matrix, read = jax.lax.scan(step, matrix, xs)
    return matrix, rearrange(read, "chunks b h t p -> b h (chunks t) p")


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


def _log_uniform_rate(key, shape, dtype):
    return jnp.log(jax.random.uniform(key, shape, dtype, 1.0, 16.0))


def _inverse_softplus_step(key, shape, dtype):
    step = jnp.exp(jax.random.uniform(key, shape, dtype, math.log(0.001), math.log(0.1)))
    return step + jnp.log(-jnp.expm1(-step))


@MIXERS.register("gated_delta_rule")
class GatedDeltaRule(StatesConfig):
    """Layers with matrices that are written to by the gated delta rule."""

    conv_length: int = size(4, "fixed")
    """The number of tokens that the short convolutions see, the token itself included."""
    chunk_length: int = size(64, "fixed")
    """The number of tokens that are read in parallel, a power of two; at most the largest one that divides a block."""

    def __post_init__(self):
        check_positive(self, ("conv_length", "chunk_length"))
        if self.chunk_length & (self.chunk_length - 1):
            raise UserError(f"GatedDeltaRule.chunk_length={self.chunk_length} must be a power of two")

    def check(self, shape):
        check_taps(self, shape)

    def build(self, shape, *, rngs):
        return DeltaRule(self, shape, rngs=rngs)

    def flops(self, shape):
        """Projections, and of a chunk its products, the inverse of its system, and the products with the states."""
        d, inner, k = shape.model_width, shape.inner_width, shape.head_size
        chunk = math.gcd(shape.window_length, self.chunk_length)
        projections = 2 * d * (4 * inner + 2 * shape.num_heads)
        within = 2 * chunk * inner * (1 + 1 + 2 + 1)
        inverse = 2 * chunk**2 / 3 * shape.num_heads
        return Flops.of_products(projections + within + inverse + 3 * 2 * k * inner)

    def traits(self, shape):
        return Traits(states=("matrix",), needs_segments=self.needs_segments)
