"""Parts of layers that make summaries of windows: maps along the sequence, and biases by distance."""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from meliad_like.layers.basic import RMSNorm, fan_in, parameter


class SequenceMix(nnx.Module):
    """A linear map along the sequence, from the tokens and summary tokens of a window to `out` vectors.

    All channels are treated alike. With `norms`, tokens and summary tokens each pass a norm before.
    """

    def __init__(self, w: int, u: int, out: int, model_width: int, norms: bool, *, rngs: nnx.Rngs):
        self.w, self.out = w, out
        self.kernel = parameter(rngs.params(), fan_in, (w + u, out), (None, None))
        self.bias = parameter(rngs.params(), jax.nn.initializers.zeros, (out,), (None,))
        self.token_norm = RMSNorm(model_width, rngs=rngs) if norms else None
        self.summary_norm = RMSNorm(model_width, rngs=rngs) if norms else None

    def of_tokens(self, x: Float[Array, "b w d"]) -> Float[Array, "b out d"]:
        """The part of the result that comes from the tokens, float32."""
        x = x if self.token_norm is None else self.token_norm(x)
        kernel = self.kernel[: self.w].astype(x.dtype)
        return jnp.einsum("so,bsd->bod", kernel, x, preferred_element_type=jnp.float32)

    def of_token(self, x: Float[Array, "b d"], offset: Int[Array, " b"]) -> Float[Array, "b out d"]:
        """The part of the result that comes from one token, at this offset in the window of each lane."""
        x = x if self.token_norm is None else self.token_norm(x)
        return self.kernel[...][offset][:, :, None] * x[:, None].astype(jnp.float32)

    def add_summaries(self, mixed: Float[Array, "b out d"], x: Float[Array, "b u d"]) -> Float[Array, "b out d"]:
        """The whole result, from the part of the tokens and the summary tokens."""
        x = x if self.summary_norm is None else self.summary_norm(x)
        kernel, bias = self.kernel[self.w :].astype(x.dtype), self.bias[...][:, None]
        return mixed + jnp.einsum("so,bsd->bod", kernel, x, preferred_element_type=jnp.float32) + bias


def toeplitz(by_distance: Float[Array, "h length"], rows: int, lead: int) -> Float[Array, "h rows s"]:
    """Values by distance (1 to `length`) laid out for `rows` queries, which follow `lead` keys of others.

    With 3 queries and 1 key before them, a query (row) and a key (column) have these distances, and where the key is
    not before the query the value is 0:

        1  0  0  0
        2  1  0  0
        3  2  1  0

    It consists of copies and a reshape, as `layers/attention.ring_square`, so that its gradient is a sum.
    """
    h, columns = by_distance.shape[0], lead + rows
    near, far = by_distance[:, :lead], by_distance[:, lead:]
    cycle = jnp.concatenate([near[:, ::-1], jnp.zeros((h, rows)), far[:, ::-1]], axis=1)
    # A row begins one place further left in the cycle than the row above it.
    by_row = jnp.tile(cycle, (1, rows))[:, : rows * (columns + rows - 2)]
    return by_row.reshape(h, rows, -1)[..., :columns]
