"""Different ways to compute the same result with models of any family: whole segments, and token by token."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

W, V = 4, 50


@functools.partial(jax.jit, static_argnums=0)
def read(model, params, tokens, carry, start):
    """Reads a segment at once; returns logits [b, n, v] and the carry after it."""
    module = model.bind(params)
    hidden, carry = module(tokens, carry, start)
    return module.logits(hidden), carry


@functools.partial(jax.jit, static_argnums=0)
def decode(model, params, tokens, carry):
    """Reads token by token; returns logits [b, n, v] and the carry after them."""
    module = model.bind(params)

    def step(carry, token):
        logits, carry = module.decode_step(token, carry)
        return carry, logits

    carry, logits = jax.lax.scan(step, carry, tokens.T)
    return jnp.moveaxis(logits, 0, 1), carry


def begin(model, params, b, decoding=False):
    return model.bind(params).init_carry(b, decoding=decoding)


def tokens_of(b, blocks, seed=0):
    return np.random.default_rng(seed).integers(0, V, (b, blocks * W), np.int32)


def starts(b, blocks, *at):
    """bool[b, blocks]: true at the places (lane, block)."""
    flags = np.zeros((b, blocks), bool)
    for lane, block in at:
        flags[lane, block] = True
    return flags


def assert_same(ours, theirs):
    jax.tree.map(functools.partial(np.testing.assert_allclose, atol=1e-5, rtol=0), ours, theirs)
