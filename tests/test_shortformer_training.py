"""Training steps of a Shortformer: it learns, and a mesh of several devices changes nothing."""

import jax
import numpy as np
import pytest

from meliad_like import config
from meliad_like.data.batch import Batch
from meliad_like.mesh import MeshConfig, make_mesh
from meliad_like.training.program import make_program

V, B, N = 64, 4, 16
RUN = config.parse(
    ["shortformer/infused_cache.gin"],
    [
        "ShortformerConfig.num_layers = 1",
        "ShortformerConfig.model_width = 16",
        "ShortformerConfig.num_heads = 2",
        "ShortformerConfig.head_size = 8",
        "ShortformerConfig.feedforward_width = 32",
        "ShortformerConfig.window_length = 8",
        "ShortformerConfig.cache_length = 12",
        "ShortformerConfig.cutoffs = (16, 32)",
        "ShortformerConfig.band_factor = 2",
        f"ReaderConfig.segment_length = {N}",
        f"ReaderConfig.tokens_per_step = {B * N}",
        "ScheduleConfig.warmup_steps = 2",
        "TrainingConfig.num_steps = 100",
    ],
)


def batches(count):
    """Of lanes that repeat a few tokens of all bands."""
    tokens = np.tile(np.random.default_rng(0).integers(0, V, (B, 11), np.int32), 20)
    blocks = np.zeros((B, 2), np.int32)
    for i in range(count):
        places = tokens[:, i * N : (i + 1) * N + 1]
        start = np.array([[i == 0, False]] * B)
        yield Batch(places[:, :-1], places[:, 1:], np.ones((B, N), bool), start, blocks, blocks)


def make(mesh):
    """A program on the first devices, and its compiled step."""
    program = make_program(RUN, V, make_mesh(mesh, jax.devices()[: mesh.data * mesh.fsdp * mesh.tensor]))
    return program, program.compile_step()


def take_step(program, step, state, batch):
    state = jax.device_put(state, jax.tree.map(lambda x: x.sharding, program.abstract_state))
    state, metrics = step(state, batch)
    return jax.tree.map(np.asarray, state), float(metrics.loss)


@pytest.fixture(scope="module")
def one_device():
    """Losses of four steps, and the states before and after them."""
    program, step = make(MeshConfig(data=1))
    losses, states = [], [jax.tree.map(np.asarray, program.initialise())]
    for batch in batches(4):
        state, loss = take_step(program, step, states[-1], batch)
        losses.append(loss)
        states.append(state)
    return losses, states


@pytest.mark.exhaustive  # test_sharded_families.py reads segments of this family on meshes
@pytest.mark.parametrize("mesh", [MeshConfig(data=1, fsdp=2, tensor=2)])
def test_sharded_equals_unsharded(one_device, mesh):
    """Every step begins with the same state, because rounding grows from step to step."""
    program, step = make(mesh)
    for batch, expected_loss, before, after in zip(batches(4), one_device[0], one_device[1], one_device[1][1:]):
        state, loss = take_step(program, step, before, batch)
        np.testing.assert_allclose(loss, expected_loss, rtol=1e-5)
        for (path, a), b in zip(jax.tree.leaves_with_path(state), jax.tree.leaves(after), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5, err_msg=jax.tree_util.keystr(path))


@pytest.mark.thorough
def test_it_learns(one_device):
    """With the paper's clipping a step moves the parameters by its rate times 0.1, however steep the loss is."""
    assert one_device[0][0] > np.log(V)
    assert one_device[0][-1] < one_device[0][0] - 0.1
