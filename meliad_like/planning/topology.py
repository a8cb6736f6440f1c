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
from meliad_like.training.hardware import DATASHEET_FLOPS

GIB = 2**30

CHIPS_OF_A_HOST = 4
"""The TPU compiler's default for every generation; smaller slices must be named to it."""


class Gpu(NamedTuple):
    """The properties in which kinds of GPUs differ, as XLA's compiler asks for them, from NVIDIA's data sheets."""

    kind: str
    capability: str
    """The compute capability, as a message of protocol buffers."""
    processors: int
    """The number of streaming multiprocessors."""
    units: int
    """The number of float32 units of a multiprocessor."""
    clock: float
    """The clock rate in GHz."""
    l2_cache: int
    """The size of the L2 cache in MiB."""
    shared_memory: int
    """The shared memory of a multiprocessor in KiB; a block can have one less."""
    memory: int
    """The size of the memory in bytes."""
    bandwidth: int
    """The bandwidth of the memory in bytes per second."""

    def target_config(self) -> str:
        """The text of XLA's `GpuTargetConfigProto`."""
        return f"""gpu_device_info {{
            cuda_compute_capability {{ {self.capability} }}
            core_count: {self.processors}
            fpus_per_core: {self.units}
            clock_rate_ghz: {self.clock}
            l2_cache_size: {self.l2_cache << 20}
            shared_memory_per_core: {self.shared_memory << 10}
            shared_memory_per_block: {48 << 10}
            shared_memory_per_block_optin: {self.shared_memory - 1 << 10}
            device_memory_size: {self.memory}
            memory_bandwidth: {self.bandwidth}
            threads_per_warp: 32 threads_per_block_limit: 1024 threads_per_core_limit: 2048
            registers_per_block_limit: 65536 registers_per_core_limit: 65536
            thread_dim_limit_x: 1024 thread_dim_limit_y: 1024 thread_dim_limit_z: 64
            block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
        }}
        platform_name: "CUDA" dnn_version_info {{ major: 9 }} device_description_str: "{self.kind}"
        """


_A100 = Gpu("NVIDIA A100-SXM4-80GB", "major: 8", 108, 64, 1.41, 40, 164, 85_100_068_864, 2_039_000_000_000)
_HOPPER = "major: 9 feature_extension: ACCELERATED_FEATURES"
_H100 = Gpu("NVIDIA H100 80GB HBM3", _HOPPER, 132, 128, 1.98, 50, 228, 84_942_979_072, 3_352_000_000_000)
_H200 = _H100._replace(kind="NVIDIA H200", memory=150_000_000_000, bandwidth=4_800_000_000_000)
GPUS = {"a100": _A100, "h100": _H100, "h200": _H200}


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
    """The devices of a TPU slice (`v4:2x2x4`, or as Google Cloud names it, `v4-32`), GPUs (`h100:8`, or of two hosts
    `h100:2x8`), or `cpu:8`, before jax starts. Raises a UserError if there are none such, or no compiler for them."""
    name = by_chips(name)
    kind, _, shape = name.partition(":")
    if not re.fullmatch(r"\d+(x\d+)*", shape):
        examples = "such as v4:2x2x4, h100:8 or cpu:8, or a type of slice, such as v4-32 or v5litepod-16"
        raise UserError(f"--topology={name} must be a kind and a shape, {examples}")
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
