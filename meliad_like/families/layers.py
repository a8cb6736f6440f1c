"""Parts of layers that families have, and decoders don't."""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, PRNGKeyArray

from meliad_like.layers.basic import RMSNorm, dropout_multiplier, over_root_mean_square, parameter, rows


class LayerNorm(RMSNorm):
    """Layer norm with a learned scale and bias; its statistics are float32 whatever the dtype of `x`."""

    def __init__(self, model_width: int, epsilon: float, *, rngs: nnx.Rngs):
        super().__init__(model_width, epsilon, rngs=rngs)
        self.bias = parameter(rngs.params(), jax.nn.initializers.zeros, (model_width,), ("model",), "bias")

    def __call__(self, x: Float[Array, "... d"]) -> Float[Array, "... d"]:
        y = rows(x).astype(jnp.float32)
        y = over_root_mean_square(y - jnp.mean(y, axis=-1, keepdims=True), self.epsilon)
        return (y * self.scale[...] + self.bias[...]).astype(x.dtype).reshape(x.shape)


def dropout(x: Float[Array, "..."], rate: float, key: PRNGKeyArray | None) -> Float[Array, "..."]:
    """Dropout with an independent mask value for every element of `x`; without a key, `x` itself."""
    multiplier = dropout_multiplier(key, rate, x.shape, x.dtype)
    return x if multiplier is None else x * multiplier
