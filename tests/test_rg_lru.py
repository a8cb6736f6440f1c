"""The RG-LRU's recurrent block against the arrays of the released code and a plain loop in numpy."""

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from released_arrays import arrays, assert_as_exact, error

from meliad_like.errors import UserError
from meliad_like.mixers.base import LayerContext
from meliad_like.mixers.rg_lru import RGLRU, RGLRUCarry, bounded_sqrt
from meliad_like.models.decoder import DecoderConfig, DecoderLayer

NAMES = {
    ("mixers", "rg_lru", "gate", "kernel"): "linear_y.weight",
    ("mixers", "rg_lru", "gate", "bias"): "linear_y.bias",
    ("mixers", "rg_lru", "input", "kernel"): "linear_x.weight",
    ("mixers", "rg_lru", "input", "bias"): "linear_x.bias",
    ("mixers", "rg_lru", "filters"): "conv_1d.w",
    ("mixers", "rg_lru", "filter_bias"): "conv_1d.b",
    ("mixers", "rg_lru", "recurrence_gate", "kernel"): "rg_lru.a_gate.w",
    ("mixers", "rg_lru", "recurrence_gate", "bias"): "rg_lru.a_gate.b",
    ("mixers", "rg_lru", "input_gate", "kernel"): "rg_lru.input_gate.w",
    ("mixers", "rg_lru", "input_gate", "bias"): "rg_lru.input_gate.b",
    ("mixers", "rg_lru", "decay"): "rg_lru.a_param",
    ("output", "kernel"): "linear_out.weight",
    ("output", "bias"): "linear_out.bias",
}
"""The names of the layer's parameters in the released code, whose matrices are [out, in]."""


both = pytest.mark.parametrize("name", ["rglru_block", "rglru_block_documents"])


@functools.cache
def layer(d=16, channels=24, heads=3, conv_length=4):
    """A layer without a feed-forward network, as a graph and parameters."""
    sizes = {"model_width": d, "num_heads": heads, "head_size": 8, "window_length": 4, "num_layers": 1}
    config = DecoderConfig(**sizes, pattern=("rg_lru",), mixers=(RGLRU(channels=channels, conv_length=conv_length),))
    graph, params = nnx.split(DecoderLayer(config, 0, rngs=nnx.Rngs(0)), nnx.Param)
    return graph, dict(nnx.to_flat_state(params))


def params_of(arrays, prefix="param/", suffix=""):
    """The layer's parameters, or their gradients, from the released code's; the norm of the layer is not among them."""
    params = {}
    for path, name in NAMES.items():
        x = arrays[f"{prefix}{name}{suffix}"]
        params[path] = x.T if name.endswith(".weight") else x.reshape(-1) if path[-1] == "bias" else x
    return params


def bind(params):
    graph, initial = layer()
    flat = {path: variable.replace(jnp.asarray(params.get(path, variable[...]))) for path, variable in initial.items()}
    return nnx.merge(graph, nnx.from_flat_state(flat))


@functools.partial(jax.jit, static_argnames="w")
def read(params, x, positions, carry, w=1):
    """The mixer and the output projection; every block of `w` tokens may begin a document."""
    bound = bind(params)
    mixer = bound.mixers["rg_lru"]
    mixer.w = w
    carry = mixer.init_carry(len(x), x.dtype) if carry is None else carry
    result, carry = mixer(x, LayerContext(positions, {}), carry, None)
    return bound.output(result), carry


@jax.jit
def decode(params, x, carry):
    bound = bind(params)

    def step(carry, token):
        context, once = LayerContext(carry.position, {}), jnp.ones_like(carry.position)
        result, carry = bound.mixers["rg_lru"].decode(token[:, None], once, context, carry)
        return carry, bound.output(result[:, 0])

    carry, y = jax.lax.scan(step, carry, jnp.moveaxis(x, 1, 0))
    return jnp.moveaxis(y, 0, 1), carry


def carry_of(arrays, name, position):
    b = len(arrays["x"])
    return RGLRUCarry(arrays[f"state{name}"], arrays[f"conv{name}"], np.full(b, position, np.int32))


def check_carry(carry, arrays, name):
    assert_as_exact(carry.state, arrays, f"state{name}")
    assert_as_exact(carry.recent, arrays, f"conv{name}")


@both
def test_outputs_are_those_of_the_released_code(name):
    a = arrays(name)
    y, carry = read(params_of(a), a["x"], a["segment_pos"], None)
    assert_as_exact(y, a, "y")
    check_carry(carry, a, "")
    one = np.broadcast_to(np.arange(a["x"].shape[1]), a["segment_pos"].shape)
    for w in 1, a["x"].shape[1]:
        assert_as_exact(read(params_of(a), a["x"], one[:, ::w], None, w=w)[0], a, "y_one_document")
    y, carry = read(params_of(a), a["x"], one + 5, carry_of(a, "0", 5))
    assert_as_exact(y, a, "y_from0")
    check_carry(carry, a, "_from0")


@both
def test_continued_outputs_are_those_of_the_released_code(name):
    a = arrays(name)
    split = json.loads(str(a["meta"]))["split"]
    _, carry = read(params_of(a), a["x"][:, :split], a["segment_pos"][:, :split], None)
    # The released code has zeros for tokens of other documents; a block is at least as long as what is carried.
    same = a["segment_pos"][:, split - 1 : split] >= np.arange(2, -1, -1)
    check_carry(carry._replace(recent=jnp.where(same[..., None], carry.recent, 0)), a, "_split")
    rest, positions = a["x"][:, split:], a["segment_pos"][:, split:]
    begun = carry_of(a, "_split", split)
    for y, carry in (read(params_of(a), rest, positions, begun), decode(params_of(a), rest, begun)):
        assert_as_exact(y, a, "y_continued")
        check_carry(carry, a, "_continued")


@both
def test_gradients_are_those_of_the_released_code(name):
    a = arrays(name)

    @jax.jit
    @functools.partial(jax.grad, argnums=(0, 1))
    def differentiate(params, x):
        return jnp.sum(read(params, x, a["segment_pos"], None)[0] * a["cotangent"])

    of_params, of_x = differentiate(params_of(a), a["x"])
    assert_as_exact(of_x, a, "grad/x")
    theirs, exact = params_of(a, "grad/"), params_of(a, "grad/", "_64")
    for path, ours in of_params.items():
        assert error(ours, exact[path]) <= 4 * max(error(theirs[path], exact[path]), 1e-7), path


def plain_loop(params, x):
    """The block as its equations stand, for one document in each lane, float64."""
    params = {path: np.asarray(value, np.float64) for path, value in params.items()}
    p = {path[-2:] if path[-1] in ("kernel", "bias") else path[-1]: value for path, value in params.items()}
    b, n, _ = x.shape
    blocks, size, _ = p["input_gate", "kernel"].shape

    def gate(name, u):
        product = np.einsum("bhi,hio->bho", u.reshape(b, blocks, size), p[name, "kernel"])
        return 0.5 * (1 + np.tanh((product.reshape(b, -1) + p[name, "bias"]) / 2))

    h, y = 0, []
    inputs = np.pad(x @ p["input", "kernel"] + p["input", "bias"], ((0, 0), (3, 0), (0, 0)))
    for t in range(n):
        z = x[:, t] @ p["gate", "kernel"] + p["gate", "bias"]
        z = 0.5 * z * (1 + np.tanh(np.sqrt(2 / np.pi) * (z + 0.044715 * z**3)))
        u = np.sum(inputs[:, t : t + 4] * p["filters"], axis=1) + p["filter_bias"]
        log_a = -8 * gate("recurrence_gate", u) * np.logaddexp(0, p["decay"])
        factor = np.sqrt(-np.expm1(2 * log_a)) if t else 1
        h = np.exp(log_a) * h + factor * gate("input_gate", u) * u
        y.append((h * z) @ p["output", "kernel"] + p["output", "bias"])
    return np.stack(y, axis=1)


def read_document(params, x):
    return read(params, x, np.broadcast_to(np.arange(x.shape[1]), x.shape[:2]), None)[0]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_extreme_gates(dtype):
    a = arrays("rglru_block")
    params = params_of(a)
    decay = np.where(np.arange(24) % 2, -18, 6).astype(np.float32)
    bias = np.where(np.arange(24) % 3, 12, -12).astype(np.float32)
    params[("mixers", "rg_lru", "decay")] = decay
    params[("mixers", "rg_lru", "recurrence_gate", "bias")] = bias
    x = jnp.asarray(a["x"], dtype)
    gradient = jax.jit(jax.grad(lambda p, x: jnp.sum(read_document(p, x).astype(jnp.float32) ** 2), (0, 1)))(params, x)
    assert all(np.isfinite(np.asarray(leaf, np.float32)).all() for leaf in jax.tree.leaves(gradient))
    expected = plain_loop(params, np.asarray(x, np.float64))
    assert error(read_document(params, x), expected) < {"float32": 2.4e-5, "bfloat16": 1.8e-2}[dtype]


def test_the_derivative_of_the_root_is_bounded():
    derivative = jax.vmap(jax.grad(bounded_sqrt))(jnp.float32([0, 1e-30, 1e-8, 1e-4, 0.25]))
    np.testing.assert_allclose(derivative, [1000, 1000, 1000, 50, 1], rtol=1e-6)


@pytest.mark.parametrize("decay", [-15.0, -10.0, 0.0, 15.0])
def test_the_share_of_the_input_has_all_its_digits(decay):
    """1 - a^2 between 5e-6 and 1, for channels that hardly forget, and for those that forget at once."""
    a = arrays("rglru_block")
    bound = bind(params_of(a) | {("mixers", "rg_lru", "decay"): np.full(24, decay, np.float32)})
    u = np.random.default_rng(0).normal(size=(1, 5, 24)).astype(np.float32)
    mixer = bound.mixers["rg_lru"]
    recurrence, gate = (
        1 / (1 + np.exp(-np.asarray(each(jnp.asarray(u)), np.float64)))
        for each in (mixer.recurrence_gate, mixer.input_gate)
    )
    kept, added = mixer._coefficients(jnp.asarray(u), jnp.zeros((1, 5), bool))
    log_decay = -8 * recurrence * np.logaddexp(0, decay)
    np.testing.assert_allclose(kept, np.exp(log_decay), rtol=2e-5, atol=1e-30)
    np.testing.assert_allclose(added, np.sqrt(-np.expm1(2 * log_decay)) * gate * u, rtol=2e-6)


def test_bfloat16_is_as_exact_as_the_released_code():
    """Its error is 1.2e-2, and 1.1e-2 for the gradient of x; ours may be larger by a half."""
    a = arrays("rglru_block")
    params = jax.tree.map(lambda p: np.asarray(jnp.asarray(p, jnp.bfloat16), np.float32), params_of(a))
    x, cotangent = (jnp.asarray(a[name], jnp.bfloat16) for name in ("x", "cotangent"))
    assert error(read_document(params, x), plain_loop(params, np.asarray(x, np.float64))) < 1.5 * 1.2e-2

    def loss(x):
        return jnp.sum(read_document(params, x).astype(jnp.float32) * cotangent.astype(jnp.float32))

    rounded, exact = jax.grad(loss)(x), jax.grad(loss)(x.astype(jnp.float32))
    assert error(rounded, np.asarray(exact, np.float64)) < 1.5 * 1.1e-2


def test_initial_values():
    _, params = layer(256, 512, 4)
    values = {path[2:] or path: np.asarray(x[...]) for path, x in params.items() if path[0] == "mixers"}
    for path, variance in {
        ("gate", "kernel"): 1 / 256,
        ("input", "kernel"): 1 / 256,
        ("filters",): 0.01 / 4,
        ("recurrence_gate", "kernel"): 1 / 128,
        ("input_gate", "kernel"): 1 / 128,
    }.items():
        assert np.std(values[path]) == pytest.approx(variance**0.5, rel=0.05)
    assert all((x == 0).all() for path, x in values.items() if path[-1] in ("bias", "filter_bias"))
    assert (params["output", "bias"][...] == 0).all()
    squares = np.exp(-2 * np.logaddexp(0, values[("decay",)].astype(np.float64)))
    assert 0.9**2 - 1e-5 < squares.min() < 0.82 and 0.99 < squares.max() < 0.999**2 + 1e-5
    assert squares.mean() == pytest.approx((0.9**2 + 0.999**2) / 2, rel=0.01)


def test_sizes_that_do_not_fit_are_errors():
    for channels, message in ((25, r"RGLRU.channels=25 must be a multiple of num_heads=3"), (0, "model_width=16 must")):
        with pytest.raises(UserError, match=message):
            layer(channels=channels)
    with pytest.raises(UserError, match="RGLRU.conv_length=6 must be at most window_length=4 and 1"):
        layer(conv_length=6)
