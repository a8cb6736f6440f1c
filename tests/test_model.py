"""The decoder: equal results of all ways of computing them, and which outputs depend on which inputs."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from decoders import recurrent, with_mixer
from dense_model import DenseModel
from ways import (
    V,
    W,
    assert_same,
    begin,
    check_documents,
    check_lanes,
    check_parts,
    check_segments,
    check_token_by_token,
    decode,
    read,
    starts,
    tokens_of,
)

from meliad_like.conversion.meliad import to_meliad
from meliad_like.families.pretrained.config import PretrainedConfig
from meliad_like.families.shortformer import ShortformerConfig
from meliad_like.layers.attention import attend, attend_window, ring_square, unit
from meliad_like.layers.basic import dropout_multiplier, tiled_dropout
from meliad_like.mixers.external_memory import ExternalMemory
from meliad_like.mixers.positions import PositionConfig, Rotary
from meliad_like.mixers.recurrent_states import RecurrentStates
from meliad_like.models.decoder import DecoderConfig
from meliad_like.models.model import Model, groups_of

SIZES = {
    "num_layers": 2,
    "model_width": 16,
    "num_heads": 2,
    "head_size": 8,
    "feedforward_width": 24,
    "window_length": W,
}
SLIDE = DecoderConfig(**SIZES)


CONFIGS = {
    "slide": SLIDE,
    **{
        f"{gate}:{cell}": with_mixer(SLIDE, RecurrentStates(num_states=3, gate=gate, cell=cell), (1,))
        for gate in ("fixed", "lstm")
        for cell in ("skip", "single", "dual")
    },
}
SKIP = CONFIGS["fixed:skip"]
CONFIGS |= {
    "rotary": dataclasses.replace(SKIP, position=Rotary()),
    "none": dataclasses.replace(SKIP, position=PositionConfig()),
    "unmasked": dataclasses.replace(SKIP, mask_empty_cache=False),
    "two": recurrent(CONFIGS["lstm:skip"], layers=(0, 1)),
}
THREE = {"num_layers": 3}
BUCKETS = ExternalMemory(num_slots=2 * W, num_neighbors=4, search="bucketed")
MEMORY = ExternalMemory(num_slots=2 * W, num_neighbors=3)
CONFIGS |= {
    "feedback": recurrent(SKIP, **THREE, feedback=True),
    "feedback of the last": recurrent(CONFIGS["lstm:single"], **THREE, layers=(0, 1), feedback=True),
    "feedback, unmasked": recurrent(SKIP, **THREE, layers=(0, 1), feedback=True, mask_empty_cache=False),
    "memory": with_mixer(SLIDE, MEMORY, (0,)),
    "memory of buckets": with_mixer(dataclasses.replace(SLIDE, mask_empty_cache=False), BUCKETS, (-2,)),
    "memory and feedback": with_mixer(recurrent(SKIP, **THREE, feedback=True, position=Rotary()), MEMORY, (0,)),
    "memory and states": with_mixer(SKIP, MEMORY, (0,)),
    "scanned": recurrent(SKIP, **THREE, layers=(1, 2), scan_layers=True),
    "scanned feedback": recurrent(SKIP, **THREE, layers=(2,), feedback=True, scan_layers=True),
}
OTHER_FAMILIES = {
    "shortformer": ShortformerConfig(**SIZES, cache_length=W, cutoffs=(10, 20), band_factor=2),
    "llama": PretrainedConfig(**SIZES, num_key_value_heads=1, max_positions=W, architecture="llama", activation="silu"),
}
# As few as show every way through the code, because compiling takes most of the time.
# Single mixers are in test_mixers.py.
WAYS = ("lstm:dual", "lstm:single", "rotary", "none", "unmasked", "feedback of the last", "feedback, unmasked")
WAYS += ("memory of buckets", "memory and feedback")
WAYS += ("memory and states",)


@functools.cache
def make(config: DecoderConfig, seed: int = 0):
    """Makes a model, and parameters without ones, zeros or values too small for the tests to notice."""
    model = Model(config, V)
    generator = np.random.default_rng(seed)

    def perturb(path, x):
        if "attention_scale" in jax.tree_util.keystr(path):
            return x * generator.uniform(2, 5, x.shape) * generator.choice([-1, 1], x.shape)
        return x + 0.3 * generator.normal(size=x.shape) if x.ndim == 1 else x

    params = jax.tree.map_with_path(perturb, model.init(jax.random.key(seed)))
    return model, jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), params)


# Others have them with more: "feedback of the last", "two", and "memory and states".
COMBINED = ("lstm:single", "lstm:skip", "memory")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.exhaustive] * (name in COMBINED)) for name in CONFIGS]
)
def test_equals_the_dense_model(name):
    model, params = make(CONFIGS[name])
    tokens = tokens_of(2, 4)
    logits, carry = read(model, params, tokens, begin(model, params, 2), starts(2, 4))
    dense = DenseModel(CONFIGS[name], to_meliad(params))
    for lane in range(2):
        expected, states = dense(tokens[lane])
        np.testing.assert_allclose(logits[lane], expected, atol=1e-5)
        for i, layer in enumerate(carry.layers):
            ours = layer.get("recurrent_states")
            if states[i] is None:
                assert ours is None
            else:
                np.testing.assert_allclose(ours.states[lane], states[i], atol=1e-5)


@pytest.mark.parametrize("name", WAYS)
def test_decoding_equals_the_parallel_pass(name):
    check_token_by_token(*make(CONFIGS[name]))


@pytest.mark.parametrize("name", ["two", "rotary", "feedback, unmasked"])
@pytest.mark.thorough
def test_a_book_in_segments_is_the_book(name):
    check_segments(*make(CONFIGS[name]))


@pytest.mark.parametrize("name", ["two", "unmasked", "feedback", "memory of buckets"])
def test_documents_that_begin_within_a_segment_are_separate(name):
    carry, alone = check_documents(*make(CONFIGS[name]))
    for ours, theirs in zip(carry.layers, alone.layers, strict=True):
        assert_same(jax.tree.map(lambda x: x[1], ours), jax.tree.map(lambda x: x[0], theirs))


@pytest.mark.parametrize(
    "name",
    [
        "memory and feedback",
        pytest.param("feedback, unmasked", marks=pytest.mark.exhaustive),
        pytest.param("scanned", marks=pytest.mark.exhaustive),
    ],
)
@pytest.mark.thorough
def test_memories_can_be_exchanged(name):
    check_parts(*make(CONFIGS[name]))


def influence(config, blocks):
    """[t, s]: how much the hidden state at t depends on the embedding of the token at s."""
    n = blocks * W
    model = Model(config, n)
    # Every token has a row of its own, so the gradient of the embedding is the gradient of each position's input.
    params = jax.tree.map(lambda x: x * (4 if x.shape == (2,) else 1), model.init(jax.random.key(0)))
    direction = jax.random.normal(jax.random.key(1), (config.model_width,))

    @jax.jit
    def jacobian(embedding):
        def project(embedding):
            module = model.bind(params | {"embedding": embedding})
            tokens = jnp.arange(n)[None]
            hidden, _ = module(tokens, module.init_carry(1), jnp.zeros((1, blocks), bool))
            return hidden[0] @ direction

        return jnp.abs(jax.jacrev(project)(embedding)).sum(axis=-1)

    return np.asarray(jacobian(params["embedding"]))


@pytest.mark.parametrize("name", ["slide", "lstm:dual"])
def test_what_depends_on_what(name):
    blocks, config = 6, CONFIGS[name]
    strength = influence(config, blocks)
    distance = np.arange(blocks * W)[:, None] - np.arange(blocks * W)[None, :]
    reach = config.num_layers * W
    assert (strength[distance < 0] == 0).all()
    assert (strength[(distance >= 0) & (distance <= reach)] > 0).all()
    beyond = strength[distance > reach]
    if name == "slide":
        assert (beyond == 0).all()
    else:
        # Through the states of the second layer, from the block before the last one on.
        assert (beyond > 0).all()


@pytest.mark.thorough
def test_states_may_reach_no_token_of_their_own_block():
    """A token reads the states from before its block, so without a window only earlier blocks are seen."""
    config = recurrent(CONFIGS["fixed:skip"], num_layers=1, layers=(0,))
    strength = influence(config, 4)
    t, s = np.indices(strength.shape)
    assert (strength[s > t] == 0).all()
    assert (strength[(s // W < t // W) | ((s <= t) & (s // W == t // W))] > 0).all()


@pytest.mark.thorough
def test_lanes_decode_independently():
    check_lanes(*make(CONFIGS["lstm:dual"]))


def test_cleared_states_start_every_segment_anew():
    model, params = make(recurrent(SKIP, clear_states=True))
    _, carry = read(model, params, tokens_of(2, 4), begin(model, params, 2), starts(2, 4))
    states = carry.layers[1]["recurrent_states"]
    layer = {"recurrent_states": states._replace(states=states.states + 100)}
    poisoned = carry._replace(layers=[carry.layers[0], layer])
    logits = [read(model, params, tokens_of(2, 4, seed=1), c, starts(2, 4))[0] for c in (carry, poisoned)]
    np.testing.assert_array_equal(*logits)
    kept, _ = make(SKIP)
    assert np.abs(read(kept, params, tokens_of(2, 4, seed=1), poisoned, starts(2, 4))[0] - logits[0]).max() > 1e-3


def test_bfloat16():
    model, params = make(dataclasses.replace(CONFIGS["lstm:dual"], activation_dtype="bfloat16"))
    exact, _ = make(CONFIGS["lstm:dual"])
    tokens, carry = tokens_of(2, 4), begin(model, params, 2, decoding=True)
    logits, new_carry = read(model, params, tokens, begin(model, params, 2), starts(2, 4))
    assert logits.dtype == jnp.float32
    assert {x.dtype.name for x in jax.tree.leaves(new_carry.layers) if x.ndim > 1} == {"bfloat16"}
    expected, _ = read(exact, params, tokens, begin(exact, params, 2), starts(2, 4))
    assert np.abs(logits - expected).max() < 0.05 * np.abs(expected).max()
    one_by_one, decoded = decode(model, params, tokens, carry)
    assert np.abs(one_by_one - expected).max() < 0.05 * np.abs(expected).max()
    assert jax.tree.map(lambda x: x.dtype, decoded) == jax.tree.map(lambda x: x.dtype, carry)


@pytest.mark.thorough
def test_rematerialisation_changes_no_gradient():
    tokens = tokens_of(1, 3)
    config = recurrent(SKIP, num_layers=1, layers=(0,), dropout_rate=0.2)
    gradients = []
    # The products alone are kept in test_mixers.py.
    for remat in ("none", "layers"):
        model, params = make(dataclasses.replace(config, remat=remat))

        @jax.jit
        def gradient(params, model=model):
            def loss(params):
                module = model.bind(params)
                hidden, _ = module(tokens, module.init_carry(1), starts(1, 3), jax.random.key(3))
                return jnp.sum(jnp.square(module.logits(hidden)))

            return jax.grad(loss)(params)

        gradients.append(gradient(params))
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-4), *gradients)
    assert all(np.abs(leaf).max() > 0 for leaf in jax.tree.leaves(gradients[0]))


def compiled_losses_and_gradient(model):
    """The compiled losses of two lanes with dropout, their gradient, and the carry."""
    tokens = tokens_of(2, 4)

    def total(params):
        module = model.bind(params)
        losses, carry = module.losses(
            tokens, tokens, module.init_carry(2), starts(2, 4), jax.random.key(3), slice_length=2 * W
        )
        return jnp.mean(losses.nats), (losses, carry)

    return jax.jit(jax.value_and_grad(total, has_aux=True))


@functools.cache
def losses_and_gradient(config):
    model, params = make(config)
    return compiled_losses_and_gradient(model)(params)


@pytest.mark.thorough
@pytest.mark.parametrize(
    "name", ["lstm:dual", *(pytest.param(name, marks=pytest.mark.exhaustive) for name in ("scanned", "feedback"))]
)
def test_what_is_computed_otherwise_on_accelerators_is_the_same(name, monkeypatch):
    """Losses and gradients of the formulations that accelerators get, run on the CPU."""
    model, params = make(dataclasses.replace(CONFIGS[name], dropout_rate=0.2))
    here = losses_and_gradient(model.config)
    monkeypatch.setattr("meliad_like.layers.backend.platform", lambda: "tpu")
    there = compiled_losses_and_gradient(model)(params)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6), there, here)


@pytest.mark.parametrize(
    ("name", "remat", "sizes"),
    [
        ("scanned", "none", [1, 2]),
        pytest.param("scanned", "dots", [1, 2], marks=pytest.mark.exhaustive),
        pytest.param("scanned", "layers", [1, 2], marks=pytest.mark.exhaustive),
        pytest.param("scanned feedback", "none", [2, 1], marks=pytest.mark.exhaustive),
        ("shortformer", "none", [2]),
        pytest.param("llama", "none", [2], marks=pytest.mark.exhaustive),
    ],
)
@pytest.mark.thorough
def test_scanned_layers_equal_unrolled_ones(name, remat, sizes):
    """Losses, gradients and carries, with dropout, so that masks are the same too; the parameters have one form."""
    config = (CONFIGS | OTHER_FAMILIES)[name]
    scanned, params = make(dataclasses.replace(config, dropout_rate=0.2, remat=remat, scan_layers=True))
    unrolled = Model(dataclasses.replace(scanned.config, scan_layers=False), V)
    for model, expected in ((scanned, sizes), (unrolled, [1] * config.num_layers)):
        module = model.bind(params)
        assert [group.size for group in groups_of(module.layers, module.config.scan_layers)] == expected
    assert scanned.axes == unrolled.axes
    compare = functools.partial(np.testing.assert_allclose, rtol=1e-6, atol=1e-6)
    jax.tree.map(compare, losses_and_gradient(scanned.config), compiled_losses_and_gradient(unrolled)(params))


def test_dropout_is_drawn_by_key_and_absent_without():
    model, params = make(dataclasses.replace(SKIP, dropout_rate=0.3))
    undropped, _ = make(SKIP)
    tokens, carry = tokens_of(2, 2), begin(model, params, 2)

    @functools.partial(jax.jit, static_argnums=0)
    def hidden(model, key):
        return model.bind(params)(tokens, carry, starts(2, 2), key)[0]

    first = hidden(model, jax.random.key(0))
    np.testing.assert_array_equal(first, hidden(model, jax.random.key(0)))
    assert np.abs(first - hidden(model, jax.random.key(1))).max() > 0.1
    np.testing.assert_array_equal(hidden(model, None), hidden(undropped, None))


def test_dropout_keeps_its_share_and_the_mean():
    multiplier = np.asarray(dropout_multiplier(jax.random.key(0), 0.25, (100_000,), jnp.float32))
    np.testing.assert_allclose(np.unique(multiplier), [0, 4 / 3], rtol=1e-6)
    assert abs((multiplier == 0).mean() - 0.25) < 5 * np.sqrt(0.25 * 0.75 / 100_000)


def test_dropout_of_tokens_is_a_tile_for_all_lanes():
    mask = np.asarray(tiled_dropout(jnp.ones((3, 384, 8)), 0.5, jax.random.key(0)))
    np.testing.assert_array_equal(mask, np.broadcast_to(np.tile(mask[:1, :128], (1, 3, 1)), mask.shape))
    assert 0 < (mask[0, :64] != mask[0, 64:128]).mean() < 1


def test_ring_square():
    # By distance 1, 2, 3, 4. The query at offset 1 sees offset 0 of its own block at distance 1, and offsets 1 to 3 of
    # the block before at distances 4, 3, 2.
    np.testing.assert_array_equal(
        ring_square(jnp.array([[1.0, 2, 3, 4], [10, 20, 30, 40]])),
        [
            [[4, 3, 2, 1], [1, 4, 3, 2], [2, 1, 4, 3], [3, 2, 1, 4]],
            [[40, 30, 20, 10], [10, 40, 30, 20], [20, 10, 40, 30], [30, 20, 10, 40]],
        ],
    )


def test_window_attention_needs_no_maximum_of_scores():
    """It is a softmax for large biases and scales, nothing where all keys are masked, and its gradient is finite."""
    generator = np.random.default_rng(0)
    b, c, h, w, k = 2, 2, 3, 8, 4

    def vectors():
        return jnp.asarray(generator.standard_normal((b, c, h, w, k)), jnp.float32)

    scale = jnp.array([0.1, 5.0, 30.0])
    bias = jnp.asarray(generator.uniform(-30, 10, (h, w)), jnp.float32)
    query, key, value, previous_key, previous_value = vectors(), vectors(), vectors(), vectors(), vectors()
    query, key, previous_key = unit(query) * scale[:, None, None], unit(key), unit(previous_key)
    valid = jnp.array([[False, True], [True, False]])

    def window(query, key, value, bias):
        return attend_window(query, key, value, previous_key, previous_value, bias, valid)

    own = np.tri(w, k=-1, dtype=bool)
    mask = np.concatenate([~own & np.asarray(valid)[:, :, None, None], np.broadcast_to(own, (b, c, w, w))], axis=-1)
    both_keys = jnp.concatenate([previous_key, key], axis=-2)
    both_values = jnp.concatenate([previous_value, value], axis=-2)
    expected = attend(query, both_keys, both_values, jnp.tile(ring_square(bias), 2), mask[:, :, None])
    result = window(query, key, value, bias)
    np.testing.assert_allclose(result, expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(result[0, 0, :, 0], 0)
    gradients = jax.grad(lambda *x: jnp.sum(window(*x) ** 2), argnums=(0, 1, 2, 3))(query, key, value, bias)
    assert all(np.isfinite(x).all() for x in gradients)


@pytest.mark.parametrize(("n", "c"), [(6, 1), (8, 1), (8, 3)])
def test_segments_are_whole_blocks(n, c):
    model, params = make(SLIDE)
    with pytest.raises(ValueError, match=f"{n} tokens with {c} start flags are not whole blocks of window_length=4"):
        read(model, params, np.zeros((1, n), np.int32), begin(model, params, 1), starts(1, c))
