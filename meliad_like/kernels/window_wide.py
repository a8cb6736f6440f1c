"""Attention to a window that is too wide for one run of a kernel, as attention to several narrower windows.

A query's keys at the distances `j r + 1` to `(j + 1) r` are those that it would have in a window of `r` tokens if all
keys stood `j r` places further on. So for every `j` below `w / r` the kernel runs with keys and values that are moved
by `j` blocks of `r`, and with its part of the bias. The results are averaged by the sums of their weights, of which the
kernel gives the logarithms. Its backward pass computes the weights from the logarithm of the sum over all of them (Dao
et al. 2022, FlashAttention, section 3.1 and appendix B).
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool

from meliad_like.layers.attention import LOWEST, unit


class Passes(NamedTuple):
    """The two passes of a kernel for windows of `length` tokens. Its inputs are a tuple of projections, scale, bias,
    whether the block before is visible, and what dropout keeps [h, p, r, r], where block `c` has entry `c % p`."""

    forward: Callable[[tuple], tuple[Array, Array]]
    """The function inputs -> outputs [b, n, i], and logarithms of the sums of the weights [b, c, h, r / rows, rows]."""
    backward: Callable[[tuple, Array, Array, Array], tuple[Any, Array, Array]]
    """The function (inputs, outputs, logarithms, cotangent) -> the gradients of projections, scale and bias."""
    length: int
    rows: int
    mask_previous: bool


class _Part(NamedTuple):
    """One of the narrower windows."""

    inputs: tuple
    """The inputs of the kernel."""
    visible: Bool[Array, "b c 1 1 1"]
    """Whether keys of the query's own block are visible; where they are not, none of the block before is."""
    largest: Array
    """The largest visible bias, which the kernel subtracts from the scores; it broadcasts to the logarithms."""


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def attend_wide_window(passes: Passes, *inputs) -> Array:
    """The outputs [b, n, i] for a window that is a multiple of the kernel's.

    The inputs are the kernel's, but what dropout keeps is [h, w, w]. If the window is as long as the kernel's, keys are
    raw; otherwise the kernel gets keys of unit length. Without `mask_previous`, a block before that is not visible has
    keys and values of 0.
    """
    return _forward(passes, *inputs)[0]


def _forward(passes: Passes, *inputs):
    parts = _parts(passes, *inputs)
    outputs, logs = zip(*(passes.forward(part.inputs) for part in parts))
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


def _backward(passes: Passes, saved, cotangent):
    (projected, scale, bias, *others), mixed, log = saved

    def parts_of(*inputs):
        parts = _parts(passes, *inputs, *others)
        return [part.inputs[:3] for part in parts], parts

    _, pull_back, parts = jax.vjp(parts_of, projected, scale, bias, has_aux=True)
    largest = _largest(parts)
    gradients = []
    for part in parts:
        # With a logarithm of inf, all weights are 0.
        part_log = jnp.where(part.visible, log - (part.largest - largest), jnp.inf)
        gradients.append(passes.backward(part.inputs, mixed, part_log, cotangent))
    return *pull_back(gradients), None, None


attend_wide_window.defvjp(_forward, _backward)


def _largest(parts: list[_Part]) -> Array:
    return functools.reduce(jnp.maximum, [jnp.where(part.visible, part.largest, LOWEST) for part in parts])


def _parts(passes: Passes, projected, scale, bias, previous_valid, kept) -> list[_Part]:
    """The narrower windows, by distance, with the kernel's inputs for each."""
    r, (h, w), (b, n, inner) = passes.length, bias.shape, projected.query.shape
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
        if not passes.mask_previous:
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
        if passes.mask_previous:
            # A query at offset t sees the first t distances in its own block.
            within = jnp.concatenate([jnp.full((h, 1), LOWEST), jax.lax.cummax(part_bias, axis=1)[:, :-1]], axis=1)
            within = within.reshape(h, r // passes.rows, passes.rows)
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
