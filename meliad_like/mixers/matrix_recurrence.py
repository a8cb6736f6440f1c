"""The base of linear recurrences whose state is a matrix for each head (`layers/linear_recurrence.py`).

A mixer of this kind says what a token reads and writes: projections, perhaps a short convolution along the document,
the rule of the recurrence, and the results from what the matrices give. The carry, reading segments and tokens, and the
operations are here. The states start at zero with every document. In shapes `p` is the size of a value, `k` that of a
key, and `h` the number of heads.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from meliad_like.errors import UserError
from meliad_like.kernels.registry import CONVOLUTIONS, RECURRENCES, kernel_of
from meliad_like.layers.basic import only_first, over_root_mean_square
from meliad_like.layers.flops import Flops
from meliad_like.layers.linear_recurrence import (
    Rule,
    convolve_segment,
    convolve_tokens,
    flops_of_rule,
    read_chunks,
    read_token,
)
from meliad_like.layers.sharding import num_parts
from meliad_like.mixers.base import DecoderShape, Mixer, MixerConfig, Traits, check_taps, projection_flops
from meliad_like.registry import size
from meliad_like.validation import check_positive


class MatrixCarry(NamedTuple):
    """The carry of the recurrence, which passes from token to token."""

    matrix: Float[Array, "b h p k"]
    """The states, float32: from keys (last axis) to values."""
    recent: Float[Array, "b recent channels"] | None = None
    """The last inputs of the convolution, of one token fewer than it sees; None without a convolution."""


class Sizes(NamedTuple):
    """The sizes of a recurrence, and the features of its rule."""

    groups: int
    """The number of groups of heads; a group shares queries and keys."""
    heads: int
    key_size: int
    value_size: int
    by_channel: bool = False
    """Whether each channel of a key has a decay of its own."""
    corrected: bool = False
    """Whether the rule is the delta rule, which corrects what the matrix gives for the key."""


class MatrixRecurrence(Mixer):
    """Tokens write to and read from matrices that forget."""

    norm_epsilon: float | None = None
    """The epsilon of an RMS norm of what each head reads; None: there is no such norm."""

    def __init__(self, config: "MatrixConfig", shape: DecoderShape):
        self.config, self.shape, self.w, self.sizes = config, shape, shape.window_length, config.sizes(shape)

    def project(self, x: Float[Array, "b n d"]) -> tuple[Any, Any]:
        """The inputs of the convolution, `[b, n, _]` each, or without one those of the rule, and other projections."""
        raise NotImplementedError

    def convolution(self) -> Sequence[Float[Array, "taps _"]]:
        """The filters of the convolution for each of its inputs; empty: there is no convolution."""
        return ()

    def rule(self, inputs: Any, others: Any) -> tuple[Rule, Any]:
        """The rule of the tokens, and the values that `output` needs, from the results of `project`: `inputs` have
        passed the convolution and are float32."""
        raise NotImplementedError

    def output(self, y: Float[Array, "b h n p"], needed: Any) -> Float[Array, "b n i"]:
        """The results of the mixer, from the vectors that the tokens read, after their norm, and the second result of
        `rule`."""
        raise NotImplementedError

    def moved(self, matrix: Float[Array, "b h p k"], n: Int[Array, "#b"]) -> Float[Array, "b h p k"]:
        """The states after `n` tokens, for a rule in whose keys positions count from the first token that is read."""
        del n
        return matrix

    def init_carry(self, b, dtype):
        matrix = jnp.zeros((b, self.sizes.heads, self.sizes.value_size, self.sizes.key_size), jnp.float32)
        if not (filters := self.convolution()):
            return MatrixCarry(matrix)
        channels = sum(x.shape[1] for x in filters)
        return MatrixCarry(matrix, jnp.zeros((b, filters[0].shape[0] - 1, channels), dtype))

    def __call__(self, x, context, carry, dropout_key):
        kernel = self.config.kernel(self.shape)

        def read(rule, matrix):
            arguments = rule, matrix, context.start, self.config.chunk(self.shape)
            if kernel is not None:
                return kernel(*arguments, dtype=x.dtype, norm_epsilon=self.norm_epsilon)
            matrix, y = read_chunks(*arguments)
            return matrix, self._normed_by_head(y)

        convolve = partial(convolve_segment, start=context.start)
        name, filters = self.shape.recurrence_kernel, self.convolution()
        kernels = [kernel_of(CONVOLUTIONS, name, self.w, *x.shape) for x in filters]
        if kernels and all(kernels):
            convolve = partial(_one_by_one, partial(convolve, kernel=kernels[0]))
        else:
            convolve = partial(_side_by_side, convolve)
        return self._read(x, jnp.array([num_parts() * x.shape[1]]), carry, convolve, read)

    def decode(self, x, counts, context, carry):
        b, n = x.shape[:2]

        def read(rule, matrix):
            # Tokens after `counts` neither decay the states nor write to them.
            rule = jax.tree.map(lambda y: only_first(y, counts, axis=2), rule.without_step())
            if n == 1:
                matrix, y = read_token(matrix, jax.tree.map(lambda z: z[:, :, 0], rule))
                return matrix, self._normed_by_head(y[:, :, None])
            chunk = math.gcd(n, self.config.chunk_length)
            matrix, y = read_chunks(rule, matrix, jnp.zeros((b, 1), bool), chunk)
            return matrix, self._normed_by_head(y)

        return self._read(x, counts, carry, partial(_side_by_side, partial(convolve_tokens, counts=counts)), read)

    def _normed_by_head(self, y: Float[Array, "b h n p"]) -> Float[Array, "b h n p"]:
        return y if self.norm_epsilon is None else over_root_mean_square(y, self.norm_epsilon)

    def _read(
        self, x: Float[Array, "b n d"], n: Int[Array, "#b"], carry: MatrixCarry, convolve: Callable, read: Callable
    ):
        inputs, others = self.project(x)
        recent = carry.recent
        if filters := self.convolution():
            inputs, recent = convolve(inputs, recent, filters)
        rule, needed = self.rule(inputs, others)
        matrix, y = read(rule, carry.matrix)
        return self.output(y, needed), MatrixCarry(self.moved(matrix, n), recent)


def _side_by_side(convolve: Callable, inputs, recent, filters):
    """The results of a convolution of inputs that lie side by side in one array, and their last ones. Without a kernel,
    a CPU takes twice as long for inputs one by one (jaxlib 0.10.2)."""
    results, recent = convolve(jnp.concatenate(inputs, axis=-1), recent, jnp.concatenate(filters, axis=-1))
    return jnp.split(results, _ends(filters), axis=-1), recent


def _one_by_one(convolve: Callable, inputs, recent, filters):
    """`_side_by_side` with a kernel, for which inputs and gradients need not be copied to one array."""
    results, after = zip(*map(convolve, inputs, jnp.split(recent, _ends(filters), axis=-1), filters))
    return results, jnp.concatenate(after, axis=-1)


def _ends(filters: Sequence[Array]) -> np.ndarray:
    """The channels at which one input ends and the next begins."""
    return np.cumsum([x.shape[1] for x in filters])[:-1]


@dataclasses.dataclass(frozen=True)
class MatrixConfig(MixerConfig):
    """The config of a recurrence of matrices."""

    chunk_length: int = size(64, "fixed")
    """The number of tokens that are read in parallel, a power of two; at most the largest one that divides a block."""

    def __post_init__(self):
        length = self.chunk_length
        if length < 1 or length & (length - 1):
            raise UserError(f"{type(self).__name__}.chunk_length={length} must be a power of two")

    def sizes(self, shape: DecoderShape) -> Sizes:
        """The sizes of the recurrence in a decoder of this shape."""
        raise NotImplementedError

    def chunk(self, shape: DecoderShape) -> int:
        """The number of tokens that are read in parallel."""
        return math.gcd(shape.window_length, self.chunk_length)

    def kernel(self, shape: DecoderShape) -> Callable[..., tuple[Array, Array]] | None:
        """The kernel that reads a segment; None: none does."""
        tokens, sizes = (shape.window_length, self.chunk(shape)), self.sizes(shape)
        of_head = sizes.key_size, sizes.value_size, sizes.by_channel
        return kernel_of(RECURRENCES, shape.recurrence_kernel, *tokens, *of_head)

    def has_kernel(self, shape, kind):
        return kind == "recurrence" and self.kernel(shape) is not None

    def width(self, shape):
        return self.sizes(shape).heads * self.sizes(shape).value_size

    def flops(self, shape):
        """The operations of the projections and of the recurrence."""
        of_rule = flops_of_rule(self.chunk(shape), **self.sizes(shape)._asdict())
        return Flops.of_products(projection_flops(self, shape) + of_rule)

    def traits(self, shape):
        return Traits(states=("matrix",))


@dataclasses.dataclass(frozen=True)
class ConvolvedMatrixConfig(MatrixConfig):
    """The config of a recurrence of matrices that reads the results of a short convolution along the document."""

    conv_length: int = size(4, "fixed")
    """The number of tokens that the short convolution sees, the token itself included."""

    def __post_init__(self):
        super().__post_init__()
        check_positive(self, ("conv_length",))

    def check(self, shape):
        check_taps(self, shape)
