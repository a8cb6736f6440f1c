"""Attention to a span of tokens on TPUs by JAX's splash attention, which writes no scores to memory.

What no query of a tile sees by its distance alone is not computed. Numbers tell documents apart.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

from meliad_like.kernels.window_tpu import ROWS, sharded_on_mesh
from meliad_like.layers.losses import divisor
from meliad_like.layers.sharding import MESH_AXES_OF

TILE = 4
"""The largest number of `ROWS` along each side of a tile of scores."""


def attend_span_in_kernel(
    query: Float[Array, "b h n k"],
    key: Float[Array, "b g s k"],
    value: Float[Array, "b g s k"],
    query_document: Int[Array, "b n"],
    key_document: Int[Array, "b s"],
    span: int,
    *,
    interpret: bool = False,
) -> Float[Array, "b h n k"]:
    """Attention of the last `n` of `s` tokens to those of the same document among the last `span`, themselves included.

    `query` has its scale; consecutive heads share a head of keys. Under a mesh each device computes its lanes and heads
    (`sharded_on_mesh`).
    """

    def run(query, key, value, *documents) -> Any:
        kernel = _kernel(query.shape[1], query.shape[2], key.shape[2], span, interpret)
        return jax.vmap(kernel)(query, key, value, splash.SegmentIds(*documents))

    if key.shape[1] % jax.sharding.get_abstract_mesh().shape.get(MESH_AXES_OF["heads"], 1):
        # Fewer heads of keys than devices that divide the heads of queries.
        key, value = (jnp.repeat(y, query.shape[1] // key.shape[1], axis=1) for y in (key, value))
    lanes = MESH_AXES_OF["lanes"]
    by_head, by_lane = PartitionSpec(lanes, MESH_AXES_OF["heads"]), PartitionSpec(lanes)
    run = sharded_on_mesh(run, (by_head, by_head, by_head, by_lane, by_lane), by_head)
    return run(query, key, value, query_document, key_document)


def _kernel(h: int, n: int, s: int, span: int, interpret: bool) -> splash.SplashAttentionKernel:
    rows, columns = (ROWS * divisor(length // ROWS, TILE) for length in (n, s))
    of_rows = dict.fromkeys(("block_q", "block_q_dkv", "block_q_dq"), rows)
    of_columns = dict.fromkeys(("block_kv", "block_kv_dkv", "block_kv_dq"), columns)
    mask = masks.LocalMask((n, s), window_size=(span - 1, 0), offset=s - n)
    # Arrays that the kernel reads, which tracing must not make part of another program.
    with jax.ensure_compile_time_eval():
        return splash.make_splash_mha_single_device(
            masks.MultiHeadMask([mask] * h), block_sizes=splash.BlockSizes(**of_rows, **of_columns), interpret=interpret
        )
