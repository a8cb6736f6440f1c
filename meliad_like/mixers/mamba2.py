"""Mamba-2: a matrix for each head that forgets, and to which every token adds (Dao & Gu 2024, section 7).

    S_t = exp(dt_t A) S_{t-1} + dt_t v_t B_t^T,    y_t = S_t C_t + D v_t

A is a negative number for each head, and dt_t a step for each head that is read from the token. The values v and, for
each group of heads, the keys B and queries C pass a short convolution along the document and a SiLU. The results are
multiplied by a SiLU of the token, and an RMS norm of each group follows, if a published model has no other order.
Segments are read in chunks (`layers/linear_recurrence.py`), and the states start at zero with every document. In shapes
`p` is the size of a value, `k` that of a state's keys, `g` the number of groups, and `i` the width of all heads.
"""

import math
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from einops import rearrange
from flax import nnx
from jaxtyping import Array, Float

from meliad_like.errors import UserError
from meliad_like.layers.attention import merge_heads, split_heads
from meliad_like.layers.basic import Linear, over_root_mean_square, parameter, project
from meliad_like.layers.flops import Flops
from meliad_like.layers.linear_recurrence import (
    Rule,
    check_chunks,
    convolve_segment,
    convolve_token,
    flops_of_rule,
    inverse_softplus_step,
    log_uniform_rate,
    read_chunks,
    read_token,
)
from meliad_like.mixers.base import MIXERS, Mixer, Shape, StatesConfig, Traits, check_taps
from meliad_like.registry import size
from meliad_like.validation import check_choices, check_not_negative, check_positive

ones, zeros = jax.nn.initializers.ones, jax.nn.initializers.zeros


class Mamba2Carry(NamedTuple):
    """What passes from token to token."""

    matrix: Float[Array, "b h p k"]
    """The states, float32."""
    recent: Float[Array, "b recent channels"]
    """The last inputs of the convolution: values, keys and queries of the last `conv_length - 1` tokens."""


class Mamba2Block(Mixer):
    """Tokens add to and read from matrices."""

    def __init__(self, config: "Mamba2", shape: Shape, *, rngs: nnx.Rngs):
        self.config, self.w = config, shape.window_length
        d, i, h, of_groups = shape.model_width, config.width(shape), config.heads_of(shape), config.of_groups
        self.num_heads, self.inner_width = h, i
        biased = {"bias_initializer": zeros if config.input_bias else None, "rngs": rngs}
        self.value, self.gate = (Linear(d, i, ("model", "heads"), **biased) for _ in range(2))
        self.key, self.query = (Linear(d, of_groups, ("model", None), **biased) for _ in range(2))
        self.step_size = Linear(d, h, ("model", "heads"), **biased)
        # The released code leaves both to PyTorch's default.
        bound = config.conv_length**-0.5
        taps, channels = config.conv_length, i + 2 * of_groups
        self.filters = parameter(rngs.params(), _uniform(bound), (taps, channels), (None, None))
        with_bias = config.conv_bias
        self.filter_bias = parameter(rngs.params(), _uniform(bound), (channels,), (None,)) if with_bias else None
        self.log_rate = parameter(rngs.params(), log_uniform_rate, (h,), ("heads",))
        """The logarithm of -A."""
        self.step_bias = parameter(rngs.params(), inverse_softplus_step, (h,), ("heads",))
        self.skip = parameter(rngs.params(), ones, (h,), ("heads",))
        """D."""
        self.norm_scale = parameter(rngs.params(), ones, (i,), ("heads",)) if config.norm != "none" else None

    def init_carry(self, b, dtype):
        matrix = jnp.zeros((b, self.num_heads, self.config.head_size, self.config.state_size), jnp.float32)
        return Mamba2Carry(matrix, jnp.zeros((b, self.config.conv_length - 1, self.filters.shape[1]), dtype))

    def _project(self, x: Float[Array, "b n d"]) -> tuple[Float[Array, "b n channels"], Array, Array]:
        """What the convolution reads, and the projections to steps and gates."""
        *inputs, step, gate = project(x, self.value, self.key, self.query, self.step_size, self.gate)
        return jnp.concatenate(inputs, axis=-1), step, gate

    def _rule(
        self, convolved: Float[Array, "b n channels"], step: Float[Array, "b n h"]
    ) -> tuple[Rule, Float[Array, "b h n p"]]:
        """What the tokens do with the states, and their values, which the rule has times the steps."""
        config, i = self.config, self.inner_width
        convolved = jax.nn.silu(convolved if self.filter_bias is None else convolved + self.filter_bias[...])
        value, key, query = jnp.split(convolved, [i, i + config.of_groups], axis=-1)
        step = jax.nn.softplus(step.astype(jnp.float32) + self.step_bias[...])
        step = jnp.clip(step, config.min_step, config.max_step)
        log_decay = split_heads(-jnp.exp(self.log_rate[...]) * step, self.num_heads)
        value, step = split_heads(value, self.num_heads), split_heads(step, self.num_heads)
        query, key = (split_heads(y, config.num_groups) for y in (query, key))
        return Rule(query, key, value * step, log_decay, None), value

    def _output(
        self, y: Float[Array, "b h n p"], value: Float[Array, "b h n p"], gate: Float[Array, "b n i"]
    ) -> Float[Array, "b n i"]:
        """The gate, and the norm of each group."""
        y, factor = merge_heads(y + self.skip[...][:, None, None] * value), jax.nn.silu(gate.astype(jnp.float32))
        y = self._normed(y) * factor if self.config.norm == "before_gate" else self._normed(y * factor)
        return y.astype(gate.dtype)

    def _normed(self, y: Float[Array, "b n i"]) -> Float[Array, "b n i"]:
        if self.norm_scale is None:
            return y
        groups = rearrange(y, "b n (g i) -> b n g i", g=self.config.num_groups)
        y = over_root_mean_square(groups, self.config.norm_epsilon)
        return rearrange(y, "b n g i -> b n (g i)") * self.norm_scale[...]

    def __call__(self, x, at, carry, dropout_key):
        inputs, step, gate = self._project(x)
        convolved, recent = convolve_segment(inputs, carry.recent, self.filters[...], at.start)
        rule, value = self._rule(convolved, step)
        chunk = math.gcd(self.w, self.config.chunk_length)
        matrix, y = read_chunks(rule, carry.matrix, at.start, chunk)
        return self._output(y, value, gate), Mamba2Carry(matrix, recent)

    def step(self, x, at, carry):
        inputs, step, gate = self._project(x[:, None])
        convolved, recent = convolve_token(inputs, carry.recent, self.filters[...])
        rule, value = self._rule(convolved, step)
        matrix, y = read_token(carry.matrix, jax.tree.map(lambda z: z[:, :, 0], rule))
        return self._output(y[:, :, None], value, gate)[:, 0], Mamba2Carry(matrix, recent)


def _uniform(bound: float):
    """Numbers between -bound and bound."""
    return lambda key, shape, dtype: jax.random.uniform(key, shape, dtype, -bound, bound)


@MIXERS.register("mamba2")
class Mamba2(StatesConfig):
    """Layers with the states of Mamba-2. Its heads are its own: `DecoderConfig.num_heads` and `head_size` are those of
    attention."""

    expand: int = size(2, "fixed")
    """The width of all heads over the model's width, unless `num_heads` is given."""
    num_heads: int = size(0, "heads")
    """The number of heads; 0: as many as `expand` asks for."""
    head_size: int = size(64, "heads")
    """The size of a value."""
    state_size: int = size(128, "heads")
    """The size of a key: a head's state has `head_size * state_size` numbers."""
    num_groups: int = size(1, "fixed")
    """The number of groups of heads; a group shares keys, queries and a norm."""
    conv_length: int = size(4, "fixed")
    """The number of tokens that the short convolution sees, the token itself included."""
    chunk_length: int = size(64, "fixed")
    """The number of tokens that are read in parallel, a power of two; at most the largest one that divides a block."""
    min_step: float = 0.0
    """The smallest step dt."""
    max_step: float | None = None
    """The largest step dt; None: none."""
    norm: Literal["after_gate", "before_gate", "none"] = "after_gate"
    """Where the norm of each group stands, if there is one; the last two are those of models by Falcon-H1's code."""
    norm_epsilon: float = 1e-5
    """Added to the mean square in this norm."""
    input_bias: bool = False
    """Whether the projections of the layer's input have biases."""
    output_bias: bool = False
    """Whether the layer's output projection has a bias."""
    conv_bias: bool = True
    """Whether the convolution has a bias."""

    def __post_init__(self):
        check_choices(self)
        check_positive(self, ("expand", "head_size", "state_size", "num_groups", "conv_length"))
        check_not_negative(self, ("num_heads",))
        check_chunks(self)

    def check(self, shape):
        check_taps(self, shape)
        i, of_group = self.width(shape), self.head_size * self.num_groups
        if i % of_group:
            name = "Mamba2.head_size * num_heads" if self.num_heads else "expand * model_width"
            raise UserError(f"{name}={i} must be a multiple of Mamba2.head_size * num_groups={of_group}")

    @property
    def of_groups(self) -> int:
        """The number of channels of the keys of all groups."""
        return self.num_groups * self.state_size

    def heads_of(self, shape: Shape) -> int:
        """The number of its heads."""
        return self.width(shape) // self.head_size

    def build(self, shape, *, rngs):
        return Mamba2Block(self, shape, rngs=rngs)

    def width(self, shape):
        return self.num_heads * self.head_size or self.expand * shape.model_width

    def flops(self, shape):
        """Projections, and the recurrence."""
        i, h, chunk = self.width(shape), self.heads_of(shape), math.gcd(shape.window_length, self.chunk_length)
        projections = 2 * shape.model_width * (2 * i + 2 * self.of_groups + h)
        recurrence = flops_of_rule(chunk, self.num_groups, h, self.state_size, self.head_size, corrected=False)
        return Flops.of_products(projections + recurrence)

    def traits(self, shape):
        return Traits(states=("matrix",), needs_segments=self.needs_segments, output_bias=self.output_bias)
