"""Pallas kernels for NVIDIA GPUs (Triton) that compute `read_chunks` (`layers/linear_recurrence.py`).

What a chunk needs of the state with which it begins is linear in it, so only the states pass from chunk to chunk: one
program takes some channels of a head's state through the segment and keeps it on the chip. Everything else is computed
for all chunks at once, before and after, and no product with the inverse or with a state is made twice (Yang et al.
2024, section 3.3). The backward pass reads the states before each chunk, the updates and the inverses, and takes the
gradient of the state through the segment in the same way, from last to first. Products of the tokens of a chunk with
each other and their decay are computed by `decayed_products`, which also derives their gradients; with a decay for each
channel they have kernels of their own (`kernels/recurrence_gpu_channels.py`).

Every sum has one order, so results are always the same.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from einops import rearrange
from jax.experimental.pallas import triton
from jaxtyping import Array, Bool, Float, Int

from meliad_like.kernels import recurrence_gpu_programs as programs
from meliad_like.kernels.common import Grid, differentiable
from meliad_like.kernels.recurrence import begins_document, read_on_mesh
from meliad_like.kernels.recurrence_gpu_channels import Products, products_by_channel_in_kernel
from meliad_like.kernels.recurrence_gpu_programs import Chunk, Options, Saved
from meliad_like.layers.basic import over_root_mean_square
from meliad_like.layers.linear_recurrence import Rule, decayed_products

SMALLEST = 16
"""Compiled for a GPU, a chunk has at least as many tokens, and keys and values at least as many channels."""
LARGEST_CHUNK, LARGEST_KEY, LARGEST_VALUE = 64, 128, 256
"""The most tokens of a chunk, and channels of a key and of a value, for which one program has enough registers."""


def fits(block: int, chunk: int, key_size: int, value_size: int, by_channel: bool) -> bool:
    """Whether the kernels can be compiled for chunks and heads of these sizes, which must be powers of two."""
    del block, by_channel
    sizes = (chunk, LARGEST_CHUNK), (key_size, LARGEST_KEY), (value_size, LARGEST_VALUE)
    return all(SMALLEST <= size <= largest and size & (size - 1) == 0 for size, largest in sizes)


def read_chunks_in_kernel(
    rule: Rule,
    matrix: Float[Array, "b h p k"],
    start: Bool[Array, "b c"],
    chunk: int,
    *,
    dtype: Any = jnp.float32,
    norm_epsilon: float | None = None,
    interpret: bool = False,
    values: int = 32,
    slice: int = 64,
    warps: tuple[int, int] = (4, 8),
    stages: tuple[int, int] = (2, 1),
) -> tuple[Float[Array, "b h p k"], Float[Array, "b h n p"]]:
    """Computes `read_chunks`, also under a mesh, where each device computes its lanes and heads.

    Args:
        dtype: the activations' type, to which queries, keys, values and states are rounded for products;
            sums, decays and the inverses are float32.
        norm_epsilon: the epsilon of an RMS norm of each vector that is read; None: no norm.
        interpret: whether the kernels are interpreted, on any platform, instead of compiled for a GPU.
        values, slice, warps, stages: see `Options`.
    """
    options = Options(jnp.dtype(dtype), values, slice, warps, stages, interpret)
    matrix, read = read_on_mesh(functools.partial(_read_segment, options, chunk), rule, matrix, start)
    return matrix, read if norm_epsilon is None else over_root_mean_square(read, norm_epsilon)


def _read_segment(options: Options, chunk: int, rule: Rule, matrix: Array, start: Array) -> tuple[Array, Array]:
    rule, groups = rule.without_step(), rule.query.shape[1]

    def cut(x: Array) -> Array:
        return rearrange(x, "b (g r) (c t) e -> b c g r t e", g=groups, t=chunk)

    query, key, value = (x.astype(options.dtype) for x in (rule.query, rule.key, rule.value))
    log_decay = cut(rule.log_decay)
    if log_decay.shape[-1] > 1 and log_decay.shape[3] == 1:
        products = products_by_channel_in_kernel(options, query, key, log_decay)
        if rule.strength is None:
            products = products._replace(of_keys=None)
    else:
        of_key = cut(rule.key)
        readers = (cut(rule.query), of_key)[: 1 if rule.strength is None else 2]
        (of_queries, *of_keys), decay, until_end = decayed_products(readers, of_key, log_decay)
        products = Products(of_queries.astype(options.dtype), of_keys[0] if of_keys else None, decay, until_end)
    inputs = Chunk(query, key, value, rule.strength, *products)
    first = begins_document(start, log_decay.shape[1])
    matrix, read = _read(options, inputs, matrix, first)
    return matrix, read.astype(jnp.float32)


def _read_forward(options, inputs, matrix, first):
    grids = _Grids(options, inputs, first)
    at, through = grids.at_chunk, grids.through_segment
    inverse, of_keys, update = None, None, inputs.value
    if inputs.strength is not None:
        read, written = [(inputs.of_keys, "bcgrtt"), (inputs.strength, "bhn1")], [grids.new("bcgrtt", jnp.float32)]
        [inverse] = grids.call(programs.inverse_kernel, at, read, written, warps=1)
        update, of_keys = grids.solved(inverse, with_values=True)
    read = *grids.sequence, (matrix, "bhpk"), (update, "bhnp"), (of_keys, "bhnk")
    corrected = (None, None) if of_keys is None else grids.new("bhnp")
    written = grids.new("bhcpk"), corrected, grids.new("bhpk", jnp.float32)
    before, corrected, after = grids.call(programs.states_kernel, through, read, written)
    update = update if of_keys is None else corrected
    read = grids.chunk, (before, "bhcpk"), (update, "bhnp")
    [read] = grids.call(programs.read_kernel, at, read, [grids.new("bhnp")])
    return (after, read), (inputs, first, before, update, inverse)


def _read_backward(options, saved, cotangents):
    inputs, first, before, update, inverse = saved
    of_after, cotangent = cotangents
    grids = _Grids(options, inputs, first)
    of_keys = None if inverse is None else grids.solved(inverse, with_values=False)[1]
    read = grids.chunk, (cotangent, "bhnp")
    [of_read] = grids.call(programs.read_gradient_kernel, grids.at_chunk, read, [grids.new("bhnp")])
    read = *grids.sequence, (inputs.query, "bgnk"), (cotangent, "bhnp"), (of_after, "bhpk"), (of_read, "bhnp")
    read = *read, (of_keys, "bhnk")
    written = grids.new("bhcpk"), grids.new("bhnp"), grids.new("bhpk", jnp.float32)
    of_state, of_update, of_matrix = grids.call(programs.states_gradient_kernel, grids.through_segment, read, written)
    saved = Saved(before, of_state, update, of_update, cotangent, inverse)
    read = grids.chunk, (saved, Saved("bhcpk", "bhcpk", "bhnp", "bhnp", "bhnp", "bcgrtt"))
    written = inputs if inverse is not None else inputs._replace(value=None)
    [gradients] = grids.call(programs.input_gradient_kernel, grids.at_group, read, [(written, OF_CHUNK)])
    return gradients if inverse is not None else gradients._replace(value=of_update), of_matrix, None


_read = differentiable(_read_forward, _read_backward)

OF_CHUNK = Chunk("bgnk", "bgnk", "bhnp", "bhn1", "bcgrtt", "bcgrtt", "bcgrte", "bcgrte")
"""The axes of a segment's arrays."""


class _Grids:
    """The grids of the kernels for a segment's arrays, by the letters of their axes.

    A segment has `n` tokens in `c` chunks of `t`, and `h` heads in `g` groups of `r`. The other letters are those of
    `recurrence_gpu_programs.py`.
    """

    def __init__(self, options: Options, inputs: Chunk, first: Int[Array, "b c"]):
        self.options = options
        b, c, g, r, t, e = inputs.decay.shape
        h, p, k = g * r, inputs.value.shape[3], inputs.key.shape[3]
        self.sizes = {"b": b, "c": c, "g": g, "r": r, "t": t, "e": e, "h": h, "n": c * t, "1": 1, "p": p, "k": k}
        self.sequence = (first, "bc"), (inputs.key, "bgnk"), (inputs.until_end, "bcgrte"), (inputs.decay, "bcgrte")
        self.chunk = inputs, OF_CHUNK
        # The places of a head's group, and of the head in it.
        in_groups = {"g": lambda at: jax.lax.div(at["h"], r), "r": lambda at: jax.lax.rem(at["h"], r)}
        of_head = in_groups if r > 1 else {"g": "h"}
        one = dict.fromkeys("bcghr")
        self.at_chunk = Grid({"c": c, "h": h, "b": b}, self.sizes | one | {"n": t}, {"n": "c"} | of_head)
        """One program for each chunk of each head."""
        of_group = self.sizes | dict.fromkeys("bcg") | {"h": r, "n": t}
        self.at_group = Grid({"c": c, "g": g, "b": b}, of_group, {"n": "c", "h": "g"})
        """One program for each chunk of each group of heads that share queries and keys."""
        values = math.gcd(options.values, p)
        of_values = self.sizes | dict.fromkeys("bghr") | {"p": values}
        self.through_segment = Grid({"p": p // values, "h": h, "b": b}, of_values, of_head)
        """One program for some channels of the values of each head."""

    def new(self, axes: str, dtype: Any = None) -> tuple[jax.ShapeDtypeStruct, str]:
        """An array to write with its axes; in the dtype of products if none is given."""
        return jax.ShapeDtypeStruct(tuple(self.sizes[axis] for axis in axes), dtype or self.options.dtype), axes

    def solved(self, inverse: Array, with_values: bool) -> list[Any]:
        """The results of `solved_kernel`."""
        written = self.new("bhnp") if with_values else (None, None), self.new("bhnk")
        return self.call(programs.solved_kernel, self.at_chunk, [self.chunk, (inverse, "bcgrtt")], written)

    def call(self, kernel, grid: Grid, read, written, warps: int | None = None) -> list[Any]:
        """Runs a kernel, a function of references to arrays that are read or written, in pairs of arrays and axes."""
        options, is_chunk = self.options, grid is not self.through_segment
        warps, stages = warps or options.warps[is_chunk], options.stages[is_chunk]
        run, params = functools.partial(kernel, options), triton.CompilerParams(num_warps=warps, num_stages=stages)
        return grid.call(run, read, written, params, interpret=options.interpret, name=kernel.__name__)
