"""Training steps on meshes of several devices equal those on one."""

import jax
import numpy as np
import pytest
import tiny_run
from tiny_run import set_up

from meliad_like import config
from meliad_like.mesh import MESH_AXES
from meliad_like.planning.programs import state_parts

NUM_STEPS = 5
SMALL = ("option/no_dropout.gin",)


@pytest.fixture(scope="module")
def bindings(tmp_path_factory):
    return tiny_run.make_bindings(tmp_path_factory.mktemp("documents"))


def take_step(setup, step, state, i):
    """The state after a step, as numpy arrays, and its loss."""
    state = jax.device_put(state, jax.tree.map(lambda x: x.sharding, setup.program.abstract_state))
    state, metrics = step(state, setup.reader.batch(i, range(8)))
    return jax.tree.map(np.asarray, state), float(metrics.loss)


# The families themselves are in test_sharded_families.py: here it is the whole step.
@pytest.mark.parametrize(
    ("files", "params", "mesh"),
    [
        pytest.param((), (), (2, 2, 2, 1), marks=pytest.mark.exhaustive),
        (SMALL, ("TrainingConfig.gradient_accumulation = 2",), (1, 2, 1, 4)),
    ],
    ids=["with dropout", "in parts, along the sequence"],
)
@pytest.mark.thorough
def test_sharded_equals_unsharded(bindings, files, params, mesh):
    """Every step begins with the same state on all meshes, because rounding grows from step to step."""

    def set_up_on(*shape):
        mesh = [f"MeshConfig.{axis} = {size}" for axis, size in zip(MESH_AXES, shape, strict=True)]
        return set_up(config.parse([*tiny_run.FILES, *files], [*bindings, *params, *mesh]))

    one = set_up_on(1, 1, 1, 1)
    step, states, losses = one.program.compile_step(), [jax.tree.map(np.asarray, one.program.initialise())], []
    for i in range(NUM_STEPS):
        state, loss = take_step(one, step, states[i], i)
        states.append(state)
        losses.append(loss)
    assert losses[-1] < losses[0] - 0.5
    sharded = set_up_on(*mesh)
    step = sharded.program.compile_step()
    for i in range(NUM_STEPS):
        state, loss = take_step(sharded, step, states[i], i)
        np.testing.assert_allclose(loss, losses[i], rtol=1e-5)
        for (path, a), b in zip(jax.tree.leaves_with_path(state), jax.tree.leaves(states[i + 1]), strict=True):
            message = f"step {i} {jax.tree_util.keystr(path)}"
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5, err_msg=message)


def test_cutting_the_parameters_does_not_gather_the_tokens(bindings):
    """A step on `fsdp` holds about what it holds on `data`: its own lanes' activations."""
    files = ["size/tiny.gin", "block_recurrent/slide_12l.gin", *SMALL]
    bindings = [binding for binding in bindings if not binding.startswith("RECURRENT_LAYERS")]
    data, fsdp = (
        set_up(config.parse(files, [*bindings, f"MeshConfig.{axis} = 8"])).program.compile_step().memory_analysis()
        for axis in ("data", "fsdp")
    )
    assert fsdp.argument_size_in_bytes < 0.3 * data.argument_size_in_bytes
    assert fsdp.temp_size_in_bytes < 1.5 * data.temp_size_in_bytes


@pytest.mark.thorough
@pytest.mark.parametrize("option", ["average", pytest.param("muon", marks=pytest.mark.exhaustive)])
def test_copies_of_the_parameters_share_the_optimizer_state(bindings, option):
    """Each device holds an eighth of all but the vectors, also of parameters that are in it, which the step gathers."""
    files = [*tiny_run.FILES, *SMALL, f"option/{option}.gin"]
    bindings = [binding for binding in bindings if option == "average" or not binding.startswith("Adafactor")]
    one, eight = (set_up(config.parse(files, [*bindings, f"MeshConfig.data = {n}"])) for n in (1, 8))
    held, share = (state_parts(setup.program)["optimizer state"] for setup in (one, eight))
    assert held / 8 < share < held / 6
    results = []
    for setup in (one, eight):
        step, state = setup.program.compile_step(), setup.program.initialise()
        # As a run with `--load_dir` begins.
        state = state.starting_with(jax.tree.map(lambda x: x / 2, state.params))
        for i in range(2):
            state, metrics = step(state, setup.reader.batch(i, range(8)))
        results.append((metrics.loss, state.params))
    for a, b in zip(*map(jax.tree.leaves, results), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)
