"""Every family on meshes of eight devices: losses, gradients and carries are those of one device."""

import collections
import dataclasses
import functools
import math
import re
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from families import CONFIGS, SKIP, SLIDE, STATES, B, C, V, W

from meliad_like.config import parse
from meliad_like.data.batch import Batch
from meliad_like.errors import UserError
from meliad_like.layers.basic import tiled_dropout
from meliad_like.layers.sharding import from_rightmost, over_sequence, scan_in_order
from meliad_like.mesh import MeshConfig, carry_shardings, lane_sharding, make_mesh, parameter_shardings
from meliad_like.models.model import Model
from meliad_like.training.program import make_program

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
from compiled_text import KINDS, Module

# data, fsdp, tensor, sequence
MESHES = [(8, 1, 1, 1), (2, 4, 1, 1), (2, 2, 2, 1), (1, 1, 8, 1)]
SEQUENCE_MESHES = [(1, 1, 1, 8), (2, 1, 2, 2), (1, 2, 2, 2), (2, 1, 1, 4)]
IN_ORDER = {"xl", "feedback", "memorizing", "memorizing in kernels", "shortformer"}
IN_ORDER |= {"gpt2", "llama", "recurrent gpt2", "recurrent llama"}

ALL = [(name, mesh) for name in CONFIGS for mesh in MESHES]
ALL += [(name, mesh) for name in CONFIGS.keys() - IN_ORDER for mesh in SEQUENCE_MESHES]
# Compiling for eight devices takes a second or more, so what is run each time is a part, and of the cells one of each
# kind: every family on one of the two meshes that cut its parameters most. All mixers are on a mesh in test_mixers.py,
# and states with fixed gates in test_sharded_training.py.
CHOSEN = [(name, (2, 2, 2, 1)) for name in ("gpt2", "xl", "llama", "recurrent gpt2")]
CHOSEN += [(name, (1, 1, 8, 1)) for name in ("shortformer", "slide")]
CHOSEN += [
    ("memorizing in kernels", (2, 2, 2, 1)),
    ("recurrences in kernels", (1, 1, 1, 8)),
    ("slide below skip", (1, 1, 1, 8)),
    ("lstm:dual", (2, 1, 2, 2)),
    ("kernel", (1, 1, 1, 8)),
    ("scanned", (2, 2, 2, 1)),
    ("spans", (2, 1, 1, 4)),
]
MARKED = [
    pytest.param(
        name,
        mesh,
        marks=() if (name, mesh) in CHOSEN else pytest.mark.exhaustive,
        id=f"{name}-{'x'.join(map(str, mesh))}",
    )
    for name, mesh in sorted(ALL)
]


@functools.cache
def model_and_params(name):
    model = Model(CONFIGS[name], V)
    generator = np.random.default_rng(0)
    # Other than they begin, so that everything counts.
    params = jax.tree.map(
        lambda x: np.asarray(x) + generator.normal(0, 0.1, x.shape).astype(np.float32), model.init(jax.random.key(0))
    )
    return model, params


def batches(model):
    """Two segments, in which documents begin and continue."""
    generator = np.random.default_rng(1)
    w = model.config.window_length
    for _ in range(2):
        inputs, targets = (generator.integers(0, V, (B, C * W), np.int32) for _ in range(2))
        start = generator.random((B, C * W // w)) < 0.2
        yield Batch(inputs, targets, np.ones(inputs.shape, bool), start, *np.zeros((2, *start.shape), np.int32))


def losses_and_gradient(model):
    def loss(params, carry, batch):
        losses, carry = model.bind(params).losses(batch.inputs, batch.targets, carry, batch.start, slice_length=2 * W)
        return jnp.mean(losses.nats), (losses, carry)

    return jax.grad(loss, has_aux=True)


def place(name, mesh):
    """Parameters and an empty carry on the mesh, and the sharding of a batch."""
    model, params = model_and_params(name)
    carry = model.bind(params).init_carry(B)
    lanes = lane_sharding(mesh, B)
    params = jax.device_put(params, parameter_shardings(mesh, model.axes, params))
    return params, jax.device_put(carry, carry_shardings(mesh, B, carry)), lanes


def read(name, mesh):
    """Losses, gradients and carry of two segments, the second of which continues with the carry of the first."""
    model, _ = model_and_params(name)
    params, carry, lanes = place(name, mesh)
    where = jax.tree.map(lambda x: x.sharding, (params, carry))
    step = jax.jit(losses_and_gradient(model), in_shardings=(*where, lanes), out_shardings=(where[0], (None, where[1])))
    results = []
    with jax.set_mesh(mesh):
        for batch in batches(model):
            gradient, (losses, carry) = step(params, carry, jax.device_put(batch, lanes))
            results.append(jax.tree.map(np.asarray, (losses.nats, gradient, carry)))
    return results


@functools.cache
def read_on_one_device(name):
    return read(name, make_mesh(MeshConfig(), jax.devices()[:1]))


@pytest.mark.parametrize(("name", "shape"), MARKED)
def test_sharded_equals_unsharded(name, shape):
    actual = read(name, make_mesh(MeshConfig(*shape)))
    for (path, a), b in zip(jax.tree.leaves_with_path(actual), jax.tree.leaves(read_on_one_device(name)), strict=True):
        # Gradients of a mean loss are small, some so small that 1e-5 would be most of them, and some are nothing.
        tolerance = np.clip(1e-3 * np.max(np.abs(b)), 1e-8, 1e-5)
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=tolerance, err_msg=jax.tree_util.keystr(path))


def compile_losses(config, mesh):
    """The losses of a segment: the forward pass alone."""
    model = Model(config, V)
    params = parameter_shardings(mesh, model.axes, model.abstract_params)
    carry = jax.eval_shape(lambda params: model.bind(params).init_carry(B), model.abstract_params)
    where = carry_shardings(mesh, B, carry)

    def losses(params, carry, batch):
        losses, carry = model.bind(params).losses(batch.inputs, batch.targets, carry, batch.start, slice_length=W)
        return losses.nats, carry

    with jax.set_mesh(mesh):
        step = jax.jit(losses, in_shardings=(params, where, lane_sharding(mesh, B)), out_shardings=(None, where))
        return step.lower(model.abstract_params, carry, next(batches(model))).compile()


def traffic(compiled):
    """The number of collectives by kind, and the bytes of their results on each device. A loop's body counts as often
    as it runs."""
    module, sums = Module(compiled.as_text()), collections.defaultdict(lambda: np.zeros(2, int))

    def add(name, runs):
        for instruction in module.computations[name]:
            kind = instruction.opcode.removesuffix("-done")
            if kind in KINDS:
                shapes = re.findall(r"[a-z]+(\d+)\[([\d,]*)\]", instruction.result)
                sizes = (math.prod(int(n) for n in axes.split(",") if n) * int(bits) // 8 for bits, axes in shapes)
                sums[kind] += runs * np.array([1, sum(sizes)])
            for _, called in instruction.called:
                add(called, runs * module.trips(instruction))

    add(module.entry, 1)
    return {kind: tuple(total) for kind, total in sums.items()}


COUNTS = B * np.int32().nbytes
"""Bytes of the number of tokens that each lane of a layer has read."""


def test_a_slide_layer_gets_one_window_of_its_left_neighbour():
    config = dataclasses.replace(SLIDE, num_layers=3)
    found = traffic(compile_losses(config, make_mesh(MeshConfig(sequence=8))))
    # And at the end all devices get what the last one remembers.
    assert found.keys() == {"collective-permute", "all-reduce"}
    window = B * W * config.num_heads * config.head_size * np.float32().nbytes
    assert found["collective-permute"] == (3, 3 * 2 * window)
    assert found["all-reduce"][1] == 3 * (2 * window + COUNTS)


def test_a_recurrent_layer_hands_on_its_states():
    found = traffic(compile_losses(SKIP, make_mesh(MeshConfig(sequence=8))))
    assert found.keys() == {"collective-permute", "all-reduce"}
    window, states = (B * n * SKIP.model_width * np.float32().nbytes for n in (W, STATES.num_states))
    # From one device to the next, until they have come to the last.
    assert found["collective-permute"] == (1 + 7, 2 * window + 7 * states)
    assert found["all-reduce"][1] == 2 * window + states + COUNTS


# Tiles of 64, 32 and 128 tokens, of which a device has 8, 12 and 128.
@pytest.mark.parametrize("n", [64, 96, 1024])
def test_dropout_of_a_cut_segment_is_that_of_the_whole(n):
    def drop(x, key):
        return tiled_dropout(x, 0.5, key), None

    x, key = jnp.ones((2, n, 4)), jax.random.key(0)
    with jax.set_mesh(make_mesh(MeshConfig(sequence=8))):
        cut, _ = jax.jit(over_sequence(drop))(x, key)
    np.testing.assert_array_equal(cut, drop(x, key)[0])


def test_a_state_of_several_arrays_passes_from_device_to_device():
    def read(tokens, state):
        def step(state, x):
            total, last = state["total"] + x, (state["last"][0] * 0.5 + x.astype(jnp.bfloat16),)
            return {"total": total, "last": last}, total * state["last"][0]

        state, results = scan_in_order(lambda state: jax.lax.scan(step, state, tokens.T), state)
        return results.T, from_rightmost(state)

    tokens = jnp.arange(32.0).reshape(2, 16)
    state = {"total": jnp.ones(2), "last": (jnp.ones(2, jnp.bfloat16),)}
    with jax.set_mesh(make_mesh(MeshConfig(sequence=8))):
        cut = jax.jit(over_sequence(read))(tokens, state)
    jax.tree.map(np.testing.assert_array_equal, cut, read(tokens, state))


def test_an_axis_of_one_device_changes_nothing():
    axes = ("data", "fsdp", "tensor")
    without = jax.make_mesh((2, 2, 2), axes, axis_types=(jax.sharding.AxisType.Auto,) * 3)
    texts = [compile_losses(SKIP, mesh).as_text() for mesh in (without, make_mesh(MeshConfig(2, 2, 2)))]
    # Where in our source an operation comes from depends on what was traced before; newer compilers name the axes.
    texts[1] = texts[1].replace(",'sequence'=1", "")
    programs = [re.findall(r"^(?:[%} ]|ENTRY).*", re.sub(r", metadata=\{.*?\}", "", text), re.M) for text in texts]
    assert len(programs[0]) > 100
    assert programs[0] == programs[1]


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("feedback", "decoder model: with StateReader a block waits for the layers of the one before"),
        (
            "memorizing",
            "decoder model: with ExternalMemory a block searches the memories of the blocks before it",
        ),
        ("shortformer", "shortformer model: its windows are read one after the other"),
        ("gpt2", "pretrained model: its windows are read one after the other"),
    ],
)
def test_models_that_read_in_order_refuse_the_axis(name, reason):
    CONFIGS[name].check_sequence(C * W, 1)
    with pytest.raises(UserError, match=re.escape(f"MeshConfig.sequence=2 must be 1 for this {reason}")):
        CONFIGS[name].check_sequence(C * W, 2)


def test_blocks_that_do_not_divide():
    run = parse(["size/tiny.gin"], ["MeshConfig.sequence = 8"])
    message = "MeshConfig.sequence=8 must divide the blocks of a segment: segment_length=64 is not a multiple of 8 x "
    with pytest.raises(UserError, match=re.escape(message)):
        make_program(run, V, make_mesh(run.mesh))
