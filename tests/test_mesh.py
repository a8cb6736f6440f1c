import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, PartitionSpec

from meliad_like import mesh as mesh_lib
from meliad_like.errors import UserError
from meliad_like.mesh import MeshConfig, make_mesh
from meliad_like.optimization.optimizers import Adafactor, Adam, Muon, make_optimizer, orthogonal

AXES = {
    "embedding": ("vocabulary", "model"),
    "layer0": {
        "kernel": ("model", "feedforward"),
        "square": ("model", "heads"),
        "scale": ("model",),
        "states": ("states", "model"),
    },
    "untied": (None, "model", "heads"),
}
SHAPES = {
    "embedding": (40, 16),
    "layer0": {"kernel": (16, 64), "square": (16, 16), "scale": (16,), "states": (5, 16)},
    "untied": (3, 8, 16),
}
KINDS = {
    "embedding": "table",
    "layer0": {"kernel": "matrix", "square": "filter", "scale": "scale", "states": "table"},
    "untied": "matrix",
}


def make_params(seed: int):
    generator = np.random.default_rng(seed)
    is_shape = lambda node: isinstance(node, tuple)  # noqa: E731
    return jax.tree.map(lambda shape: jnp.asarray(generator.normal(size=shape), jnp.float32), SHAPES, is_leaf=is_shape)


def optimizer_of(name: str):
    configs = {"adafactor": Adafactor(factored_size=8), "average": Adam(average_decay=0.9), "muon": Muon()}
    return make_optimizer(configs[name], lambda step: jnp.float32(0.01), KINDS)


def two_updates(optimizer, params, state):
    @jax.jit
    def update(params, state, gradients):
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state

    for seed in (1, 2):
        params, state = update(params, state, make_params(seed))
    return params, state


def place(mesh, optimizer, params):
    """Parameters, and the state made from them, on the mesh."""
    shardings = mesh_lib.training_shardings(mesh, AXES, params)
    state = jax.eval_shape(optimizer.init, params)
    state_shardings = mesh_lib.optimizer_state_shardings(mesh, state, params, shardings.shares)
    params = jax.device_put(params, shardings.whole)
    return params, jax.jit(optimizer.init, out_shardings=state_shardings)(params)


@pytest.mark.parametrize(
    "name, shape",
    [
        ("adafactor", (8, 1, 1)),
        ("adafactor", (2, 2, 2)),
        ("adafactor", (1, 4, 2)),
        ("adafactor", (1, 1, 8)),
        ("muon", (2, 2, 2)),
        ("average", (2, 2, 2)),
    ],
)
def test_sharded_updates_equal_unsharded(name, shape):
    optimizer = optimizer_of(name)
    params = make_params(0)
    expected = two_updates(optimizer, params, optimizer.init(params))
    mesh = make_mesh(MeshConfig(*shape))
    with jax.set_mesh(mesh):
        actual = two_updates(optimizer, *place(mesh, optimizer, params))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-6, atol=1e-6), actual, expected)


def test_muon_divides_its_matrices_among_the_copies_of_the_parameters():
    matrices = {str(i): jax.ShapeDtypeStruct((32, 32), jnp.float32) for i in range(8)}

    def flops(num_devices):
        mesh = make_mesh(MeshConfig(), jax.devices()[:num_devices])
        with jax.set_mesh(mesh):
            everywhere = mesh_lib.replicated(mesh)
            program = jax.jit(orthogonal, in_shardings=everywhere, out_shardings=everywhere).lower(matrices)
            return program.compile().cost_analysis()["flops"]

    assert flops(8) < flops(1) / 4


def test_shardings_of_parameters_and_adafactor_state():
    mesh = make_mesh(MeshConfig(2, 2, 2))
    params, state = place(mesh, optimizer_of("adafactor"), make_params(0))
    spec = lambda tree: jax.tree.map(lambda array: array.sharding.spec, tree)  # noqa: E731
    # v_row is the mean over the largest dimension, v_col over the second largest.
    v_row, v_col, v, momentum = (
        spec(optax.tree_utils.tree_get(state, name)) for name in ("v_row", "v_col", "v", "ema")
    )
    assert spec(params)["embedding"] == PartitionSpec("tensor", "fsdp")
    # Each of the two copies along `data` has a share of every matrix, along the first dimension that divides.
    rows, columns = ("tensor", "data"), ("fsdp", "data")
    assert momentum["embedding"] == PartitionSpec(rows, "fsdp")
    assert momentum["layer0"] == spec(params)["layer0"] | {
        "kernel": PartitionSpec(columns, "tensor"),
        "square": PartitionSpec(columns, "tensor"),
        "states": PartitionSpec(None, columns),
    }
    assert (v_row["embedding"], v_col["embedding"]) == (PartitionSpec("fsdp"), PartitionSpec(rows))
    assert (v_row["layer0"]["kernel"], v_col["layer0"]["kernel"]) == (PartitionSpec(columns), PartitionSpec("tensor"))
    assert (v_row["untied"], v_col["untied"]) == (PartitionSpec(None, columns), PartitionSpec(None, "tensor"))
    assert (v["layer0"]["states"], v["embedding"]) == (PartitionSpec(None, columns), PartitionSpec())


@pytest.mark.parametrize("shape, copies", [((8,), ("data",)), ((2, 1, 2, 2), ("data", "sequence")), ((1, 8), ())])
def test_shares_of_the_copies_of_the_parameters(shape, copies):
    mesh, params = make_mesh(MeshConfig(*shape)), make_params(0)
    whole, gradients, shares, has_copies = mesh_lib.training_shardings(mesh, AXES, params)
    assert has_copies == bool(copies)
    assert shares["layer0"]["scale"] == whole["layer0"]["scale"]
    assert gradients["embedding"] == whole["embedding"] and gradients["layer0"] == shares["layer0"]
    for name in ("embedding", "untied"):
        [share] = {shard.data.size for shard in jax.device_put(params[name], shares[name]).addressable_shards}
        [held] = {shard.data.size for shard in jax.device_put(params[name], whole[name]).addressable_shards}
        assert held == share * int(np.prod([mesh.shape[axis] for axis in copies]))


def test_a_state_without_a_rule_is_an_error():
    mesh, params = make_mesh(MeshConfig(2, 2, 2)), make_params(0)
    shardings = mesh_lib.training_shardings(mesh, AXES, params).shares
    for state in ({"mu": {"embedding": jnp.zeros(40)}}, {"rows": jnp.zeros(3)}, optax.sm3(0.1).init(params)):
        with pytest.raises(NotImplementedError, match=r"no rule says how to shard the optimizer's \w+"):
            mesh_lib.optimizer_state_shardings(mesh, state, params, shardings)


def test_each_device_holds_only_its_part():
    params, _ = place(make_mesh(MeshConfig(1, 4, 2)), optimizer_of("adafactor"), make_params(0))
    assert params["embedding"].addressable_shards[0].data.shape == (20, 4)


def test_data_axis_takes_the_remaining_devices():
    mesh = make_mesh(MeshConfig(fsdp=2))
    assert dict(mesh.shape) == {"data": 4, "fsdp": 2, "tensor": 1, "sequence": 1}
    assert set(mesh.axis_types) == {AxisType.Auto}


@dataclasses.dataclass(frozen=True)
class Chip:
    """The attributes of a TPU device that jax reads to lay out a mesh."""

    coords: tuple[int, int, int]
    id: int
    platform: str = "tpu"
    device_kind: str = "TPU v6 lite"
    core_on_chip: int = 0
    process_index: int = 0


@pytest.mark.parametrize("shape", [(8, 2, 1, 1), (8, 1, 2, 1), (2, 2, 2, 2), (2, 1, 8, 1), (4, 4, 1, 1)])
def test_a_slice_whose_sides_are_no_axes_of_the_mesh(shape):
    chips = [Chip((i % 4, i // 4, 0), i) for i in range(16)]
    mesh = make_mesh(MeshConfig(*shape), chips)
    assert tuple(mesh.shape.values()) == shape and set(mesh.axis_types) == {AxisType.Auto}
    assert set(mesh.devices.flat) == set(chips)


def test_lanes_are_shared_out_over_data_and_fsdp():
    sharding = mesh_lib.lane_sharding(make_mesh(MeshConfig(2, 2, 2)), num_lanes=8)
    batch = jax.device_put(jnp.zeros((8, 3)), sharding)
    assert {shard.data.shape for shard in batch.addressable_shards} == {(2, 3)}


@pytest.mark.parametrize("config", [MeshConfig(3), MeshConfig(fsdp=3), MeshConfig(8, 2), MeshConfig(sequence=16)])
def test_a_mesh_that_does_not_fit_the_devices(config):
    sizes = f"data={config.data} fsdp={config.fsdp} tensor={config.tensor} sequence={config.sequence}"
    message = f"mesh {sizes} does not fit 8 device"
    with pytest.raises(UserError, match=re.escape(message)):
        make_mesh(config)


def test_lanes_that_do_not_divide():
    with pytest.raises(UserError, match=re.escape("6 lanes (tokens_per_step / segment_length) do not divide by mesh")):
        mesh_lib.lane_sharding(make_mesh(MeshConfig(4, 2)), num_lanes=6)


def test_a_dimension_that_does_not_divide_is_named():
    message = "dimension 0 (vocabulary, 257) of parameter layer/embedding does not divide by mesh axis tensor=2"
    with pytest.raises(UserError, match=re.escape(message)):
        mesh_lib.parameter_shardings(
            make_mesh(MeshConfig(tensor=2)),
            {"layer": {"embedding": ("vocabulary", "model")}},
            {"layer": {"embedding": jax.ShapeDtypeStruct((257, 16), jnp.float32)}},
        )


@pytest.mark.parametrize("fields", [{"fsdp": 0}, {"tensor": -1}, {"sequence": 0}])
def test_wrong_fields_are_named(fields):
    ((name, value),) = fields.items()
    with pytest.raises(UserError, match=f"MeshConfig.{name}={value}"):
        MeshConfig(**fields)
