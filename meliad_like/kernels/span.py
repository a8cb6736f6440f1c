"""Attention to a span of tokens by kernels of JAX's own, which write no scores to memory: splash attention on TPUs, and
cuDNN's on NVIDIA GPUs.

Splash attention does not compute what no query of a tile sees by its distance alone. cuDNN gets a mask, which all heads
of a lane share.
"""

import functools
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from einops import rearrange
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

from meliad_like.kernels.common import HEADS, LANES, largest_part, sharded_on_mesh
from meliad_like.kernels.window_tpu_programs import ROWS

LARGEST = 4 * ROWS
"""The most queries, and the most keys, of a tile of scores."""


def attend_span_in_kernel(
    query: Float[Array, "b h n k"],
    key: Float[Array, "b g s k"],
    value: Float[Array, "b g s k"],
    query_document: Int[Array, "b n"],
    key_document: Int[Array, "b s"],
    span: int,
    *,
    run: Callable[..., Array],
) -> Float[Array, "b h n k"]:
    """Attention of the last `n` of `s` tokens to those of the same document among the last `span`, themselves included.

    `query` has its scale; consecutive heads share a head of keys. `run` is `splash_attention` or `cudnn_attention`;
    under a mesh each device runs it for its lanes and heads (`sharded_on_mesh`).
    """
    if key.shape[1] % jax.sharding.get_abstract_mesh().shape.get(HEADS, 1):
        # Fewer heads of keys than devices that divide the heads of queries.
        key, value = (jnp.repeat(y, query.shape[1] // key.shape[1], axis=1) for y in (key, value))
    by_head, by_lane = PartitionSpec(LANES, HEADS), PartitionSpec(LANES)

    attend = sharded_on_mesh(functools.partial(run, span), (by_head, by_head, by_head, by_lane, by_lane), by_head)
    return attend(query, key, value, query_document, key_document)


def splash_attention(span: int, query, key, value, query_document, key_document, *, interpret: bool = False) -> Any:
    (h, n), s = query.shape[1:3], key.shape[2]
    rows, columns = (largest_part(length, LARGEST, ROWS) for length in (n, s))
    of_rows = dict.fromkeys(("block_q", "block_q_dkv", "block_q_dq"), rows)
    of_columns = dict.fromkeys(("block_kv", "block_kv_dkv", "block_kv_dq"), columns)
    mask = masks.LocalMask((n, s), window_size=(span - 1, 0), offset=s - n)
    # Arrays that the kernel reads, which tracing must not make part of another program.
    with jax.ensure_compile_time_eval():
        kernel = splash.make_splash_mha_single_device(
            masks.MultiHeadMask([mask] * h), block_sizes=splash.BlockSizes(**of_rows, **of_columns), interpret=interpret
        )
    return jax.vmap(kernel)(query, key, value, splash.SegmentIds(query_document, key_document))


def cudnn_attention(
    span: int, query, key, value, query_document, key_document, *, implementation: Literal["cudnn", "xla"] = "cudnn"
) -> Array:
    """`implementation`: "xla" computes the same with scores in memory, on any device."""
    n, s = query.shape[2], key.shape[2]
    distance = np.arange(s - n, s)[:, None] - np.arange(s)
    seen = (distance >= 0) & (distance < span) & (query_document[:, :, None] == key_document[:, None])
    query, key, value = (rearrange(y, "b h n k -> b n h k") for y in (query, key, value))
    mixed = jax.nn.dot_product_attention(
        query, key, value, mask=seen[:, None], scale=1.0, implementation=implementation
    )
    return rearrange(mixed, "b n h k -> b h n k")
