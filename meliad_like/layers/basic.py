"""The parts that every layer is made of: parameters with logical axes, linear maps, norms, feed-forward, dropout."""

import functools
import math
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jax.core import Tracer
from jax.experimental.layout import Layout, with_layout_constraint
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from meliad_like.errors import UserError
from meliad_like.layers.backend import keeps_only_named_values, sums_by_products, transposes_before_products
from meliad_like.layers.sharding import num_parts, own_blocks

Activation = Literal["gelu", "gelu_tanh", "relu", "silu", "squared_relu", "tanh"]

REMAT_POLICIES = {
    "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    "layers": jax.checkpoint_policies.nothing_saveable,
}

# Names of values that policies of `jax.checkpoint` keep: the outputs of linear maps, the maxima and sums of a softmax,
# the results of `relu`, and vectors of unit length with the factors that gave it to them.
LINEAR, SOFTMAX, RELU, UNIT = "linear", "softmax", "relu", "unit"


fan_in = jax.nn.initializers.variance_scaling(1.0, "fan_in", "truncated_normal")
"""Initialisation with which a linear map keeps the scale of independent inputs."""


def uniform(bound: float):
    """An initializer, uniform between -bound and bound."""
    return lambda key, shape, dtype: jax.random.uniform(key, shape, dtype, -bound, bound)


Kind = Literal["matrix", "table", "filter", "bias", "scale", "rate"]
"""The kind of a parameter, which optimizers ask for (`optimization/optimizers.py`).

`matrix`: a factor of products with activations; more than two axes are several matrices. `table`: vectors that are
looked up, of tokens, positions or states. `filter`: those of a convolution. `bias`: what is added to activations, gates
or scores, or what such numbers are computed from. `scale`: what multiplies them. `rate`: how fast a state forgets.
"""


def parameter(
    key: PRNGKeyArray, initializer, shape: tuple[int, ...], axes: tuple[str | None, ...], kind: Kind
) -> nnx.Param:
    """A float32 parameter annotated with its kind, and with its logical axes, which `mesh` maps to axes of the device
    mesh."""
    if len(shape) != len(axes):
        raise ValueError(f"shape {shape} and axes {axes} differ in length")
    return nnx.Param(initializer(key, shape, jnp.float32), axes=axes, kind=kind)


def split_key(key: PRNGKeyArray | None, number: int) -> list[PRNGKeyArray | None]:
    """A number of keys from one; without a key, None for each."""
    return [None] * number if key is None else list(jax.random.split(key, number))


def fold_key(key: PRNGKeyArray | None, data: int | Int[Array, ""]) -> PRNGKeyArray | None:
    """The key with a number folded in; without a key, None."""
    return None if key is None else jax.random.fold_in(key, data)


def rows(x: Float[Array, "*batch d"]) -> Float[Array, "n d"]:
    """The vectors of `x` as rows, with one leading axis.

    Gradients of parameters are sums over tokens: only over one axis XLA makes them fast reductions on a CPU.
    """
    return x.reshape(-1, x.shape[-1])


def for_all(x: Float[Array, "..."], shape: tuple[int, ...]) -> Float[Array, "..."]:
    """`x`, which all lanes, blocks or tokens share, with the first axes of `shape` that it lacks."""
    batch = shape[: max(len(shape) - x.ndim, 0)]
    if not sums_by_products():
        return jnp.broadcast_to(x, (*batch, *x.shape))
    # Between two axes: for the gradient of a product of more, XLA would first transpose all of it.
    return (jnp.ones((math.prod(batch), 1), x.dtype) @ x.reshape(1, -1)).reshape(*batch, *x.shape)


def times_column(x: Float[Array, "*batch n"], factor: Float[Array, "*batch 1"]) -> Float[Array, "*batch n"]:
    """`x * factor`; on a CPU the sums for the gradient of the factor are products (`sums_by_products`)."""
    # XLA's own sums over an axis of a matrix are fast.
    if sums_by_products() and x.ndim > 2:
        factor = factor @ jnp.ones((1, x.shape[-1]), factor.dtype)
    return x * factor


def product(
    x: Float[Array, "n i"], kernel: Float[Array, "i o"], dtype: Any = None, *, shares_x: bool = False
) -> Float[Array, "n o"]:
    """`x @ kernel`; on a CPU a factor of the kernel's gradient is transposed (`transposes_before_products`), which is
    `x` if other products share it.

    With a `dtype`, both factors are rounded to it, here and for the gradient of `x`; sums and the kernel's gradient are
    not. A function with its own backward pass has no forward-mode derivative (`jax.jvp`) in JAX; so on other platforms
    only a rounded product is such a function.
    """
    if dtype is None and not transposes_before_products():
        return x @ kernel
    return _product(x, kernel, dtype, shares_x)


def _rounded_product(x: Array, y: Array, dtype: Any, _: bool = False) -> Array:
    rounded = x.dtype if dtype is None else dtype
    return jnp.matmul(x.astype(rounded), y.astype(rounded), preferred_element_type=x.dtype)


def _product_backward(dtype, shares_x, saved, cotangent):
    x, kernel = saved
    if not transposes_before_products():
        kernel_cotangent = x.T @ cotangent
    # The barriers keep XLA from undoing the transpositions.
    elif kernel.shape[0] > kernel.shape[1] and not shares_x:
        kernel_cotangent = jax.lax.optimization_barrier(jax.lax.optimization_barrier(cotangent.T) @ x).T
    else:
        kernel_cotangent = jax.lax.optimization_barrier(x.T) @ cotangent
    return _rounded_product(cotangent, kernel.T, dtype), kernel_cotangent


def _product_forward(x, kernel, dtype, shares_x):
    return _rounded_product(x, kernel, dtype), (x, kernel)


_product = jax.custom_vjp(_rounded_product, nondiff_argnums=(2, 3))
_product.defvjp(_product_forward, _product_backward)


def scores(x: Float[Array, "*batch i"], table: Float[Array, "v i"]) -> Float[Array, "*batch v"]:
    """The products with each vector of a table, which is rounded to the dtype of `x`, in float32.

    Their gradient is rounded to this dtype, too, before it is multiplied by the table and by `x`; for this they have a
    backward pass of their own, and so no forward-mode derivative.
    """
    return _scores(rows(x), table).reshape(*x.shape[:-1], -1)


@jax.custom_vjp
def _scores(x: Float[Array, "n i"], table: Float[Array, "v i"]) -> Float[Array, "n v"]:
    return jnp.einsum("ni,vi->nv", x, table.astype(x.dtype), preferred_element_type=jnp.float32)


def _scores_backward(saved, cotangent):
    x, table = saved
    cotangent = cotangent.astype(x.dtype)
    of_table = jnp.einsum("nv,ni->vi", cotangent, x, preferred_element_type=table.dtype)
    return cotangent @ table.astype(x.dtype), of_table


_scores.defvjp(lambda x, table: (_scores(x, table), (x, table)), _scores_backward)


def check_tokens(tokens: Int[Array, "*batch"], vocabulary_size: int) -> None:
    """Checks token ids outside of a compiled program; inside one their values are not known yet. Raises a UserError if
    an id is negative, or not below the vocabulary's size."""
    if isinstance(tokens, Tracer):
        return
    ids = np.asarray(tokens)
    if (wrong := ids[(ids < 0) | (ids >= vocabulary_size)]).size:
        raise UserError(f"token {wrong[0]} is not in the vocabulary, whose ids are 0 to {vocabulary_size - 1}")


@jax.named_scope("embedding")
def embed(table: Float[Array, "v d"], tokens: Int[Array, "*batch"]) -> Float[Array, "*batch d"]:
    """The row of `table` for each token.

    In a compiled program the row of an id out of range is NaN, so that the loss becomes NaN, too; outside of one it is
    a UserError.
    """
    check_tokens(tokens, table.shape[0])
    return table.at[tokens].get(mode="fill", fill_value=jnp.nan, wrap_negative_indices=False)


def rematerialise(function: Callable[..., Any], remat: str, *, inside_scan: bool = False) -> Callable[..., Any]:
    """`function` with a rematerialisation policy: the backward pass computes nothing again (`none`), everything except
    matrix products (`dots`), or everything (`layers`).

    `inside_scan` leaves out the barriers between the forward and the backward pass, which are two loops there.
    """
    if remat == "none":
        return function
    return jax.checkpoint(function, policy=REMAT_POLICIES[remat], prevent_cse=not inside_scan)


def rematerialise_iteration(function: Callable[..., Any], remat: str = "none") -> Callable[..., Any]:
    """`function`, the body of a scan, of which accelerators keep only some values for the backward pass.

    They keep results of linear maps, vectors of unit length, and the sums of a softmax. A policy inside of `function`,
    other than `remat="none"`, is left alone: this one would replace it.
    """
    if remat != "none" or not keeps_only_named_values():
        return function
    policy = jax.checkpoint_policies.save_only_these_names(LINEAR, SOFTMAX, RELU, UNIT)
    return jax.checkpoint(function, policy=policy, prevent_cse=False)


def row_major(x: Array) -> Array:
    """`x`, which the compiler must keep in memory in the order of its axes.

    XLA chooses one layout for arrays that meet in elementwise operations, so that what one layer does with its keys can
    change the layout, and the fusions, of all layers.
    """
    return with_layout_constraint(x, Layout(tuple(range(x.ndim))))


class Linear(nnx.Module):
    """`x @ kernel (+ bias)`, computed in the dtype of `x`. The kernel is [in, out], fan-in truncated normal.

    The bias is added in float32, so that its gradient, a sum over all tokens, is a float32 sum.

    With a `matmul_dtype`, factors are rounded to it, except for the gradient of the kernel; see `product`.
    """

    def __init__(
        self,
        size_in: int,
        size_out: int,
        axes: tuple[str | None, str | None],
        *,
        rngs: nnx.Rngs,
        initializer=fan_in,
        bias_initializer=None,
        matmul_dtype: str | None = None,
    ):
        self.matmul_dtype = matmul_dtype
        # The projections of a layer share their input.
        self.shares_x = axes[0] == "model"
        self.kernel = parameter(rngs.params(), initializer, (size_in, size_out), axes, "matrix")
        biased = bias_initializer is not None
        self.bias = parameter(rngs.params(), bias_initializer, (size_out,), axes[1:], "bias") if biased else None

    def __call__(self, x: Float[Array, "... i"]) -> Float[Array, "... o"]:
        y = product(rows(x), self.kernel[...].astype(x.dtype), self.matmul_dtype, shares_x=self.shares_x)
        if self.bias is not None:
            y = (y.astype(jnp.float32) + self.bias[...]).astype(x.dtype)
        return checkpoint_name(y, LINEAR).reshape(*x.shape[:-1], -1)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _copies(x: Array, number: int) -> tuple[Array, ...]:
    return (x,) * number


def _sum_of_cotangents(_, saved, cotangents):
    del saved
    total = functools.reduce(jnp.add, (x.astype(jnp.float32) for x in cotangents))
    return (total.astype(cotangents[0].dtype),)


_copies.defvjp(lambda x, number: (_copies(x, number), None), _sum_of_cotangents)


def project(x: Float[Array, "... i"], *projections: Callable[[Array], Array]) -> list[Array]:
    """The results of several projections of the same numbers, whose gradients are added in float32."""
    return [projection(copy) for projection, copy in zip(projections, _copies(x, len(projections)))]


def over_root_mean_square(x: Float[Array, "... d"], epsilon: float) -> Float[Array, "... d"]:
    """Each vector divided by its root mean square, in float32."""
    y = x.astype(jnp.float32)
    return times_column(y, jax.lax.rsqrt(jnp.mean(jnp.square(y), axis=-1, keepdims=True) + epsilon))


class RMSNorm(nnx.Module):
    """Root-mean-square norm with a learned scale; its statistics are float32 whatever the dtype of `x`."""

    def __init__(self, model_width: int, epsilon: float = 1e-6, *, rngs: nnx.Rngs):
        self.epsilon = epsilon
        self.scale = parameter(rngs.params(), jax.nn.initializers.ones, (model_width,), ("model",), "scale")

    def __call__(self, x: Float[Array, "... d"]) -> Float[Array, "... d"]:
        y = over_root_mean_square(rows(x), self.epsilon)
        return (y * self.scale[...]).astype(x.dtype).reshape(x.shape)


@jax.custom_jvp
def relu(x: Float[Array, "..."]) -> Float[Array, "..."]:
    """The larger of `x` and 0; its derivative needs only the result, which the next linear map keeps anyway."""
    return jnp.maximum(x, 0)


@relu.defjvp
def _relu_jvp(primals, tangents):
    y = checkpoint_name(relu(*primals), RELU)
    return y, jnp.where(y > 0, tangents[0], 0)


ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "gelu": functools.partial(jax.nn.gelu, approximate=False),
    "gelu_tanh": jax.nn.gelu,
    "relu": relu,
    "silu": jax.nn.silu,
    # So et al. 2021.
    "squared_relu": lambda x: jnp.square(jax.nn.relu(x)),
    "tanh": jnp.tanh,
}


class FeedForward(nnx.Module):
    """`activation(x W1) W2`, or if `gated` `(activation(x W1) * x W2) W3`; with biases if there is a `bias`.

    The recurrent cell calls the two halves separately, because its gate reads the hidden layer.
    """

    def __init__(
        self,
        size_in: int,
        feedforward_width: int,
        model_width: int,
        *,
        rngs: nnx.Rngs,
        bias: bool = False,
        activation: Activation = "relu",
        gated: bool = False,
    ):
        biases = {"rngs": rngs, "bias_initializer": jax.nn.initializers.zeros if bias else None}
        self.activation: Activation = activation
        self.gate = Linear(size_in, feedforward_width, ("model", "feedforward"), **biases) if gated else None
        self.hidden = Linear(size_in, feedforward_width, ("model", "feedforward"), **biases)
        self.output = Linear(feedforward_width, model_width, ("feedforward", "model"), **biases)

    def __call__(self, x: Float[Array, "... i"]) -> Float[Array, "... d"]:
        if self.gate is not None:
            gate, hidden = project(x, self.gate, self.hidden)
            return self.output(ACTIVATIONS[self.activation](gate) * hidden)

        def finish(output, hidden):
            return output(ACTIVATIONS[self.activation](hidden))

        # Otherwise a relu's mask would be kept as well, and a TPU takes longer to pack it than to compare again.
        if keeps_only_named_values():
            finish = jax.checkpoint(finish, policy=jax.checkpoint_policies.save_only_these_names(RELU))
        return finish(self.output, self.hidden(x))


def dropout_multiplier(
    key: PRNGKeyArray | None, rate: float, shape: tuple[int, ...], dtype: Any = jnp.float32
) -> Array | None:
    """A random array of 0 and 1 / (1 - rate), by which dropout multiplies; None without a key."""
    return multiplier_of(kept_by_dropout(key, rate, shape), rate, dtype)


def kept_by_dropout(key: PRNGKeyArray | None, rate: float, shape: tuple[int, ...]) -> Bool[Array, "..."] | None:
    """A random array, True where dropout keeps a value; None without a key."""
    return None if key is None or rate == 0.0 else jax.random.bernoulli(key, 1.0 - rate, shape)


def multiplier_of(kept: Bool[Array, "..."] | None, rate: float, dtype: Any = jnp.float32) -> Array | None:
    """The array by which dropout multiplies, from the result of `kept_by_dropout`."""
    return None if kept is None else jnp.where(kept, 1.0 / (1.0 - rate), 0.0).astype(dtype)


def tiled_dropout(x: Float[Array, "*batch n d"], rate: float, key: PRNGKeyArray | None) -> Float[Array, "*batch n d"]:
    """Dropout whose mask is a tile of at most 128 tokens, shared by all lanes and repeated along the segment.

    The reference does the same: far fewer random numbers are drawn than there are activations.
    """
    if key is None:
        return x
    n, d = x.shape[-2:]
    whole = num_parts() * n
    tile = math.gcd(whole, 128)
    mask = dropout_multiplier(key, rate, (1, 1, tile, d), x.dtype)
    if mask is None:
        return x
    if n % tile:
        # A device's part of a segment begins and ends within a tile.
        return x * own_blocks(jnp.tile(mask[0], (1, whole // tile, 1)))
    return (x.reshape(x.shape[0], n // tile, tile, d) * mask).reshape(x.shape)


def only_first(new: Float[Array, "b ..."], counts: Int[Array, " b"], *, axis: int) -> Float[Array, "b ..."]:
    """The first `counts` tokens of each lane along `axis`, and zeros after them: a weight of 0 does not hide a NaN."""
    is_read = np.arange(new.shape[axis]) < counts[:, None]
    return jnp.where(jnp.expand_dims(is_read, [i for i in range(1, new.ndim) if i != axis]), new, 0)
