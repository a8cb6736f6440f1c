import dataclasses
from pathlib import Path
from typing import get_args

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from meliad_like.errors import UserError
from meliad_like.layers.basic import Kind
from meliad_like.optimization.averages import begin_at, gradient_point
from meliad_like.optimization.optimizers import (
    OPTIMIZERS,
    Adafactor,
    Adam,
    Nesterov,
    OptimizerConfig,
    applied_rate,
    by_kind,
    decayed,
    make_optimizer,
    orthogonal,
)

# Three steps of the reference's optimizers; of the results, the first 16 entries of the first axis.
GOLDEN = np.load(Path(__file__).parent / "golden" / "e_adafactor_three_steps.npz")


def golden_tree(prefix: str) -> dict[str, jax.Array]:
    return {key.removeprefix(prefix): jnp.asarray(GOLDEN[key]) for key in GOLDEN if key.startswith(prefix)}


def scheduled(step):
    return jnp.asarray(GOLDEN["learning_rates"])[step]


def kinds_of(params):
    return jax.tree.map(lambda param: "matrix" if param.ndim == 2 else "bias", params)


def one_update(config: OptimizerConfig, params, gradients, kinds=None):
    optimizer = make_optimizer(config, lambda step: jnp.float32(0.1), kinds or kinds_of(params))
    updates, _ = jax.jit(optimizer.update)(gradients, optimizer.init(params), params)
    return updates


@pytest.mark.parametrize(
    "case, config, schedule",
    [
        ("mom0.9", Adafactor(), scheduled),
        ("nomom", Adafactor(momentum=0), scheduled),
        ("const0.01", Adafactor(), lambda step: jnp.float32(0.01)),
        ("adam", Adam(base_rate=1.0), scheduled),
    ],
)
def test_golden_updates(case, config, schedule):
    params = golden_tree("params0/")
    optimizer = make_optimizer(config, schedule, kinds_of(params))
    state = optimizer.init(params)
    for step in range(3):
        updates, state = jax.jit(optimizer.update)(golden_tree(f"step{step}/grads/"), state, params)
        params = optax.apply_updates(params, updates)
    for name, expected in golden_tree(f"{case}/params/").items():
        np.testing.assert_allclose(params[name][:16], expected, rtol=1e-6, atol=5e-7, err_msg=name)


def test_nag_is_fairseqs():
    """Its update as its code writes it, with rates that change from step to step and a decay of the weights."""
    rates, m, decay = [0.5, 1.0, 0.2, 0.4], 0.9, 0.01
    config = Nesterov(momentum=m, weight_decay=decay)
    optimizer = make_optimizer(config, lambda step: jnp.asarray(rates)[step], {"a": "matrix"})
    gradients = np.random.default_rng(0).normal(size=(4, 1, 3))
    ours, theirs, buffer = {"a": jnp.ones((1, 3))}, np.ones((1, 3)), np.zeros((1, 3))
    state = optimizer.init(ours)
    for step, (rate, gradient) in enumerate(zip(rates, gradients)):
        correction = rate / rates[max(step - 1, 0)]
        theirs = theirs * (1 - rate * decay) + m * m * correction * buffer - (1 + m) * rate * gradient
        buffer = m * correction * buffer - rate * gradient
        updates, state = optimizer.update({"a": jnp.asarray(gradient, jnp.float32)}, state, ours)
        ours = optax.apply_updates(ours, updates)
        np.testing.assert_allclose(ours["a"], theirs, rtol=1e-6)


def test_nag_after_a_rate_of_zero():
    optimizer = make_optimizer(Nesterov(), lambda step: jnp.asarray([0.0, 0.5])[step], {"a": "bias"})
    params = {"a": jnp.ones(2)}
    updates, state = optimizer.update({"a": jnp.ones(2)}, optimizer.init(params), params)
    np.testing.assert_array_equal(updates["a"], 0)
    updates, _ = optimizer.update({"a": jnp.ones(2)}, state, params)
    np.testing.assert_allclose(updates["a"], -0.5 * 1.9, rtol=1e-6)


def test_factored_parameters_need_no_full_second_moment():
    params = {"large": jnp.ones((128, 200)), "small": jnp.ones((127, 200))}
    state = optax.tree_utils.tree_get(make_optimizer(Adafactor(), scheduled, kinds_of(params)).init(params), "v")
    assert {name: array.shape for name, array in state.items()} == {"large": (1,), "small": (127, 200)}


def test_state_is_float32():
    state = make_optimizer(Adafactor(), scheduled, {"kernel": "matrix"}).init({"kernel": jnp.ones((128, 128))})
    assert {str(leaf.dtype) for leaf in jax.tree.leaves(state)} == {"float32", "int32"}


def test_adafactor_ignores_the_scale_of_the_loss():
    params, gradients = golden_tree("params0/"), golden_tree("step0/grads/")
    updates = one_update(Adafactor(), params, gradients)
    scaled = one_update(Adafactor(), params, jax.tree.map(lambda gradient: 4096 * gradient, gradients))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7), updates, scaled)


def test_clipping_bounds_the_norm_of_the_whole_gradient():
    params = {"a": jnp.ones(2), "b": jnp.ones(1)}
    gradients = {"a": jnp.array([3.0, 0.0]), "b": jnp.array([4.0])}
    config = Adam(weight_decay=0.0, first_decay=0.0, clip_norm=1.0)
    optimizer = make_optimizer(config, lambda step: jnp.float32(0.1), kinds_of(params))
    _, state = jax.jit(optimizer.update)(gradients, optimizer.init(params), params)
    np.testing.assert_allclose(optax.tree_utils.tree_get(state, "mu")["a"], [0.6, 0], rtol=1e-6)
    np.testing.assert_allclose(optax.tree_utils.tree_get(state, "mu")["b"], [0.8], rtol=1e-6)


@pytest.mark.parametrize(
    "name, removed",
    [("adam", 0.02 * 0.1 * 0.05), ("adafactor", 0.02), ("nag", 0.02 * 0.1)],
)
def test_weight_decay_is_for_matrices_tables_and_filters(name, removed):
    """All parameters have two axes: their number says nothing. A part of the parameters is fixed."""
    kinds: dict = {kind: kind for kind in get_args(Kind)} | {"fixed": {"matrix": "matrix"}}
    params = jax.tree.map(lambda _: jnp.full((2, 3), 2.0), kinds)
    optimizer = make_optimizer(OPTIMIZERS[name](weight_decay=0.02), lambda step: 0.1, kinds, {"fixed": 0.0})
    updates, _ = jax.jit(optimizer.update)(jax.tree.map(jnp.zeros_like, params), optimizer.init(params), params)
    for kind in ("matrix", "table", "filter"):
        np.testing.assert_allclose(updates[kind], np.full((2, 3), -2 * removed), rtol=1e-5)
    for still in (updates["bias"], updates["scale"], updates["rate"], updates["fixed"]["matrix"]):
        np.testing.assert_array_equal(still, np.zeros((2, 3)))


def test_without_kinds_names_say_what_parameters_are():
    kind = ""
    for line in Path(__file__).with_name("parameter_kinds.txt").read_text().splitlines():
        if line.startswith("# "):
            kind = line.removeprefix("# ")
        elif line and not line.startswith("#"):
            assert by_kind(str, None, {line: jnp.ones((2, 2))}) == {line: kind}
    params = {"kernel": jnp.ones((2, 2)), "step_bias": jnp.ones((2, 2))}
    assert decayed(params) == {"kernel": True, "step_bias": False}
    optimizer = make_optimizer(Adam(), lambda step: 0.1)
    with pytest.raises(UserError, match="the name of parameter a/b doesn't say what it is"):
        optimizer.init({"a": {"b": jnp.ones(2)}})


def test_a_factor_on_the_rate_of_some_parameters():
    params = {"a": {"b": jnp.full(3, 2.0)}, "c": jnp.ones(2), "d": jnp.ones(2)}
    rate = lambda step: jnp.float32(0.1)  # noqa: E731
    optimizer = make_optimizer(Adam(), rate, kinds_of(params))

    def updates(optimizer):
        return optimizer.update(params, optimizer.init(params), params)[0]

    changed = updates(make_optimizer(Adam(), rate, kinds_of(params), {"a": 10.0, "c": 0.0}))
    plain = updates(optimizer)
    np.testing.assert_allclose(changed["a"]["b"], 10 * plain["a"]["b"], rtol=1e-6)
    np.testing.assert_array_equal(changed["c"], np.zeros(2))
    np.testing.assert_array_equal(changed["d"], plain["d"])


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_parameters_that_are_not_trained_stay_and_have_no_state(name):
    """Nor do they change the steps of the others, with clipping and decay."""
    kinds = {"layers": {0: {"a": "matrix", "b": "bias"}, 1: {"a": "matrix"}}, "table": "table"}
    params = jax.tree.map(lambda _: jnp.asarray([[1.5, -0.0, 0.0], [-2.0, 3.0, 1e-30]]), kinds)
    config = OPTIMIZERS[name](weight_decay=0.1, clip_norm=0.5, trained=("layers/*/a", "layers/0/b*"))
    alone = {"layers": params["layers"]}

    def steps(optimizer, params, gradients):
        state = optimizer.init(params)
        for _ in range(2):
            updates, state = optimizer.update(gradients, state, params)
            params = optax.apply_updates(params, updates)
        return params, state

    rate = lambda step: jnp.float32(0.1)  # noqa: E731
    some = make_optimizer(config, rate, kinds)
    after, state = steps(some, params, jax.tree.map(jnp.cos, params))
    np.testing.assert_array_equal(after["table"], params["table"])
    of_alone = make_optimizer(dataclasses.replace(config, trained=("*",)), rate, {"layers": kinds["layers"]})
    expected, state_of_alone = steps(of_alone, alone, jax.tree.map(jnp.cos, alone))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), after["layers"], expected["layers"])
    assert not np.array_equal(after["layers"][1]["a"], params["layers"][1]["a"])
    assert [x.shape for x in jax.tree.leaves(state)] == [x.shape for x in jax.tree.leaves(state_of_alone)]


def test_a_pattern_of_names_without_a_parameter_is_an_error():
    with pytest.raises(UserError, match=r"OptimizerConfig.trained: 'layers/\*' matches no parameter, such as kernel"):
        make_optimizer(Adam(trained=("kern*", "layers/*")), lambda step: 0.1, KERNEL)


KERNEL = {"kernel": "matrix"}


def test_an_average_by_hand():
    """With a quadratic's gradients; each step's parameters count with a power of the decay."""
    optimizer = make_optimizer(Adam(average_decay=0.5), lambda step: 1.0, KERNEL)
    average = {"kernel": jnp.asarray([[1.0, -2.0], [3.0, 0.5]])}
    state, moved = optimizer.init(average), []
    for _ in range(3):
        point = gradient_point(average, state)["kernel"]
        updates, state = optimizer.update({"kernel": point - 1}, state, average)
        average = optax.apply_updates(average, updates)
        moved.append(state.trained["kernel"])
    one, two, three = moved
    assert not np.array_equal(one, two) and np.array_equal(gradient_point(average, state)["kernel"], three)
    np.testing.assert_allclose(average["kernel"], (0.25 * one + 0.5 * two + three) / 1.75, rtol=1e-6)


def test_a_run_with_an_average_begins_at_loaded_parameters():
    fresh, loaded = {"kernel": jnp.ones((2, 2))}, {"kernel": jnp.full((2, 2), 3.0)}
    for config in Adam(average_decay=0.5), Adam():
        state = make_optimizer(config, lambda step: 0.1, KERNEL).init(fresh)
        np.testing.assert_array_equal(gradient_point(loaded, begin_at(loaded, state))["kernel"], loaded["kernel"])


def test_muon_makes_matrices_orthogonal():
    generator = np.random.default_rng(0)
    shapes = [(24, 16), (16, 24), (24, 16), (4, 4)]
    updates = {str(i): jnp.asarray(generator.normal(size=shape), jnp.float32) for i, shape in enumerate(shapes)}
    together = orthogonal(updates)
    for name, update in updates.items():
        left, _, right = np.linalg.svd(update, full_matrices=False)
        singular = np.diag(left.T @ np.asarray(together[name]) @ right.T) / (0.2 * max(update.shape) ** 0.5)
        assert 0.6 < singular.min() and singular.max() < 1.25
        np.testing.assert_allclose(together[name], orthogonal({name: update})[name], rtol=1e-4, atol=1e-5)


def test_muon_is_for_matrices_and_adamw_for_the_rest():
    kinds = {"embedding": "table", "layer": {"kernel": "matrix", "blocks": "matrix", "bias": "bias", "taps": "filter"}}
    shapes = {"embedding": (4, 4), "layer": {"kernel": (4, 3), "blocks": (2, 4, 3), "bias": (2, 4), "taps": (4, 3)}}
    params = jax.tree.map(jnp.ones, shapes, is_leaf=lambda node: isinstance(node, tuple))
    gradients = jax.tree.map(lambda param: jnp.asarray(np.random.default_rng(1).normal(size=param.shape)), params)
    muon, adamw = (one_update(OPTIMIZERS[name](), params, gradients, kinds) for name in ("muon", "adamw"))
    np.testing.assert_array_equal(muon["embedding"], adamw["embedding"])
    for name in ("bias", "taps"):
        np.testing.assert_array_equal(muon["layer"][name], adamw["layer"][name])
    # Each block of a matrix in blocks is made orthogonal by itself.
    matrices = gradients["layer"]["kernel"], *gradients["layer"]["blocks"]
    for update, gradient in zip((muon["layer"]["kernel"], *muon["layer"]["blocks"]), matrices, strict=True):
        expected = -0.1 * 0.05 * (orthogonal(gradient) + 0.1)
        np.testing.assert_allclose(update, expected, rtol=1e-5, atol=1e-7)


def test_applied_rate_has_the_optimizers_factor():
    np.testing.assert_allclose(applied_rate(Adam(), scheduled)(2), 0.005 * 0.05, rtol=1e-6)


@pytest.mark.parametrize(
    "fields, message",
    [
        ({"momentum": 1.0}, "momentum=1.0"),
        # A second moment would become negative, and its root no number.
        ({"decay": -0.8}, "Adafactor.decay=-0.8 must not be negative"),
        ({"base_rate": 0.0}, "base_rate=0.0"),
        ({"clip_norm": -1.0}, "clip_norm=-1.0"),
        ({"weight_decay": -0.1}, "weight_decay=-0.1"),
        ({"average_decay": 1.0}, "average_decay=1.0"),
    ],
)
def test_wrong_fields_are_named(fields, message):
    with pytest.raises(UserError, match=message):
        Adafactor(**fields)
