"""The recurrent block of Griffin: a gated linear recurrence of each channel, the RG-LRU (De et al. 2024).

Griffin, sections 2.3 and 2.4. One branch passes a short convolution along the document and the RG-LRU; the other one is
a gate, and the layer's output projection reads the product of the two:

    gate = gelu(x W_y + b_y),    u = convolution(x W_x + b_x),    i = h * gate
    log a_t = -8 sigmoid(u_t A + a) softplus(lambda),    h_t = a_t h_{t-1} + sqrt(1 - a_t^2) sigmoid(u_t B + b) u_t

A and B are block-diagonal, with a block for each head. At the first token of a document the square root is replaced by
1, as in the released code (google-deepmind/recurrentgemma), whose initial values these are as well: the square of
sigmoid(-lambda) is uniform, where the paper has a uniform sigmoid(-lambda)^8. In shapes `channels` is the width of the
recurrence, and `taps` the length of the convolution.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from meliad_like.errors import UserError
from meliad_like.kernels.registry import CONVOLUTIONS, SCANS, kernel_of
from meliad_like.layers.basic import Linear, parameter
from meliad_like.layers.flops import Flops
from meliad_like.layers.linear_recurrence import convolve_segment, convolve_tokens, scan_channels
from meliad_like.mixers.base import MIXERS, DecoderShape, Mixer, MixerConfig, Traits, check_taps, projection_flops
from meliad_like.registry import size
from meliad_like.validation import check_not_negative, check_positive

EXPONENT = 8.0
"""The constant c of equation 3."""
LARGEST_DERIVATIVE = 1000.0
"""Upper bound of the derivative of `bounded_sqrt`. Without it the gradient of a channel that hardly forgets (`a` close
to 1) is unbounded."""
zeros = jax.nn.initializers.zeros


class RGLRUCarry(NamedTuple):
    """The carry of the recurrence, which passes from token to token."""

    state: Float[Array, "b channels"]
    """The states, float32."""
    recent: Float[Array, "b recent channels"]
    """The inputs of the convolution of the last `conv_length - 1` tokens."""
    position: Int[Array, " b"]
    """The number of tokens of the document that these states have seen."""


class RecurrentBlock(Mixer):
    """A gated linear recurrence of each channel, multiplied by a gate."""

    def __init__(self, config: "RGLRU", shape: DecoderShape, *, rngs: nnx.Rngs):
        self.config, self.shape, self.w = config, shape, shape.window_length
        d, self.channels, blocks = shape.model_width, config.width(shape), shape.num_heads
        normal = jax.nn.initializers.variance_scaling(1.0, "fan_in", "normal")
        biased = {"initializer": normal, "bias_initializer": zeros, "rngs": rngs}
        self.gate = Linear(d, self.channels, ("model", "heads"), **biased)
        self.input = Linear(d, self.channels, ("model", "heads"), **biased)
        small = jax.nn.initializers.normal((0.01 / config.conv_length) ** 0.5)
        self.filters = parameter(rngs.params(), small, (config.conv_length, self.channels), (None, "heads"), "filter")
        self.filter_bias = parameter(rngs.params(), zeros, (self.channels,), ("heads",), "bias")
        self.recurrence_gate, self.input_gate = (BlockLinear(self.channels, blocks, rngs=rngs) for _ in range(2))
        self.decay = parameter(rngs.params(), _decay_of_released_code, (self.channels,), ("heads",), "rate")
        """The parameter lambda of the decay."""

    def init_carry(self, b, dtype):
        recent = jnp.zeros((b, self.config.conv_length - 1, self.channels), dtype)
        return RGLRUCarry(jnp.zeros((b, self.channels), jnp.float32), recent, jnp.zeros(b, jnp.int32))

    def _coefficients(
        self, u: Float[Array, "b n channels"], first: Bool[Array, "b n"]
    ) -> tuple[Float[Array, "b n channels"], Float[Array, "b n channels"]]:
        """a and b of h_t = a_t h_{t-1} + b_t, from the outputs of the convolution and the documents' first tokens."""
        first = first[..., None]
        recurrence, input_gate = (jax.nn.sigmoid(gate(u)) for gate in (self.recurrence_gate, self.input_gate))
        log_decay = -EXPONENT * recurrence * jax.nn.softplus(self.decay[...])
        # `1 - a**2` would have no correct digit left where a is close to 1.
        factor = jnp.where(first, 1, bounded_sqrt(-jnp.expm1(2 * log_decay)))
        return jnp.where(first, 0, jnp.exp(log_decay)), factor * input_gate * u

    def _output(self, states: Float[Array, "b n channels"], x: Float[Array, "b n d"]) -> Float[Array, "b n i"]:
        return states.astype(x.dtype) * jax.nn.gelu(self.gate(x))

    def __call__(self, x, context, carry, dropout_key):
        inputs, start = self.input(x), context.start
        positions, position = context.count(carry.position, self.w)
        kernel = kernel_of(CONVOLUTIONS, self.shape.recurrence_kernel, self.w, *self.filters.shape)
        # The kernel sums the gradient of its inputs in float32, whatever their type.
        inputs = inputs if kernel else inputs.astype(jnp.float32)
        convolved, recent = convolve_segment(inputs, carry.recent, self.filters[...], start, kernel)
        u = convolved + self.filter_bias[...]
        c, n = positions.shape[1], x.shape[1]
        first = (jnp.arange(n) % (n // c) == 0) & jnp.repeat(positions == 0, n // c, axis=1)
        scan = kernel_of(SCANS, self.shape.recurrence_kernel, self.w, self.channels) or scan_channels
        state, states = scan(*self._coefficients(u, first), carry.state)
        return self._output(states, x), RGLRUCarry(state, recent, position)

    def decode(self, x, counts, context, carry):
        convolved, recent = convolve_tokens(self.input(x), carry.recent, self.filters[...], counts)
        token = np.arange(x.shape[1])
        first, is_read = carry.position[:, None] + token == 0, (token < counts[:, None])[..., None]
        decay, added = self._coefficients(convolved + self.filter_bias[...], first)
        # Tokens after `counts` leave the states as they are.
        state, states = scan_channels(jnp.where(is_read, decay, 1), jnp.where(is_read, added, 0), carry.state)
        return self._output(states, x), RGLRUCarry(state, recent, carry.position + counts)


class BlockLinear(nnx.Module):
    """`x @ kernel + bias` with a block-diagonal kernel, in float32."""

    def __init__(self, channels: int, blocks: int, *, rngs: nnx.Rngs):
        size_of_block = channels // blocks
        normal = jax.nn.initializers.variance_scaling(1.0, "fan_in", "normal", batch_axis=0)
        shape = (blocks, size_of_block, size_of_block)
        self.kernel = parameter(rngs.params(), normal, shape, ("heads", None, None), "matrix")
        self.bias = parameter(rngs.params(), zeros, (channels,), ("heads",), "bias")

    def __call__(self, x: Float[Array, "b n channels"]) -> Float[Array, "b n channels"]:
        kernel = self.kernel[...]
        product = jnp.einsum("nhi,hio->nho", x.reshape(-1, *kernel.shape[:2]), kernel)
        return product.reshape(x.shape) + self.bias[...]


@jax.custom_jvp
def bounded_sqrt(x: Float[Array, "..."]) -> Float[Array, "..."]:
    """The square root, with a derivative of at most `LARGEST_DERIVATIVE`."""
    return jnp.sqrt(x)


@bounded_sqrt.defjvp
def _bounded_sqrt_jvp(primals, tangents):
    y = bounded_sqrt(*primals)
    return y, tangents[0] / (2 * jnp.maximum(y, 1 / (2 * LARGEST_DERIVATIVE)))


def _decay_of_released_code(key, shape, dtype):
    """softplus(lambda) = -log R, with R^2 uniform between 0.9^2 and 0.999^2."""
    return jnp.log(jax.random.uniform(key, shape, dtype, 0.9**2, 0.999**2) ** -0.5 - 1)


@MIXERS.register("rg_lru")
class RGLRU(MixerConfig):
    """Layers with Griffin's recurrent block, the RG-LRU."""

    channels: int = size(0, "width")
    """The number of channels of the recurrence, a multiple of `num_heads`; 0: `model_width`."""
    conv_length: int = size(4, "fixed")
    """The number of tokens that the short convolution sees, the token itself included."""

    def __post_init__(self):
        check_not_negative(self, ("channels",))
        check_positive(self, ("conv_length",))

    def check(self, shape):
        check_taps(self, shape)
        if self.width(shape) % shape.num_heads:
            name = "RGLRU.channels" if self.channels else "model_width"
            raise UserError(f"{name}={self.width(shape)} must be a multiple of num_heads={shape.num_heads}")

    def build(self, shape, *, rngs):
        return RecurrentBlock(self, shape, rngs=rngs)

    def has_kernel(self, shape, kind):
        kernel = kernel_of(SCANS, shape.recurrence_kernel, shape.window_length, self.width(shape))
        return kind == "recurrence" and kernel is not None

    def width(self, shape):
        return self.channels or shape.model_width

    def flops(self, shape):
        """The operations of two projections, and of two gates in blocks."""
        return Flops.of_products(projection_flops(self, shape))

    def traits(self, shape):
        return Traits(states=("state",), output_bias=True)
