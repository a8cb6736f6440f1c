"""Pallas kernels for NVIDIA GPUs (Triton) that compute `scan_channels` (`layers/linear_recurrence.py`).

One program takes some channels through a part of the tokens. A first kernel composes the maps h -> a h + x of these
tokens. The compositions of all parts give the states before each part, from which a second kernel computes all states.
The backward pass takes the gradients of the states through the tokens in the same way, from last to first.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import triton
from jaxtyping import Array, Float

from meliad_like.kernels.common import Grid, differentiable
from meliad_like.kernels.recurrence import scan_on_mesh
from meliad_like.layers.linear_recurrence import compose

TOKENS, CHANNELS = 64, 128
"""The most tokens and channels of a program. Compiled for a GPU, the channels must be a multiple of `CHANNELS`."""
LOADED = 8
"""The most tokens that are loaded at once, so that programs wait less often for memory."""


def fits(block: int, channels: int) -> bool:
    """Whether the kernels can be compiled for this number of tokens in a block, and of channels."""
    return block % LOADED == 0 and channels % CHANNELS == 0


def scan_in_kernel(
    decay: Float[Array, "b n channels"],
    added: Float[Array, "b n channels"],
    state: Float[Array, "b channels"],
    *,
    interpret: bool = False,
) -> tuple[Float[Array, "b channels"], Float[Array, "b n channels"]]:
    """Computes `scan_channels`, also under a mesh, where each device computes its lanes and channels.

    Args:
        interpret: whether the kernels are interpreted, on any platform, instead of compiled for a GPU.
    """
    return scan_on_mesh(functools.partial(_scan, interpret), decay, added, state)


def _scan_forward(interpret, decay, added, state):
    before = _before_parts(interpret, decay, added, state, reversed=False)
    [states] = _call(interpret, states_kernel, [decay, added], [before], 1)
    return states, (decay, states, before)


def _scan_backward(interpret, saved, cotangent):
    decay, states, before = saved
    through = _before_parts(interpret, decay, cotangent, jnp.zeros_like(decay[:, 0]), reversed=True)
    of_decay, of_added = _call(interpret, gradients_kernel, [decay, cotangent, states], [through, before], 2)
    return of_decay, of_added, decay[:, 0] * of_added[:, 0]


_scan = differentiable(_scan_forward, _scan_backward)


def _before_parts(
    interpret: bool,
    decay: Float[Array, "b n channels"],
    added: Float[Array, "b n channels"],
    first: Float[Array, "b channels"],
    reversed: bool,
) -> Float[Array, "b parts channels"]:
    """The states before each part, of h_t = a_t h_{t-1} + x_t; if `reversed` after it, of h_t = a_t (h_{t+1} + x_t)."""
    kernel = functools.partial(composing_kernel, reversed)
    composed = _call(interpret, kernel, [decay, added], [], 2, for_parts=True)
    of_first, total = jax.lax.associative_scan(compose, tuple(composed), axis=1, reverse=reversed)
    first = first[:, None]
    after = of_first * first + total
    return jnp.concatenate([after[:, 1:], first] if reversed else [first, after[:, :-1]], axis=1)


def _call(
    interpret: bool,
    kernel: Callable[..., None],
    of_tokens: Sequence[Float[Array, "b n channels"]],
    of_parts: Sequence[Float[Array, "b parts channels"]],
    number: int,
    *,
    for_parts: bool = False,
) -> list[Any]:
    """Runs a kernel that writes this number of arrays with a vector for each token, or `for_parts` for each part."""
    b, n, channels = of_tokens[0].shape
    t, width = math.gcd(n, TOKENS), math.gcd(channels, CHANNELS)
    sizes = {"b": None, "p": None, "n": t, "i": width}
    grid = Grid({"p": n // t, "i": channels // width, "b": b}, sizes, {"n": "p"})
    written = jax.ShapeDtypeStruct((b, n // t if for_parts else n, channels), jnp.float32)
    read = [(x, "bni") for x in of_tokens] + [(x, "bpi") for x in of_parts]
    results = [(written, "bpi" if for_parts else "bni")] * number
    return grid.call(kernel, read, results, triton.CompilerParams(num_warps=1), interpret=interpret)


def composing_kernel(reversed, decay, added, of_first, total):
    """Writes the composed map of a part's tokens."""

    def load(token):
        a, x = decay[token, :], added[token, :]
        return a, a * x if reversed else x

    def step(composed, token, a, x):
        return compose(composed, (a, x))

    first = jnp.ones_like(of_first), jnp.zeros_like(total)
    of_first[...], total[...] = _in_order(len(decay), load, step, first, reversed)


def states_kernel(decay, added, before, states):
    """Writes the state after every token."""

    def load(token):
        return decay[token, :], added[token, :]

    def step(state, token, a, x):
        states[token, :] = state = a * state + x
        return state

    _in_order(len(decay), load, step, before[...])


def gradients_kernel(decay, cotangent, states, through, before, of_decay, of_added):
    """Writes the gradients. `through` is the part of that of a state which comes through later tokens."""
    before_all = before[...]

    def load(token):
        earlier = jnp.where(token == 0, before_all, states[jnp.maximum(token - 1, 0), :])
        return decay[token, :], cotangent[token, :], earlier

    def step(through, token, a, of_state, earlier):
        of_added[token, :] = gradient = of_state + through
        of_decay[token, :] = gradient * earlier
        return a * gradient

    _in_order(len(decay), load, step, through[...], reversed=True)


def _in_order(
    tokens: int, load: Callable[..., tuple], step: Callable[..., Any], carry: Any, reversed: bool = False
) -> Any:
    """The last result of `step(carry, token, *load(token)) -> carry` over all tokens, if `reversed` the last first."""
    loaded = math.gcd(tokens, LOADED)

    def some(i, carry):
        order = [i * loaded + j for j in range(loaded)]
        order = [tokens - 1 - token for token in order] if reversed else order
        for token, vectors in [(token, load(token)) for token in order]:
            carry = step(carry, token, *vectors)
        return carry

    return jax.lax.fori_loop(0, tokens // loaded, some, carry)
