"""Parts of layers that make summaries of windows: the order of tokens and summary tokens, maps along the sequence, and
attention to memories.

Between the layers of a stack, the u summary tokens of each window stand behind its w tokens: n2 = c (w + u) vectors.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from einops import rearrange
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from meliad_like.layers.attention import MASKED, average, weigh, without_largest
from meliad_like.layers.basic import RMSNorm, fan_in, parameter


def with_summaries(x: Float[Array, "b n d"], summaries: Float[Array, "b c u d"] | None) -> Float[Array, "b n2 d"]:
    """Tokens with the summary tokens of each window behind it; None: there are none."""
    if summaries is None:
        return x
    windows = rearrange(x, "b (c w) d -> b c w d", c=summaries.shape[1])
    return rearrange(jnp.concatenate([windows, summaries], axis=2), "b c s d -> b (c s) d")


def without_summaries(
    x: Float[Array, "b n2 d"], c: int, w: int
) -> tuple[Float[Array, "b n d"], Float[Array, "b c u d"] | None]:
    """The tokens of `c` windows of `w` tokens, and their summary tokens; the inverse of `with_summaries`."""
    if x.shape[1] == c * w:
        return x, None
    windows = rearrange(x, "b (c s) d -> b c s d", c=c)
    return rearrange(windows[:, :, :w], "b c w d -> b (c w) d"), windows[:, :, w:]


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


def attend_parts(
    query: Float[Array, "b h t k"],
    keys: Sequence[Float[Array, "b h _ k"]],
    values: Sequence[Float[Array, "b h _ k"]],
    shown: Bool[Array, "..."],
    real: Bool[Array, "b s"],
    bias: Float[Array, "..."] | None = None,
    multiplier: Float[Array, "..."] | None = None,
) -> Float[Array, "b h t k"]:
    """Attention to keys of which some are read as zeros: those that are shown although they are not `real`.

    The keys are in several arrays, so that within a scan those that stay the same are not copied in every iteration.

    Args:
        query: queries, with the attention scale.
        keys, values: `s` of each in all arrays together.
        shown: broadcasts to [b, h, t, s].
        real: whether there is anything at this place.
        bias, multiplier: as for `layers/attention.attend`.
    """
    real = real[:, None, None]
    products = [jnp.einsum("bhtk,bhsk->bhts", query, key, preferred_element_type=jnp.float32) for key in keys]
    scores = jnp.where(real, jnp.concatenate(products, axis=-1), 0.0)
    if bias is not None:
        scores += without_largest(bias, shown)
    # Neither zeros nor what dropout removes is added to the result.
    multiplier = real.astype(jnp.float32) if multiplier is None else real * multiplier
    weights, total = weigh(jnp.where(shown, scores, MASKED), query.dtype, multiplier)
    mixed, first = jnp.zeros((), jnp.float32), 0
    for value in values:
        some = weights[..., first : first + value.shape[2]]
        mixed += jnp.einsum("bhts,bhsk->bhtk", some, value, preferred_element_type=jnp.float32)
        first += value.shape[2]
    return average(mixed, total, query.dtype)
