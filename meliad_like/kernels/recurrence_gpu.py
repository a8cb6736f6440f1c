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
from collections.abc import Callable
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
from einops import rearrange
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton
from jaxtyping import Array, Bool, Float, Int

from meliad_like.kernels import recurrence_gpu_programs as programs
from meliad_like.kernels.common import call_kernel
from meliad_like.kernels.recurrence import begins_document, read_on_mesh
from meliad_like.kernels.recurrence_gpu_channels import Products, products_by_channel_in_kernel
from meliad_like.kernels.recurrence_gpu_programs import Chunk, Options, Saved, Sequence
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
    matrix, read = cast(tuple[Array, Array], _read(options, inputs, matrix, first))
    return matrix, read.astype(jnp.float32)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _read(options: Options, inputs: Chunk, matrix: Array, first: Array) -> tuple[Array, Array]:
    return _read_forward(options, inputs, matrix, first)[0]


def _read_forward(options, inputs, matrix, first):
    grid = _Grid(options, inputs, first)
    at, through = grid.at_chunk, grid.through_segment
    inverse, of_keys, update = None, None, inputs.value
    if inputs.strength is not None:
        read = (inputs.of_keys, at.of_chunk(grid.t)), (inputs.strength, at.of_head(1))
        [inverse] = grid.call(programs.inverse_kernel, at, read, [(grid.squares, at.of_chunk(grid.t))], warps=1)
        update, of_keys = grid.solved(inverse, with_values=True)
    read = (matrix, through.matrix), (update, through.values), (of_keys, through.of_head(grid.k))
    corrected = None if of_keys is None else grid.vectors(grid.p)
    written = (grid.states, through.states), (corrected, through.values), (grid.matrix, through.matrix)
    before, corrected, after = grid.call(programs.states_kernel, through, [grid.sequence, *read], written)
    update = update if of_keys is None else corrected
    read = grid.chunk, (before, at.states), (update, at.values)
    [read] = grid.call(programs.read_kernel, at, read, [(grid.vectors(grid.p), at.values)])
    return (after, read), (inputs, first, before, update, inverse)


def _read_backward(options, saved, cotangents):
    inputs, first, before, update, inverse = saved
    of_after, cotangent = cotangents
    grid = _Grid(options, inputs, first)
    at, through, group = grid.at_chunk, grid.through_segment, grid.at_group
    of_keys = None if inverse is None else grid.solved(inverse, with_values=False)[1]
    read = grid.chunk, (cotangent, at.values)
    [of_read] = grid.call(programs.read_gradient_kernel, at, read, [(grid.vectors(grid.p), at.values)])
    read = (inputs.query, through.of_group(grid.k)), (cotangent, through.values), (of_after, through.matrix)
    read = *read, (of_read, through.values), (of_keys, through.of_head(grid.k))
    written = (grid.states, through.states), (grid.vectors(grid.p), through.values), (grid.matrix, through.matrix)
    of_state, of_update, of_matrix = grid.call(
        programs.states_gradient_kernel, through, [grid.sequence, *read], written
    )

    specs = Saved(*[group.states] * 2, *[group.values] * 3, inverse=group.of_chunk(grid.t))
    read = (inputs, group.inputs), (Saved(before, of_state, update, of_update, cotangent, inverse), specs)
    written = inputs if inverse is not None else inputs._replace(value=None)
    [gradients] = grid.call(programs.input_gradient_kernel, group, read, [(written, group.inputs)])
    return gradients if inverse is not None else gradients._replace(value=of_update), of_matrix, None


_read.defvjp(_read_forward, _read_backward)


class _Specs(NamedTuple):
    """The parts of arrays that the programs of a grid see."""

    grid: tuple[int, int, int]
    of_head: Callable[[int], pl.BlockSpec]
    """The specification of an array [b, h, n, size], by the size of its last axis."""
    of_group: Callable[[int], pl.BlockSpec]
    """The specification of an array [b, g, n, size], by the size of its last axis."""
    of_chunk: Callable[[int], pl.BlockSpec]
    """The specification of an array [b, c, g, r, t, size], by the size of its last axis."""
    values: pl.BlockSpec
    """The specification of an array [b, h, n, p]."""
    states: pl.BlockSpec
    """The specification of an array [b, h, c, p, k]."""
    matrix: pl.BlockSpec | None
    """The specification of an array [b, h, p, k]."""
    inputs: Chunk


class _Grid:
    """The sizes of a segment's arrays, and how its kernels are called."""

    def __init__(self, options: Options, inputs: Chunk, first: Int[Array, "b c"]):
        self.options, self.inputs = options, inputs
        (self.b, self.c, self.g, self.r, self.t, self.e) = inputs.decay.shape
        self.h, self.n, self.p, self.k = self.g * self.r, self.c * self.t, inputs.value.shape[3], inputs.key.shape[3]
        self.matrix = jax.ShapeDtypeStruct((self.b, self.h, self.p, self.k), jnp.float32)
        self.states = jax.ShapeDtypeStruct((self.b, self.h, self.c, self.p, self.k), options.dtype)
        self.squares = jax.ShapeDtypeStruct((*inputs.decay.shape[:-1], self.t), jnp.float32)
        through = self.through_segment
        of_first, decay = pl.BlockSpec((None, self.c), lambda i, h, b: (b, 0)), through.of_chunk(self.e)
        specs = Sequence(of_first, through.of_group(self.k), decay, decay)
        self.sequence = Sequence(first, inputs.key, inputs.until_end, inputs.decay), specs
        self.chunk = inputs, self.at_chunk.inputs

    def vectors(self, size: int) -> jax.ShapeDtypeStruct:
        """One vector for each token and head."""
        return jax.ShapeDtypeStruct((self.b, self.h, self.n, size), self.options.dtype)

    def _head(self, h: Any) -> tuple[Any, Any]:
        """The group of a head, and its index in the group."""
        return (jax.lax.div(h, self.r), jax.lax.rem(h, self.r)) if self.r > 1 else (h, 0)

    def _specs(self, grid, of_head, of_group, of_chunk, values, states, matrix=None) -> _Specs:
        square, decay = of_chunk(self.t), of_chunk(self.e)
        of_key = of_group(self.k)
        inputs = Chunk(of_key, of_key, values, of_head(1), square, square, decay, decay)
        return _Specs(grid, of_head, of_group, of_chunk, values, states, matrix, inputs)

    @functools.cached_property
    def at_chunk(self) -> _Specs:
        """One program for each chunk of each head."""
        head, chunk = (None, None, self.t), (None, None, None, None, self.t)
        return self._specs(
            (self.c, self.h, self.b),
            of_head=lambda size: pl.BlockSpec((*head, size), lambda c, h, b: (b, h, c, 0)),
            of_group=lambda size: pl.BlockSpec((*head, size), lambda c, h, b: (b, self._head(h)[0], c, 0)),
            of_chunk=lambda size: pl.BlockSpec((*chunk, size), lambda c, h, b: (b, c, *self._head(h), 0, 0)),
            values=pl.BlockSpec((*head, self.p), lambda c, h, b: (b, h, c, 0)),
            states=pl.BlockSpec((None, None, None, self.p, self.k), lambda c, h, b: (b, h, c, 0, 0)),
        )

    @functools.cached_property
    def at_group(self) -> _Specs:
        """One program for each chunk of each group of heads that share queries and keys."""
        head, chunk = (None, self.r, self.t), (None, None, None, self.r, self.t)
        return self._specs(
            (self.c, self.g, self.b),
            of_head=lambda size: pl.BlockSpec((*head, size), lambda c, g, b: (b, g, c, 0)),
            of_group=lambda size: pl.BlockSpec((None, None, self.t, size), lambda c, g, b: (b, g, c, 0)),
            of_chunk=lambda size: pl.BlockSpec((*chunk, size), lambda c, g, b: (b, c, g, 0, 0, 0)),
            values=pl.BlockSpec((*head, self.p), lambda c, g, b: (b, g, c, 0)),
            states=pl.BlockSpec((None, self.r, None, self.p, self.k), lambda c, g, b: (b, g, c, 0, 0)),
        )

    @functools.cached_property
    def through_segment(self) -> _Specs:
        """One program for some channels of the values of each head."""
        size, head = math.gcd(self.options.values, self.p), (None, None, self.n)
        chunk = (None, self.c, None, None, self.t)
        return self._specs(
            (self.p // size, self.h, self.b),
            of_head=lambda size: pl.BlockSpec((*head, size), lambda i, h, b: (b, h, 0, 0)),
            of_group=lambda size: pl.BlockSpec((*head, size), lambda i, h, b: (b, self._head(h)[0], 0, 0)),
            of_chunk=lambda size: pl.BlockSpec((*chunk, size), lambda i, h, b: (b, 0, *self._head(h), 0, 0)),
            values=pl.BlockSpec((*head, size), lambda i, h, b: (b, h, 0, i)),
            states=pl.BlockSpec((None, None, self.c, size, self.k), lambda i, h, b: (b, h, 0, i, 0)),
            matrix=pl.BlockSpec((None, None, size, self.k), lambda i, h, b: (b, h, i, 0)),
        )

    def solved(self, inverse: Array, with_values: bool) -> list[Any]:
        """The results of `solved_kernel`."""
        at = self.at_chunk
        of_values = (self.vectors(self.p) if with_values else None), at.values
        read = self.chunk, (inverse, at.of_chunk(self.t))
        return self.call(programs.solved_kernel, at, read, [of_values, (self.vectors(self.k), at.of_head(self.k))])

    def call(self, kernel, specs: _Specs, read, written, warps: int | None = None) -> list[Any]:
        """Runs a kernel, a function of references to arrays that are read or written, in pairs of arrays and specs."""
        options, is_chunk = self.options, specs is not self.through_segment
        read, written = ([(x, _with_array(x, spec)) for x, spec in pairs] for pairs in (read, written))
        warps, stages = warps or options.warps[is_chunk], options.stages[is_chunk]
        run, params = functools.partial(kernel, options), triton.CompilerParams(num_warps=warps, num_stages=stages)
        return call_kernel(run, specs.grid, read, written, params, interpret=options.interpret, name=kernel.__name__)


def _with_array(arrays: Any, specs: Any) -> Any:
    """The specs of the arrays that are not None."""
    if isinstance(arrays, Chunk | Saved):
        return type(arrays)(*map(_with_array, arrays, specs))
    return None if arrays is None else specs
