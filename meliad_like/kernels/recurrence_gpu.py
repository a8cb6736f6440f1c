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
from typing import Any, cast

import jax
import jax.numpy as jnp
from einops import rearrange
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton
from jaxtyping import Array, Bool, Float, Int

from meliad_like.kernels import recurrence_gpu_programs as programs
from meliad_like.kernels.common import Specs, call_kernel
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
        read = (inputs.of_keys, at("bcgrtt")), (inputs.strength, at("bhn1"))
        [inverse] = grid.call(programs.inverse_kernel, at, read, [grid.new(at, "bcgrtt", jnp.float32)], warps=1)
        update, of_keys = grid.solved(inverse, with_values=True)
    read = (matrix, through("bhpk")), (update, through("bhnp")), (of_keys, through("bhnk"))
    corrected = (None, None) if of_keys is None else grid.new(through, "bhnp")
    written = grid.new(through, "bhcpk"), corrected, grid.new(through, "bhpk", jnp.float32)
    before, corrected, after = grid.call(programs.states_kernel, through, [grid.sequence, *read], written)
    update = update if of_keys is None else corrected
    read = grid.chunk, (before, at("bhcpk")), (update, at("bhnp"))
    [read] = grid.call(programs.read_kernel, at, read, [grid.new(at, "bhnp")])
    return (after, read), (inputs, first, before, update, inverse)


def _read_backward(options, saved, cotangents):
    inputs, first, before, update, inverse = saved
    of_after, cotangent = cotangents
    grid = _Grid(options, inputs, first)
    at, through, group = grid.at_chunk, grid.through_segment, grid.at_group
    of_keys = None if inverse is None else grid.solved(inverse, with_values=False)[1]
    read = grid.chunk, (cotangent, at("bhnp"))
    [of_read] = grid.call(programs.read_gradient_kernel, at, read, [grid.new(at, "bhnp")])
    read = (inputs.query, through("bgnk")), (cotangent, through("bhnp")), (of_after, through("bhpk"))
    read = *read, (of_read, through("bhnp")), (of_keys, through("bhnk"))
    written = grid.new(through, "bhcpk"), grid.new(through, "bhnp"), grid.new(through, "bhpk", jnp.float32)
    of_state, of_update, of_matrix = grid.call(
        programs.states_gradient_kernel, through, [grid.sequence, *read], written
    )

    specs, of_inputs = Saved(*[group("bhcpk")] * 2, *[group("bhnp")] * 3, inverse=group("bcgrtt")), _of_chunk(group)
    read = (inputs, of_inputs), (Saved(before, of_state, update, of_update, cotangent, inverse), specs)
    written = inputs if inverse is not None else inputs._replace(value=None)
    [gradients] = grid.call(programs.input_gradient_kernel, group, read, [(written, of_inputs)])
    return gradients if inverse is not None else gradients._replace(value=of_update), of_matrix, None


_read.defvjp(_read_forward, _read_backward)


class _Grid:
    """The sizes of a segment's arrays by the letters of their axes, and how its kernels are called.

    A segment has `n` tokens in `c` chunks of `t`, and `h` heads in `g` groups of `r`. The other letters are those of
    `recurrence_gpu_programs.py`.
    """

    def __init__(self, options: Options, inputs: Chunk, first: Int[Array, "b c"]):
        self.options = options
        b, c, g, r, t, e = inputs.decay.shape
        sizes = {"b": b, "c": c, "g": g, "r": r, "t": t, "e": e, "h": g * r, "n": c * t, "1": 1}
        self.sizes = sizes | {"p": inputs.value.shape[3], "k": inputs.key.shape[3]}
        through = self.through_segment
        specs = Sequence(through("bc"), through("bgnk"), through("bcgrte"), through("bcgrte"))
        self.sequence = Sequence(first, inputs.key, inputs.until_end, inputs.decay), specs
        self.chunk = inputs, _of_chunk(self.at_chunk)

    def new(self, specs: Specs, axes: str, dtype: Any = None) -> tuple[jax.ShapeDtypeStruct, pl.BlockSpec]:
        """An array to write with its specs; in the dtype of products if none is given."""
        shape = tuple(self.sizes[axis] for axis in axes)
        return jax.ShapeDtypeStruct(shape, dtype or self.options.dtype), specs(axes)

    def _specs(self, grid: str, parts: dict[str, int | None], places: dict[str, Callable[..., Any]]) -> Specs:
        return Specs({axis: self.sizes[axis] for axis in grid}, self.sizes | parts, places)

    def _of_head(self) -> dict[str, Callable[..., Any]]:
        """The places of a head's group, and of the head in it."""
        if (r := self.sizes["r"]) == 1:
            return {"g": lambda at: at["h"]}
        return {"g": lambda at: jax.lax.div(at["h"], r), "r": lambda at: jax.lax.rem(at["h"], r)}

    @functools.cached_property
    def at_chunk(self) -> Specs:
        """One program for each chunk of each head."""
        parts = dict.fromkeys("bcghr") | {"n": self.sizes["t"]}
        return self._specs("chb", parts, {"n": lambda at: at["c"]} | self._of_head())

    @functools.cached_property
    def at_group(self) -> Specs:
        """One program for each chunk of each group of heads that share queries and keys."""
        parts = dict.fromkeys("bcg") | {"h": self.sizes["r"], "n": self.sizes["t"]}
        return self._specs("cgb", parts, {"n": lambda at: at["c"], "h": lambda at: at["g"]})

    @functools.cached_property
    def through_segment(self) -> Specs:
        """One program for some channels of the values of each head."""
        sizes, size = self.sizes, math.gcd(self.options.values, self.sizes["p"])
        grid = {"p": sizes["p"] // size, "h": sizes["h"], "b": sizes["b"]}
        return Specs(grid, sizes | dict.fromkeys("bghr") | {"p": size}, self._of_head())

    def solved(self, inverse: Array, with_values: bool) -> list[Any]:
        """The results of `solved_kernel`."""
        at = self.at_chunk
        of_values = self.new(at, "bhnp") if with_values else (None, None)
        read = self.chunk, (inverse, at("bcgrtt"))
        return self.call(programs.solved_kernel, at, read, [of_values, self.new(at, "bhnk")])

    def call(self, kernel, specs: Specs, read, written, warps: int | None = None) -> list[Any]:
        """Runs a kernel, a function of references to arrays that are read or written, in pairs of arrays and specs."""
        options, is_chunk = self.options, specs is not self.through_segment
        read, written = ([(x, _with_array(x, spec)) for x, spec in pairs] for pairs in (read, written))
        warps, stages = warps or options.warps[is_chunk], options.stages[is_chunk]
        run, params = functools.partial(kernel, options), triton.CompilerParams(num_warps=warps, num_stages=stages)
        grid = tuple(specs.grid.values())
        return call_kernel(run, grid, read, written, params, interpret=options.interpret, name=kernel.__name__)


def _of_chunk(specs: Specs) -> Chunk:
    """The parts of a segment's arrays."""
    axes = "bgnk", "bgnk", "bhnp", "bhn1", "bcgrtt", "bcgrtt", "bcgrte", "bcgrte"
    return Chunk(*map(specs, axes))


def _with_array(arrays: Any, specs: Any) -> Any:
    """The specs of the arrays that are not None."""
    if isinstance(arrays, Chunk | Saved):
        return type(arrays)(*map(_with_array, arrays, specs))
    return None if arrays is None else specs
