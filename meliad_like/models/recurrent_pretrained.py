"""The recurrence added to a pretrained decoder: it summarises a window in vectors for the next window.

Adding Recurrence to Pretrained Transformers (Yoshida et al. 2020), section 3.1. Equation 1 is a sum over the tokens of
a window, but the text calls it an average: `sum` is the equation, `mean` the text.
"""

import itertools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from meliad_like.layers.basic import Linear, fan_in_scaled, over_root_mean_square, parameter
from meliad_like.models.pretrained.config import PretrainedConfig
from meliad_like.models.pretrained.parts import activate

zeros = jax.nn.initializers.zeros


class Recurrence(nnx.Module):
    """Weighs the layers, pools the tokens, and computes the vectors that the next window can attend to."""

    def __init__(self, config: PretrainedConfig, *, rngs: nnx.Rngs):
        self.config = config
        d, width = config.model_width, config.recurrence_width
        self.layer_scores = parameter(rngs.params(), zeros, (config.num_layers,), (None,))
        # Zeros make it an average at the start of training.
        self.pooling_key = parameter(rngs.params(), zeros, (d,), ("model",)) if config.pooling == "attention" else None
        sizes = [d, *[width] * config.recurrence_depth, config.num_inserted * d]
        scales = [1.0] * config.recurrence_depth + [config.recurrence_scale]
        # Small and replicated on all devices, so that its inner sizes need not be multiples of the mesh's.
        self.layers = nnx.List(
            Linear(size_in, size_out, (None, None), rngs=rngs, initializer=fan_in_scaled(scale), bias_initializer=zeros)
            for (size_in, size_out), scale in zip(itertools.pairwise(sizes), scales, strict=True)
        )

    def weigh(self, outputs: Sequence[Float[Array, "b t d"]]) -> Float[Array, "b t d"]:
        """The sum of all layers' outputs, weighted by a softmax over layers (equation 1, the inner sum)."""
        weights = jax.nn.softmax(self.layer_scores[...]).astype(outputs[0].dtype)
        if self.config.normalise_pooled:
            outputs = [
                over_root_mean_square(output, self.config.norm_epsilon).astype(output.dtype) for output in outputs
            ]
        return sum(weight * output for weight, output in zip(weights, outputs, strict=True))  # type: ignore[return-value]

    def pool(self, weighed: Float[Array, "b t d"]) -> Float[Array, "b d"]:
        """One vector for a whole window (equation 1, the outer sum, z)."""
        y = weighed.astype(jnp.float32)
        if self.config.pooling == "max":
            return jnp.max(y, axis=1)
        if self.config.pooling == "sum":
            return jnp.sum(y, axis=1)
        if self.pooling_key is None:
            return jnp.mean(y, axis=1)
        scores = jnp.einsum("btd,d->bt", y, self.pooling_key[...]) * self.config.model_width**-0.5
        return jnp.einsum("bt,btd->bd", jax.nn.softmax(scores, axis=1), y)

    def __call__(self, weighed: Float[Array, "b t d"]) -> Float[Array, "b e d"]:
        """The vectors for the next window (h_prev): a feed-forward network of the pooled vector, float32.

        Args:
            weighed: the result of `weigh` for all tokens of a window.
        """
        x = self.pool(weighed)
        for i, layer in enumerate(self.layers):
            x = layer(x)
            if i < self.config.recurrence_depth:
                x = activate(x, self.config.recurrence_activation)
        return x.reshape(x.shape[0], self.config.num_inserted, self.config.model_width)
