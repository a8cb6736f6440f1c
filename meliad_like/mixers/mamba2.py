"""Mamba-2: a matrix for each head that forgets, and to which every token adds (Dao & Gu 2024, section 7).

    S_t = exp(dt_t A) S_{t-1} + dt_t v_t B_t^T,    y_t = S_t C_t + D v_t

A is a negative number for each head, and dt_t a step for each head that is read from the token. The values v and, for
each group of heads, the keys B and queries C pass a short convolution along the document and a SiLU. The results are
multiplied by a SiLU of the token, and an RMS norm of each group follows, if a published model has no other order.
"""

from typing import Literal

import jax
import jax.numpy as jnp
from einops import rearrange
from flax import nnx
from jaxtyping import Array, Float

from meliad_like.errors import UserError
from meliad_like.layers.attention import merge_heads, split_heads
from meliad_like.layers.basic import Linear, for_all, over_root_mean_square, parameter, project, uniform
from meliad_like.layers.linear_recurrence import Rule, inverse_softplus_step, log_uniform_rate
from meliad_like.mixers.base import MIXERS, DecoderShape
from meliad_like.mixers.matrix_recurrence import ConvolvedMatrixConfig, MatrixRecurrence, Sizes
from meliad_like.registry import size
from meliad_like.validation import check_choices, check_not_negative, check_positive

ones, zeros = jax.nn.initializers.ones, jax.nn.initializers.zeros


class Mamba2Block(MatrixRecurrence):
    """Tokens add to and read from matrices."""

    config: "Mamba2"

    def __init__(self, config: "Mamba2", shape: DecoderShape, *, rngs: nnx.Rngs):
        super().__init__(config, shape)
        d, i, h, of_groups = shape.model_width, config.width(shape), self.sizes.heads, config.of_groups
        biased = {"bias_initializer": zeros if config.input_bias else None, "rngs": rngs}
        self.value, self.gate = (Linear(d, i, ("model", "heads"), **biased) for _ in range(2))
        self.key, self.query = (Linear(d, of_groups, ("model", None), **biased) for _ in range(2))
        self.step_size = Linear(d, h, ("model", "heads"), **biased)
        # The released code leaves both to PyTorch's default.
        initial = uniform(config.conv_length**-0.5)
        taps, channels = config.conv_length, i + 2 * of_groups
        self.filters = parameter(rngs.params(), initial, (taps, channels), (None, None), "filter")
        with_bias = config.conv_bias
        self.filter_bias = parameter(rngs.params(), initial, (channels,), (None,), "bias") if with_bias else None
        self.log_rate = parameter(rngs.params(), log_uniform_rate, (h,), ("heads",), "rate")
        """The logarithm of -A."""
        self.step_bias = parameter(rngs.params(), inverse_softplus_step, (h,), ("heads",), "bias")
        self.skip = parameter(rngs.params(), ones, (h,), ("heads",), "scale")
        """The factor D of the values that are added to the results."""
        self.norm_scale = parameter(rngs.params(), ones, (i,), ("heads",), "scale") if config.norm != "none" else None

    def convolution(self):
        return self._parts(self.filters[...])

    def _parts(self, x: Float[Array, "*axes channels"]) -> list[Float[Array, "*axes _"]]:
        """The channels of values, keys and queries."""
        i = self.sizes.heads * self.sizes.value_size
        return jnp.split(x, [i, i + self.config.of_groups], axis=-1)

    def project(self, x):
        *inputs, step, gate = project(x, self.value, self.key, self.query, self.step_size, self.gate)
        return inputs, (step, gate)

    def rule(self, inputs, others):
        config, (step, gate) = self.config, others
        if self.filter_bias is not None:
            inputs = map(jnp.add, inputs, self._parts(self.filter_bias[...]))
        value, key, query = map(jax.nn.silu, inputs)
        step = jax.nn.softplus(step.astype(jnp.float32) + self.step_bias[...])
        step = jnp.clip(step, config.min_step, config.max_step)
        log_decay = split_heads(-jnp.exp(self.log_rate[...]) * step, self.sizes.heads)
        query, key = (split_heads(y, config.num_groups) for y in (query, key))
        by_head, step = split_heads(value, self.sizes.heads), split_heads(step, self.sizes.heads)
        return Rule(query, key, by_head, log_decay, None, step), (value, gate)

    def output(self, y, needed):
        value, gate = needed
        skip = for_all(jnp.repeat(self.skip[...], self.sizes.value_size), value.shape)
        y, factor = merge_heads(y) + skip * value, jax.nn.silu(gate.astype(jnp.float32))
        y = self._normed(y) * factor if self.config.norm == "before_gate" else self._normed(y * factor)
        return y.astype(gate.dtype)

    def _normed(self, y: Float[Array, "b n i"]) -> Float[Array, "b n i"]:
        """The norm of each group, if there is one."""
        if self.norm_scale is None:
            return y
        groups = rearrange(y, "b n (g i) -> b n g i", g=self.config.num_groups)
        y = over_root_mean_square(groups, self.config.norm_epsilon)
        y = rearrange(y, "b n g i -> b n (g i)")
        return y * for_all(self.norm_scale[...], y.shape)


@MIXERS.register("mamba2")
class Mamba2(ConvolvedMatrixConfig):
    """Layers with the states of Mamba-2. It has its own numbers and sizes of heads: `DecoderConfig.num_heads` and
    `head_size` are for attention."""

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
    min_step: float = 0.0
    """The smallest step dt."""
    max_step: float | None = None
    """The largest step dt; None: none."""
    norm: Literal["after_gate", "before_gate", "none"] = "after_gate"
    """The position of the norm of each group, if there is one; models by Falcon-H1's code have the last two."""
    norm_epsilon: float = 1e-5
    """The epsilon of this RMS norm."""
    input_bias: bool = False
    """Whether the projections of the layer's input have biases."""
    output_bias: bool = False
    """Whether the layer's output projection has a bias."""
    conv_bias: bool = True
    """Whether the convolution has a bias."""

    def __post_init__(self):
        super().__post_init__()
        check_choices(self)
        check_positive(self, ("expand", "head_size", "state_size", "num_groups"))
        check_not_negative(self, ("num_heads",))

    def check(self, shape):
        super().check(shape)
        i, of_group = self._inner_width(shape), self.head_size * self.num_groups
        if i % of_group:
            name = "Mamba2.head_size * num_heads" if self.num_heads else "expand * model_width"
            raise UserError(f"{name}={i} must be a multiple of Mamba2.head_size * num_groups={of_group}")

    def _inner_width(self, shape: DecoderShape) -> int:
        return self.num_heads * self.head_size or self.expand * shape.model_width

    @property
    def of_groups(self) -> int:
        """The number of channels of the keys of all groups."""
        return self.num_groups * self.state_size

    def build(self, shape, *, rngs):
        return Mamba2Block(self, shape, rngs=rngs)

    def sizes(self, shape):
        heads = self._inner_width(shape) // self.head_size
        return Sizes(self.num_groups, heads, self.state_size, self.head_size)

    def traits(self, shape):
        return super().traits(shape)._replace(output_bias=self.output_bias)
