"""Makes rounding larger on purpose, to find tests whose outcome depends on it, and so on the processor.

With LARGER_ROUNDING=1, every number of every gradient that a training step computes changes by a relative 1e-6 at most.
The change is a function of the number's bits: equal gradients stay equal, and two that differ in their last bit get
changes that have nothing in common.
"""

import os

import jax
import jax.numpy as jnp


def rounded(x: jax.Array) -> jax.Array:
    """The float32 numbers of x, each with a relative change between -1e-6 and 1e-6."""
    bits = jax.lax.bitcast_convert_type(x.astype(jnp.float32), jnp.uint32)
    # The finaliser of MurmurHash3.
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        bits = (bits ^ (bits >> shift)) * jnp.uint32(factor)
    share = ((bits ^ (bits >> 16)) >> 8).astype(jnp.float32) / 2**23 - 1
    return (x * (1 + 1e-6 * share)).astype(x.dtype)


def install() -> None:
    """Changes the gradients of the training steps that this process makes, if the environment asks for it."""
    if os.environ.get("LARGER_ROUNDING") != "1":
        return
    from meliad_like.training import step

    accumulated = step._accumulated

    def accumulated_and_rounded(differentiate, parts):
        def rounded_gradient(*arguments):
            gradient, others = differentiate(*arguments)
            return jax.tree.map(rounded, gradient), others

        return accumulated(rounded_gradient, parts)

    step._accumulated = accumulated_and_rounded
