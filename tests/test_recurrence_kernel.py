"""The kernels for linear recurrences, interpreted, against the default computation and released arrays."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import test_linear_recurrence as recurrences
import test_released_mixers as released
import test_rg_lru

from meliad_like.kernels import convolution_tpu, recurrence_gpu_channels, recurrence_tpu, scan_gpu, scan_tpu
from meliad_like.kernels.recurrence_gpu import read_chunks_in_kernel
from meliad_like.kernels.recurrence_tpu_programs import inverse_of_unit_triangular
from meliad_like.kernels.registry import RECURRENCES, SCANS, kernel_of
from meliad_like.layers.basic import over_root_mean_square
from meliad_like.layers.linear_recurrence import Rule, convolve, read_chunks, scan_channels
from meliad_like.mesh import MeshConfig, make_mesh
from meliad_like.mixers import matrix_recurrence, rg_lru
from meliad_like.mixers.kimi_delta_attention import KimiDeltaAttention
from meliad_like.mixers.rg_lru import RGLRU
from meliad_like.models.decoder import DecoderConfig

# Large, because the norm of a short vector multiplies the vector's rounding errors.
EPSILON = 0.1


@functools.cache
def with_options(read, **options):
    """The same function for the same options, so that tests share programs."""
    return functools.partial(read, **options)


@functools.partial(jax.jit, static_argnums=(0, 4))
def differentiate(read, rule, matrix, start, chunk):
    def weighed(rule, matrix):
        after, read_by_tokens = read(rule, matrix, start, chunk)
        return jnp.sum(jnp.sin(read_by_tokens)) + jnp.sum(jnp.sin(after)), (after, read_by_tokens)

    return jax.grad(weighed, argnums=(0, 1), has_aux=True)(rule, matrix)


def results(read, rule, matrix, start, chunk=recurrences.BLOCK):
    """The states after the segment, what the tokens read, and the gradients of all inputs."""
    leaves, _ = jax.tree.flatten_with_path(differentiate(read, rule, matrix, start, chunk))
    return {jax.tree_util.keystr(path): np.asarray(x, np.float64) for path, x in leaves}


def with_norm(rule, matrix, start, chunk):
    after, read = read_chunks(rule, matrix, start, chunk)
    return after, over_root_mean_square(read, EPSILON)


def check(kernel, *arguments, default=read_chunks):
    """The interpreted kernel's results and gradients are the default's."""
    kernel = with_options(kernel, interpret=True)
    ours, default = (results(read, *arguments) for read in (kernel, default))
    for name, x in default.items():
        np.testing.assert_allclose(ours[name], x, atol=1e-5 * np.abs(x).max(), err_msg=name)


@pytest.mark.parametrize(("kind", "values"), [("mamba", 4), ("delta", 1), ("kimi", 4), ("by channel", 1)])
@pytest.mark.parametrize("make", [recurrences.rule_of, recurrences.extreme])
def test_the_kernels_equal_the_default(kind, make, values):
    rule, start = make(kind), recurrences.starts("documents")
    # Three channels of a value are one after the other, or a fourth one is there.
    rule = rule if values == 1 else rule._replace(value=jnp.pad(rule.value, [(0, 0)] * 3 + [(0, 1)], "reflect"))
    matrix = jax.random.normal(jax.random.key(1), (*rule.value.shape[:2], rule.value.shape[3], recurrences.K))
    check(with_options(read_chunks_in_kernel, values=values, slice=values), rule, matrix, start)


@recurrences.of_each_kind
@pytest.mark.parametrize(
    ("make", "heads", "norm_epsilon"),
    [(recurrences.rule_of, 2, EPSILON), (recurrences.extreme, 1, None)],
)
def test_the_kernel_for_tpus_equals_the_default(kind, make, heads, norm_epsilon):
    """A program reads the two heads of a group one after the other, or at once."""
    kernel = with_options(recurrence_tpu.read_chunks_in_kernel, heads=heads, norm_epsilon=norm_epsilon)
    default = read_chunks if norm_epsilon is None else with_norm
    check(kernel, make(kind), recurrences.first_states(), recurrences.starts("documents"), default=default)


@pytest.mark.parametrize(("kind", "size"), [("kimi", 2), ("by channel", 64)])
@pytest.mark.parametrize("make", [recurrences.rule_of, recurrences.extreme])
@pytest.mark.thorough
def test_heads_with_their_own_keys_and_decays_by_channel(monkeypatch, kind, make, size):
    """A kernel computes their products; the others share keys."""
    monkeypatch.setattr(recurrence_gpu_channels, "SLICE", size)
    rule = make(kind)
    query, key = (jnp.repeat(x, recurrences.R, axis=1) for x in (rule.query, rule.key))
    arguments = rule._replace(query=query, key=key), recurrences.first_states(), recurrences.starts("documents")
    # Stages have no effect here, but jit then traces each size.
    check(with_options(read_chunks_in_kernel, values=1, slice=1, stages=(size, 1)), *arguments)


@pytest.mark.parametrize(
    ("kernel", "chunk"),
    [(read_chunks_in_kernel, 1), pytest.param(read_chunks_in_kernel, 8, marks=pytest.mark.exhaustive)]
    + [(read_chunks_in_kernel, 64)]
    + [(recurrence_tpu.read_chunks_in_kernel, block) for block in (1, 128)],
)
def test_a_chunk_may_have_any_number_of_squares(kernel, chunk):
    """Keys of four channels are as alike as those of a text that repeats itself, and strengths are near 1."""
    generator = np.random.default_rng(0)
    query, key, value = generator.normal(size=(3, 1, 1, 128, 4))
    query, key = (x / np.linalg.norm(x, axis=-1, keepdims=True) for x in (query, key))
    log_decay, strength = np.log(generator.uniform(0.9, 1, (1, 1, 128, 1))), generator.uniform(0.99, 1, (1, 1, 128, 1))
    rule = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), Rule(query, key, value, log_decay, strength))
    check(kernel, rule, jnp.ones((1, 1, 4, 4)), np.zeros((1, 128 // chunk), bool), chunk)


@pytest.mark.parametrize(("noise", "strength"), [(0.2, 2), (0.05, 1), (10, 1)])
def test_the_inverse_is_more_exact_than_the_values_it_multiplies(noise, strength):
    """Of keys that repeat but for noise, on a TPU where activations are bfloat16: a single pass has errors up to 0.08,
    the values' own rounding one of 0.0017."""
    generator = np.random.default_rng(0)
    key = generator.normal(size=(1, 128)) + noise * generator.normal(size=(128, 128))
    key /= np.linalg.norm(key, axis=1, keepdims=True)
    below = np.tril(key @ key.T * generator.uniform(strength - 0.01, strength, (128, 1)), -1).astype(np.float32)
    options = recurrence_tpu.Options(jnp.dtype("bfloat16"), 1, False, True, None, True)
    inverse = jax.jit(functools.partial(inverse_of_unit_triangular, options))(jnp.asarray(below))
    exact, values = np.linalg.inv(np.eye(128) + below.astype(np.float64)), generator.normal(size=(128, 128))
    assert np.linalg.norm((inverse - exact) @ values) < 4e-4 * np.linalg.norm(exact @ values)


@pytest.mark.parametrize("tokens", [8, 16])
def test_the_convolution_for_tpus_equals_the_default(monkeypatch, tokens):
    """A run computes half of a block, or all of it on each of two devices."""
    monkeypatch.setattr(convolution_tpu, "LARGEST", tokens)
    generator = np.random.default_rng(0)
    sizes = (2, 48, 6), (2, 3, 6), (4, 6)
    arguments = [jnp.asarray(generator.normal(size=size), jnp.float32) for size in sizes]
    start = jnp.asarray([[False, True, False], [True, False, True]])

    def outputs_and_gradients(convolve):
        outputs, pull_back = jax.vjp(lambda *x: convolve(*x, start), *arguments)
        return outputs, *pull_back(jnp.sin(outputs))

    kernel = functools.partial(convolution_tpu.convolve_in_kernel, interpret=True)
    devices = jax.devices()[: tokens // 8]
    with jax.set_mesh(make_mesh(MeshConfig(tensor=len(devices)), devices)):
        results = jax.jit(lambda: outputs_and_gradients(kernel))()
    for ours, default in zip(results, outputs_and_gradients(convolve), strict=True):
        np.testing.assert_allclose(ours, default, atol=1e-6 * np.abs(default).max())


@pytest.mark.parametrize("module", [scan_tpu, scan_gpu])
@pytest.mark.parametrize(("tokens", "largest"), [(48, 16), (12, 12), (7, 1), (64, 64)])
def test_the_scan_equals_the_default(monkeypatch, module, tokens, largest):
    """Documents begin inside of a run; a run has tiles of 8, 4 or 1 tokens; two devices compute all of the last."""
    monkeypatch.setattr(convolution_tpu, "LARGEST", largest)
    monkeypatch.setattr(scan_gpu, "TOKENS", largest)

    @functools.partial(jax.jit, static_argnums=0)
    def outputs_and_gradients(scan, *arguments):
        outputs, pull_back = jax.vjp(scan, *arguments)
        return *outputs, *pull_back(jax.tree.map(jnp.sin, outputs))

    devices = jax.devices()[: 1 + (tokens == 64)]
    mesh, kernel = (
        make_mesh(MeshConfig(tensor=len(devices)), devices),
        with_options(module.scan_in_kernel, interpret=True),
    )
    for decays in (0, 1), (1 - 1e-5, 1), (0, 1e-30):
        generator = np.random.default_rng(0)
        decay = generator.uniform(*decays, (2, tokens, 6)) * (generator.uniform(size=(2, tokens, 1)) > 0.1)
        added, state = generator.normal(size=(2, tokens, 6)), generator.normal(size=(2, 6))
        arguments = [jnp.asarray(x, jnp.float32) for x in (decay, added, state)]
        with jax.set_mesh(mesh):
            results = outputs_and_gradients(kernel, *arguments)
        for ours, default in zip(results, outputs_and_gradients(scan_channels, *arguments), strict=True):
            np.testing.assert_allclose(ours, default, atol=1e-5 * np.abs(default).max())
        plain = [state := decay[:, t] * state + added[:, t] for t in range(tokens)]
        np.testing.assert_allclose(results[1], np.stack(plain, axis=1), atol=1e-5 * np.abs(plain).max())


@pytest.mark.parametrize("kind", ["delta", "kimi"])
@pytest.mark.thorough
def test_factors_of_products_may_be_bfloat16(kind):
    rule, start = recurrences.rule_of(kind), recurrences.starts("documents")
    kernel = with_options(read_chunks_in_kernel, interpret=True, dtype=jnp.bfloat16, values=1, slice=1)
    arguments = rule, recurrences.first_states(), start
    ours, default = (results(read, *arguments) for read in (kernel, read_chunks))
    for name, x in default.items():
        assert 1e-4 < np.linalg.norm(ours[name] - x) / np.linalg.norm(x) < 2e-2, name


@pytest.mark.parametrize("kind", ["mamba", "kimi"])
@pytest.mark.parametrize(
    "kernel", [with_options(read_chunks_in_kernel, values=1, slice=1), recurrence_tpu.read_chunks_in_kernel]
)
@pytest.mark.thorough
def test_a_mesh_may_divide_heads_where_it_cannot_divide_groups(kind, kernel):
    arguments = recurrences.rule_of(kind), recurrences.first_states(), recurrences.starts("documents")
    with jax.set_mesh(make_mesh(MeshConfig(tensor=recurrences.H), jax.devices()[: recurrences.H])):
        ours = results(with_options(kernel, interpret=True), *arguments)
    for name, x in results(read_chunks, *arguments).items():
        np.testing.assert_allclose(ours[name], x, atol=1e-5 * np.abs(x).max(), err_msg=name)


@pytest.fixture(params=["gpu", "tpu"])
def interpreted(monkeypatch, request):
    """Mixers use the interpreted kernels, whatever their sizes."""
    jax.clear_caches()

    def kernel_of(kernels, *_):
        return functools.partial(kernels[request.param][0], interpret=True) if request.param in kernels else None

    for module in matrix_recurrence, rg_lru:
        monkeypatch.setattr(module, "kernel_of", kernel_of)
    yield
    jax.clear_caches()


@pytest.mark.parametrize("name", [name for name in released.LAYERS if "document_starts" in released.arrays(name)])
def test_outputs_and_gradients_are_those_of_the_released_code(interpreted, name):
    released.test_outputs_with_documents_are_those_of_the_released_code(name)
    released.test_gradients_are_those_of_the_released_code(name, "grad_documents/")


def test_grouped_values_are_read_as_by_the_released_code(interpreted):
    released.test_outputs_are_those_of_the_released_code("gated_delta_layer_grouped")


@pytest.mark.parametrize("name", ["rglru_block_documents"])
@pytest.mark.thorough
def test_the_rg_lru_in_kernels_is_that_of_the_released_code(interpreted, name):
    test_rg_lru.test_outputs_are_those_of_the_released_code(name)
    test_rg_lru.test_continued_outputs_are_those_of_the_released_code(name)
    test_rg_lru.test_gradients_are_those_of_the_released_code(name)


@pytest.mark.thorough
def test_the_rg_lru_in_kernels_is_exact_in_bfloat16(interpreted):
    test_rg_lru.test_bfloat16_is_as_exact_as_the_released_code()


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("interpreted", "name"),
    [pytest.param("gpu", "kda_layer", marks=pytest.mark.exhaustive), ("tpu", "gated_delta_layer")],
    indirect=["interpreted"],
)
def test_bfloat16_is_as_exact_as_the_released_code(interpreted, name):
    released.test_bfloat16_is_as_exact_as_the_released_code(name)


@pytest.mark.parametrize(("groups", "heads", "key_size", "value_size", "by_channel", "corrected"), [
    (8, 8, 128, 128, False, True),
    (8, 8, 128, 256, False, False),
    (1, 32, 128, 64, False, False),
    (2, 2, 64, 64, True, True),
])  # fmt: skip
def test_programs_are_lowered_for_a_gpu(groups, heads, key_size, value_size, by_channel, corrected):
    """Triton gets programs that it can read; no GPU compiles them here."""

    def array(*shape, dtype=jnp.float32):
        return jax.ShapeDtypeStruct(shape, dtype)

    query, value = array(1, groups, 128, key_size), array(1, heads, 128, value_size)
    decay = array(1, heads, 128, key_size if by_channel else 1)
    rule = Rule(query, query, value, decay, array(1, heads, 128, 1) if corrected else None)

    def loss(rule, matrix, start):
        return jnp.sum(read_chunks_in_kernel(rule, matrix, start, 64, dtype="bfloat16")[1])

    arguments = rule, array(1, heads, value_size, key_size), array(1, 2, dtype=bool)
    text = jax.jit(jax.grad(loss, argnums=(0, 1))).trace(*arguments).lower(lowering_platforms=("cuda",)).as_text()
    kernels = [
        "states_kernel",
        "read_kernel",
        "read_gradient_kernel",
        "states_gradient_kernel",
        "input_gradient_kernel",
    ]
    assert all(kernel in text for kernel in kernels)
    assert ("inverse_kernel" in text) == ("solved_kernel" in text) == corrected
    assert ("products_kernel" in text) == ("products_gradient_kernel" in text) == by_channel


def test_the_scan_is_lowered_for_a_gpu():
    def loss(*arguments):
        return sum(map(jnp.sum, scan_gpu.scan_in_kernel(*arguments)))

    vectors, state = (jax.ShapeDtypeStruct(size, jnp.float32) for size in ((8, 4096, 1024), (8, 1024)))
    gradient = jax.jit(jax.grad(loss, argnums=(0, 1, 2)))
    text = gradient.trace(vectors, vectors, state).lower(lowering_platforms=("cuda",)).as_text()
    # The maps of parts are composed in both directions.
    calls = {"composing_kernel": 2, "states_kernel": 1, "gradients_kernel": 1}
    assert {kernel: len(re.findall(rf'name = "{kernel}"', text)) for kernel in calls} == calls


def test_sizes_that_do_not_fit_use_the_default():
    assert kernel_of(RECURRENCES, "gpu", 512, 64, 128, 256, True) is RECURRENCES["gpu"][0]
    for sizes in ((8, 128, 128), (128, 128, 128), (64, 96, 128), (64, 256, 64), (64, 64, 8)):
        assert kernel_of(RECURRENCES, "gpu", 512, *sizes, False) is None
    assert kernel_of(RECURRENCES, "tpu", 256, 64, 64, 256, False) is RECURRENCES["tpu"][0]
    for sizes in ((64, 64, 128, 128, False), (512, 64, 96, 128, False), (512, 64, 128, 8, True)):
        assert kernel_of(RECURRENCES, "tpu", *sizes) is None
    assert kernel_of(RECURRENCES, "interpreted", 8, 8, 6, 6, True) is RECURRENCES["interpreted"][0]
    mixer = KimiDeltaAttention()
    config = DecoderConfig(pattern=("kimi_delta_attention+feedforward",))
    assert config.recurrence_kernel == "auto" and not mixer.has_kernel(config.shape, "recurrence")
    assert mixer.has_kernel(dataclasses.replace(config, recurrence_kernel="gpu").shape, "recurrence")
    assert kernel_of(SCANS, "tpu", 512, 1024) is scan_tpu.scan_in_kernel
    assert kernel_of(SCANS, "gpu", 8, 1024) is scan_gpu.scan_in_kernel
    for sizes in (("tpu", 512, 96), ("tpu", 64, 1024), ("gpu", 512, 96), ("gpu", 4, 1024), ("none", 512, 1024)):
        assert kernel_of(SCANS, *sizes) is None
    for kernel in "tpu", "gpu", "interpreted":
        assert RGLRU().has_kernel(dataclasses.replace(config, recurrence_kernel=kernel).shape, "recurrence")
