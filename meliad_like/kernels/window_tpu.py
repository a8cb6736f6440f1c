"""A Pallas kernel for TPUs that computes `attend_window` (`layers/attention.py`) without writing scores to memory.

A window that is too wide for one run of the kernel is computed as several narrower windows. A query's keys at the
distances `j r + 1` to `(j + 1) r` are those that it would have in a window of `r` tokens if all keys stood `j r` places
further on. So for every `j` below `w / r` the kernel runs with keys and values that are moved by `j` blocks of `r`, and
with its part of the bias. The results are averaged by the sums of their weights, of which the kernel gives the
logarithms. Its backward pass computes the weights from the logarithm of the sum over all of them (Dao et al. 2022,
FlashAttention, section 3.1 and appendix B).
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, Float

from meliad_like.kernels import window_tpu_programs as programs
from meliad_like.kernels.common import HEADS, LANES, Interpret, differentiable, largest_part, sharded_on_mesh
from meliad_like.kernels.window_tpu_programs import Options, Projected, rows_of
from meliad_like.layers.attention import LOWEST, unit

WIDEST = 1024
"""The widest window that one run of the kernel computes: one of 2,048 would need 32.5 of v4's 16 MiB."""


def attend_window_in_kernel(
    projected: Projected,
    scale: Float[Array, " h"],
    bias: Float[Array, "h w"],
    previous_valid: Bool[Array, "b c"],
    kept: Bool[Array, "h w w"] | None = None,
    *,
    dropout_rate: float,
    mask_previous: bool = True,
    rows: int | None = None,
    widest: int = WIDEST,
    interpret: Interpret = False,
) -> Float[Array, "b n i"]:
    """`attend_window` of projections in one kernel, also under a mesh, where each device computes its lanes and heads.

    Queries and keys get unit length (`attention.unit`), and queries their scale. The gradient reaches all arguments but
    `previous_valid` and `kept`.

    Args:
        projected: a segment of n = c w tokens, with heads of i / h numbers each.
        scale: the attention scale of each head, not negative.
        bias, previous_valid: as for `attend_window`.
        kept, dropout_rate: the weights that dropout keeps, and its rate; None: all.
        mask_previous: whether a block before that is not valid is masked; otherwise its keys and values are 0.
        rows: the number of queries in each row of the ring; a divisor of `w`. None: 128, or `w` if 128 is none.
        widest: a wider window is computed as several, best of a length near this one.
    """
    w = bias.shape[1]
    rows = rows or rows_of(w)
    length = largest_part(w, widest, rows)
    run = functools.partial(_attend, Options(length, rows, mask_previous, dropout_rate, length < w, interpret))
    # A number for each weight, so in bytes: they must fit into the chip's own memory.
    kept = None if kept is None else kept.astype(jnp.int8)
    return sharded_by_head(run)(projected, scale, bias, previous_valid, kept)


def sharded_by_head(run: Callable[..., Array]) -> Callable[..., Array]:
    """`run`, a function of the arguments of `attend_window_in_kernel`, on the mesh."""
    tokens, by_head = PartitionSpec(LANES, None, HEADS), PartitionSpec(HEADS)
    return sharded_on_mesh(run, (Projected(*[tokens] * 5), by_head, by_head, PartitionSpec(LANES), by_head), tokens)


class _Part(NamedTuple):
    """One of the narrower windows."""

    inputs: tuple
    """The inputs of the kernel."""
    visible: Bool[Array, "b c 1 1 1"]
    """Whether keys of the query's own block are visible; where they are not, none of the block before is."""
    largest: Array
    """The largest visible bias, which the kernel subtracts from the scores; it broadcasts to the logarithms."""


def _forward(options: Options, *inputs):
    parts = _parts(options, *inputs)
    outputs, logs = zip(*(programs.forward(options, part.inputs) for part in parts))
    if len(parts) == 1:
        return outputs[0], (inputs, outputs[0], logs[0])
    largest = _largest(parts)
    logs = jnp.stack(
        [jnp.where(part.visible, log + (part.largest - largest), -jnp.inf) for part, log in zip(parts, logs)]
    )
    b, n, inner = outputs[0].shape
    mixed = jnp.zeros((), jnp.float32)
    # Normalised by their own sum, because a logarithm of large scores is rounded.
    for each, share in zip(outputs, jax.nn.softmax(logs, axis=0)):
        by_token = jnp.moveaxis(share, 2, -1).reshape(b, n, -1)
        mixed += each * jnp.repeat(by_token, inner // by_token.shape[-1], axis=-1)
    mixed = mixed.astype(outputs[0].dtype)
    return mixed, (inputs, mixed, jax.nn.logsumexp(logs, axis=0))


def _backward(options: Options, saved, cotangent):
    (projected, scale, bias, *others), mixed, log = saved

    def parts_of(*inputs):
        parts = _parts(options, *inputs, *others)
        return [part.inputs[:3] for part in parts], parts

    _, pull_back, parts = jax.vjp(parts_of, projected, scale, bias, has_aux=True)
    largest = _largest(parts)
    gradients = []
    for part in parts:
        # With a logarithm of inf, all weights are 0.
        part_log = jnp.where(part.visible, log - (part.largest - largest), jnp.inf)
        gradients.append(programs.backward(options, part.inputs, mixed, part_log, cotangent))
    return *pull_back(gradients), None, None


_attend = differentiable(_forward, _backward)


def _largest(parts: list[_Part]) -> Array:
    return functools.reduce(jnp.maximum, [jnp.where(part.visible, part.largest, LOWEST) for part in parts])


def _parts(options: Options, projected, scale, bias, previous_valid, kept) -> list[_Part]:
    """The narrower windows, by distance, with the kernel's inputs for each; keys have unit length if there are several.
    Without `mask_previous`, a block before that is not visible has keys and values of 0."""
    r, (h, w), (b, n, inner) = options.length, bias.shape, projected.query.shape
    if (num_parts := w // r) == 1:
        kept = None if kept is None else kept[:, None]
        return [_Part((projected, scale, bias, previous_valid, kept), jnp.array(True), jnp.array(0.0))]
    key = unit(projected.key.reshape(b, n, h, -1)).reshape(b, n, inner)
    keys = jnp.concatenate([projected.before_key, key], axis=1)
    values = jnp.concatenate([projected.before_value, projected.value], axis=1)
    # The place of each block of `r` in its window.
    place = jnp.arange(num_parts)
    parts = []
    for j in range(num_parts):
        own_visible, previous_visible = (
            (previous_valid[..., None] | in_window).reshape(b, n // r) for in_window in (place >= j, place > j)
        )
        begin = w - j * r
        key, value = (x[:, begin : begin + n] for x in (keys, values))
        if not options.mask_previous:
            key, value = (
                jnp.where(own_visible[..., None, None], x.reshape(b, n // r, r, inner), 0).reshape(x.shape)
                for x in (key, value)
            )
        moved = projected._replace(
            key=key, value=value, before_key=keys[:, begin - r : begin], before_value=values[:, begin - r : begin]
        )
        part_bias = bias[:, j * r : (j + 1) * r]
        inputs = moved, scale, part_bias, previous_visible, None if kept is None else _kept(kept, j, num_parts)
        part_bias = jax.lax.stop_gradient(part_bias).astype(jnp.float32)
        largest, visible = jnp.max(part_bias, axis=1)[:, None, None], jnp.ones_like(own_visible)
        if options.mask_previous:
            # A query at offset t sees the first t distances in its own block.
            within = jnp.concatenate([jnp.full((h, 1), LOWEST), jax.lax.cummax(part_bias, axis=1)[:, :-1]], axis=1)
            within = within.reshape(h, r // options.rows, options.rows)
            largest, visible = jnp.where(previous_visible[..., None, None, None], largest, within), own_visible
        parts.append(_Part(inputs, visible[..., None, None, None], largest))
    return parts


def _kept(kept: Array, j: int, num_parts: int) -> Array:
    """The weights that dropout keeps of part `j`, [h, w / r, r, r], from those of the window, [h, w, w]."""
    h, w, _ = kept.shape
    r = w // num_parts
    tiles = kept.reshape(h, num_parts, r, num_parts, r)
    within_block = np.tri(r, k=-1, dtype=bool)
    by_place = [
        jnp.where(within_block, *(tiles[:, place, :, (place - j - before) % num_parts] for before in (0, 1)))
        for place in range(num_parts)
    ]
    return jnp.stack(by_place, axis=1)
