"""How many files somebody has to open who follows a forward pass, or a decoded token: those that a profiler visits."""

import functools
import sys
from pathlib import Path

import jax
import jax.numpy as jnp

from meliad_like.models.decoder import DecoderConfig
from meliad_like.models.model import Model

PACKAGE = Path(__file__).parent.parent / "meliad_like"


def files_visited(function, *arguments) -> set[str]:
    """The files of the package whose functions are called while `function` is traced."""
    visited = set()

    def visit(frame, event, _):
        if event == "call":
            visited.add(frame.f_code.co_filename)

    # What is cached, such as shapes of parameters, is made before.
    jax.eval_shape(function, *arguments)
    jax.clear_caches()
    sys.setprofile(visit)
    try:
        jax.eval_shape(functools.partial(function), *arguments)
    finally:
        sys.setprofile(None)
    return {Path(name).relative_to(PACKAGE).as_posix() for name in visited if Path(name).is_relative_to(PACKAGE)}


MODEL = Model(DecoderConfig(num_layers=2), 256)
LANES, BLOCKS = 2, 2


def test_a_forward_pass_with_its_loss():
    def losses(params, carry, tokens, start):
        return MODEL.bind(params).losses(tokens, tokens, carry, start, slice_length=512)

    tokens = jnp.zeros((LANES, BLOCKS * MODEL.config.window_length), jnp.int32)
    visited = files_visited(
        losses, MODEL.abstract_params, MODEL.abstract_carry(LANES), tokens, jnp.zeros((LANES, BLOCKS), bool)
    )
    assert len(visited) <= 10, sorted(visited)


def test_a_decoded_token():
    def decode(params, carry, token):
        return MODEL.bind(params).decode_step(token, carry)

    carry = MODEL.abstract_carry(LANES, decoding=True)
    visited = files_visited(decode, MODEL.abstract_params, carry, jnp.zeros(LANES, jnp.int32))
    assert len(visited) <= 8, sorted(visited)
