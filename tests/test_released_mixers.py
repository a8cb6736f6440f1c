"""Delta rules and Mamba-2 against arrays of released code: Qwen3-Next, Kimi Linear and Mamba-2 of transformers 5.24,
and the naive recurrences of flash-linear-attention."""

import functools
import json
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from einops import rearrange
from flax import nnx
from released_arrays import arrays, assert_as_exact, error

from meliad_like.layers.linear_recurrence import Rule, read_chunks
from meliad_like.mixers.base import MIXERS, LayerContext
from meliad_like.mixers.gated_delta_rule import GatedDeltaRule
from meliad_like.mixers.kimi_delta_attention import KimiDeltaAttention
from meliad_like.mixers.mamba2 import Mamba2
from meliad_like.mixers.matrix_recurrence import MatrixCarry
from meliad_like.mixers.retention import Retention
from meliad_like.models.decoder import DecoderConfig, DecoderLayer


def of_qwen(a):
    """Qwen3-Next has for each head of keys a query, a key, the values and their gates in one matrix, [out, in]."""
    meta = json.loads(str(a["meta"]))
    groups, ratio = meta["kheads"], meta["vheads"] // meta["kheads"]
    of_group = rearrange(a["in_proj_qkvz.weight"], "(g i) d -> d g i", g=groups)
    sizes = np.cumsum([meta["k"], meta["k"], ratio * meta["p"]])
    query, key, value, gate = (x.reshape(len(x), -1) for x in np.split(of_group, sizes, axis=-1))
    strength, decay = (
        x.reshape(len(x), -1)
        for x in np.split(rearrange(a["in_proj_ba.weight"], "(g i) d -> d g i", g=groups), 2, axis=-1)
    )
    return {
        ("query", "kernel"): query,
        ("key", "kernel"): key,
        ("value", "kernel"): value,
        ("gate", "kernel"): gate,
        ("strength", "kernel"): strength,
        ("decay", "kernel"): decay,
        **filters(a, query.shape[1]),
        ("log_rate",): a["A_log"],
        ("step_bias",): a["dt_bias"],
        ("norm_scale",): a["norm.weight"],
        ("output",): a["out_proj.weight"].T,
    }


def filters(a, of_keys):
    """One filter for queries, keys and values, [channels, 1, taps]."""
    parts = np.split(a["conv1d.weight"][:, 0].T, [of_keys, 2 * of_keys], axis=1)
    return {(f"{name}_filter",): part for name, part in zip(("query", "key", "value"), parts)}


def of_kimi(a):
    names = {"query": "q_proj", "key": "k_proj", "value": "v_proj", "strength": "b_proj"}
    low_rank = {("decay", "first"): "forget_gate.f_a_proj", ("decay", "second"): "forget_gate.f_b_proj"}
    low_rank |= {("gate", "first"): "g_a_proj", ("gate", "second"): "g_b_proj"}
    heads = a["forget_gate.A_log"].size
    return {
        **{(ours, "kernel"): a[f"{theirs}.weight"].T for ours, theirs in names.items()},
        **{(*ours, "kernel"): a[f"{theirs}.weight"].T for ours, theirs in low_rank.items()},
        **filters(a, len(a["q_proj.weight"])),
        ("log_rate",): a["forget_gate.A_log"].reshape(-1),
        ("step_bias",): a["forget_gate.dt_bias"].reshape(heads, -1),
        ("norm_scale",): a["o_norm.weight"],
        ("output",): a["o_proj.weight"].T,
    }


def of_mamba(a):
    """Mamba-2 convolves values, keys (B) and queries (C), in this order, as ours does."""
    meta = json.loads(str(a["meta"]))
    inner, of_groups = meta["heads"] * meta["p"], meta["groups"] * meta["n_state"]
    sizes = np.cumsum([inner, inner, of_groups, of_groups])
    gate, value, key, query, step = np.split(a["in_proj.weight"].T, sizes, axis=1)
    kernels = {"gate": gate, "value": value, "key": key, "query": query, "step_size": step}
    return {
        **{(name, "kernel"): kernel for name, kernel in kernels.items()},
        ("filters",): a["conv1d.weight"][:, 0].T,
        ("filter_bias",): a["conv1d.bias"],
        ("log_rate",): a["A_log"],
        ("step_bias",): a["dt_bias"],
        ("skip",): a["D"],
        ("norm_scale",): a["norm.weight"],
        ("output",): a["out_proj.weight"].T,
    }


class Released(NamedTuple):
    """A released layer, and ours."""

    config: Any
    sizes: dict[str, int]
    params_of: Callable[[dict[str, Any]], dict[tuple[str, ...], Any]]


LAYERS = {
    "gated_delta_layer": Released(GatedDeltaRule(), {"window_length": 8}, of_qwen),
    "gated_delta_layer_grouped": Released(
        GatedDeltaRule(values_per_key=2, value_size=6), {"window_length": 4}, of_qwen
    ),
    "kda_layer": Released(KimiDeltaAttention(), {"window_length": 8}, of_kimi),
    "mamba2_layer": Released(Mamba2(head_size=8, state_size=8), {"window_length": 8}, of_mamba),
    "mamba2_layer_groups_clamp": Released(
        Mamba2(head_size=8, state_size=6, num_groups=2, min_step=0.01, max_step=0.08), {"window_length": 4}, of_mamba
    ),
}
of_each_layer = pytest.mark.parametrize("name", LAYERS)


def params_of(name, prefix="param/", suffix=""):
    """The parameters of our layer, or their gradients, from the released code's."""
    a = {
        key.removeprefix(prefix).removesuffix(suffix): x
        for key, x in arrays(name).items()
        if key.startswith(prefix) and key.endswith(suffix) and (suffix or not key.endswith("_64"))
    }
    mixer = MIXERS.name_of(LAYERS[name].config)
    params = LAYERS[name].params_of(a | {"meta": arrays(name)["meta"]})
    output = params.pop(("output",))
    return {("mixers", mixer, *path): x for path, x in params.items()} | {("output", "kernel"): output}


@functools.cache
def layer(name, **changes):
    """Our layer without a feed-forward network, as a graph and parameters."""
    config, sizes, _ = LAYERS[name]
    sizes = {"model_width": 16, "num_heads": 2, "head_size": 8, "num_layers": 1} | sizes | changes
    decoder = DecoderConfig(**sizes, pattern=(MIXERS.name_of(config),), mixers=(config,))
    graph, params = nnx.split(DecoderLayer(decoder, 0, rngs=nnx.Rngs(0)), nnx.Param)
    return graph, dict(nnx.to_flat_state(params))


def bind(name, params):
    graph, initial = layer(name)
    assert set(initial) == set(params) | {("norm", "scale")}
    flat = {path: variable.replace(jnp.asarray(params.get(path, variable[...]))) for path, variable in initial.items()}
    assert all(flat[path][...].shape == variable[...].shape for path, variable in initial.items())
    return nnx.merge(graph, nnx.from_flat_state(flat))


@functools.partial(jax.jit, static_argnums=0)
def read(name, params, x, start, carry=None):
    """The mixer and the output projection; `start`, [b, n], is true only at the beginnings of blocks."""
    bound = bind(name, params)
    [mixer] = bound.mixers.values()
    positions = jnp.where(start[:, :: mixer.w], 0, mixer.w)
    y, carry = mixer(x, LayerContext(positions, {}), carry or mixer.init_carry(len(x), x.dtype), None)
    return bound.output(y), carry


@functools.partial(jax.jit, static_argnums=0)
def decode(name, params, x, carry):
    bound = bind(name, params)
    [mixer] = bound.mixers.values()

    def step(carry, token):
        once = jnp.ones(len(token), int)
        y, carry = mixer.decode(token[:, None], once, LayerContext(once, {}), carry)
        return carry, bound.output(y[:, 0])

    carry, y = jax.lax.scan(step, carry, jnp.moveaxis(x, 1, 0))
    return jnp.moveaxis(y, 0, 1), carry


def carry_of(name, of):
    """The released state is [b, h, k, p] in delta rules, and its convolution has a fourth column that is never read."""
    state, conv = arrays(name)[f"state{of}"], arrays(name)[f"conv{of}"]
    recent = np.swapaxes(conv[..., 1:], 1, 2)
    return MatrixCarry(state if isinstance(LAYERS[name].config, Mamba2) else np.swapaxes(state, 2, 3), recent)


def check_carry(carry, name, of):
    state = carry.matrix if isinstance(LAYERS[name].config, Mamba2) else np.swapaxes(carry.matrix, 2, 3)
    assert_as_exact(state, arrays(name), f"state{of}")
    exact = arrays(name)[f"conv{of}_64"][..., 1:]
    assert error(np.swapaxes(carry.recent, 1, 2), exact) < 1e-6


def no_start(x):
    return np.zeros(x.shape[:2], bool)


@of_each_layer
def test_outputs_are_those_of_the_released_code(name):
    a, params = arrays(name), params_of(name)
    nothing = jax.tree.map(np.zeros_like, carry_of(name, "0"))
    y, carry = read(name, params, a["x"], no_start(a["x"]), nothing)
    assert_as_exact(y, arrays(name), "y")
    check_carry(carry, name, "")
    for y, carry in (
        read(name, params, a["x"], no_start(a["x"]), carry_of(name, "0")),
        decode(name, params, a["x"], carry_of(name, "0")),
    ):
        assert_as_exact(y, arrays(name), "y_from0")
        check_carry(carry, name, "_from0")


@pytest.mark.parametrize("name", [name for name in LAYERS if "document_starts" in arrays(name)])
def test_outputs_with_documents_are_those_of_the_released_code(name):
    a = arrays(name)
    y, carry = read(name, params_of(name), a["x"], a["document_starts"])
    assert_as_exact(y, arrays(name), "y_documents")
    check_carry(carry, name, "_documents")


@pytest.mark.parametrize(
    ("name", "prefix"),
    [(name, "grad_documents/" if "grad_documents/x" in arrays(name) else "grad/") for name in LAYERS],
)
def test_gradients_are_those_of_the_released_code(name, prefix):
    a = arrays(name)
    start = a["document_starts"] if prefix == "grad_documents/" else no_start(a["x"])

    @jax.jit
    @functools.partial(jax.grad, argnums=(0, 1))
    def differentiate(params, x):
        return jnp.sum(read(name, params, x, start)[0] * a["cotangent"])

    of_params, of_x = differentiate(params_of(name), a["x"])
    assert_as_exact(of_x, arrays(name), f"{prefix}x")
    theirs, exact = params_of(name, prefix), params_of(name, prefix, "_64")
    for path, ours in of_params.items():
        assert error(ours, exact[path]) <= 4 * max(error(theirs[path], exact[path]), 1e-6), path


@pytest.mark.parametrize("name", ["recurrence_retention", "recurrence_lightning"])
def test_constant_decays_are_those_of_the_released_code(name):
    a = arrays(name)
    query, key, value = (np.moveaxis(a[f"input/{x}"], 2, 1) for x in "qkv")
    decay = np.moveaxis(a["input/g"], 2, 1)[..., None]
    rule = Rule(query * query.shape[-1] ** -0.5, key, value, decay, None)
    state = np.swapaxes(a["input/initial_state"], 2, 3)
    matrix, y = jax.jit(read_chunks, static_argnums=3)(rule, state, np.zeros((len(query), 4), bool), 8)
    if name == "recurrence_retention":
        retention = Retention().build(DecoderConfig(num_heads=decay.shape[1]).shape, rngs=nnx.Rngs(0))
        np.testing.assert_allclose(
            np.broadcast_to(retention.log_decay()[:, None, None], decay.shape[1:]), decay[0], rtol=1e-6
        )
    assert_as_exact(np.moveaxis(y, 1, 2), arrays(name), "output")
    assert_as_exact(np.swapaxes(matrix, 2, 3), arrays(name), "final_state")


# The errors of the released code in bfloat16: of outputs, and of the gradient of x.
IN_BFLOAT16 = {"gated_delta_layer": (1.3e-2, 3.4e-2), "kda_layer": (1.0e-2, 2.8e-2), "mamba2_layer": (7.5e-3, 4.9e-3)}


@pytest.mark.parametrize("name", IN_BFLOAT16)
def test_bfloat16_is_as_exact_as_the_released_code(name):
    """Ours may be larger by a half."""
    a, rounded = arrays(name), functools.partial(jnp.asarray, dtype=jnp.bfloat16)
    params = {path: np.asarray(rounded(value), np.float32) for path, value in params_of(name).items()}
    x, cotangent = rounded(a["x"]), np.asarray(rounded(a["cotangent"]), np.float32)
    start = no_start(x)

    def loss(x):
        return jnp.sum(read(name, params, x, start)[0].astype(jnp.float32) * cotangent)

    of_outputs, of_gradient = IN_BFLOAT16[name]
    exact = read(name, params, x.astype(jnp.float32), start)[0]
    assert error(read(name, params, x, start)[0], np.asarray(exact, np.float64)) < 1.5 * of_outputs
    gradient, exact = jax.grad(loss)(x), jax.grad(loss)(x.astype(jnp.float32))
    assert error(gradient, np.asarray(exact, np.float64)) < 1.5 * of_gradient


@of_each_layer
def test_initial_values(name):
    """Rates between 1 and 16, steps between 0.001 and 0.1, as in Mamba-2; all else is ones or scaled by its inputs."""
    _, params = layer(name, model_width=256, num_heads=32)
    values = {path[2:]: np.asarray(x[...], np.float64) for path, x in params.items() if path[0] == "mixers"}
    assert 0 <= values[("log_rate",)].min() and values[("log_rate",)].max() <= np.log(16)
    steps = np.logaddexp(0, values[("step_bias",)])
    assert 0.0009 < steps.min() and steps.max() < 0.101
    assert np.median(steps) == pytest.approx(0.01, rel=0.8)
    for path, x in values.items():
        if path[-1] == "kernel":
            assert np.std(x) == pytest.approx(len(x) ** -0.5, rel=0.2), path
    assert (values[("norm_scale",)] == 1).all()
