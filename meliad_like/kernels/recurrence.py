"""What the kernels for linear recurrences on all platforms share."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Float, Int

from meliad_like.kernels.common import HEADS, LANES, sharded_on_mesh, sharded_vectors
from meliad_like.layers.linear_recurrence import Rule
from meliad_like.layers.sharding import scan_in_order


def read_on_mesh(
    read: Callable[[Rule, Array, Array], tuple[Array, Array]],
    rule: Rule,
    matrix: Float[Array, "b h p k"],
    start: Bool[Array, "b c"],
) -> tuple[Float[Array, "b h p k"], Float[Array, "b h n p"]]:
    """Runs a kernel with arguments and results as `read_chunks`; under a mesh, each device runs it for its lanes and
    heads."""
    by_lane, by_head = PartitionSpec(LANES), PartitionSpec(LANES, HEADS)
    groups = rule.query.shape[1]
    # All devices have a group that all heads share.
    shared = by_head if groups > 1 else by_lane
    if groups > 1 and groups % jax.sharding.get_abstract_mesh().shape.get(HEADS, 1):
        # A mesh that can't divide the groups divides the heads, each with its own queries and keys: of several groups,
        # a device could not tell which one its heads belong to.
        query, key = (jnp.repeat(x, rule.value.shape[1] // groups, axis=1) for x in (rule.query, rule.key))
        rule = rule._replace(query=query, key=key)
    of_rule = Rule(shared, shared, *(None if x is None else by_head for x in rule[2:]))

    def run(rule, matrix, start):
        return scan_in_order(lambda matrix: read(rule, matrix, start), matrix)

    return sharded_on_mesh(run, (of_rule, by_head, by_lane), (by_head, by_head))(rule, matrix, start)


def scan_on_mesh(
    scan: Callable[..., Any],
    decay: Float[Array, "b n channels"],
    added: Float[Array, "b n channels"],
    state: Float[Array, "b channels"],
) -> tuple[Float[Array, "b channels"], Float[Array, "b n channels"]]:
    """Runs a kernel with the arguments of `scan_channels` that returns the states after all tokens; under a mesh, each
    device runs it for its lanes and channels. Returns what `scan_channels` does."""
    vectors = sharded_vectors(state.shape[1])
    of_state = PartitionSpec(vectors[0], vectors[2])

    def run(decay, added, state):
        def scan_blocks(state):
            states = scan(decay, added, state)
            return states[:, -1], states

        return scan_in_order(scan_blocks, state)

    return sharded_on_mesh(run, (vectors, vectors, of_state), (of_state, vectors))(decay, added, state)


def times(dtype: Any, x: Array, factor: Array) -> Array:
    """The product with a factor in float32, rounded to the dtype of the factors of products."""
    return (x.astype(jnp.float32) * factor).astype(dtype)


def begins_document(start: Bool[Array, "b blocks"], num_chunks: int) -> Int[Array, "b c"]:
    """1 for the chunks with which a document begins, otherwise 0."""
    in_block = num_chunks // start.shape[1]
    return (jnp.repeat(start, in_block, axis=1) & (jnp.arange(num_chunks) % in_block == 0)).astype(jnp.int32)
