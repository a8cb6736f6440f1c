"""Devices to compile for, as their own compiler describes them: a TPU slice, GPUs of one kind, or a CPU."""

import importlib.util
import math
import os
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
from jax.experimental import topologies

from meliad_like.errors import UserError
from meliad_like.planning.gpus import GPUS, Gpu
from meliad_like.training.hardware import DATASHEET_FLOPS

GIB = 2**30

CHIPS_OF_A_HOST = 4
"""The TPU compiler's default for every generation; smaller slices must be named to it."""


class Chip(NamedTuple):
    """Figures of the vendor's data sheets, in bytes and in bytes per second."""

    memory: float
    """The memory of a TPU without the compiler's reserve (1.25 of v4's 32 GiB, 0.25 of v5e's 16), from its error
    messages; of a GPU the three quarters that JAX takes unless XLA_PYTHON_CLIENT_MEM_FRACTION says otherwise."""
    memory_bandwidth: float
    peak_flops: float
    """FLOP/s of bfloat16 matrix products."""


CHIPS = {
    "TPU v4": Chip(30.75 * GIB, 1228e9, DATASHEET_FLOPS["TPU v4"]),
    "TPU v5 lite": Chip(15.75 * GIB, 819e9, DATASHEET_FLOPS["TPU v5 lite"]),
    "TPU v5": Chip(95.74 * GIB, 2765e9, DATASHEET_FLOPS["TPU v5"]),
    "TPU v6 lite": Chip(31.25 * GIB, 1640e9, DATASHEET_FLOPS["TPU v6 lite"]),
} | {gpu.kind: Chip(0.75 * gpu.memory, gpu.bandwidth, DATASHEET_FLOPS[gpu.kind]) for gpu in GPUS.values()}


class Topology(NamedTuple):
    """Devices to compile for."""

    name: str
    devices: Sequence[Any]
    kind: str
    chip: Chip | None = None
    """The data sheet's figures; None for unknown devices."""


def open_topology(name: str) -> Topology:
    """The devices of a TPU slice, as its compiler names it by its chips (`v4:2x2x4`); GPUs (`h100:8`, or of two hosts
    `h100:2x8`); or `cpu:8`, before jax starts. A slice may also have the name by which Google Cloud hands it out
    (`v4-32`, `v5litepod-16`).

    Raises UserError if there are no such devices, or no compiler for them.
    """
    name = by_chips(name)
    kind, _, shape = name.partition(":")
    if not re.fullmatch(r"\d+(x\d+)*", shape):
        raise UserError(
            f"--topology={name} must be a kind and a shape, such as v4:2x2x4, h100:8 or cpu:8, or a type of slice, "
            "such as v4-32 or v5litepod-16"
        )
    if kind == "cpu":
        jax.config.update("jax_num_cpu_devices", int(shape))
        return Topology(name, jax.devices("cpu"), "cpu")
    try:
        devices = _gpus(name, GPUS[kind], shape) if kind in GPUS else _slice(name, kind, shape)
    except jax.errors.JaxRuntimeError as error:
        raise UserError(f"the compiler knows no topology {name}: {str(error).splitlines()[0]}") from None
    kind = devices[0].device_kind
    return Topology(name, devices, kind, CHIPS.get(kind))


def by_chips(name: str) -> str:
    """The name by chips of a TPU slice with a name of Google Cloud's: `v5litepod-16` is `v5e:4x4`. Other names stay.

    The numbers of v4 and v5p count cores, two in each chip. The slices of these generations are boxes, those of v5e and
    v6e rectangles, with sides as equal as powers of two can be.
    """
    match = re.fullmatch(r"(v4|v5p|v5litepod|v5e|v6e)-(\d+)", name)
    if match is None:
        return name
    generation, number = match[1].replace("litepod", "e"), int(match[2])
    dimensions, chips = (3, number // 2) if generation in ("v4", "v5p") else (2, number)
    exponent = chips.bit_length() - 1
    if chips != 2**exponent:
        raise UserError(f"--topology={name} is not a power of two: name the slice by its chips, such as v4:4x4x12")
    sides = sorted(2 ** ((exponent + i) // dimensions) for i in range(dimensions))
    # A host of v4 has 2x2x1 chips.
    return f"{generation}:{'x'.join(map(str, [*filter(lambda side: side > 1, sides), *[1] * sides.count(1)]))}"


def _slice(name: str, generation: str, shape: str) -> Sequence[Any]:
    if importlib.util.find_spec("libtpu") is None:
        raise UserError(f"--topology={name} needs the TPU compiler: install it with pip install 'meliad_like[tpu]'")
    # The compiler would otherwise ask this machine for its slice, and only one process at a time could load it.
    slice_of = {"TPU_ACCELERATOR_TYPE": "v4-32", "TPU_WORKER_HOSTNAMES": "localhost", "TPU_SKIP_MDS_QUERY": "1"}
    os.environ.update({"ALLOW_MULTIPLE_LIBTPU_LOAD": "1", **slice_of, **os.environ})
    # JAX uses one device for each chip, which is the default of generations after v4.
    options: dict[str, Any] = {"chip_config_name": "megacore"} if generation == "v4" else {}
    sides = [int(side) for side in shape.split("x")]
    if math.prod(sides) < CHIPS_OF_A_HOST:
        options["chips_per_host_bounds"] = [*sides, 1, 1][:3]
    return topologies.get_topology_desc(platform="tpu", topology_name=name, **options).devices


def _gpus(name: str, gpu: Gpu, shape: str) -> Sequence[Any]:
    if not any(importlib.util.find_spec(f"jax_cuda{version}_plugin") for version in (12, 13)):
        raise UserError(f"--topology={name} needs the GPU compiler: install it with pip install 'meliad_like[gpu]'")
    hosts = "1x" * (2 - shape.count("x")) + shape
    return topologies.get_topology_desc(platform="cuda", target_config=gpu.target_config(), topology=hosts).devices
