"""Token ids that are not in the vocabulary are an error, or make the loss NaN where their values are not known."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meliad_like.errors import UserError
from meliad_like.families.pretrained.config import PretrainedConfig
from meliad_like.families.pretrained.recurrence import WindowSummary
from meliad_like.families.shortformer import ShortformerConfig
from meliad_like.layers.basic import embed
from meliad_like.models.decoder import DecoderConfig
from meliad_like.models.model import Model

V, W = 64, 4
SIZES = {"num_layers": 1, "model_width": 8, "num_heads": 2, "head_size": 4, "feedforward_width": 8, "window_length": W}
RECURRENT = {"recurrence": (WindowSummary(layers=(0,), width=5, depth=1),)}
CONFIGS = {
    "decoder": DecoderConfig(**SIZES),
    "shortformer": ShortformerConfig(**SIZES, cache_length=W, cutoffs=()),
    "shortformer in bands": ShortformerConfig(**SIZES, cache_length=W, cutoffs=(16, 32), band_factor=2),
    "pretrained": PretrainedConfig(**SIZES, num_key_value_heads=2, max_positions=W),
    "recurrent pretrained": PretrainedConfig(**SIZES, num_key_value_heads=2, max_positions=W, **RECURRENT),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_an_id_out_of_range_does_not_pass_for_another_token(name):
    model = Model(CONFIGS[name], V)
    params = model.init(jax.random.key(0))
    start = np.zeros((2, 2), bool)

    def read(params, tokens):
        module = model.bind(params)
        hidden, _ = module(tokens, module.init_carry(2), start)
        return module.logits(hidden)

    compiled = jax.jit(read)
    for wrong in (-1, V):
        tokens = np.full((2, 2 * W), 3, np.int32)
        tokens[1, 1] = wrong
        with pytest.raises(UserError, match=f"^token {wrong} is not in the vocabulary, whose ids are 0 to {V - 1}$"):
            read(params, tokens)
        logits = compiled(params, tokens)
        assert np.isnan(logits[1, 1]).all() and np.isfinite(logits[0]).all()


def test_rows_and_their_gradient_are_those_of_a_table():
    table = np.random.default_rng(0).standard_normal((V, 3), np.float32)
    tokens = np.random.default_rng(1).integers(0, V, (2, 50), np.int32)
    np.testing.assert_array_equal(embed(jnp.asarray(table), tokens), table[tokens])
    gradient = jax.jit(jax.grad(lambda table: jnp.sum(embed(table, tokens))))(table)
    np.testing.assert_array_equal(gradient[:, 0], np.bincount(tokens.ravel(), minlength=V))
