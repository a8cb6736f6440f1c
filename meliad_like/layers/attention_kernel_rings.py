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

from meliad_like.layers.attention import LOWEST


class Kernel(NamedTuple):
    """A kernel for windows of `length` tokens. Its inputs are a tuple of projections, scale, bias, whether the block
    before is visible, and what dropout keeps [h, p, r, r], where block `c` has entry `c % p`."""

    forward: Callable[[tuple], tuple[Array, Array]]
    """inputs -> the outputs [b, n, i], and the logarithms of the sums of the weights [b, c, h, r / rows, rows]."""
    backward: Callable[[tuple, Array, Array, Array], tuple[Any, Array, Array]]
    """(inputs, outputs, logarithms, cotangent) -> the gradients of projections, scale and bias."""
    length: int
    rows: int
    mask_previous: bool


class _Ring(NamedTuple):
    """One of the narrower windows."""

    inputs: tuple
    """The inputs of the kernel."""
    visible: Bool[Array, "b c 1 1 1"]
    """Whether keys of the query's own block are visible; where they are not, none of the block before is."""
    largest: Array
    """The largest visible bias, which the kernel subtracts from the scores; it broadcasts to the logarithms."""


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def attend_in_rings(kernel: Kernel, *inputs) -> Array:
    """The outputs [b, n, i] for a window that is a multiple of the kernel's. Without `mask_previous`, a block before
    that is not visible has keys and values of 0."""
    return _forward(kernel, *inputs)[0]


def _forward(kernel: Kernel, *inputs):
    rings = _rings(kernel, *inputs)
    outputs, logs = zip(*(kernel.forward(ring.inputs) for ring in rings))
    if len(rings) == 1:
        return outputs[0], (inputs, outputs[0], logs[0])
    largest = _largest(rings)
    logs = [jnp.where(ring.visible, log + (ring.largest - largest), -jnp.inf) for ring, log in zip(rings, logs)]
    log = jax.nn.logsumexp(jnp.stack(logs), axis=0)
    b, n, inner = outputs[0].shape
    mixed = jnp.zeros((), jnp.float32)
    for each, ring_log in zip(outputs, logs):
        share = jnp.moveaxis(jnp.exp(ring_log - log), 2, -1).reshape(b, n, -1)
        mixed += each * jnp.repeat(share, inner // share.shape[-1], axis=-1)
    mixed = mixed.astype(outputs[0].dtype)
    return mixed, (inputs, mixed, log)


def _backward(kernel: Kernel, saved, cotangent):
    (projected, scale, bias, *others), mixed, log = saved
    rings = _rings(kernel, projected, scale, bias, *others)

    def differentiable(*inputs):
        return [ring.inputs[:3] for ring in _rings(kernel, *inputs, *others)]

    _, pull_back = jax.vjp(differentiable, projected, scale, bias)
    largest = _largest(rings)
    gradients = []
    for ring in rings:
        # With a logarithm of inf, all weights are 0.
        ring_log = jnp.where(ring.visible, log - (ring.largest - largest), jnp.inf)
        gradients.append(kernel.backward(ring.inputs, mixed, ring_log, cotangent))
    return *pull_back(gradients), None, None


attend_in_rings.defvjp(_forward, _backward)


def _largest(rings: list[_Ring]) -> Array:
    return functools.reduce(jnp.maximum, [jnp.where(ring.visible, ring.largest, LOWEST) for ring in rings])


def _rings(kernel: Kernel, projected, scale, bias, previous_valid, kept) -> list[_Ring]:
    """The narrower windows, by distance, and what the kernel needs for each."""
    r, (h, w), (b, n, inner) = kernel.length, bias.shape, projected.query.shape
    if (num_rings := w // r) == 1:
        kept = None if kept is None else kept[:, None]
        return [_Ring((projected, scale, bias, previous_valid, kept), jnp.array(True), jnp.array(0.0))]
    keys, values = (
        jnp.concatenate(pair, axis=1)
        for pair in ((projected.before_key, projected.key), (projected.before_value, projected.value))
    )
    rings = []
    for j in range(num_rings):
        # In units of `r`: the place of a block in its window, and whether its own and the previous keys are visible.
        place = jnp.arange(num_rings)
        own, previous = ((previous_valid[..., None] | inside).reshape(b, n // r) for inside in (place >= j, place > j))
        begin = w - j * r
        key, value = (x[:, begin : begin + n] for x in (keys, values))
        if not kernel.mask_previous:
            key, value = (
                jnp.where(own[..., None, None], x.reshape(b, n // r, r, inner), 0).reshape(x.shape)
                for x in (key, value)
            )
        moved = projected._replace(
            key=key, value=value, before_key=keys[:, begin - r : begin], before_value=values[:, begin - r : begin]
        )
        part = bias[:, j * r : (j + 1) * r]
        inputs = moved, scale, part, previous, None if kept is None else _kept(kept, j, num_rings)
        part = jax.lax.stop_gradient(part).astype(jnp.float32)
        largest = jnp.max(part, axis=1)[None, None, :, None, None]
        if kernel.mask_previous:
            # A query at offset t sees the first t distances in its own block.
            within = jnp.concatenate([jnp.full((h, 1), LOWEST), jax.lax.cummax(part, axis=1)[:, :-1]], axis=1)
            within = within.reshape(h, r // kernel.rows, kernel.rows)
            largest = jnp.where(previous[..., None, None, None], largest, within)
        else:
            own = jnp.ones_like(own)
        rings.append(_Ring(inputs, own[..., None, None, None], largest))
    return rings


def _kept(kept: Array, j: int, num_rings: int) -> Array:
    """What dropout keeps of ring `j`, [h, w / r, r, r], of what it keeps of the window, [h, w, w]."""
    h, w, _ = kept.shape
    r = w // num_rings
    tiles = kept.reshape(h, num_rings, r, num_rings, r)
    within_block = np.tri(r, k=-1, dtype=bool)
    by_place = [
        jnp.where(within_block, *(tiles[:, place, :, (place - j - before) % num_rings] for before in (0, 1)))
        for place in range(num_rings)
    ]
    return jnp.stack(by_place, axis=1)
