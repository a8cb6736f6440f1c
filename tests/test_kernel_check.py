"""The attention kernel's check at the start of a program, with interpreted kernels."""

import dataclasses
import functools
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from decoders import with_mixer

from meliad_like.kernels import check, span, window_tpu_programs
from meliad_like.kernels.registry import KERNELS, RECURRENCES, SCANS
from meliad_like.mesh import MeshConfig, make_mesh
from meliad_like.mixers import kernel_check
from meliad_like.mixers.dot_product_attention import DotProductAttention
from meliad_like.mixers.external_memory import ExternalMemory
from meliad_like.mixers.gated_delta_rule import GatedDeltaRule
from meliad_like.mixers.kernel_check import kernel_that_works
from meliad_like.mixers.mamba2 import Mamba2
from meliad_like.mixers.positions import Rotary
from meliad_like.mixers.recurrent_states import RecurrentStates
from meliad_like.models import decoder
from meliad_like.models.decoder import DecoderConfig

CONFIG = DecoderConfig(num_layers=1, model_width=8, num_heads=2, head_size=4, window_length=8)


COMPUTATION = kernel_check._computation


@functools.cache
def default_computation(*arguments):
    run, make_inputs = COMPUTATION(*arguments)
    results = jax.jit(run)(make_inputs())
    return lambda _: results, dict


@pytest.fixture(autouse=True)
def default_once(monkeypatch):
    """The default is computed once for all checks of the same modules, right kernels and wrong ones. On a CPU its
    products have the highest precision anyway."""

    def computation(build, shape, *others):
        has_kernel = "interpreted" in (shape.attention_kernel, shape.recurrence_kernel)
        return (COMPUTATION if has_kernel else default_computation)(build, shape, *others)

    monkeypatch.setattr(kernel_check, "_computation", computation)


@pytest.fixture
def checked(capsys):
    """The kernel that the check of an interpreted kernel chooses, and the line that it prints."""

    def chosen(config, dtype="float32"):
        jax.clear_caches()  # a changed kernel would not be traced again
        kernel_check._checked.cache_clear()
        kernel = kernel_that_works(config.shape, dtype, "attention", "interpreted")
        return kernel, capsys.readouterr().err

    return chosen


@pytest.mark.parametrize(("name", "dtype", "dropout_rate"), [("tpu", "float32", 0.0), ("gpu", "bfloat16", 0.1)])
def test_a_kernel_that_agrees_is_used(checked, monkeypatch, name, dtype, dropout_rate):
    interpreted = functools.partial(KERNELS[name].attend, interpret=True)
    monkeypatch.setitem(KERNELS, "interpreted", KERNELS["interpreted"]._replace(attend=interpreted))
    config = dataclasses.replace(CONFIG, dropout_rate=dropout_rate)
    assert checked(config, dtype) == ("interpreted", "attention kernel: checked on this device\n")


def test_a_kernel_with_a_wrong_index_is_refused(checked, monkeypatch):
    sheared = window_tpu_programs._sheared
    monkeypatch.setattr(window_tpu_programs, "_sheared", lambda x, right: jnp.roll(sheared(x, right), 1, axis=1))
    kernel, line = checked(CONFIG)
    assert kernel == "none" and line.count("\n") == 1
    assert line.startswith("attention kernel: the default is used instead: the window: the error of ")


@pytest.fixture
def without_the_window(monkeypatch):
    """Other tests check the attention to the window."""
    monkeypatch.setattr(kernel_check, "_has_window", lambda shape: False)


@pytest.mark.thorough
def test_a_kernel_for_states_is_checked_as_well(checked, without_the_window, monkeypatch):
    states = RecurrentStates(num_states=4)
    config = with_mixer(CONFIG, states, (0,))
    right = KERNELS["interpreted"].attend_states
    assert checked(config) == ("interpreted", "attention kernel: checked on this device\n")
    broken = KERNELS["interpreted"]._replace(attend_states=functools.partial(without_unit_length, right))
    monkeypatch.setitem(KERNELS, "interpreted", broken)
    kernel, line = checked(config)
    assert kernel == "none" and "the default is used instead: recurrent_states: the error of " in line


@pytest.mark.thorough
def test_the_kernels_for_an_external_memory_are_checked_as_well(checked, without_the_window, monkeypatch):
    memory = ExternalMemory(num_slots=32, num_neighbors=4, search="bucketed")
    config = with_mixer(CONFIG, memory, (0,))
    right = KERNELS["interpreted"].memory
    assert checked(config) == ("interpreted", "attention kernel: checked on this device\n")
    wrong = right._replace(products=lambda query, memory, slot: right.products(query, memory, jnp.maximum(slot - 4, 0)))
    monkeypatch.setitem(KERNELS, "interpreted", KERNELS["interpreted"]._replace(memory=wrong))
    kernel, line = checked(config)
    assert kernel == "none" and "the default is used instead: external_memory: the error of " in line


CUDNN = functools.partial(span.attend_span_in_kernel, run=functools.partial(span.cudnn_attention, implementation="xla"))
"""The call of cuDNN's attention, with the mathematics of XLA."""


@pytest.mark.thorough
@pytest.mark.parametrize("right", [KERNELS["interpreted"].attend_span, CUDNN], ids=["splash", "cudnn"])
def test_the_kernel_of_attention_to_a_span_is_checked_as_well(checked, monkeypatch, right):
    """To 1e-5, gradients too: groups of keys, a cache, a document that begins inside, and a span that ends inside."""
    monkeypatch.setitem(check.ERRORS, "float32", 1e-5)
    monkeypatch.setitem(KERNELS, "interpreted", KERNELS["interpreted"]._replace(attend_span=right))
    mixers = (DotProductAttention(span=150, num_key_heads=1),)
    config = dataclasses.replace(CONFIG, window_length=128, mixers=mixers, pattern=("dot_product_attention",))
    assert checked(config) == ("interpreted", "attention kernel: checked on this device\n")
    for changes in ({"span": 149}, {"key_document": 0}):
        wrong = KERNELS["interpreted"]._replace(attend_span=functools.partial(with_other_arguments, right, changes))
        monkeypatch.setitem(KERNELS, "interpreted", wrong)
        kernel, line = checked(config)
        assert kernel == "none" and "the default is used instead: dot_product_attention: the error of " in line
    shape = dataclasses.replace(config, window_length=64).shape
    assert kernel_that_works(shape, "float32", "attention", "interpreted") == "none"


def with_other_arguments(attend, changes, query, key, value, query_document, key_document, span):
    if "key_document" in changes:  # All in one.
        query_document, key_document = 0 * query_document, 0 * key_document
    return attend(query, key, value, query_document, key_document, changes.get("span", span))


@pytest.mark.parametrize("attend_span", [KERNELS["interpreted"].attend_span, CUDNN], ids=["splash", "cudnn"])
def test_the_kernel_of_attention_to_a_span_on_several_devices(attend_span):
    """More devices than heads of keys."""
    array = functools.partial(np.random.default_rng(0).normal, size=(2, 4, 128, 4))
    query, keys = jnp.asarray(array(), jnp.float32), [jnp.asarray(array()[:, :2], jnp.float32) for _ in range(2)]
    documents = jnp.zeros((2, 128), jnp.int32)

    def attend(query, key, value):
        return attend_span(query, key, value, documents, documents, 50)

    expected = jax.jit(attend)(query, *keys)
    with jax.set_mesh(make_mesh(MeshConfig(data=2, tensor=4))):
        np.testing.assert_allclose(jax.jit(attend)(query, *keys), expected, atol=1e-5)


@pytest.mark.thorough
@pytest.mark.parametrize("dtype", [pytest.param("float32", marks=pytest.mark.exhaustive), "bfloat16"])
def test_the_kernel_of_recurrences_is_checked_on_its_own(capsys, monkeypatch, dtype):
    mixers = GatedDeltaRule(chunk_length=4), Mamba2(head_size=4, state_size=4)
    config = dataclasses.replace(CONFIG, mixers=mixers, pattern=("gated_delta_rule+mamba2",), position=Rotary())
    kernel_check._checked.cache_clear()
    assert kernel_that_works(config.shape, dtype, "recurrence", "interpreted") == "interpreted"
    assert capsys.readouterr().err == "recurrence kernel: checked on this device\n"
    assert kernel_that_works(CONFIG.shape, dtype, "recurrence", "interpreted") == "none"
    assert kernel_that_works(config.shape, dtype, "recurrence") == "none"
    right, fits = RECURRENCES["interpreted"]

    def without_start(rule, matrix, start, chunk, **options):
        return right(rule, matrix, jnp.zeros_like(start), chunk, **options)

    monkeypatch.setitem(RECURRENCES, "interpreted", (without_start, fits))
    kernel_check._checked.cache_clear()
    assert kernel_that_works(config.shape, dtype, "recurrence", "interpreted") == "none"
    assert "the default is used instead: gated_delta_rule: the error of " in capsys.readouterr().err


@pytest.mark.thorough
def test_the_scan_of_the_rg_lru_is_checked_as_well(capsys, monkeypatch):
    config = dataclasses.replace(CONFIG, pattern=("rg_lru",), position=Rotary())
    (right, fits), for_tpus = SCANS["interpreted"], functools.partial(SCANS["tpu"][0], interpret=True)

    def without_state(decay, added, state):
        return right(decay, added, jnp.zeros_like(state))

    kernel_check._checked.cache_clear()
    assert kernel_check._checked(config.shape, "float32", "recurrence", "interpreted", "v5e") == "interpreted"
    assert capsys.readouterr().err == "recurrence kernel: compiled for v5e\n"
    refused = "the default is used instead: rg_lru: the error of "
    checked = "checked on this device"
    for kernel, line in (right, checked), (for_tpus, checked), (without_state, refused):
        monkeypatch.setitem(SCANS, "interpreted", (kernel, fits))
        kernel_check._checked.cache_clear()
        name = kernel_that_works(config.shape, "float32", "recurrence", "interpreted")
        assert name == ("interpreted" if line == checked else "none")
        assert capsys.readouterr().err.startswith(f"recurrence kernel: {line}")


def without_unit_length(attend, query, scale, *parts):
    return attend(query, scale, *(part._replace(has_unit_length=None) for part in parts))


def test_a_kernel_that_does_not_compile_is_refused(checked, monkeypatch):
    for_tpus = KERNELS["interpreted"]._replace(attend=KERNELS["tpu"].attend)
    monkeypatch.setitem(KERNELS, "interpreted", for_tpus)
    kernel, line = checked(CONFIG)
    assert kernel == "none" and line.count("\n") == 1
    assert "the default is used instead: the window: it does not compile or run (ValueError: " in line


def test_all_processes_decide_the_same(checked, monkeypatch):
    monkeypatch.setattr(check, "_problem", lambda *_: None)
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    gather = SimpleNamespace(process_allgather=lambda agrees: np.array([agrees, False]))
    monkeypatch.setattr(check, "multihost_utils", gather)
    assert checked(CONFIG) == ("none", "attention kernel: the default is used instead: another process refuses it\n")


def test_a_program_resolves_auto_and_a_cpu_changes_nothing(monkeypatch):
    assert CONFIG.attention_kernel == "auto" and CONFIG.on_this_platform() is CONFIG
    assert not CONFIG.shape.has_kernel
    assert checked_nothing(dataclasses.replace(CONFIG, position=Rotary()))
    kernels = {"attention": "interpreted", "recurrence": "gpu"}
    monkeypatch.setattr(decoder, "kernel_that_works", lambda shape, dtype, kind: kernels[kind])
    resolved = CONFIG.on_this_platform()
    assert (resolved.attention_kernel, resolved.recurrence_kernel) == ("interpreted", "gpu")
    without = dataclasses.replace(CONFIG, attention_kernel="none", recurrence_kernel="none")
    assert without.on_this_platform() is without


def checked_nothing(config):
    return kernel_that_works(config.shape, "float32", "attention", "interpreted") == "none"
