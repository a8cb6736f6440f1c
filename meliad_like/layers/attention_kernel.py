"""A Pallas kernel for TPUs that computes `attend_window` (`layers/attention.py`) without writing scores to memory.

It reads queries, keys and values as the projections write them, with the heads side by side, because an axis for the
heads would cost copies. Unit length, scale and the block before are computed or kept inside, because each would be one
more array in memory.

One run of the kernel computes one block of one head (`attention_kernel_block`). What lasts for a whole head, its bias
and the gradients of bias and scale, is laid out or summed in the chip's own memory; so the head is the grid's outermost
axis.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Float

from meliad_like.layers.attention_kernel_block import Heads, Options, Projected, Sums, backward_kernel, forward_kernel
from meliad_like.layers.sharding import MESH_AXES_OF

ROWS = 128
"""The number of queries in each row of the ring; compiled for a TPU, window and head size must be multiples of it."""
VMEM_LIMIT = 100 * 2**20
"""The chip's own memory that a kernel may use, in bytes. The compiler's default is too little for windows of 1024."""


def attend_window_in_kernel(
    projected: Projected,
    scale: Float[Array, " h"],
    bias: Float[Array, "h w"],
    previous_valid: Bool[Array, "b c"],
    multiplier: Float[Array, "h w w"] | None = None,
    *,
    mask_previous: bool = True,
    rows: int | None = None,
    interpret: bool = False,
) -> Float[Array, "b n i"]:
    """`attend_window` of projections in one kernel, also under a mesh, where each device computes its lanes and heads.

    Queries and keys get unit length (`attention.unit`), and queries their scale. The gradient reaches all arguments but
    `previous_valid` and `multiplier`.

    Args:
        projected: a segment of n = c w tokens, with heads of i / h numbers each.
        scale: the attention scale of each head, not negative.
        bias: scaled bias at the distances 1 to w.
        previous_valid: whether the block before each block belongs to the same document.
        multiplier: dropout of the weights, shared by lanes and blocks.
        mask_previous: whether a block before that is not valid is masked; otherwise its keys and values are 0.
        rows: the number of queries in each row of the ring, of which `w` must be a multiple. None: 128, or `w` if it
            is no multiple.
        interpret: whether the kernel is interpreted, on any platform, instead of compiled for a TPU.
    """
    w = bias.shape[1]
    if rows is None:
        rows = ROWS if w % ROWS == 0 else w
    run = functools.partial(_attend, Options(rows, mask_previous, interpret))
    mesh = jax.sharding.get_abstract_mesh()
    if not mesh.empty:
        # The compiler can't divide a kernel among devices.
        lanes, heads = MESH_AXES_OF["lanes"], MESH_AXES_OF["heads"]
        tokens, by_head = PartitionSpec(lanes, None, heads), PartitionSpec(heads)
        run = jax.shard_map(
            run,
            in_specs=(Projected(*[tokens] * 5), by_head, by_head, PartitionSpec(lanes), by_head),
            out_specs=tokens,
            axis_names=set(mesh.axis_names) - set(mesh.manual_axes),
            check_vma=False,
        )
    return run(projected, scale, bias, previous_valid, multiplier)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(options: Options, projected: Projected, scale, bias, valid, multiplier) -> Array:
    return _attend_forward(options, projected, scale, bias, valid, multiplier)[0]


def _attend_forward(options, projected, scale, bias, valid, multiplier):
    grid = _Grid(projected, bias, options, backward=False)
    mixed, log_totals = grid.call(
        forward_kernel,
        (valid, scale, bias, multiplier, projected),
        (),
        outputs=(projected.value, grid.log_totals),
        output_specs=(grid.block_spec, grid.log_totals_spec),
        scratch=(),
    )
    return mixed, (valid, scale, bias, multiplier, projected, mixed, log_totals)


def _attend_backward(options, saved, cotangent):
    *inputs, projected, mixed, log_totals = saved
    _, scale, bias, _ = inputs
    grid = _Grid(projected, bias, options, backward=True)
    gradients, scale_gradient, bias_gradient = grid.call(
        backward_kernel,
        (*inputs, projected),
        ((mixed, grid.block_spec), (log_totals, grid.log_totals_spec), (cotangent, grid.block_spec)),
        outputs=(projected, jax.ShapeDtypeStruct((grid.h, 1, grid.k), jnp.float32), grid.bias),
        output_specs=(grid.specs, pl.BlockSpec((None, 1, grid.k), lambda h, b, c: (h, 0, 0)), grid.bias_spec),
        scratch=(
            pltpu.VMEM((1, grid.k), jnp.float32),
            grid.bias_row,
            Sums(*[pltpu.VMEM((grid.w, grid.k), jnp.float32)] * 4),
        ),
    )
    scale_gradient = jnp.sum(scale_gradient, axis=(1, 2)).astype(scale.dtype)
    return gradients, scale_gradient, bias_gradient[:, 0, ::-1].astype(bias.dtype), None, None


_attend.defvjp(_attend_forward, _attend_backward)


class _Grid:
    """The grid of the kernels (heads, lanes, blocks), and the parts of the arrays that a run of them sees.

    The forward pass goes through the blocks from first to last; each leaves its keys and values in scratch for the next
    one. The backward pass goes from last to first; each leaves there the gradient of the keys and values before it.
    """

    def __init__(self, projected: Projected, bias: Array, options: Options, backward: bool):
        self.options, (self.h, self.w) = options, bias.shape
        self.b, n, inner = projected.query.shape
        self.c, self.k = n // self.w, inner // self.h
        last = self.c - 1

        def at(c):
            return last - c if backward else c

        def spec(index):
            return pl.BlockSpec((None, self.w, self.k), index)

        self.block_spec = spec(lambda h, b, c: (b, at(c), h))
        before = spec(lambda h, b, c: (b, 0, h))
        self.specs = Projected(self.block_spec, self.block_spec, self.block_spec, before, before)
        self.previous_specs = [spec(lambda h, b, c: (b, jnp.maximum(at(c) - 1, 0), h))] * 2 if backward else []
        rows = options.rows
        shape = (self.w // rows, rows)
        self.log_totals = jax.ShapeDtypeStruct((self.b, self.c, self.h, *shape), jnp.float32)
        self.log_totals_spec = pl.BlockSpec((None, None, None, *shape), lambda h, b, c: (b, at(c), h, 0, 0))
        self.bias = jax.ShapeDtypeStruct((self.h, 1, self.w), jnp.float32)
        self.bias_spec = pl.BlockSpec((None, 1, self.w), lambda h, b, c: (h, 0, 0))
        # The largest of the arrays, and constant for all blocks of a head, so a second buffer for the next is no use.
        self.multiplier_spec = pl.BlockSpec(
            (None, self.w, self.w), lambda h, b, c: (h, 0, 0), pipeline_mode=pl.Buffered(1)
        )
        self.bias_row = pltpu.VMEM((rows, self.w), jnp.float32)
        self.heads = Heads(*[pltpu.VMEM((self.w, self.k), projected.query.dtype)] * 5)

    def call(self, kernel, inputs, others, *, outputs, output_specs, scratch):
        """Runs a kernel on the whole grid.

        Args:
            kernel: a function of the references to inputs, others, outputs and scratch.
            inputs: `previous_valid`, the scale, the bias by distance, the multiplier or None, and the projections.
            others: more inputs with their specs.
            outputs: arrays of the shapes and dtypes of the outputs.
        """
        valid, scale, bias, multiplier, projected = inputs
        # Reversed, because a column further on the ring is a distance less.
        bias = bias[:, None, ::-1].astype(jnp.float32)
        specs = (
            pl.BlockSpec(memory_space=pltpu.SMEM),
            pl.BlockSpec(memory_space=pltpu.SMEM),
            self.bias_spec,
            None if multiplier is None else self.multiplier_spec,
            self.specs,
            self.previous_specs,
        )
        previous = [projected.key, projected.value] if self.previous_specs else []
        return pl.pallas_call(
            functools.partial(kernel, self.options),
            grid=(self.h, self.b, self.c),
            in_specs=[*specs, *(spec for _, spec in others)],
            out_shape=jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), outputs),
            out_specs=output_specs,
            scratch_shapes=[self.bias_row, self.heads, *scratch],
            compiler_params=pltpu.CompilerParams(
                dimension_semantics=("parallel", "arbitrary", "arbitrary"), vmem_limit_bytes=VMEM_LIMIT
            ),
            interpret=self.options.interpret,
            name=kernel.__name__,
        )(
            valid.astype(jnp.int32),
            scale.astype(jnp.float32),
            bias,
            multiplier,
            projected,
            previous,
            *(x for x, _ in others),
        )
