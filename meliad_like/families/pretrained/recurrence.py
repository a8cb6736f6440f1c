"""A recurrence between the windows of a pretrained decoder: a window is summarised in vectors for the next window.

Adding Recurrence to Pretrained Transformers (Yoshida et al. 2020), section 3.1. Equation 1 is a sum over the tokens of
a window, but the text calls it an average: `sum` is the equation, `mean` the text. The vectors are additional keys and
values in some layers of the next window, in the same softmax as its own tokens.
"""

import functools
import itertools
from collections.abc import Sequence
from typing import Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from meliad_like.errors import UserError
from meliad_like.layers.basic import ACTIVATIONS, Activation, Linear, over_root_mean_square, parameter
from meliad_like.registry import Registry, size
from meliad_like.validation import check_choices, check_not_negative, check_positive

RECURRENCES = Registry("recurrence of a pretrained decoder")

zeros = jax.nn.initializers.zeros


@RECURRENCES.register("window_summary")
class WindowSummary:
    """The recurrence, by default with the settings that the paper states."""

    layers: tuple[int, ...] = size((1,), "layer_indices")
    """The layers, counted from 0, or from the end below 0, whose attention receives the vectors."""
    insertion_point: Literal["before_norm", "after_norm"] = "before_norm"
    """Whether the inserted vectors pass that layer's attention norm, as the tokens do."""
    num_inserted: int = size(1, "fixed")
    """The number of inserted vectors."""
    pooling: Literal["mean", "sum", "max", "attention"] = "mean"
    """The function by which the hidden vectors of a window become one: `attention` has one learned key."""
    pooled_layers: Literal["blocks", "final_norm"] = "blocks"
    """The output of the last layer that is pooled: before (`blocks`) or after the model's `final_norm`."""
    normalise_pooled: bool = False
    """Whether each token's output of each layer is divided by its root mean square before it is weighed. Pretrained
    decoders have first tokens with outputs a hundred times those of others, and last layers with ten times those of
    the first, which otherwise dominate the result."""
    width: int = size(200, "width")
    """Width of the hidden layers of the feed-forward network between windows."""
    depth: int = size(3, "fixed")
    """Number of those hidden layers."""
    activation: Activation = "relu"
    scale: float = 1.0
    """Factor on the initial weights of that network's last layer. With 0, and inserted `after_norm`, training begins
    with vectors of zeros, which change the model the least."""
    rate: float = 1.0
    """Factor on the learning rate of the recurrence, whose parameters are new."""

    def __post_init__(self):
        check_choices(self)
        check_positive(self, ("num_inserted", "width"))
        check_not_negative(self, ("depth", "scale"))
        if not self.rate > 0:
            raise UserError(f"WindowSummary.rate={self.rate} must be positive")

    def sizes(self, model_width: int) -> list[tuple[int, int]]:
        """The widths of the input and the output of each layer of the network."""
        widths = [model_width, *[self.width] * self.depth, self.num_inserted * model_width]
        return list(itertools.pairwise(widths))

    def flops_per_window(self, num_layers: int, model_width: int, window_length: int) -> float:
        """The operations of a window's summary: weighing the layers, pooling by attention, and the network."""
        network = sum(2 * size_in * size_out for size_in, size_out in self.sizes(model_width))
        weighing = 2 * num_layers * model_width * window_length
        pooling = 2 * 2 * window_length * model_width if self.pooling == "attention" else 0
        return network + weighing + pooling


class Recurrence(nnx.Module):
    """Weighs the layers, pools the tokens, and computes the vectors that the next window can attend to."""

    def __init__(self, config: WindowSummary, num_layers: int, model_width: int, epsilon: float, *, rngs: nnx.Rngs):
        self.config, self.epsilon = config, epsilon
        self.layer_scores = parameter(rngs.params(), zeros, (num_layers,), (None,), "bias")
        # Zeros make it an average at the start of training.
        pooled = config.pooling == "attention"
        self.pooling_key = parameter(rngs.params(), zeros, (model_width,), ("model",), "scale") if pooled else None
        scales = [1.0] * config.depth + [config.scale]
        # Small and replicated on all devices, so that its inner sizes need not be multiples of the mesh's.
        scaled = [jax.nn.initializers.variance_scaling(scale**2, "fan_in", "truncated_normal") for scale in scales]
        self.layers = nnx.List(
            Linear(size_in, size_out, (None, None), rngs=rngs, initializer=initial, bias_initializer=zeros)
            for (size_in, size_out), initial in zip(config.sizes(model_width), scaled, strict=True)
        )

    def weigh(self, outputs: Sequence[Float[Array, "*batch d"]]) -> Float[Array, "*batch d"]:
        """The sum of all layers' outputs, weighted by a softmax over layers (equation 1, the inner sum)."""
        weights, dtype = jax.nn.softmax(self.layer_scores[...]), outputs[0].dtype
        if self.config.normalise_pooled:
            outputs = [over_root_mean_square(output, self.epsilon).astype(dtype) for output in outputs]
        # In float32, because the gradients of the weights are sums over all tokens.
        weighed = [weight * x.astype(jnp.float32) for weight, x in zip(weights, outputs, strict=True)]
        return functools.reduce(jnp.add, weighed).astype(dtype)

    def pool(self, weighed: Float[Array, "b w d"]) -> Float[Array, "b d"]:
        """One vector for a whole window (equation 1, the outer sum, z)."""
        y = weighed.astype(jnp.float32)
        if self.pooling_key is not None:
            scores = jnp.einsum("bwd,d->bw", y, self.pooling_key[...]) * y.shape[-1] ** -0.5
            return jnp.einsum("bw,bwd->bd", jax.nn.softmax(scores, axis=1), y)
        return {"mean": jnp.mean, "sum": jnp.sum, "max": jnp.max}[self.config.pooling](y, axis=1)

    def __call__(self, weighed: Float[Array, "b w d"]) -> Float[Array, "b e d"]:
        """The vectors for the next window (h_prev), float32, from the results of `weigh` for a window's tokens."""
        x = self.pool(weighed)
        for i, layer in enumerate(self.layers):
            x = layer(x)
            if i < self.config.depth:
                x = ACTIVATIONS[self.config.activation](x)
        return x.reshape(x.shape[0], self.config.num_inserted, -1)
