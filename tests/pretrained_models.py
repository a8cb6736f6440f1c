"""A tiny GPT-2 and Llama of the pretrained family, and what their windows give."""

import functools
from pathlib import Path

import jax
import jax.numpy as jnp

from meliad_like.models.pretrained.config import PretrainedConfig

FOLDER = Path(__file__).parent / "golden" / "gpt2_tiny"
LLAMA_CONFIG = PretrainedConfig(
    architecture="llama",
    num_layers=2,
    model_width=24,
    num_heads=6,
    num_key_value_heads=2,
    head_size=4,
    feedforward_width=40,
    activation="silu",
    max_positions=32,
    window_length=32,
    norm_epsilon=1e-5,
    rotary_base=1e5,
)


@functools.partial(jax.jit, static_argnums=0)
def read(model, params, tokens, first):
    if "positions" in params:
        params = params | {"positions": jnp.roll(params["positions"], -first, axis=0)}
    module = model.bind(params)
    outputs = module.read_window(tokens)
    hidden = module.final_norm(outputs[-1])
    return outputs, hidden, module.logits(hidden)
