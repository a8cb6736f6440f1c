"""The device mesh, and the shardings of parameters, optimizer state and lanes on it.

The axes `data` and `fsdp` shard the lanes; `fsdp` also shards every parameter along the model width, and `tensor` along
heads, feed-forward width and vocabulary. Arrays have a `NamedSharding`; the compiler derives intermediate layouts,
except for the few that the model prescribes (`layers.sharding.constrain`) and for `sequence`, which shards the tokens
of a segment (`layers/sharding.py`): parameters, carry and batch are replicated along it.

Along `data` and `sequence` there are copies of the parameters. Each updates its share of them, for which alone it holds
the optimizer state, and the new parameters are gathered (Xu et al. 2020, Automatic cross-replica sharding of weight
update in data-parallel training; Rajbhandari et al. 2020, ZeRO, stage 1). An average of the parameters is gathered too.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.experimental.mesh_utils import create_device_mesh
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from meliad_like.errors import UserError
from meliad_like.layers.sharding import MESH_AXES_OF
from meliad_like.registry import resumable
from meliad_like.validation import check_positive

MESH_AXES = ("data", "fsdp", "tensor", "sequence")
COPIES = ("data", "sequence")
"""The axes along which the parameters are copied."""


@dataclass(frozen=True)
class MeshConfig:
    """Number of devices along each axis of the mesh; their product is the number of devices."""

    data: int = resumable(-1)
    """The number of copies of the parameters, which divide the optimizer state and the lanes; -1: all other devices."""
    fsdp: int = resumable(1)
    """The number of shards of parameters and optimizer state along the model width; each has its own lanes too."""
    tensor: int = resumable(1)
    """The number of shards of heads, feed-forward width and vocabulary; these devices share their lanes."""
    sequence: int = resumable(1)
    """The number of shards of the blocks of a segment, for segments that are too long for one device. It works
    where no block waits for all of the one before; other models are an error with the reason (`sequential_because`)."""

    def __post_init__(self):
        check_positive(self, ("fsdp", "tensor", "sequence"))


def make_mesh(config: MeshConfig, devices: Sequence[Any] | None = None) -> Mesh:
    """A mesh of Auto axes (MESH_AXES) over `devices` (default: all, of all processes)."""
    devices = jax.devices() if devices is None else devices
    inner = config.fsdp * config.sequence * config.tensor
    data = len(devices) // inner if config.data == -1 else config.data
    if data * inner != len(devices):
        sizes = " ".join(f"{name}={size}" for name, size in vars(config).items())
        raise UserError(f"mesh {sizes} does not fit {len(devices)} device(s): the product must be their number")
    # jax.make_mesh makes Explicit axes by default.
    axis_types = (AxisType.Auto,) * len(MESH_AXES)
    shape = (data, config.fsdp, config.tensor, config.sequence)
    try:
        return jax.make_mesh(shape, MESH_AXES, axis_types=axis_types, devices=devices)
    except NotImplementedError:
        # jax.make_mesh assigns whole sides of a TPU slice to an axis, but a 4x4 slice has no side of 2: split sides.
        arranged = create_device_mesh(shape, devices, allow_split_physical_axes=True)
        return Mesh(arranged, MESH_AXES, axis_types=axis_types)


def replicated(mesh: Mesh) -> NamedSharding:
    """The sharding of an array that every device has a copy of."""
    return NamedSharding(mesh, PartitionSpec())


def lane_shards(mesh: Mesh) -> int:
    """The number of shards of the lanes, of which their number must be a multiple."""
    return mesh.shape["data"] * mesh.shape["fsdp"]


def lane_sharding(mesh: Mesh, num_lanes: int, parts: int = 1) -> NamedSharding:
    """The sharding of every array whose first axis is the lane, such as the arrays of a batch.

    Raises a UserError if the shards of lanes, in this number of `parts` (gradient_accumulation), can't be equal.
    """
    if num_lanes % (multiple := parts * lane_shards(mesh)):
        problem = f"{num_lanes} lanes (tokens_per_step / segment_length) do not divide by mesh data x fsdp"
        raise UserError(f"{problem} x gradient_accumulation: make their number a multiple of {multiple}")
    return NamedSharding(mesh, PartitionSpec(MESH_AXES_OF["lanes"]))


def carry_shardings(mesh: Mesh, num_lanes: int, carry: Any) -> Any:
    """The shardings of a carry: by lanes, and of arrays with four axes, [b, h, ...], also by heads. Heads of keys that
    are fewer than those of queries, and don't divide by the devices that share heads, are on all of them."""
    lanes = lane_sharding(mesh, num_lanes)  # Raises an error if they don't divide.

    def sharding(array) -> NamedSharding:
        shared = array.ndim == 4 and array.shape[1] % mesh.shape[MESH_AXES_OF["heads"]] == 0
        return _sharding(mesh, ("lanes", "heads")) if shared else lanes

    return jax.tree.map(sharding, carry)


def _sharding(mesh: Mesh, names: Sequence[str | None]) -> NamedSharding:
    return NamedSharding(mesh, PartitionSpec(*(MESH_AXES_OF[name] for name in names)))


def parameter_shardings(mesh: Mesh, axes: Any, abstract_params: Any) -> Any:
    """The shardings of the parameters, from a tree like them with a tuple of logical names (or None) for each array.

    Raises a UserError if a dimension is not a multiple of its mesh axis.
    """

    def sharding(path, names: tuple[str | None, ...], array) -> NamedSharding:
        for i, (name, size) in enumerate(zip(names, array.shape, strict=True)):
            axis = MESH_AXES_OF[name]
            if isinstance(axis, str) and size % mesh.shape[axis]:
                problem = f"dimension {i} ({name}, {size}) of parameter {'/'.join(_names(path))}"
                raise UserError(f"{problem} does not divide by mesh axis {axis}={mesh.shape[axis]}")
        return _sharding(mesh, names)

    return jax.tree.map_with_path(sharding, axes, abstract_params, is_leaf=lambda node: isinstance(node, tuple))


class ParameterShardings(NamedTuple):
    """Three trees of shardings like the parameters, and the exchange of a step between the copies of the parameters."""

    whole: Any = None
    """Shardings of the parameters as the model reads them."""
    gradients: Any = None
    """Shardings of the gradients where each copy gets the sum of its share alone (`layers/backend.py`): `shares`, but
    whole for tables of the vocabulary, whose gradients the loss adds up in a loop; each turn would sum over copies."""
    shares: Any = None
    """Shardings of the trees that only the optimizer reads: each copy of the parameters has a share of them."""
    has_copies: bool = False
    """Whether there is more than one copy. Otherwise methods return their argument: constraints change the rounding."""

    def gather(self, params: Any) -> Any:
        """All-gather: every copy gets all parameters, of which each had its share."""
        return self._constrain(params, self.whole)

    def reduce(self, gradient: Any, scatter: bool) -> Any:
        """The sum of the copies' gradients, of which every copy gets its share: it receives the share alone with
        `scatter` (reduce-scatter), otherwise the whole sum (all-reduce)."""
        return self.share(self._constrain(gradient, self.gradients if scatter else self.whole))

    def share(self, tree: Any) -> Any:
        """The share that each copy has of a tree like the parameters."""
        return self._constrain(tree, self.shares)

    def _constrain(self, tree: Any, shardings: Any) -> Any:
        return jax.lax.with_sharding_constraint(tree, shardings) if self.has_copies else tree


ONE_COPY = ParameterShardings()
"""The shardings of a step without a mesh."""


def training_shardings(mesh: Mesh, axes: Any, abstract_params: Any) -> ParameterShardings:
    """The shardings of the parameters, by the arguments of `parameter_shardings`, and of the shares of their copies.

    A parameter is divided along the first dimension that is a multiple of the number of its shares. If there is none,
    every copy updates all of it, and so it does with norms and biases, which have one dimension.
    """
    whole = parameter_shardings(mesh, axes, abstract_params)
    copies = tuple(axis for axis in COPIES if mesh.shape[axis] > 1)

    def share(sharding: NamedSharding, array) -> NamedSharding:
        if array.ndim < 2:
            return sharding
        for i, (axis, size) in enumerate(zip(sharding.spec, array.shape, strict=True)):
            divided = (*([] if axis is None else [axis]), *copies)
            if size % math.prod(mesh.shape[name] for name in divided) == 0:
                return NamedSharding(mesh, PartitionSpec(*sharding.spec[:i], divided, *sharding.spec[i + 1 :]))
        return sharding

    shares = jax.tree.map(share, whole, abstract_params) if copies else whole

    def of_gradient(names: tuple[str | None, ...], whole: NamedSharding, share: NamedSharding) -> NamedSharding:
        return whole if "vocabulary" in names else share

    gradients = jax.tree.map(of_gradient, axes, whole, shares, is_leaf=lambda node: isinstance(node, tuple))
    return ParameterShardings(whole, gradients, shares, has_copies=bool(copies))


def optimizer_state_shardings(mesh: Mesh, abstract_state: Any, abstract_params: Any, shares: Any) -> Any:
    """The shardings of an optax state, which follow those of the parameters' shares (`ParameterShardings.shares`).

    A state's array belongs to the parameter whose path its own path ends with. An array of the parameter's shape
    (momentum, second moment) has the sharding of its shares. Adafactor's `v_row` and `v_col` lack one of the two
    largest dimensions, so their sharding lacks that entry; `optax.tree.map_params` would not tell which of the two an
    array is. Counters and placeholders of shape (1,) are replicated. Raises a NotImplementedError without a rule.
    """
    parameters = {
        _names(path): (tuple(array.shape), sharding.spec)
        for (path, array), sharding in zip(jax.tree.leaves_with_path(abstract_params), jax.tree.leaves(shares))
    }

    def sharding(path, array) -> NamedSharding:
        names = _names(path)
        if array.shape in ((), (1,)):
            return replicated(mesh)
        for start in range(1, len(names)):
            shape, spec = parameters.get(names[start:], (None, PartitionSpec()))
            if array.shape == shape:
                return NamedSharding(mesh, spec)
            # optax drops the largest dimension for v_row and the second largest for v_col, by the same argsort.
            dropped = {"v_row": -1, "v_col": -2}.get(names[start - 1])
            if shape is not None and dropped is not None:
                dimension = int(np.argsort(shape)[dropped])
                return NamedSharding(mesh, PartitionSpec(*(each for i, each in enumerate(spec) if i != dimension)))
        raise NotImplementedError(f"no rule says how to shard the optimizer's {'/'.join(names)} of shape {array.shape}")

    return jax.tree.map_with_path(sharding, abstract_state)


def _names(path) -> tuple[str, ...]:
    return tuple(jax.tree_util.keystr((key,), simple=True) for key in path)
